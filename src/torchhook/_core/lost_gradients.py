"""A loss on a value that was kept alive, where FSDP has taken the weights behind it apart.

FSDP gathers weights for the backward pass, and takes their gradients, when a gradient comes in at the output of the
module that it wraps. One that begins inside, at a kept value, finds them taken apart: FSDP2 loses it without a word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._core import hooks
from torchhook._core.index import Index, unwrapped
from torchhook._core.sharding import Homes
from torchhook._recording.address import Site
from torchhook._torch.sharded import expects_gradients, shards
from torchhook._values import tree
from torchhook.errors import SessionError

_FAR = 5000  # steps of a graph that are looked at for a weight


class Units:
    """The modules that FSDP wraps, each with the weights that it takes apart."""

    def __init__(self, index: Index) -> None:
        self._homes = Homes(index)
        self._by_path: dict[str, tuple[Any, list[tuple[nn.Module, str]]]] = {}
        for module in (*index.wrappers, *index.distinct.values()) if self._homes else ():
            kept = shards(module)
            if kept:
                path = index.names(unwrapped(module))[0]
                self._by_path[path] = kept[0].unit, [(shard.module, shard.name) for shard in kept]

    def __bool__(self) -> bool:
        return bool(self._by_path)

    def checked(self, site: Site) -> Callable[[Any], Any] | None:
        """Has a value at a site say, when a gradient comes back to it, whether it is lost; ``None`` if it never is."""
        above = [path for path in self._by_path if not path or site.path == path or site.path.startswith(f"{path}.")]
        path = max(above, key=len, default=None)
        if path is None or (site.path == path and site.op is None and site.port == "output"):
            return None
        unit, places = self._by_path[path]

        def check(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            if tensor.is_leaf:  # a weight itself
                with torch.enable_grad():
                    tensor = tensor.view_as(tensor)
            leaves = {id(leaf) for place in places for leaf in self._leaves(*place)}
            if tensor.grad_fn is not None and _reaches(tensor.grad_fn, leaves):
                # On a step of this graph, and with it gone: the loss may come when the session has closed.
                hooks.before_node(tensor.grad_fn, lambda grads: _refuse(unit, site, path))
            return tensor

        return lambda value: tree.map_tensors(check, value)

    def _leaves(self, module: nn.Module, name: str) -> list[Tensor]:
        home, live = self._homes.of(module, name), module._parameters.get(name)
        return [leaf for leaf in (live, None if home is None else home.leaf) if leaf is not None]


def _reaches(node: Any, leaves: set[int]) -> bool:
    """Whether a gradient at this step goes on to one of the leaves."""
    todo, seen = deque([node]), {node}
    while todo and len(seen) < _FAR:
        node = todo.popleft()
        if id(getattr(node, "variable", None)) in leaves:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return False


def _refuse(unit: Any, site: Site, path: str) -> None:
    # What the gradient came through first, the output of the module, has told FSDP of it.
    if not expects_gradients(unit):
        inside = repr(path) if path else "the model"
        raise SessionError(
            f"{site.shown!r}: a loss on this value alone would lose the gradients of the weights behind it. FSDP has "
            f"taken them apart, and gathers them again only for a gradient that comes through the output of {inside}. "
            f"Take the loss on {inside} instead, or add it to one on the model's output and call backward on the sum."
        )

"""How many rows and tokens a model is called with: what the values inside of the call are measured by."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from torchhook._torch import graph_task
from torchhook._values import tree
from torchhook._values.tree import Inputs


class Sizes(NamedTuple):
    """How many rows and tokens a model is called with."""

    rows: int
    tokens: frozenset[int]
    """How many tokens a row may have: those of an encoder and those of a decoder differ."""
    one: bool = False
    """Whether each row is one token, as while a model generates: then its value is the token's."""
    images: frozenset[int] = frozenset()
    """How many images come with the tokens, which are rows too."""

    @classmethod
    def of(cls, call: Any) -> Sizes | None:
        """Those of a call, which is one argument or ``Inputs``; ``None`` where it is not of tokens first of all.

        >>> import torch
        >>> Sizes.of(torch.zeros(2, 6, dtype=torch.long)), Sizes.of(torch.zeros(2, 6))
        (Sizes(rows=2, tokens=frozenset({6}), one=False, images=frozenset()), None)
        """
        held = [tensor for tensor in tree.tensors(call) if not tensor.is_nested]
        found = [tensor for tensor in held if _are_tokens(tensor)]
        # By its name first: positions that are the same for all rows may be given before it.
        named = {name: value for name, value in _named(call) if any(value is one for one in found)}
        main = next((named[name] for name in _TOKENS if name in named), held[0] if held else None)
        if main is None or not _are_tokens(main):  # edges of a graph come after its nodes
            return None
        tokens = frozenset(one.shape[1] for one in found if len(one) == len(main))
        images = frozenset(len(one) for one in held if one.dim() > 3 and one.is_floating_point())
        return cls(len(main), tokens, main.shape[1] == 1, images - {len(main)})


_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")


def _are_tokens(tensor: Tensor) -> bool:
    """Whether a tensor is tokens by their ids ``(N, T)``, or as vectors ``(N, T, D)``."""
    floats = tensor.is_floating_point()
    return (tensor.dim() == 2 and not floats and not tensor.is_complex()) or (tensor.dim() == 3 and floats)


def _named(call: Any) -> Iterator[tuple[Any, Any]]:
    args, kwargs = (call.args, call.kwargs) if isinstance(call, Inputs) else ((call,), {})
    for part in (kwargs, *args):
        if isinstance(part, Mapping):
            yield from part.items()


class RunningCall(threading.local):
    """The sizes of the model's call that runs now, in each thread; read when somebody asks.

    Inside of it may be calls of another model, which generates for it, of other sizes.
    """

    def __init__(self) -> None:
        self._calls: list[Any] = []
        self._around: list[list[Any]] = []
        """The calls in which the one that runs was made, of a model that calls itself."""
        self._sizes: Sizes | None = None

    def begin(self, value: Any, is_inside: Callable[[], bool]) -> None:
        """The model is called with this. ``is_inside`` tells whether by itself: a pass that was stopped has no end."""
        self._around = [*self._around, self._calls] if self._calls and is_inside() else []
        self._calls = [value]
        self._sizes = None

    def end(self, *_: Any) -> None:
        """The call is over: what passes a part of the model now belongs to no call of it, but in the backward pass."""
        sizes = self._read()
        self._calls = self._around.pop() if self._around else []
        self._sizes = None if self._calls else sizes

    def begin_inside(self, value: Any) -> None:
        """One that generates is called, by the model or alone."""
        self._calls.append(value)
        self._sizes = None

    def end_inside(self, *_: Any) -> None:
        """That call is over."""
        sizes = self._read()
        del self._calls[-1:]
        self._sizes = None if self._calls else sizes

    def sizes(self) -> Sizes | None:
        """Those of the innermost call; ``None`` outside of calls."""
        # Gradients, and what a checkpointed part computes once more, are of the last call.
        return self._read() if self._calls or graph_task() != -1 else None

    def _read(self) -> Sizes | None:
        if self._sizes is None and self._calls:
            self._sizes = Sizes.of(self._calls[-1])
        return self._sizes

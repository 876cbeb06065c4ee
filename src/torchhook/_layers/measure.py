"""One run for the shapes, the sizes and the multiply-adds of every module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchhook._core import calling
from torchhook._core.index import Index, is_callable
from torchhook._core.session import Session
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook._words import listed

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

Shape = tuple[Any, ...]


class Seen(NamedTuple):
    """What the first call of a module gave, and the multiply-adds of all its calls."""

    output: str | None
    """In a few words, and how many others there were that differ."""
    shape: Shape | None
    memory: int | None
    multiply_adds: int | None


def measure(model: nn.Module, index: Index, given: Inputs, meta: bool, counts: bool) -> dict[int, Seen]:
    """By the id of the module: a shared one has its shape under each of its names."""
    session = Session(model, index=index, warn=False)
    seen: dict[int, Seen] = {}
    with contextlib.ExitStack() as stack:
        counter = stack.enter_context(_counting()) if counts else None
        for module in filter(is_callable, index.distinct.values()):
            site, look = Site(index.names(module)[0]), _Look(seen, id(module), counter)
            if counts:
                session.look(Target(site.but(port="input"), module), look.enter)
            session.look(Target(site, module), look.leave)
        # Only text and numbers are kept: all values of a large model at once may not fit in memory.
        with calling.undisturbed(model), calling.evaluating(model), torch.no_grad(), session:
            _call(model, given, meta)
    return seen


def _call(model: nn.Module, given: Inputs, meta: bool) -> None:
    if not meta:
        calling.call(model, given)
        return
    # Without memory for weights or values: the parameters are lent as shapes, for this call.
    state = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    args, kwargs = tree.map_tensors(lambda tensor: tensor.to("meta"), given)
    torch.func.functional_call(model, state, args, kwargs)


@contextlib.contextmanager
def _counting() -> Iterator[FlopCounterMode]:
    """Counts what runs inside, in operations that it knows."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        # Fused attention counts as nothing on a CPU: let it be what it stands for, two matrix products.
        from torch.utils.flop_counter import FlopCounterMode  # not before: whoever counts nothing needs none of it

        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            yield counter
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Look:
    """Sees the calls of one module."""

    def __init__(self, seen: dict[int, Seen], key: int, counter: FlopCounterMode | None) -> None:
        self._seen = seen
        self._key = key
        self._counter = counter
        # A stack: a module may run inside its own call.
        self._open: list[int] = []
        self._sum = 0
        # Texts alone, in order: the shapes of a layer that is used at several places.
        self._outputs: dict[str, None] = {}

    def enter(self, value: Any, call: int) -> None:
        assert self._counter is not None
        self._open.append(self._counter.get_total_flops())

    def leave(self, value: Any, call: int) -> None:
        if self._counter is not None and self._open:
            start = self._open.pop()
            if not self._open:
                # A multiply-add is two operations.
                self._sum += (self._counter.get_total_flops() - start) // 2
        self._outputs[tree.describe(value)] = None
        first = self._seen.get(self._key)
        if first is None:
            nbytes = sum(t.nbytes for t in tree.tensors(value) if t.layout == torch.strided and not t.is_nested)
            first = Seen(None, _shape(value), nbytes, None)
        sums = None if self._counter is None else self._sum
        self._seen[self._key] = first._replace(output=listed(list(self._outputs), most=1), multiply_adds=sums)


def _shape(value: Any) -> Shape | None:
    """Sizes of a tensor; of a value that holds several, a tuple of theirs."""
    if isinstance(value, Tensor):
        return None if value.is_nested else tuple(value.shape)
    found = [tuple(t.shape) for t in tree.tensors(value) if not t.is_nested]
    return tuple(found) if found else None

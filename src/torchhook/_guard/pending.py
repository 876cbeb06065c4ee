"""When tensors are looked at: on the CPU at once, on a device many together, because asking makes it wait.

There, the sums of a window of operations stay on the device and are read together, at the latest before the outermost
module returns or the backward pass ends: the model may run a few operations past the first bad value, but its caller
never gets it.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook._core import hooks
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.recompute import graph_task
from torchhook._guard.events import Crossing, Passing
from torchhook._guard.judge import Judge
from torchhook._guard.operations import Named
from torchhook._values.finite import probe
from torchhook._values.memory import storage

_LENGTH = 64
_BYTES = 1 << 28


class _Asked(NamedTuple):
    """A place whose outputs are finite if the total is."""

    total: Tensor
    passing: Passing


class Window:
    """Shows the judge what may be bad, in the order in which it was made."""

    def __init__(self, index: Index, judge: Judge) -> None:
        self._judge = judge
        self._waiting: list[_Asked | Crossing] = []
        self._held_bytes = 0
        self._settles_after: int | None = None
        owned = [getattr(module, name) for module, name in index.tensors.values()]
        self._owned = frozenset(map(id, owned))
        self._keep = Keep("copy")
        self._keep.owns(t for t in owned if isinstance(t, Tensor))

    def called_with(self, tensors: Iterable[Tensor]) -> None:
        self._keep.called_with(tensors)

    def check(self, made: list[Tensor], passing: Callable[[], Passing]) -> None:
        """Look at what was made; ``passing`` tells the rest, which is only needed if something is wrong with it."""
        answers = [probe(tensor) for tensor in made]
        if any(answer is True for answer in answers):
            self.settle()
            self._judge.passing(passing())
        totals = [answer for answer in answers if isinstance(answer, Tensor)]
        if totals and not torch.cuda.is_current_stream_capturing():
            self._wait(totals, passing(), sum(tensor.nbytes for tensor in made))

    def cross(self, values: Named, left: nn.Module | None) -> None:
        """Something goes into a module, or comes out of the one that is ``left``."""
        if self._waiting:
            self._waiting.append(Crossing([storage(t) for _, t in values], left))
        elif self._judge.has_suspects():
            self._judge.crossing(Crossing([storage(t) for _, t in values], left, [t for _, t in values]))

    def settle(self) -> None:
        """Ask the device about all that is waiting."""
        waiting, self._waiting, self._held_bytes = self._waiting, [], 0
        numbers = _read([entry.total for entry in waiting if isinstance(entry, _Asked)])
        judged = None
        for entry in waiting:
            if isinstance(entry, Crossing):
                self._judge.crossing(entry)
            elif cmath.isfinite(numbers[id(entry.total)]):
                self._judge.acquit(entry.passing.storages)
            elif entry.passing is not judged:  # it has a total for each of its outputs
                judged = entry.passing
                self._judge.passing(judged)

    def clear(self) -> None:
        self._waiting.clear()

    def _wait(self, totals: list[Tensor], it: Passing, size: int) -> None:
        it = it._replace(inputs=self._kept(it.inputs), outputs=self._kept(it.outputs), saved=self._kept(it.saved))
        self._waiting += [_Asked(total, it) for total in totals]
        self._held_bytes += size
        if it.phase == "backward" and self._settles_after != graph_task():
            self._settles_after = graph_task()
            hooks.after_backward(self.settle)
        if len(self._waiting) >= _LENGTH or self._held_bytes > _BYTES:
            self.settle()

    def _kept(self, values: Iterable[tuple[str, Tensor]]) -> Named:
        # The model's own tensors stay as they are: nobody writes to them before the window ends.
        return [(name, t if id(t) in self._owned else self._keep.value(t)) for name, t in values]


def _read(totals: list[Tensor]) -> dict[int, complex]:
    """The numbers of many tensors, by their ids, with one transfer for each device and type."""
    alike: dict[Any, list[Tensor]] = {}
    for total in totals:
        alike.setdefault((total.device, total.dtype), []).append(total)
    return {
        id(total): number
        for some in alike.values()
        for total, number in zip(some, torch.stack(some).tolist(), strict=True)
    }

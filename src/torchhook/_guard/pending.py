"""When tensors are looked at: on the CPU at once, on a device many together, because asking makes it wait.

There, the sums of many operations stay on the device and are read together, at the latest before the outermost module
returns or the backward pass ends: the model may run a few operations past the first bad value, but its caller never
gets it.
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
from torchhook._guard.events import Crossing, Event
from torchhook._guard.judge import Judge
from torchhook._guard.operations import Named
from torchhook._torch import graph_task
from torchhook._values.finite import probe
from torchhook._values.memory import storage

# As few waits as possible, but what waits is kept alive: a limit on the number of sums, and one on the memory of what
# they are the sums of.
_MOST = 64
_MOST_BYTES = 1 << 28


class _Held(NamedTuple):
    """An event whose outputs are finite if the total is."""

    total: Tensor
    event: Event


class Pending:
    """Shows the judge what may be bad, in the order in which it was made."""

    def __init__(self, index: Index, judge: Judge) -> None:
        self._judge = judge
        self._waiting: list[_Held | Crossing] = []
        self._held_bytes = 0
        self._flushes_after: int | None = None
        owned = [getattr(module, name) for module, name in index.tensors.values()]
        self._owned = frozenset(map(id, owned))
        self._keep = Keep("copy")
        self._keep.owned_by(lambda: [t for t in owned if isinstance(t, Tensor)])

    def called_with(self, tensors: Iterable[Tensor]) -> None:
        self._keep.called_with(tensors)

    def check(self, made: list[Tensor], event: Callable[[], Event]) -> None:
        """Look at what was made; ``event`` tells the rest, which is only needed if something is wrong with it."""
        answers = [probe(tensor) for tensor in made]
        if any(answer is True for answer in answers):
            # What waits on a device was made before this, and may be what spoilt it.
            self.flush()
            self._judge.judge_event(event())
        totals = [answer for answer in answers if isinstance(answer, Tensor)]
        # While a CUDA graph is captured, a read would end the capture with an error.
        if totals and not torch.cuda.is_current_stream_capturing():
            self._hold(totals, event(), sum(tensor.nbytes for tensor in made))

    def note_crossing(self, values: Named, left: nn.Module | None) -> None:
        """Something goes into a module, or comes out of the one that is ``left``."""
        # Behind what waits, a crossing waits too: the judge must see things in the order in which they happened.
        if self._waiting:
            self._waiting.append(Crossing([storage(t) for _, t in values], left))
        elif self._judge.has_suspects():
            self._judge.judge_crossing(Crossing([storage(t) for _, t in values], left, [t for _, t in values]))

    def flush(self) -> None:
        """Ask the device about all that is waiting."""
        # Emptied first: the judge may raise, and what it raised for must not be judged again.
        waiting, self._waiting, self._held_bytes = self._waiting, [], 0
        numbers = _read([entry.total for entry in waiting if isinstance(entry, _Held)])
        judged = None
        for entry in waiting:
            if isinstance(entry, Crossing):
                self._judge.judge_crossing(entry)
            elif cmath.isfinite(numbers[id(entry.total)]):
                self._judge.drop_suspects(entry.event.storages)
            elif entry.event is not judged:  # it has a total for each of its outputs
                judged = entry.event
                self._judge.judge_event(judged)

    def clear(self) -> None:
        self._waiting.clear()

    def _hold(self, totals: list[Tensor], event: Event, size: int) -> None:
        # The model goes on and may overwrite these tensors before the sum is read. Copies on write cost nothing where
        # it does not.
        event = event._replace(
            inputs=self._kept(event.inputs), outputs=self._kept(event.outputs), saved=self._kept(event.saved)
        )
        self._waiting += [_Held(total, event) for total in totals]
        self._held_bytes += size
        if event.phase == "backward" and self._flushes_after != graph_task():
            # No module returns at the end of a backward pass, so autograd is asked to call.
            self._flushes_after = graph_task()
            hooks.after_backward(self.flush)
        if len(self._waiting) >= _MOST or self._held_bytes > _MOST_BYTES:
            self.flush()

    def _kept(self, values: Iterable[tuple[str, Tensor]]) -> Named:
        # The model's own tensors stay as they are: nobody writes to them before the next flush.
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

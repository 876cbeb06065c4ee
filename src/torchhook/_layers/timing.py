"""How long each module takes: the quickest of a few plain runs, with nothing else attached."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook._core import calling
from torchhook._core.index import Index, is_callable
from torchhook._core.session import Session
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._values.tree import Inputs, map_tensors, tensors


class Times(NamedTuple):
    """Seconds of a run with clocks by module, which goes by its first name; all its calls count together."""

    whole: dict[str, float]
    """From a call to its return, what it calls included."""
    own: dict[str, float]
    """Without the time in other modules that it calls."""


def seconds(model: nn.Module, index: Index, inputs: Inputs, repeats: int) -> tuple[float, Times]:
    """Seconds of the quickest plain run, and those of each module in the quickest run with clocks."""
    plain = [_plain(model, inputs) for _ in range(repeats + 1)]
    runs = [_timed(model, index, inputs) for _ in range(repeats + 1)]
    # The first warms up. All numbers are of one run: the quickest of each would not add up.
    return min(plain[1:] or plain), min(runs[1:] or runs, key=lambda run: run.whole.get("", sum(run.whole.values())))


def _plain(model: nn.Module, inputs: Inputs) -> float:
    clock = _Clock(_streams(model, inputs))
    with torch.no_grad():
        # A copy before the clock starts: the model may write to its input.
        given = map_tensors(Tensor.clone, inputs)
        clock.enter("")(None, 0)
        model(*given.args, **given.kwargs)
        clock.leave("")(None, 0)
    return clock.read().whole[""]


def _streams(model: nn.Module, inputs: Inputs) -> list[Any]:
    # Work on a GPU is only queued when a call returns: its own clock is asked, and not before the end, to wait once.
    devices = {t.device for t in (*model.parameters(), *tensors(inputs)) if t.device.type == "cuda"}
    return [torch.cuda.current_stream(device) for device in devices]


def _timed(model: nn.Module, index: Index, inputs: Inputs) -> Times:
    clock = _Clock(_streams(model, inputs))
    session = Session(model, index=index, warn=False)
    for module in filter(is_callable, index.distinct.values()):
        site = Site(index.names(module)[0])
        session.look(Target(site.but(port="input"), module), clock.enter(site.path))
        session.look(Target(site, module), clock.leave(site.path))
    with torch.no_grad(), session:
        calling.call(model, inputs)
    return clock.read()


class _Clock:
    """Marks in time: of the processor, or of the streams of the devices where there are any."""

    def __init__(self, streams: list[Any]) -> None:
        self._streams = streams
        # One stack for all: what is on it below a call is who called it. A module may run inside its own call.
        self._open: list[tuple[str, Any]] = []
        self._spans: list[tuple[str, str | None, Any, Any]] = []

    def enter(self, path: str) -> Callable[[Any, int], None]:
        return lambda value, call: self._open.append((path, self._mark()))

    def leave(self, path: str) -> Callable[[Any, int], None]:
        def close(value: Any, call: int) -> None:
            if not any(path == above for above, _ in self._open):
                return
            # A call that raised, and whose caller went on, never came back: it is still above.
            while self._open[-1][0] != path:
                self._open.pop()
            _, start = self._open.pop()
            self._spans.append((path, self._open[-1][0] if self._open else None, start, self._mark()))

        return close

    def _mark(self) -> Any:
        return [s.record_event(torch.cuda.Event(True)) for s in self._streams] or time.perf_counter()

    def read(self) -> Times:
        whole: dict[str, float] = {}
        own: dict[str, float] = {}
        # Two events have no time between them until both have passed.
        for stream in self._streams:
            stream.synchronize()
        for path, caller, start, end in self._spans:
            took = _between(start, end)
            whole[path] = whole.get(path, 0.0) + took
            own[path] = own.get(path, 0.0) + took
            if caller is not None:
                own[caller] = own.get(caller, 0.0) - took
        # By the clocks of several streams, each of which may be the slowest somewhere, little is less than nothing.
        return Times(whole, {path: max(own[path], 0.0) for path in whole})


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    return max(float(a.elapsed_time(b)) for a, b in zip(start, end, strict=True)) / 1e3

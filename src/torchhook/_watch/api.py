"""``watch``: statistics of a model while it trains.

A hook on the model counts its calls. When a step is due, a session of its own is opened for it, and closed when the
step is over: between measured steps the model runs with one hook, or with none when steps are counted by hand.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

from torch import nn

from torchhook._core.index import Index
from torchhook._core.select import Selector, Target, resolve
from torchhook._core.session import Session, Threads
from torchhook._recording.address import Site
from torchhook._recording.tables import Table
from torchhook._values.histograms import Histogram
from torchhook._watch.alarms import Alarm, Alarms
from torchhook._watch.engine import Engine, Plan, Snapshot
from torchhook._watch.sinks import sinks
from torchhook._watch.statistics import DEFAULT, STATISTICS
from torchhook.errors import NeverRanWarning, SessionError, suggestion

Steps = Literal["calls", "manual"]


def watch(
    model: nn.Module,
    *selectors: Selector,
    every: int = 1,
    log: Any = None,
    statistics: Sequence[str] = DEFAULT,
    gradients: bool = True,
    parameters: bool = True,
    alarms: bool | Alarms = True,
    exclude: Selector | None = None,
    steps: Steps = "calls",
    start: int = 0,
    loss_scale: float | Callable[[], float] = 1.0,
    history: int = 100,
    bins: int = 64,
    threads: Threads = "own",
) -> Watch:
    """Take statistics of the selected sites at every Nth step, from now until ``close``; without selectors, of every
    module.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    >>> with watch(model, every=10, log=lambda step, values: print(step, len(values))) as w:
    ...     for _ in range(20):
    ...         model(torch.ones(2, 3)).sum().backward()
    0 23
    10 23

    ``log`` is a TensorBoard ``SummaryWriter``, a W&B run, the path of a CSV file (one row for each step and site), a
    function ``(step, values)``, or a list of these. ``statistics`` are of the site's value (``mean``, ``std``, ``min``,
    ``max``, ``zeros``, ``nans``, ``norm``, ``histogram``; ``dead``, the share of units of a ReLU that are zero
    throughout), of the gradient of a module's output or a parameter (``grad_norm``), and of the parameters of the
    selected modules (``norm``, ``update_ratio``: how far the step moved them, relative to their norm); all but
    ``histogram`` unless told. They stay on the device and come over once, when the step ends.

    A step is one call of the model, from its beginning to the next call, so that it holds the backward pass and the
    optimizer's step; several calls of a layer in it are taken together (``"relu#1"`` means one of them). Where a step
    is something else (accumulated gradients, two forwards for one backward, a compiled model, which runs eagerly
    while its calls are counted), say ``steps="manual"`` and call ``step()`` at the end of each. Keep validation out
    with ``paused()``.

    ``loss_scale=scaler.get_scale`` takes a gradient scaler's factor out again; ``alarms`` are warnings about dead units
    and vanishing or exploding gradients, once for each site; ``start`` is the number of the first step.
    """
    if every != int(every) or every < 1:
        raise ValueError(f"every={every!r}: expected a number of steps, 1 or more.")
    if steps not in ("calls", "manual"):
        raise ValueError(f"steps={steps!r}: use 'calls' (each call of the model is a step) or 'manual' (call step()).")
    names = [statistics] if isinstance(statistics, str) else list(statistics)
    for name in names:
        if name not in STATISTICS:
            raise ValueError(f"{name!r} is not a statistic. {suggestion(name, STATISTICS)}")
    wanted = [
        name
        for name in STATISTICS
        if name in names and (gradients or name != "grad_norm") and (parameters or name != "update_ratio")
    ]
    index = Index(model)
    targets = resolve(index, list(selectors) or "**", exclude=exclude)
    plan = Plan(index, targets, wanted, gradients, parameters, bins, threads, steps == "calls")
    limits = alarms if isinstance(alarms, Alarms) else Alarms() if alarms else None
    engine = Engine(plan, int(every), sinks(log, wanted), limits, start, loss_scale, history)
    return Watch(engine, steps, threads)


class Watch:
    """Statistics of a model in training: a context manager, or a handle to ``close``."""

    def __init__(self, engine: Engine, steps: Steps, threads: Threads) -> None:
        self._engine = engine
        self._steps = steps
        self._closed = True
        self._session: Session | None = None
        if steps == "manual":
            engine.advance()
            self._closed = False
            return
        index = engine.plan.index
        session = self._session = Session(index.modules[""], index=index, threads=threads, warn=False)
        session.look(Target(Site("", port="input"), index.modules[""]), lambda value, call: engine.advance())
        for target in engine.plan.at_the_door:
            session.look(target, _while_measuring(engine, target))
        session.open()
        self._closed = False

    @property
    def history(self) -> deque[Snapshot]:
        """The newest snapshots, oldest first."""
        return self._engine.history

    @property
    def last(self) -> dict[str, dict[str, Any]]:
        """The newest statistics, by site and name."""
        if not self.history:
            raise SessionError(
                "no step has been measured to its end yet: a step ends with the next one, with flush() or with close()."
            )
        return self.history[-1].sites

    @property
    def alarms(self) -> list[Alarm]:
        """What was warned about."""
        return [] if self._engine.bell is None else list(self._engine.bell.rung)

    def step(self) -> None:
        """With ``steps="manual"``: a step ends here, and the next begins."""
        if self._steps != "manual":
            raise SessionError("step() is for steps='manual'; here each call of the model is a step. flush() ends one.")
        if self._closed:
            raise SessionError("this watch is closed. Start a new one: start= continues its count.")
        self._engine.advance()

    def flush(self) -> None:
        """End the running step now: what happens until the next one belongs to neither."""
        self._engine.finish()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """End the running step, and see nothing in this block: validation, for example."""
        self._engine.finish()
        before, self._engine.paused = self._engine.paused, True
        try:
            yield
        finally:
            self._engine.paused = before

    def close(self) -> None:
        """End the running step, take the hooks away, and warn about sites that never ran. Again: nothing."""
        self._close(None)

    remove = close

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._session is not None:
                self._session.close()
        finally:
            self._engine.close(finished=error is None)
        if error is None:
            self._report()

    def _report(self) -> None:
        engine = self._engine
        if not self.history:
            waiting = f"none of the {engine.next - engine.started} steps was a multiple of every={engine.every}"
            nothing = engine.next == engine.started or bool(engine.missing)
            why = "the model was not called" if nothing else waiting
            warnings.warn(f"watch measured nothing: {why}.", NeverRanWarning, stacklevel=4)
            return
        silent = [a for a in (str(t.site) for t in engine.plan.inside) if a not in engine.seen]
        if silent:
            lines = [f"  {a or '(model)'!r}: {engine.missing.get(a, '')}" for a in silent[:10]]
            more = [f"  … and {len(silent) - 10} more"] if len(silent) > 10 else []
            what = "1 watched site" if len(silent) == 1 else f"{len(silent)} watched sites"
            warnings.warn("\n".join([f"{what} never ran:", *lines, *more]), NeverRanWarning, stacklevel=4)

    def __del__(self) -> None:
        if not self._closed and self._engine.next == self._engine.started and self._steps == "calls":
            warnings.warn(
                "a watch was dropped before it saw a step, and its hooks with it: keep what th.watch(...) returns.",
                ResourceWarning,
                stacklevel=2,
            )

    def table(self) -> Table:
        """The newest statistics as a table."""
        names = [name for name in self._engine.plan.wanted if name != "histogram"]
        title = f"step {self.history[-1].step}" if self.history else "no step measured yet"
        rows = [
            [site or "(model)", *(_cell(values.get(name)) for name in names)]
            for site, values in (self.last if self.history else {}).items()
        ]
        notes = [alarm.message for alarm in self.alarms]
        return Table(title, ["site", *(f">{name}" for name in names)], rows, notes)

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _cell(value: Any) -> str:
    return "" if value is None or isinstance(value, Histogram) else f"{value:.4g}"


def _while_measuring(engine: Engine, target: Target) -> Callable[[Any, int], None]:
    def look(value: Any, call: int) -> None:
        if engine.step is not None:
            engine.step.look(str(target.site), False)(value, call)

    return look

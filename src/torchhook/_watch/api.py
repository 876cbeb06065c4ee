"""``watch``: statistics of a model while it trains.

A hook on the model counts its calls. When a step is due, a session of its own is opened for it, and closed when the
step is over: between measured steps the model runs with one hook, or with none when steps are counted by hand.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from torchhook._callbacks import callback
from torchhook._core.index import Index, is_callable
from torchhook._core.openable import Openable
from torchhook._core.select import Selector, resolve
from torchhook._core.session import Session, Threads
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._recording.tables import Table
from torchhook._watch.alarms import Alarm, Alarms
from torchhook._watch.callbacks import WatchedFit
from torchhook._watch.engine import Engine
from torchhook._watch.sinks import sinks
from torchhook._watch.snapshot import Snapshot
from torchhook._watch.statistics import DEFAULT, STATISTICS
from torchhook._watch.watched import Watched
from torchhook._words import counted, plural
from torchhook.errors import NeverRanWarning, SessionError, suggestion, warn

__all__ = ["Alarm", "Alarms", "Snapshot", "Watch", "watch"]

Steps = Literal["calls", "manual"]
_Counted = Literal["calls", "manual", "trainer"]


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
    """Take statistics of the selected sites at every Nth step; without selectors, of every module.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    >>> with watch(model, every=10, log=lambda step, values: print(step, len(values))) as w:
    ...     for _ in range(20):
    ...         model(torch.ones(2, 3)).sum().backward()
    0 23
    10 23

    It watches in a ``with`` block, or from ``open`` to ``close``, and does nothing before. A step is one call of the
    model, from its beginning to the next call, so that it holds the backward pass and the optimizer's step; several
    calls of a layer in it are taken together (``"relu#1"`` means one of them). Once the model was called in training
    mode and with gradients, calls in evaluation mode or without gradients are validation: they end the running step
    and are no steps. ``paused()`` keeps anything else out, and validation where steps are counted by hand. Numbers
    stay on the device and come over once, when the step ends.

    Args:
        model: the model in training; it computes what it would without a watch.
        selectors: sites to watch: names, globs, types, modules, ``"layer4:input"``, ``"block/relu"``.
        every: measure each Nth step; the others cost one hook.
        log: where the statistics go: a TensorBoard ``SummaryWriter``, a W&B run, the path of a CSV file (one row for
            each step and site; a file that is there already is continued as a new run), a function ``(step, values)``,
            or a list of these. On a GPU a step is told when the model has run in the next one.
        statistics: of the site's value: ``mean``, ``std`` (``correction=0``), ``min``, ``max``, ``zeros``, ``nans``,
            ``norm``, ``histogram``, ``dead`` (the share of units of a ReLU that are zero throughout; behind two layers
            it has the units of both); of the gradient of a module's output or a parameter: ``grad_norm`` (for its
            histogram, select ``"layer4:grad"``); of the parameters of the selected modules: ``norm``, ``update_ratio``
            (how far the step moved them, relative to their norm). All but ``histogram`` unless told.
        gradients: whether to look at gradients.
        parameters: whether to look at the parameters of the selected modules.
        alarms: warn about dead units (of ``"relu#1"``, where a ReLU runs behind several layers) and vanishing or
            exploding gradients, once for each site; ``Alarms(...)`` says when.
        exclude: sites to leave out of those selected.
        steps: ``"manual"`` where a step is something else than a call (accumulated gradients, two forwards for one
            backward, a compiled model, which runs eagerly while its calls are counted): call ``step()`` at the end of
            each.
        start: the number of the first step, to continue an older count.
        loss_scale: a gradient scaler's factor, to be taken out again: ``scaler.get_scale``.
        history: how many of the newest snapshots to keep.
        bins: the number of bins of a histogram.
        threads: ``"all"`` also measures calls from other threads than the one that opens it.
    """
    if every != int(every) or every < 1:  # 10.0 will do: such numbers are often computed
        raise ValueError(f"every={every!r}: expected a number of steps, 1 or more.")
    if steps not in ("calls", "manual"):
        raise ValueError(f"steps={steps!r}: use 'calls' (each call of the model is a step) or 'manual' (call step()).")
    if threads not in ("own", "all"):
        raise ValueError(f"threads={threads!r}: use 'own' (the context that opens the watch) or 'all'.")
    names = [statistics] if isinstance(statistics, str) else list(statistics)
    for name in names:
        if name not in STATISTICS:
            raise ValueError(f"{name!r} is not a statistic. {suggestion(name, STATISTICS)}")
    # In an order of our own, whatever the order asked for: it is that of a CSV file's columns, which may be continued.
    wanted = [
        name
        for name in STATISTICS
        if name in names and (gradients or name != "grad_norm") and (parameters or name != "update_ratio")
    ]
    index = Index(model)
    targets = resolve(index, list(selectors) or _everything(index), exclude=exclude)
    watched = Watched(index, targets, wanted, gradients, parameters, bins, threads, steps == "calls")
    limits = alarms if isinstance(alarms, Alarms) else Alarms() if alarms else None
    engine = Engine(watched, int(every), sinks(log, wanted), limits, start, loss_scale, history)
    return Watch(engine, steps, threads)


def _everything(index: Index) -> str:
    """Every module, but not the model around them, mostly with the output of the last layer; alone, it is the layer."""
    return "**" if any(path and is_callable(module) for path, module in index.modules.items()) else "(model)"


class Watch(Openable):
    """Statistics of a model in training, for as long as it is open: a context manager, or ``open`` and ``close``."""

    _kind = "watch"

    def __init__(self, engine: Engine, steps: Steps, threads: Threads) -> None:
        self._engine = engine
        self._steps: _Counted = steps
        self._threads: Threads = threads
        self._session: Session | None = None
        self._failed = False
        self._sites = len(engine.watched.targets)
        self._made()

    @property
    def history(self) -> deque[Snapshot]:
        """The newest snapshots, oldest first."""
        self._needs_opening("history")
        self._engine.settle()
        return self._engine.history

    @property
    def last(self) -> dict[str, dict[str, Any]]:
        """The newest statistics, by site and name."""
        self._needs_opening("last")
        if not self.history:
            raise SessionError(self._why_nothing())
        return self.history[-1].sites

    @property
    def alarms(self) -> list[Alarm]:
        """What was warned about."""
        self._needs_opening("alarms")
        self._engine.settle()
        return [] if self._engine.alarms is None else list(self._engine.alarms.raised)

    def step(self) -> None:
        """With ``steps="manual"``: a step ends here, and the next begins."""
        self._needs_opening("step()")
        if self._steps != "manual":
            here = (
                "each call of the model is a step" if self._steps == "calls" else "the trainer's optimizer makes them"
            )
            raise SessionError(f"step() is for steps='manual'; here {here}. flush() ends one.")
        if self._life == "closed":
            raise SessionError("this watch is closed. Start a new one: start= continues its count.")
        self._engine.advance()

    def callback(self) -> Any:
        """A callback for the trainer of Lightning or Hugging Face: a step is one of its optimizer's.

        ``Trainer(callbacks=[th.watch(model, every=100, log="statistics.csv").callback()])``. A step lasts from its
        first batch to the optimizer's step, over all batches whose gradients are accumulated, and has the trainer's
        number. Validation is no part of any. The watch opens when training begins and closes when it ends, unless it
        is open already.
        """
        if self._life == "closed":
            raise SessionError("callback(): this watch is closed. Start a new one: start= continues its count.")
        made = callback(WatchedFit(self, self._engine))
        # In an open watch, the hook that counts calls is there already, or a step that was to be ended by hand.
        if self._session is not None:
            self._session.close()
            self._session = None
        self._engine.abandon()
        self._engine.next = self._engine.started
        self._steps = "trainer"
        self._engine.watched.count_by_hand()
        return made

    def flush(self) -> None:
        """End the running step now: what happens until the next one belongs to neither."""
        self._needs_opening("flush()")
        self._engine.finish()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """End the running step, and see nothing in this block: validation, for example."""
        self._needs_opening("paused()")
        engine = self._engine
        waiting = engine.waiting
        engine.finish()  # or what runs in the block would be taken for more calls of the running step
        before, engine.paused = engine.paused, True
        try:
            yield
        finally:
            engine.paused = before
        if waiting is not None and self._life == "open":
            engine.begin(waiting)

    def _start(self) -> None:
        engine = self._engine
        engine.shared.together.open()
        if self._steps == "trainer":
            return  # a step begins with its first batch
        if self._steps == "manual":
            engine.advance()  # without a hook that counts: between measured steps the model is bare
            return
        index = engine.watched.index
        if type(index.modules[""]).forward.__qualname__ == "LightningModule.forward":
            warn(
                "a step is a call of the model here, and Lightning calls the training_step of a model without a "
                "forward of its own: give the Trainer this watch's callback(), which counts the optimizer's steps.",
                NeverRanWarning,
            )
        session = Session(index.modules[""], index=index, threads=self._threads, warn=False)
        # The hooks know the engine and not this object: one that is dropped must not live on in the model's hooks.
        session.look(Target(Site("", port="input"), index.modules[""]), _counting(engine, index.modules[""]))
        for target in engine.watched.before_step:
            session.look(target, _while_measuring(engine, target))
        self._session = session
        session.open()

    def _stop(self, error: BaseException | None) -> None:
        try:
            if self._session is not None:
                self._session.close()
        finally:
            # A step that an error cut short is not like the others, so it is not measured.
            self._engine.close(finished=error is None)
        self._failed = error is not None
        if error is None:
            self._report()
        # Whoever keeps the watch for its history does not keep the model.
        self._session = None
        del self._engine.watched

    def _report(self) -> None:
        """Warn about what never ran."""
        engine = self._engine
        if not self.history and self.history.maxlen != 0:
            warn(f"watch measured nothing: {self._why_closed_empty()}.", NeverRanWarning)
            return
        silent = [t.site for t in engine.watched.in_step if t.site not in engine.seen]
        if silent:
            lines = [f"  {site.shown!r}: {engine.missing.get(site, '')}" for site in silent[:10]]
            more = [f"  … and {len(silent) - 10} more"] if len(silent) > 10 else []
            what = f"{len(silent)} watched {plural(len(silent), 'site')}"
            warn("\n".join([f"{what} never ran:", *lines, *more]), NeverRanWarning)

    def _why_nothing(self) -> str:
        """Why there is no snapshot."""
        if self._engine.history.maxlen == 0:
            return "history=0 keeps no snapshot: what is measured goes to log= alone."
        if self._life == "closed":
            return f"this watch is closed, and it measured nothing: {self._why_closed_empty()}."
        return "no step has been measured to its end yet: a step ends with the next one, with flush() or with close()."

    def _why_closed_empty(self) -> str:
        engine = self._engine
        if engine.next == engine.started:
            return "the model was not called"
        if self._failed:
            return "an error ended the block before a measured step was over"
        waiting = f"none of the {engine.next - engine.started} steps was a multiple of every={engine.every}"
        return "the model was not called" if engine.missing else waiting

    def __del__(self) -> None:
        super().__del__()
        # The hooks go with this object, so a loop that did not keep it would train on unwatched and in silence.
        saw_nothing = self._life == "open" and self._steps == "calls" and self._engine.next == self._engine.started
        if saw_nothing and not self._is_shutting_down():
            warn(
                "a watch was dropped before it saw a step, and its hooks with it: keep what th.watch(...).open() "
                "returns.",
                ResourceWarning,
            )

    def table(self) -> Table:
        """The newest statistics as a table."""
        self._needs_opening("table()")
        nothing = self._why_nothing() if self._life == "closed" else "no step measured yet"
        table = self.history[-1].table() if self.history else Table(nothing, [], [])
        table.notes += [alarm.message for alarm in self.alarms]
        if count := self._engine.unmeasured:
            verb = plural(count, "is no step", "are no steps")
            table.notes.append(f"{counted(count, 'call')} in evaluation mode or without gradients {verb}")
        return table

    def __repr__(self) -> str:
        state = (
            "not open yet"
            if self._life == "made"
            else f"{self._life}, {counted(len(self._engine.history), 'snapshot')}"
        )
        return f"<watch of {counted(self._sites, 'site')}: {state}>"

    def __str__(self) -> str:
        return repr(self) if self._life == "made" else str(self.table())

    def _repr_html_(self) -> str:
        # Before it is opened, there is no table; a notebook shows what a cell ends with all the same.
        table = Table(repr(self)[1:-1], [], []) if self._life == "made" else self.table()
        return table._repr_html_()


def _counting(engine: Engine, model: nn.Module) -> Callable[[Any, int], None]:
    here = weakref.ref(model)

    def look(value: Any, call: int) -> None:
        model = here()
        engine.called(trains=torch.is_grad_enabled() and model is not None and model.training)

    return look


def _while_measuring(engine: Engine, target: Target) -> Callable[[Any, int], None]:
    def look(value: Any, call: int) -> None:
        # This hook outlives the steps, so it asks each time which one is running, if any.
        if engine.step is not None:
            engine.step.saw(str(target.site), value, False)

    return look

"""What is looked at in a measured step, and the engine that opens a session for each of them.

The session is built once and opened for each measured step, and for none between: hooks that only asked whether a step
is due would cost every step.
"""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.nn.parameter import is_lazy

from torchhook._core.index import Index
from torchhook._core.select import Target
from torchhook._core.session import Session, Threads
from torchhook._core.sharding import Home, Homes
from torchhook._core.taps import Look
from torchhook._recording.address import Site, shown
from torchhook._recording.tables import Table, counted
from torchhook._values.statistics import Measure
from torchhook._watch.alarms import Alarms, AlarmState
from torchhook._watch.ledger import Key, Ledger, Room
from torchhook._watch.shared import Shared
from torchhook._watch.sinks import Sink
from torchhook._watch.statistics import STATISTICS
from torchhook._watch.step import Looks, Step
from torchhook._watch.units import Units, layers, rectifies
from torchhook._watch.weights import Weights

_INWARD = ("input", "grad_input")  # seen from a hook before the module runs


class Snapshot(NamedTuple):
    """The statistics of one step: ``snapshot.sites["layer1.0.conv1"]["mean"]``."""

    step: int
    sites: dict[str, dict[str, Any]]

    def __repr__(self) -> str:
        return f"<snapshot of step {self.step}: {counted(len(self.sites), 'site')}>"

    def table(self) -> Table:
        """Its statistics, one line for each site."""
        known = {name for values in self.sites.values() for name in values} - {"histogram"}  # which fits no cell
        names = [name for name in STATISTICS if name in known]
        rows = [[shown(site), *(_cell(values.get(name)) for name in names)] for site, values in self.sites.items()]
        return Table(f"step {self.step}", ["site", *(f">{name}" for name in names)], rows)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


class Watched:
    """What is looked at in a measured step, decided before any hook is attached."""

    def __init__(
        self,
        index: Index,
        targets: list[Target],
        wanted: list[str],
        gradients: bool,
        parameters: bool,
        bins: int,
        threads: Threads,
        by_call: bool,
    ) -> None:
        self.index = index
        self.by_call: bool = by_call
        self.wanted = wanted
        self.threads = threads
        self.measure: Measure = Measure(wanted, bins)
        self.gradients = gradients
        self.targets = targets
        root = index.modules[""]
        # With steps counted by calls, the model's own call opens the session of a step. The model's inputs have passed
        # by then, and are looked at by the hook that counts.
        early = [t for t in targets if t.module is root and (t.site.port in _INWARD or t.tensor is not None)]
        self.before_step: list[Target] = early if by_call else []
        self.in_step: list[Target] = [t for t in targets if t not in self.before_step]
        self.parameters: dict[str, Target] = _parameters(index, targets) if parameters else {}
        self._trained: dict[str, Home] = {}

    @property
    def can_begin_anew(self) -> bool:
        """Whether a session for these can be opened again as it is: it keeps nothing from call to call."""
        return all(t.tensor is None and t.site.op is None and t.site.port == "output" for t in self.in_step)

    def count_by_hand(self) -> None:
        """Steps are begun and ended from outside: the hooks of one are there before the model is called."""
        self.by_call, self.before_step, self.in_step = False, [], list(self.targets)

    def attach(self, session: Session, looks: Looks, limits: Alarms | None, trained: Mapping[str, Home]) -> None:
        """Have the session show the running step what is watched."""
        # Which dim holds the units is only known from the layers before a rectifier, so these are looked at too.
        rectified = "dead" in self.wanted or (limits is not None and limits.dead_units)
        if rectified and any(rectifies(target.module, target.site.op) for target in self.in_step):
            for layer in layers(self.index):
                session.look(layer, looks.units.look(layer.module))
        for target in self.in_step:
            site = target.site
            if target.tensor is not None and site.port == "output":
                session.look(target, looks.once(str(site)))
                continue
            is_output = target.tensor is None and site.port == "output"
            session.look(target, looks.value(str(site), rectified and is_output and rectifies(target.module, site.op)))
            if self.gradients and is_output:
                session.look(target._replace(site=site.but(port="grad")), looks.gradient(str(site)))
        if self.gradients:
            session.reduced = True
            for name, home in trained.items():
                if home.way == "own":
                    session.follow(home.parameter, looks.parameter_gradient(name, home.parameter))
                else:
                    session.look(self.parameters[name], looks.reduced_gradient(name))

    def trained(self) -> dict[str, Home]:
        """The parameters that training can move, as the model holds them now, or will again when it has run.

        The very same answer for as long as nothing changes.
        """
        # Asked for each step: layers are frozen, unfrozen and replaced while a model trains.
        homes, known = Homes(self.index), self._trained
        found = {name: home for name, home in self._homes(homes, {} if homes else known) if home is not None}
        if found.keys() != known.keys() or any(home is not known[name] for name, home in found.items()):
            self._trained = found
        return self._trained

    def _homes(self, homes: Homes, known: Mapping[str, Home]) -> Iterator[tuple[str, Home | None]]:
        for name, (_, module, attribute) in self.parameters.items():
            live = module._parameters.get(attribute)  # type: ignore[arg-type]
            home = known.get(name)
            if home is not None and home.parameter is live and live.requires_grad and home.shape == live.shape:
                yield name, home
            elif live is not None and live.requires_grad and not is_lazy(live):
                yield name, homes.of(module, str(attribute))

    def compared(self, trained: Mapping[str, Home]) -> dict[str, int]:
        """Sites whose gradient norms say something about each other: weights, or else the outputs of modules.

        With the number of a weight's elements; outputs are of any size.
        """
        # Not biases: before a normalization, or as keys of an attention, their gradient is zero as it should be.
        weights = {name: home.shape.numel() for name, home in trained.items() if len(home.shape) > 1}
        return weights or {str(target.site): 1 for target in self.targets if target.tensor is None}


def _parameters(index: Index, targets: list[Target]) -> dict[str, Target]:
    """The parameters of the selected modules and of what they hold, each once."""
    chosen = {module for target in targets if target.tensor is None for module in target.module.modules()}
    named = {(target.module, target.tensor) for target in targets if target.tensor is not None}
    found: dict[int, tuple[str, Target]] = {}
    for name, (module, attribute) in index.tensors.items():
        parameter = module._parameters.get(attribute)
        if parameter is not None and (module in chosen or (module, attribute) in named):
            # By identity: a tied weight has one gradient and moves once, whatever the number of its names.
            found.setdefault(id(parameter), (name, Target(Site(name, port="grad"), module, attribute)))
    return dict(found.values())


class Built(NamedTuple):
    """What steps are measured with, for as long as the same parameters are trained."""

    trained: dict[str, Home]
    looks: Looks
    session: Session
    sites: frozenset[str]
    compared: dict[str, int]


class Ended(NamedTuple):
    """A step that is over, and whose numbers may still be on their way."""

    step: Step
    norms: dict[str, Key]
    updates: dict[str, Key]
    compared: dict[str, int]
    by_hand: bool


class Engine:
    """Counts steps, measures those that are due, and hands out what was found."""

    # Both the model's hook and the user's handle hold this. It must not hold the handle, or one that was dropped would
    # stay for as long as the model.

    def __init__(
        self,
        watched: Watched,
        every: int,
        sinks: list[Sink],
        limits: Alarms | None,
        start: int,
        loss_scale: float | Callable[[], float],
        history: int,
    ) -> None:
        self.watched = watched
        self.every = every
        self.next: int = start
        self.started = start
        self.history: deque[Snapshot] = deque(maxlen=history)
        self.alarms: AlarmState | None = None if limits is None else AlarmState(limits)
        self.paused = False
        self.step: Step | None = None
        self.seen: set[str] = set()
        self.missing: dict[str, str] = {}
        self.shared: Shared = Shared(f"watched {every} {start} {zlib.crc32(' '.join(watched.parameters).encode())}")
        self._limits = limits
        self._sinks = sinks
        self._loss_scale = loss_scale
        self._session: Session | None = None
        self._weights = Weights("update_ratio" in watched.wanted)
        self._norms: dict[str, Key] = {}
        self._ended: Ended | None = None
        self._built: Built | None = None
        self._room: Room = {}
        self._wanted = watched.wanted

    def advance(self) -> None:
        """One step ends and the next begins."""
        if self.paused:
            return
        self._settle_if_there()
        if self.step is not None:  # it lasts until here, so that it holds the optimizer's step
            self.finish(by_hand=not self.watched.by_call, now=False)
        number = self.next
        self.next += 1
        if number % self.every == 0:
            self._begin(number)

    def _begin(self, number: int) -> None:
        watched = self.watched
        # Asked now: a scaler changes its factor after the optimizer's step, and the gradients will hold this one.
        scale = self._loss_scale() if callable(self._loss_scale) else self._loss_scale
        built = self._build(watched.trained())
        step = built.looks.begin(Ledger(self._room))
        step.number, step.loss_scale = number, float(scale)
        self._norms = self._weights.begin(built.trained, step.ledger, step.weights_lie)
        # What no step has seen yet may be asked for at the end; there is nothing to say of the others.
        built.session.reports = not built.sites <= self.seen
        built.session.open(running=watched.by_call)
        self.step, self._session = step, built.session

    def _build(self, trained: dict[str, Home]) -> Built:
        """What a step is measured with, not open yet: what there is, if nothing has changed since it was built."""
        watched, built = self.watched, self._built
        if built is not None and built.trained is trained and watched.can_begin_anew:
            built.session.begin_anew()
            return built
        looks = Looks(watched.measure, Units(watched.index))
        session = Session(watched.index.modules[""], index=watched.index, threads=watched.threads, warn=False)
        watched.attach(session, looks, self._limits, trained)
        # When the model has run, the device is busy for a while: the time for what the host has to do.
        session.look(Target(Site(""), watched.index.modules[""]), _settling(weakref.ref(self)))
        sites = frozenset(str(target.site) for target in watched.in_step)
        self._built = Built(trained, looks, session, sites, watched.compared(trained))
        return self._built

    def hide(self) -> None:
        """What runs until ``show`` is no part of the running step."""
        if self._session is None:
            return
        if self.watched.threads == "all":
            self.abandon()  # it takes calls from wherever they come
        else:
            self._session.scope.leave()

    def show(self) -> None:
        if self._session is not None:
            self._session.scope.enter()

    def abandon(self) -> Step | None:
        """Take the hooks of the running step away."""
        # Before anything that may fail: no hook may write to a step that is over.
        step, self.step = self.step, None
        session, self._session = self._session, None
        if session is not None and self._built is not None:
            session.close()
            self._built.looks.end()
            if session.reports:
                # A layer may be skipped in one step and run in another: only what no step has seen is reported.
                self.missing = session.recording.missing
                self.seen.update(self._built.sites.difference(self.missing))
        return step

    def close(self, finished: bool) -> None:
        """No more steps: end the running one, or forget it."""
        self.shared.together.leave()
        if finished:
            self.finish()
        self.abandon()
        self._built = None
        self.settle()
        self.shared.together.close()
        self._weights.clear()  # copies as large as the model, while the user may keep the handle for its history

    def finish(self, by_hand: bool = True, now: bool = True) -> None:
        """End the running step, if it is a measured one, and tell what was found; not ``now``, where that would wait.

        ``by_hand`` says that it does not end with the next call of the model.
        """
        # The hooks go first: what follows reads from the device, writes to files and warns, and each of it may raise.
        step = self.abandon()
        self.settle()
        if step is None or not step.ran:
            return
        updates = self._weights.end(step.ledger)
        step.ledger.send()
        compared = {} if self._built is None else self._built.compared
        self._ended = Ended(step, self._norms, updates, compared, by_hand)
        # Nobody waits for a device while there is a next step to give it: the numbers come over meanwhile. Other ranks
        # wait, though, where they have parts of what was measured.
        if now or step.is_shared or not step.ledger.is_far:
            self.settle()

    def _settle_if_there(self) -> None:
        if self._ended is not None and self._ended.step.ledger.is_there():
            self.settle()

    def settle(self) -> None:
        """Tell what was found in the step that has ended, if that was not done yet."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        step, known = ended.step, 0 if self.alarms is None else len(self.alarms.raised)
        sites, live = step.finish(self._wanted, ended.norms, ended.updates, self.shared, ended.by_hand)
        if self.alarms is not None:
            self.alarms.check(step.number, sites, ended.compared, live)
        self.history.append(Snapshot(step.number, sites))
        for sink in self._sinks:
            sink(step.number, sites)
        if self.alarms is not None:
            self.alarms.warn_since(known)


def _settling(engine: weakref.ref[Engine]) -> Look:
    # The engine holds the session, and what is dropped must go at once.
    def look(value: Any, call: int) -> None:
        if (found := engine()) is not None:
            found.settle()

    return look

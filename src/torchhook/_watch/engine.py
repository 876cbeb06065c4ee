"""What is looked at in a measured step, and the engine that opens a session for each of them.

A session for each measured step, and none between: hooks that only asked whether a step is due would cost every step.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.nn.parameter import is_lazy

from torchhook._core.index import Index
from torchhook._core.select import Target
from torchhook._core.session import Session, Threads
from torchhook._core.sharding import Home, Homes
from torchhook._recording.address import Site
from torchhook._values.statistics import Measure
from torchhook._watch.alarms import Alarms, AlarmState
from torchhook._watch.ledger import Key, Ledger, Room
from torchhook._watch.shared import Shared
from torchhook._watch.sinks import Sink
from torchhook._watch.step import Step
from torchhook._watch.units import Units, layers, rectifies
from torchhook._watch.weights import Weights

_INWARD = ("input", "grad_input")  # seen from a hook before the module runs


class Snapshot(NamedTuple):
    """The statistics of one step: ``snapshot.sites["layer1.0.conv1"]["mean"]``."""

    step: int
    sites: dict[str, dict[str, Any]]


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

    def count_by_hand(self) -> None:
        """Steps are begun and ended from outside: the hooks of one are there before the model is called."""
        self.by_call, self.before_step, self.in_step = False, [], list(self.targets)

    def attach(self, session: Session, step: Step, limits: Alarms | None, trained: Mapping[str, Home]) -> None:
        """Have the session show the step what is watched."""
        # Which dim holds the units is only known from the layers before a rectifier, so these are looked at too.
        rectified = "dead" in self.wanted or (limits is not None and limits.dead_units)
        if rectified and any(rectifies(target.module, target.site.op) for target in self.in_step):
            for layer in layers(self.index):
                session.look(layer, step.units.look(layer.module))
        for target in self.in_step:
            site = target.site
            if target.tensor is not None and site.port == "output":
                session.look(target, step.look_once(str(site)))
                continue
            is_output = target.tensor is None and site.port == "output"
            session.look(target, step.look(str(site), rectified and is_output and rectifies(target.module, site.op)))
            if self.gradients and is_output:
                session.look(target._replace(site=site.but(port="grad")), step.look_gradient(str(site)))
        if self.gradients:
            session.reduced = True
            for name, home in trained.items():
                own = home.way == "own"
                look = step.look_parameter_gradient(name, home.parameter) if own else step.look_reduced_gradient(name)
                session.look(self.parameters[name], look)

    def trained(self) -> Iterator[tuple[str, Home]]:
        """The parameters that training can move, as the model holds them now, or will again when it has run."""
        # Asked for each step: layers are frozen, unfrozen and replaced while a model trains.
        homes = Homes(self.index)
        for name, target in self.parameters.items():
            assert target.tensor is not None
            live = target.module._parameters.get(target.tensor)
            if live is not None and live.requires_grad and not is_lazy(live):
                home = homes.of(target.module, target.tensor)
                if home is not None:
                    yield name, home

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
        self._trained: dict[str, Home] = {}
        self._ended: Ended | None = None
        self._ahead: tuple[dict[str, Home], tuple[Step, Session]] | None = None
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
        trained = dict(watched.trained())
        step, session = self._taken(trained) or self._built(trained)
        step.number, step.loss_scale = number, float(scale)
        self._trained = trained
        self._norms = self._weights.begin(trained.items(), step.ledger, step.weights_lie)
        if self._ended is not None:
            # When the model has run, the device is busy for a while: the time for what the host has to do.
            session.look(Target(Site(""), watched.index.modules[""]), lambda value, call: self._model_has_run())
        session.open(running=watched.by_call)
        self.step, self._session = step, session

    def _built(self, trained: dict[str, Home]) -> tuple[Step, Session]:
        """A step and its session, which is not open yet."""
        watched = self.watched
        step = Step(watched.measure, Units(watched.index), Ledger(self._room))
        session = Session(watched.index.modules[""], index=watched.index, threads=watched.threads, warn=False)
        watched.attach(session, step, self._limits, trained)
        return step, session

    def _taken(self, trained: dict[str, Home]) -> tuple[Step, Session] | None:
        """What was built ahead, if nothing has changed since."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not self.watched.by_call or _identity(ahead[0]) != _identity(trained):
            return None
        return ahead[1]

    def _model_has_run(self) -> None:
        self.settle()
        if self.every == 1 and self._ahead is None:
            self._ahead = self._trained, self._built(self._trained)

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
        if session is not None:
            session.close()
            missing = session.recording.missing
            # A layer may be skipped in one step and run in another: only what no step has seen is reported at the end.
            self.seen.update(a for a in (str(t.site) for t in self.watched.in_step) if a not in missing)
            self.missing = missing
        return step

    def close(self, finished: bool) -> None:
        """No more steps: end the running one, or forget it."""
        self.shared.together.leave()
        if finished:
            self.finish()
        self.abandon()
        self._ahead, self._trained = None, {}
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
        self._ended = Ended(step, self._norms, updates, self.watched.compared(self._trained), by_hand)
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


def _identity(homes: Mapping[str, Home]) -> list[tuple[str, str, int]]:
    return [(name, home.way, id(home.parameter)) for name, home in homes.items()]

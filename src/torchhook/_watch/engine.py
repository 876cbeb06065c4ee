"""What is looked at in a measured step, and the engine that opens a session for each of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from torchhook._core.index import Index
from torchhook._core.select import Target, live_tensor
from torchhook._core.session import Session, Threads
from torchhook._recording.address import Site
from torchhook._values.statistics import Measure
from torchhook._watch.alarms import Alarms, Bell
from torchhook._watch.sinks import Sink
from torchhook._watch.step import Step
from torchhook._watch.units import Units, layers, rectifies
from torchhook._watch.weights import Weights

_INWARD = ("input", "grad_input")


class Snapshot(NamedTuple):
    """The statistics of one step: ``snapshot.sites["layer1.0.conv1"]["mean"]``."""

    step: int
    sites: dict[str, dict[str, Any]]


class Plan:
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
        self.by_call = by_call
        self.wanted = wanted
        self.threads = threads
        self.measure = Measure(wanted, bins)
        self.gradients = gradients
        self.targets = targets
        root = index.modules[""]
        # What is seen before the model runs is past when the session of a step opens, which the model's own call does.
        early = [t for t in targets if t.module is root and (t.site.port in _INWARD or t.tensor is not None)]
        self.at_the_door = early if by_call else []
        self.inside = [t for t in targets if t not in self.at_the_door]
        self.parameters = _parameters(index, targets) if parameters else {}

    def attach(self, session: Session, step: Step, limits: Alarms | None) -> None:
        rectified = "dead" in self.wanted or (limits is not None and limits.dead_units)
        if rectified and any(rectifies(target.module, target.site.op) for target in self.inside):
            for layer in layers(self.index):
                session.look(layer, step.units.look(layer.module))
        for target in self.inside:
            site = target.site
            if target.tensor is not None and site.port == "output":
                session.look(target, step.look_once(str(site)))
                continue
            is_output = target.tensor is None and site.port == "output"
            session.look(target, step.look(str(site), rectified and is_output and rectifies(target.module, site.op)))
            if self.gradients and is_output:
                session.look(target._replace(site=site.but(port="grad")), step.look_gradient(str(site)))
        if self.gradients:
            for name, target in self.parameters.items():
                tensor = live_tensor(target)
                if tensor.requires_grad:
                    session.look(target, step.look_parameter_gradient(name, tensor))

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that training can move, as the model holds them now."""
        for name, target in self.parameters.items():
            tensor = live_tensor(target)
            if tensor.requires_grad:
                yield name, tensor

    def compared(self) -> dict[str, int]:
        """Sites whose gradient norms say something about each other: weights, or else the outputs of modules.

        With the number of a weight's elements; outputs are of any size.

        Not biases: before a normalisation, or as keys of an attention, their gradient is zero as it should be.
        """
        weights = {name: tensor.numel() for name, tensor in self.trained() if tensor.dim() > 1}
        return weights or {str(target.site): 1 for target in self.targets if target.tensor is None}


def _parameters(index: Index, targets: list[Target]) -> dict[str, Target]:
    """The parameters of the selected modules and of what they hold, each once."""
    chosen = {module for target in targets if target.tensor is None for module in target.module.modules()}
    named = {(target.module, target.tensor) for target in targets if target.tensor is not None}
    found: dict[int, tuple[str, Target]] = {}
    for name, (module, attribute) in index.tensors.items():
        parameter = module._parameters.get(attribute)
        if parameter is not None and (module in chosen or (module, attribute) in named):
            found.setdefault(id(parameter), (name, Target(Site(name, port="grad"), module, attribute)))
    return dict(found.values())


class Engine:
    """Counts steps, measures those that are due, and hands out what was found."""

    # The model's hook holds this and the handle does: it must not hold the handle, or a dropped handle would stay.

    def __init__(
        self,
        plan: Plan,
        every: int,
        outlets: list[Sink],
        limits: Alarms | None,
        start: int,
        loss_scale: float | Callable[[], float],
        history: int,
    ) -> None:
        self.plan = plan
        self.every = every
        self.next = start
        self.started = start
        self.history: deque[Snapshot] = deque(maxlen=history)
        self.bell = None if limits is None else Bell(limits)
        self.paused = False
        self.step: Step | None = None
        self.seen: set[str] = set()
        self.missing: dict[str, str] = {}
        self._limits = limits
        self._outlets = outlets
        self._loss_scale = loss_scale
        self._session: Session | None = None
        self._weights = Weights("update_ratio" in plan.wanted)
        self._norms: dict[str, int] = {}

    def advance(self) -> None:
        """One step ends and the next begins."""
        if self.paused:
            return
        if self.step is not None:
            self.finish()
        number = self.next
        self.next += 1
        if number % self.every == 0:
            self._begin(number)

    def _begin(self, number: int) -> None:
        scale = self._loss_scale() if callable(self._loss_scale) else self._loss_scale
        step = Step(number, self.plan.measure, Units(self.plan.index), float(scale))
        self._norms = self._weights.begin(self.plan.trained(), step.ledger)
        session = Session(self.plan.index.modules[""], index=self.plan.index, threads=self.plan.threads, warn=False)
        self.plan.attach(session, step, self._limits)
        session.open(running=self.plan.by_call)
        self.step, self._session = step, session

    def abandon(self) -> Step | None:
        """Take the hooks of the running step away."""
        step, self.step = self.step, None
        session, self._session = self._session, None
        if session is not None:
            session.close()
            missing = session.recording.missing
            self.seen.update(a for a in (str(t.site) for t in self.plan.inside) if a not in missing)
            self.missing = missing
        return step

    def close(self, finished: bool) -> None:
        """No more steps: end the running one, or forget it."""
        if finished:
            self.finish()
        self.abandon()
        self._weights.clear()

    def finish(self) -> None:
        """End the running step, if it is a measured one, and tell what was found."""
        step = self.abandon()
        if step is None or not step.ran:
            return
        told = 0 if self.bell is None else len(self.bell.rung)
        updates = self._weights.end(step.ledger)
        sites = step.finish(self.plan.wanted, self._norms, updates, self.bell)
        if self.bell is not None:
            self.bell.gradients(step.number, sites, self.plan.compared())
        self.history.append(Snapshot(step.number, sites))
        for outlet in self._outlets:
            outlet(step.number, sites)
        if self.bell is not None:
            self.bell.ring(told)

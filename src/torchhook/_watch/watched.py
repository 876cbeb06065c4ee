"""What is looked at in a measured step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchhook._core.index import Index
from torchhook._core.observing import can_observe, observe
from torchhook._core.session import Session, Threads
from torchhook._core.sharding import Home, Homes
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._values.statistics import Measure
from torchhook._watch.alarms import Alarms
from torchhook._watch.looks import Looks
from torchhook._watch.units import layers, rectifies

_INWARD = ("input", "grad_input")  # seen from a hook before the module runs


class Watched:
    """What is looked at in a measured step, decided before any hook is attached."""

    def __init__(
        self,
        index: Index,
        targets: Sequence[Target],
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
        self._lively: list[tuple[nn.Module, Any, Any, torch.Size]] = []
        """Of those: where the model holds them, and as what."""
        self._idle: list[tuple[nn.Module, Any]] = []
        """Where the model held none that was trained."""

    @property
    def can_begin_anew(self) -> bool:
        """Whether a session for these can be opened again as it is: it keeps nothing from call to call."""
        return all(t.tensor is None and t.site.op is None and t.site.port == "output" for t in self.in_step)

    @property
    def can_go_on(self) -> bool:
        """Whether such a session can also stay open: it does not count calls, nor ask other ranks."""
        own = all(home.way == "own" for home in self._trained.values())
        return own and self.can_begin_anew and all(target.site.call is None for target in self.in_step)

    def count_by_hand(self) -> None:
        """Steps are begun and ended from outside: the hooks of one are there before the model is called."""
        self.by_call, self.before_step, self.in_step = False, [], list(self.targets)

    def attach(self, session: Session, looks: Looks, limits: Alarms | None, trained: Mapping[str, Home]) -> None:
        """Have the session show the running step what is watched."""
        # Which dim holds the units is only known from the layers before a rectifier, so these are looked at too.
        rectified = "dead" in self.wanted or (limits is not None and limits.dead_units)
        rectified = rectified and any(rectifies(target.module, target.site.op) for target in self.in_step)
        telling = {layer.module: layer for layer in layers(self.index)} if rectified else {}
        for target in self.in_step:
            site, module = target.site, target.module
            if self.gradients and can_observe(session, target):
                tells = module if telling.pop(module, None) is not None else None
                look = looks.value(str(site), rectified and rectifies(module, None), tells)
                observe(session, target, look, looks.gradient(str(site)))
            elif target.tensor is not None and site.port == "output":
                session.look(target, looks.once(str(site)))
            else:
                self._look(session, target, looks, rectified)
        for layer in telling.values():
            session.look(layer, looks.units.look(layer.module))
        if self.gradients:
            session.reduced = True
            for name, home in trained.items():
                if home.way == "own":
                    session.follow(home.parameter, looks.parameter_gradient(name, home.parameter))
                else:
                    session.look(self.parameters[name], looks.reduced_gradient(name))

    def _look(self, session: Session, target: Target, looks: Looks, rectified: bool) -> None:
        site = target.site
        is_output = target.tensor is None and site.port == "output"
        session.look(target, looks.value(str(site), rectified and is_output and rectifies(target.module, site.op)))
        if self.gradients and is_output:
            session.look(target._replace(site=site.but(port="grad")), looks.gradient(str(site)))

    def trained(self) -> dict[str, Home]:
        """The parameters that training can move, as the model holds them now, or will again when it has run.

        The very same answer for as long as nothing changes.
        """
        # Asked for each step: layers are frozen, unfrozen and replaced while a model trains.
        homes = Homes(self.index)
        if homes or not self._is_known():
            self._trained = {name: home for name, home in self._homes(homes) if home is not None}
            self._lively, self._idle = [], []
            for name, (_, module, attribute) in self.parameters.items():
                if (home := self._trained.get(name)) is not None:
                    self._lively.append((module, attribute, home.parameter, home.shape))
                else:
                    self._idle.append((module, attribute))
        return self._trained

    def _is_known(self) -> bool:
        """Whether nothing has changed; asked for each step and parameter, so in as few words as can be."""
        if len(self._lively) + len(self._idle) != len(self.parameters):
            return False
        for module, attribute, parameter, shape in self._lively:
            held: Any = module._parameters.get(attribute)
            if held is not parameter or not parameter.requires_grad or parameter.shape != shape:
                return False
        for module, attribute in self._idle:
            live = module._parameters.get(attribute)
            if live is not None and live.requires_grad and not is_lazy(live):
                return False
        return True

    def _homes(self, homes: Homes) -> Iterator[tuple[str, Home | None]]:
        for name, (_, module, attribute) in self.parameters.items():
            live = module._parameters.get(attribute)  # type: ignore[arg-type]
            if live is not None and live.requires_grad and not is_lazy(live):
                yield name, homes.of(module, str(attribute))

    def compared(self, trained: Mapping[str, Home]) -> dict[str, int]:
        """Sites whose gradient norms say something about each other: weights, or else the outputs of modules.

        With the number of a weight's elements; outputs are of any size.
        """
        # Not biases: before a normalization, or as keys of an attention, their gradient is zero as it should be.
        weights = {name: home.shape.numel() for name, home in trained.items() if len(home.shape) > 1}
        return weights or {str(target.site): 1 for target in self.targets if target.tensor is None}


def _parameters(index: Index, targets: Sequence[Target]) -> dict[str, Target]:
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

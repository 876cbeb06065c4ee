"""One measured step: what its hooks noted, and what comes of it when the step is over."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from torchhook._core.hooks import after_backward
from torchhook._core.taps import Look
from torchhook._torch import version
from torchhook._values import tree
from torchhook._values.elements import measurable
from torchhook._values.moments import norm
from torchhook._values.statistics import Measure, Measured, summarize
from torchhook._values.subclasses import is_distributed, packed, sharded_over
from torchhook._watch.alarms import AlarmState
from torchhook._watch.shared import Part, Shared, part_norm
from torchhook._watch.statistics import Ledger
from torchhook._watch.units import Units


class Step:
    """Takes the statistics of passing values. Holds numbers, never the values: graphs are freed as without it."""

    def __init__(self, number: int, measure: Measure, units: Units, loss_scale: float, shared: Shared) -> None:
        self.number = number
        self.shared = shared
        self.ledger = Ledger()
        self.ran = False
        """Whether anything passed at all."""
        self.units = units
        self._measure = measure
        self._loss_scale = loss_scale
        self._values: dict[str, list[Measured]] = {}
        """Where their numbers are in the ledger."""
        self._masks: dict[str, Tensor] = {}
        self._gradients: dict[str, list[int]] = {}
        self._parameter_gradients: dict[str, int] = {}
        self._awaited: dict[str, tuple[Tensor, int, int]] = {}
        self._waiting: weakref.ref[Any] | None = None
        ledger = self.ledger  # not self: a step is freed when it is over, not when the collector comes by
        self._moments = _Latest(lambda tensor: measure(tensor).map(ledger.note))
        self._gradient_norm = _Latest(lambda tensor: ledger.note(part_norm(tensor)))

    # -- what hooks call -----------------------------------------------------------------------

    def look(self, site: str, rectifies: bool) -> Look:
        def look(value: Any, call: int) -> None:
            self.ran = True
            for key, tensor in _parts(site, value):
                self.shared.values[key] = sharded_over(tensor)
                if self._measure.needed:
                    self._values.setdefault(key, []).append(self._moments.of(tensor))
                mask = self.units.alive(tensor) if rectifies and not is_distributed(tensor) else None
                if mask is not None:  # a unit lives that lived in any call of the step
                    before = self._masks.get(key)
                    self._masks[key] = mask if before is None or before.shape != mask.shape else before | mask

        return look

    def look_once(self, site: str) -> Look:
        """For parameters, which are the same at every call of their module."""
        look = self.look(site, False)
        return lambda value, call: None if site in self._values else look(value, call)

    def look_gradient(self, site: str) -> Look:
        def look(value: Any, call: int) -> None:
            for key, tensor in _parts(site, value):
                self._gradients.setdefault(key, []).append(self._gradient_norm.of(tensor))

        return look

    def look_reduced_gradient(self, site: str) -> Look:
        """For parameters whose gradient is read once all ranks have added theirs: it is the sum already."""

        def look(gradient: Tensor, call: int) -> None:
            self._parameter_gradients[site] = self.ledger.note(part_norm(gradient))

        return look

    def look_parameter_gradient(self, site: str, parameter: Tensor) -> Look:
        def look(gradient: Tensor, call: int) -> None:
            if not (measurable(gradient) or gradient.is_sparse):  # without numbers
                return
            before = parameter.grad
            if before is None:
                self._parameter_gradients[site] = self.ledger.note(norm(_dense(gradient)))
                return
            # What the optimizer will see is the sum, and it is there when the backward pass has ended.
            if self._waiting is None or self._waiting() is None:
                # Autograd alone holds it, until the backward pass ends or fails.
                read = functools.partial(self._read_sums)
                self._waiting = weakref.ref(read)
                after_backward(read)
            self._awaited[site] = (parameter, id(before), version(before))

        return look

    def _read_sums(self) -> None:
        awaited, self._awaited = self._awaited, {}
        for site, (parameter, identity, known) in awaited.items():
            total = parameter.grad
            # Unchanged after autograd.grad, which hands its gradients out instead.
            if total is not None and (id(total) != identity or version(total) != known):
                self._parameter_gradients[site] = self.ledger.note(norm(_dense(total)))

    # -- at the end ----------------------------------------------------------------------------

    def finish(
        self,
        wanted: Sequence[str],
        weights: dict[str, int],
        updates: dict[str, int],
        alarms: AlarmState | None,
        by_hand: bool,
    ) -> dict[str, dict[str, Any]]:
        """Read all numbers at once: statistics by site, modules first."""
        # Everything is noted before anything is read: one transfer for the whole step.
        dead = {site: self.ledger.note((~mask).sum()) for site, mask in self._masks.items()}
        window = alarms.add_live_units(self._masks) if alarms is not None else {}
        dead_in_window = {site: self.ledger.note((~mask).sum()) for site, mask in window.items()}
        numbers = self.ledger.read()
        values = self._of_values(numbers)
        values |= self.shared.merge(values, self.shared.values, by_hand)
        of_weights = self._of_weights(numbers, weights, updates)
        of_weights |= self.shared.merge(of_weights, self.shared.weights, by_hand)
        found = {site: summarize(part["parts"], wanted) for site, part in values.items() if "parts" in part}
        for site, part in (*values.items(), *of_weights.items()):
            if "norm" in part:
                _note(found, site, "norm", part["norm"])
            if "grad_norm" in part:
                _note(found, site, "grad_norm", self._unscaled(part["grad_norm"]))
            if "update" in part:
                _note(found, site, "update_ratio", _ratio(part["update"], part["norm"]))
        for site, key in dead.items():
            _note(found, site, "dead", numbers[key] / self._masks[site].numel())
        for site, key in dead_in_window.items():
            assert alarms is not None
            alarms.check_dead_units(self.number, site, int(numbers[key]), window[site])
        return {s: {n: values[n] for n in wanted if n in values} for s, values in found.items()}

    def _of_values(self, numbers: dict[int, Any]) -> dict[str, Part]:
        """What this rank knows of what passed the sites."""
        mine: dict[str, Part] = {
            site: {"parts": [part.map(numbers.__getitem__) for part in parts]} for site, parts in self._values.items()
        }
        # Several calls are parts of one vector, as several gradients of a parameter are not: those were summed.
        for site, keys in self._gradients.items():
            mine.setdefault(site, {})["grad_norm"] = math.hypot(*(numbers[key] for key in keys))
        return mine

    def _of_weights(self, numbers: dict[int, Any], weights: dict[str, int], updates: dict[str, int]) -> dict[str, Part]:
        """What this rank knows of the parameters."""
        mine: dict[str, Part] = {}
        for site, key in weights.items():
            part = mine[site] = {"norm": numbers[key]}
            if site in self._parameter_gradients:
                part["grad_norm"] = numbers[self._parameter_gradients[site]]
            if site in updates:
                part["update"] = numbers[updates[site]]
        return mine

    def _unscaled(self, gradient: float) -> float:
        return gradient / self._loss_scale


class _Latest:
    """A function that is not called again for the same tensor: what a layer returns, its container often does too."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        self._function = function
        self._tensor: Callable[[], Tensor | None] = lambda: None
        self._version = -1
        self._result: Any = None

    def of(self, tensor: Tensor) -> Any:
        # An inference tensor counts no versions, so a write to it would go unnoticed.
        now = -1 if tensor.is_inference() else version(tensor)
        if now == -1 or now != self._version or self._tensor() is not tensor:
            self._result = self._function(tensor)
            self._tensor, self._version = weakref.ref(tensor), now
        return self._result


def _parts(site: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if measurable(value := packed(value)):
            yield site, value
        return
    for address, leaf in tree.leaves(value):
        if isinstance(leaf, Tensor) and measurable(part := packed(leaf)):
            yield f"{site}[{address}]", part


def _dense(gradient: Tensor) -> Tensor:
    # Coalesced: a row that was looked up twice is there twice, and only the sum of the two is its gradient.
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _note(found: dict[str, dict[str, Any]], site: str, name: str, value: float) -> None:
    found.setdefault(site, {})[name] = value


def _ratio(update: float, weight: float) -> float:
    if weight == 0:  # initialized at zero: any step is infinitely far, except none
        return 0.0 if update == 0 else math.inf
    return update / weight

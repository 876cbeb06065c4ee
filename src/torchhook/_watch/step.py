"""One measured step: what its hooks noted, and what comes of it when the step is over."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from torchhook._core.hooks import after_backward
from torchhook._torch import version
from torchhook._values import tree
from torchhook._values.elements import measurable
from torchhook._values.statistics import Measure, Measured, summarize
from torchhook._values.subclasses import is_distributed, packed, sharded_over
from torchhook._watch.ledger import Key, Ledger
from torchhook._watch.rows import NORM
from torchhook._watch.shared import Groups, Part, Shared
from torchhook._watch.tables import Table
from torchhook._watch.units import Units, alive


class Step:
    """Takes the statistics of passing values. Holds numbers, never the values: graphs are freed as without it."""

    def __init__(self, measure: Measure, units: Units, ledger: Ledger) -> None:
        self.number = 0
        self.loss_scale: float = 1.0
        self.ledger = ledger
        self.ran: bool = False
        """Whether anything passed at all."""
        self.units = units
        # Apart: while its module runs, FSDP's weight is whole on every rank, and a site too.
        self.lie: dict[str, Groups] = {}
        """Which values lie on several ranks."""
        self.weights_lie: dict[str, Groups] = {}
        self._measure = measure
        self._values: dict[str, list[Measured | Key]] = {}
        """Where their numbers are in the ledger."""
        self._masks: dict[str, list[Key]] = {}
        self._gradients: dict[str, list[Key]] = {}
        self._parameter_gradients: dict[str, Key] = {}
        self._awaited: dict[str, tuple[Tensor, int, int]] = {}
        self._waiting: weakref.ref[Any] | None = None
        # Not of self: a step is freed when it is over, not when the collector comes by.
        self._statistics = _Latest(functools.partial(ledger.statistics, measure))
        self._gradient_norm = _Latest(lambda tensor, _, plain: (ledger.norm(tensor, plain), None))

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have parts of what was measured."""
        return any(self.lie.values()) or any(self.weights_lie.values())

    # -- what hooks call, of plain tensors like those before -----------------------------------------

    def saw_again(self, site: str, value: Tensor, unit: int | None) -> bool:
        """A plain tensor has passed; whether it is like one before, and all was done that ``saw`` does with it."""
        latest = self._statistics
        if latest.tensor() is value and latest.is_unchanged(value):
            if unit is not None:  # which may not have been asked for before
                return False
            row = latest.result[0]
        else:
            rows = self.ledger.rows.get(value.device)
            row = None if rows is None else rows.again(value, unit)
            if row is None or (unit is not None and not row.units):
                return False
            latest.remember(value, (row, None))
        self.ran = True
        if site in self._values:
            self._values[site].append(row)
        else:
            self._values[site] = [row]
        if unit is not None:
            self._masks.setdefault(site, []).append((row, "live"))
        return True

    def saw_gradient_again(self, site: str, value: Tensor) -> bool:
        """As ``saw_again``, for ``saw_gradient``."""
        latest = self._gradient_norm
        if latest.tensor() is value and latest.is_unchanged(value):
            row = latest.result[0]
        else:
            rows = self.ledger.rows.get(value.device)
            row = None if rows is None else rows.again(value, NORM)
            if row is None:
                return False
            latest.remember(value, (row, None))
        if site in self._gradients:
            self._gradients[site].append(row)
        else:
            self._gradients[site] = [row]
        return True

    def saw_parameter_gradient_soon(self, site: str, gradient: Tensor) -> None:
        """As ``saw_parameter_gradient``, for one that is taken together with others: at the end of the pass, and not
        later, for gradients are clipped and zeroed in place."""
        self.ledger.norm_soon(site, gradient)
        self._parameter_gradients[site] = site
        if self._waiting is None or self._waiting() is None:
            self._wait_for_end()

    # -- what hooks call, of all others ---------------------------------------------------------------

    def saw(self, site: str, value: Any, rectifies: bool) -> None:
        """A value has passed."""
        self.ran = True
        plain = type(value) is Tensor and self.ledger.takes(value)
        for key, tensor in ((site, value),) if plain else _parts(site, value):
            self.lie[key] = () if plain else sharded_over(tensor)
            unit = self.units.dim(tensor) if rectifies and not is_distributed(tensor) else None
            mask = None
            if self._measure.needed:
                measured, mask = self._statistics.of(tensor, unit, plain)
                if key in self._values:
                    self._values[key].append(measured)
                else:
                    self._values[key] = [measured]
            if unit is not None:
                mask = self.ledger.note(alive(tensor, unit)) if mask is None else mask
                self._masks.setdefault(key, []).append(mask)

    def has_seen(self, site: str) -> bool:
        return site in self._values

    def saw_gradient(self, site: str, value: Any) -> None:
        plain = type(value) is Tensor and self.ledger.takes(value)
        for key, tensor in ((site, value),) if plain else _parts(site, value):
            self._gradients.setdefault(key, []).append(self._gradient_norm.of(tensor, None, plain)[0])

    def saw_reduced_gradient(self, site: str, gradient: Tensor) -> None:
        self._parameter_gradients[site] = self.ledger.norm(gradient)

    def saw_parameter_gradient(self, site: str, parameter: Tensor, gradient: Tensor) -> None:
        plain = type(gradient) is Tensor and self.ledger.takes(gradient)
        if not (plain or measurable(gradient) or gradient.is_sparse):  # without numbers
            return
        before = parameter.grad
        if before is not None:
            # What the optimizer will see is the sum, and it is there when the backward pass has ended.
            self._wait_for_end()
            self._awaited[site] = (parameter, id(before), version(before))
            return
        if self.ledger.can_wait(gradient):
            self.saw_parameter_gradient_soon(site, gradient)
        else:
            self._parameter_gradients[site] = self.ledger.norm(_dense(gradient))

    def _wait_for_end(self) -> None:
        if self._waiting is None or self._waiting() is None:
            # Autograd alone holds it, until the backward pass ends or fails.
            read = functools.partial(self._backward_ended)
            self._waiting = weakref.ref(read)
            after_backward(read)

    def _backward_ended(self) -> None:
        self.ledger.take_norms()
        awaited, self._awaited = self._awaited, {}
        for site, (parameter, identity, known) in awaited.items():
            total = parameter.grad
            # Unchanged after autograd.grad, which hands its gradients out instead.
            if total is not None and (id(total) != identity or version(total) != known):
                self._parameter_gradients[site] = self.ledger.norm(_dense(total))

    # -- at the end ----------------------------------------------------------------------------

    def finish(
        self,
        wanted: Sequence[str],
        weights: dict[str, Key],
        updates: dict[str, Key],
        shared: Shared,
        by_hand: bool,
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
        """Read all numbers at once: statistics by site, modules first, and which units of rectifiers live."""
        numbers = self.ledger.read()
        values = self._of_values(numbers)
        values |= shared.merge(values, self.lie, by_hand)
        of_weights = self._of_weights(numbers, weights, updates)
        of_weights |= shared.merge(of_weights, self.weights_lie, by_hand)
        found = {site: self._summary(part["parts"], wanted) for site, part in values.items() if "parts" in part}
        for site, part in (*values.items(), *of_weights.items()):
            if site not in found:
                found[site] = {}
            if "norm" in part:
                found[site]["norm"] = part["norm"]
            if "grad_norm" in part:
                found[site]["grad_norm"] = part["grad_norm"] / self.loss_scale
            if "update" in part:
                found[site]["update_ratio"] = _ratio(part["update"], part["norm"])
        masks = {site: _any([numbers[key] for key in keys]) for site, keys in self._masks.items()}
        for site, mask in masks.items():
            found.setdefault(site, {})["dead"] = (mask.numel() - int(mask.sum())) / mask.numel()
        return {s: {n: values[n] for n in wanted if n in values} for s, values in found.items()}, masks

    def _summary(self, parts: list[Measured | tuple[Table, int]], wanted: Sequence[str]) -> dict[str, Any]:
        if len(parts) == 1 and not isinstance(first := parts[0], Measured):
            return first[0].summaries(wanted)[first[1]].copy()  # as of nearly all: one call, and all numbers at once
        return summarize([self._measured(part) for part in parts], wanted)

    def _measured(self, part: Measured | tuple[Table, int]) -> Measured:
        return part if isinstance(part, Measured) else part[0].measured(part[1], self._measure)

    def _of_values(self, numbers: dict[Key, Any]) -> dict[str, Part]:
        """What this rank knows of what passed the sites."""
        mine: dict[str, Part] = {
            site: {"parts": [p.map(numbers.__getitem__) if isinstance(p, Measured) else numbers[p] for p in parts]}
            for site, parts in self._values.items()
        }
        for site, groups in self.lie.items():
            if groups and site in mine:  # other ranks have no tables of ours
                mine[site]["parts"] = [self._measured(part) for part in mine[site]["parts"]]
        # Several calls are parts of one vector, as several gradients of a parameter are not: those were summed.
        for site, keys in self._gradients.items():
            mine.setdefault(site, {})["grad_norm"] = math.hypot(*(numbers[key] for key in keys))
        return mine

    def _of_weights(self, numbers: dict[Key, Any], weights: dict[str, Key], updates: dict[str, Key]) -> dict[str, Part]:
        """What this rank knows of the parameters."""
        mine: dict[str, Part] = {}
        for site, key in weights.items():
            part = mine[site] = {"norm": numbers[key]}
            if site in self._parameter_gradients:
                part["grad_norm"] = numbers[self._parameter_gradients[site]]
            if site in updates:
                part["update"] = numbers[updates[site]]
        return mine


class _Latest:
    """A function that is not called again for the same tensor: what a layer returns, its container often does too."""

    def __init__(self, function: Callable[[Tensor, int | None, bool], tuple[Any, Key | None]]) -> None:
        self._function = function
        self.tensor: Callable[[], Tensor | None] = lambda: None
        self._version = -1
        self.result: Any = None

    def of(self, tensor: Tensor, unit: int | None = None, plain: bool = False) -> Any:
        """What the function makes of a tensor; it may not have been asked for units before."""
        if self.tensor() is not tensor or not self.is_unchanged(tensor):
            self.remember(tensor, self._function(tensor, unit, plain))
            return self.result
        return self.result if unit is None else (self.result[0], None)

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether the newest tensor was not written to since."""
        # An inference tensor counts no versions, so a write to it would go unnoticed.
        return self._version != -1 and version(tensor) == self._version

    def remember(self, tensor: Tensor, result: Any) -> None:
        self.tensor, self.result = weakref.ref(tensor), result
        self._version = -1 if tensor.is_inference() else version(tensor)


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


def _any(masks: list[Tensor]) -> Tensor:
    """Which units lived in any call of the step."""
    found = masks[0]
    for mask in masks[1:]:
        found = found | mask if found.shape == mask.shape else mask
    return found


def _ratio(update: float, weight: float) -> float:
    if weight == 0:  # initialized at zero: any step is infinitely far, except none
        return 0.0 if update == 0 else math.inf
    return update / weight

"""One measured step: what its hooks noted, and what comes of it when the step is over."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from torchhook._core.hooks import after_backward
from torchhook._torch import version, version_of
from torchhook._values import tree
from torchhook._values.elements import measurable
from torchhook._values.statistics import Measure, Measured, summarize
from torchhook._values.subclasses import is_distributed, packed, sharded_over
from torchhook._watch.ledger import Key, Ledger, Several, norm_at
from torchhook._watch.rows import Row, Rows
from torchhook._watch.shared import Groups, Part, Shared
from torchhook._watch.units import Living, Made, Units, alive, living

Found = dict[str, dict[str, Any]]
"""Statistics by site and name."""
Keys = dict[str, Key]


class Step:
    """Takes the statistics of passing values. Holds numbers, never the values: graphs are freed as without it."""

    def __init__(self, measure: Measure, units: Units, ledger: Ledger) -> None:
        self.number = 0
        self.loss_scale: float = 1.0
        self.ledger: Ledger = ledger
        self.rows: dict[torch.device, Rows] = ledger.rows
        self.ran: bool = False
        """Whether anything passed at all."""
        self.units = units
        # Apart: while its module runs, FSDP's weight is whole on every rank, and a site too.
        self.lie: dict[str, Groups] = {}
        """Which values lie on several ranks."""
        self.weights_lie: dict[str, Groups] = {}
        self._measure = measure
        self.values: dict[str, list[Measured | Key]] = {}
        """Where their numbers are in the ledger."""
        self.masks: dict[str, list[tuple[Key, Made] | None]] = {}
        """For each call of a rectifier where its flags are, and whose units; none where those are unknown."""
        self.gradients: dict[str, list[Key]] = {}
        self.parameter_gradients: dict[str, Key] = {}
        self._awaited: dict[str, tuple[Tensor, int, int]] = {}
        self.waiting: weakref.ref[Any] | None = None
        # Not of self: a step is freed when it is over, not when the collector comes by.
        self.latest_value: Latest = Latest(functools.partial(ledger.statistics, measure))
        self.latest_gradient: Latest = Latest(lambda tensor, _, plain: (ledger.norm(tensor, plain), None))

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have parts of what was measured."""
        return any(self.lie.values()) or any(self.weights_lie.values())

    # -- what hooks call -----------------------------------------------------------------------

    def saw(self, site: str, value: Any, rectifies: bool) -> None:
        """A value has passed."""
        self.ran = True
        plain = type(value) is Tensor and self.ledger.takes(value)
        for key, tensor in ((site, value),) if plain else _parts(site, value):
            self.lie[key] = () if plain else sharded_over(tensor)
            made = self.units.take(tensor, key) if rectifies and not is_distributed(tensor) else None
            unit, mask = None if made is None else made.dim, None
            if self._measure.needed:
                measured, mask = self.latest_value.of(tensor, unit, plain)
                if key in self.values:
                    self.values[key].append(measured)
                else:
                    self.values[key] = [measured]
            if made is not None:
                mask = self.ledger.note(alive(tensor, made.dim)) if mask is None else mask
            if rectifies:
                self.masks.setdefault(key, []).append(None if made is None else (mask, made))

    def has_seen(self, site: str) -> bool:
        return site in self.values

    def saw_gradient(self, site: str, value: Any) -> None:
        plain = type(value) is Tensor and self.ledger.takes(value)
        for key, tensor in ((site, value),) if plain else _parts(site, value):
            self.gradients.setdefault(key, []).append(self.latest_gradient.of(tensor, None, plain)[0])

    def saw_reduced_gradient(self, site: str, gradient: Tensor) -> None:
        self.parameter_gradients[site] = self.ledger.norm(gradient)

    def saw_parameter_gradient(self, site: str, parameter: Tensor, gradient: Tensor) -> None:
        plain = type(gradient) is Tensor and self.ledger.takes(gradient)
        if not (plain or measurable(gradient) or gradient.is_sparse):  # without numbers
            return
        before = parameter.grad
        if before is not None:
            # What the optimizer will see is the sum, and it is there when the backward pass has ended.
            self.wait_for_end()
            self._awaited[site] = (parameter, id(before), version(before))
            return
        if self.ledger.can_wait(gradient):
            self.ledger.norm_soon(site, gradient, (gradient.device, gradient.dtype))
            self.parameter_gradients[site] = site
            self.wait_for_end()  # not longer: gradients are clipped and zeroed in place
        else:
            self.parameter_gradients[site] = self.ledger.norm(_dense(gradient))

    def wait_for_end(self) -> None:
        if self.waiting is None or self.waiting() is None:
            # Autograd alone holds it, until the backward pass ends or fails.
            read = functools.partial(self._backward_ended)
            self.waiting = weakref.ref(read)
            after_backward(read)

    def _backward_ended(self) -> None:
        self.ledger.take_norms()
        awaited, self._awaited = self._awaited, {}
        for site, (parameter, identity, known) in awaited.items():
            total = parameter.grad
            # Unchanged after autograd.grad, which hands its gradients out instead.
            if total is not None and (id(total) != identity or version(total) != known):
                self.parameter_gradients[site] = self.ledger.norm(_dense(total))

    # -- at the end ----------------------------------------------------------------------------

    def finish(
        self,
        wanted: Sequence[str],
        weights: Keys,
        updates: Keys,
        shared: Shared,
        by_hand: bool,
    ) -> tuple[Found, dict[str, list[Living]]]:
        """Read all numbers at once: statistics by site, modules first, and which units of rectifiers live."""
        numbers = self.ledger.read()
        found = self._of_values(numbers, wanted)
        live = self._live(numbers)
        for site, units in live.items():
            found.setdefault(site, {})
            if "dead" in wanted:
                number = dead = 0
                for some in units:
                    number += some.mask.size
                    dead += some.mask.tobytes().count(0)  # in fewer steps than numpy counts
                found[site]["dead"] = dead / number
        self._add_norms(found, numbers, weights, updates, wanted)
        if self.is_shared:
            self._add_shared(found, numbers, weights, updates, wanted, shared, by_hand)
        return found, live

    def _live(self, numbers: dict[Key, Any]) -> dict[str, list[Living]]:
        """Which units of rectifiers live."""
        found = {}
        for site, calls in self.masks.items():
            if units := living([None if call is None else (_flags(numbers[call[0]]), call[1]) for call in calls]):
                found[site] = units
        return found

    def _of_values(self, numbers: dict[Key, Any], wanted: Sequence[str]) -> Found:
        """The statistics of what passed the sites; many at once, for a model has hundreds of them."""
        found: Found = {}
        several: dict[int, dict[str, list[int]]] = {}
        device, rows, names = -2, list[tuple[Any, ...]](), list[str]()
        for site, parts in self.values.items():
            first = parts[0]
            if len(parts) == 1 and type(first) is Row:  # as nearly all
                if first.device != device:
                    device = first.device
                    names, rows = numbers["table", device].told(wanted)
                found[site] = dict(zip(names, rows[first.at]))  # noqa: B905  # what is checked takes longer
            elif all(type(part) is Row and part.device == first.device for part in parts):  # type: ignore[union-attr]
                found[site] = {}
                several.setdefault(first.device, {})[site] = [part.at for part in parts]  # type: ignore[union-attr]
            else:
                found[site] = summarize(self._measured(parts, numbers), wanted)
        for device, groups in several.items():
            joined = numbers["table", device].joined(list(groups.values()))
            found |= zip(groups, joined.summaries(wanted), strict=True)
        return found

    def _measured(self, parts: Sequence[Any], numbers: dict[Key, Any]) -> list[Measured]:
        return [
            numbers["table", part.device].measured(part.at, self._measure)
            if type(part) is Row
            else part.map(numbers.__getitem__)
            for part in parts
        ]

    def _add_norms(
        self, found: Found, numbers: dict[Key, Any], weights: Keys, updates: Keys, wanted: Sequence[str]
    ) -> None:
        """The norms of gradients and of parameters, and how far those went."""
        scale, gradients, norms = self.loss_scale, "grad_norm" in wanted, "norm" in wanted
        for site, keys in self.gradients.items():
            if site not in found:
                found[site] = {}
            if gradients:
                # Several calls are parts of one vector, as several gradients of a parameter are not: those were summed.
                first = keys[0]
                if len(keys) > 1:
                    norm = math.hypot(*[norm_at(key, numbers) for key in keys])
                else:
                    norm = numbers["norms", first.device][first.at] if type(first) is Row else norm_at(first, numbers)
                found[site]["grad_norm"] = norm / scale
        for site, key in weights.items():
            if site not in found:
                found[site] = {}
            of_site = found[site]
            norm = numbers[key[0]][key[1]] if type(key) is Several else norm_at(key, numbers)
            if norms:
                of_site["norm"] = norm
            if gradients and site in self.parameter_gradients:
                key = self.parameter_gradients[site]
                of_site["grad_norm"] = (numbers[key] if type(key) is str else norm_at(key, numbers)) / scale
            if site in updates:
                key = updates[site]
                update = numbers[key[0]][key[1]] if type(key) is Several else norm_at(key, numbers)
                of_site["update_ratio"] = update / norm if norm != 0 else _ratio(update, norm)

    def _add_shared(
        self,
        found: Found,
        numbers: dict[Key, Any],
        weights: Keys,
        updates: Keys,
        wanted: Sequence[str],
        shared: Shared,
        by_hand: bool,
    ) -> None:
        """What all ranks know together, of the sites that lie on several of them."""
        mine: dict[str, Part] = {}
        for site in [site for site, groups in self.lie.items() if groups]:
            part = mine[site] = {"parts": self._measured(self.values[site], numbers)} if site in self.values else {}
            if site in self.gradients:
                part["grad_norm"] = math.hypot(*[norm_at(key, numbers) for key in self.gradients[site]])
        of_weights: dict[str, Part] = {}
        for site in [site for site in weights if self.weights_lie.get(site)]:
            part = of_weights[site] = {"norm": norm_at(weights[site], numbers)}
            if site in self.parameter_gradients:
                part["grad_norm"] = norm_at(self.parameter_gradients[site], numbers)
            if site in updates:
                part["update"] = norm_at(updates[site], numbers)
        for whole in (shared.merge(mine, self.lie, by_hand), shared.merge(of_weights, self.weights_lie, by_hand)):
            for site, part in whole.items():
                told = found.setdefault(site, {}) | self._told(part, wanted)
                found[site] = {name: told[name] for name in wanted if name in told}

    def _told(self, part: Part, wanted: Sequence[str]) -> dict[str, Any]:
        told = summarize(part["parts"], wanted) if part.get("parts") else {}
        if "norm" in part:
            told["norm"] = part["norm"]
        if "grad_norm" in part:
            told["grad_norm"] = part["grad_norm"] / self.loss_scale
        if "update" in part:
            told["update_ratio"] = _ratio(part["update"], part["norm"])
        return told


class Latest:
    """A function that is not called again for the same tensor: what a layer returns, its container often does too."""

    def __init__(self, function: Callable[[Tensor, int | None, bool], tuple[Any, Key | None]]) -> None:
        self._function = function
        self.tensor: Callable[[], Tensor | None] = lambda: None
        self.version: int = -1
        """None is counted for an inference tensor, so a write to it would go unnoticed."""
        self.of_newest: Any = None

    def of(self, tensor: Tensor, unit: int | None = None, plain: bool = False) -> tuple[Any, Key | None]:
        """What the function makes of a tensor, and where its units are, which may not have been asked for before."""
        if self.tensor() is tensor and self.is_unchanged(tensor):
            return self.of_newest, None
        self.of_newest, units = self._function(tensor, unit, plain)
        self.tensor = weakref.ref(tensor)
        self.version = -1 if tensor.is_inference() else version_of(tensor)
        return self.of_newest, units

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether the newest tensor was not written to since."""
        return self.version != -1 and version_of(tensor) == self.version


def _parts(site: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if measurable(value := packed(value)):
            yield site, value
        return
    for address, leaf in tree.leaves(value):
        if isinstance(leaf, Tensor) and measurable(part := packed(leaf)):
            yield f"{site}[{address}]", part


def _flags(found: NDArray[Any] | Tensor) -> NDArray[Any]:
    return found.numpy() if isinstance(found, Tensor) else found


def _dense(gradient: Tensor) -> Tensor:
    # Coalesced: a row that was looked up twice is there twice, and only the sum of the two is its gradient.
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _ratio(update: float, weight: float) -> float:
    if weight == 0:  # initialized at zero: any step is infinitely far, except none
        return 0.0 if update == 0 else math.inf
    return update / weight

"""What the statistics of a training run say that nobody wants to read too late: dead units, vanishing and exploding
gradients. Each is said once for each site."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from torchhook.errors import TrainingWarning

_BORN_AT_ZERO = 1e-3  # a weight whose elements are below: its norm says nothing yet of how large gradients may be


class Alarm(NamedTuple):
    """One thing that looked wrong."""

    step: int
    site: str
    kind: str
    message: str


@dataclass(frozen=True)
class Alarms:
    """When ``watch`` warns.

    >>> Alarms(window=20).window
    20

    ``window`` is in measured steps: units are dead, and gradients vanish, when it lasts that long. A gradient vanishes
    below ``vanishing`` times the largest gradient norm of the model; it explodes when it is not finite, or when its
    norm is over ``exploding`` times that of its weight, if that is not near zero as some are initialised, or over
    ``exploding`` times what it usually was.
    """

    window: int = 10
    vanishing: float = 1e-6
    exploding: float = 1e3
    dead_units: bool = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window}: expected a number of measured steps, 1 or more.")


class Bell:
    """Remembers what it needs of the steps gone by, and warns."""

    def __init__(self, limits: Alarms) -> None:
        self.limits = limits
        self.rung: list[Alarm] = []
        self._said: set[tuple[str, str]] = set()
        self._weak: dict[str, int] = {}
        self._usual: dict[str, tuple[int, float]] = {}
        self._alive: dict[str, Tensor] = {}
        self._seen = 0

    def saw(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take a step's live channels; at the end of a window, those that lived in it."""
        for site, mask in masks.items():
            before = self._alive.get(site)
            # A channel count that changes starts over: those were not the same units.
            self._alive[site] = mask if before is None or before.shape != mask.shape else before | mask
        self._seen += 1
        if self._seen < self.limits.window:
            return {}
        window, self._alive, self._seen = self._alive, {}, 0
        return window

    def dead(self, step: int, site: str, number: int, mask: Tensor) -> None:
        if number and ("dead", site) not in self._said:
            which = (~mask).nonzero().flatten()[:8].tolist()
            more = ", …" if number > len(which) else ""
            self._say(
                step,
                site,
                "dead",
                f"{site!r}: {number} of {mask.numel()} units were zero in all of the last {self.limits.window} "
                f"measured steps (units {', '.join(map(str, which))}{more}). A lower learning rate, another "
                "initialisation or a leaky activation keeps units alive.",
            )

    def gradients(self, step: int, sites: Mapping[str, Mapping[str, Any]], compared: Mapping[str, int]) -> None:
        """Look at the gradient norms of the sites whose norms can be compared with each other, given their sizes."""
        norms = {
            site: values["grad_norm"] for site, values in sites.items() if site in compared and "grad_norm" in values
        }
        finite = [norm for norm in norms.values() if math.isfinite(norm)]
        largest = max(finite, default=0.0)
        for site, norm in norms.items():
            weight = sites[site].get("norm")
            settled = weight is not None and weight >= _BORN_AT_ZERO * math.sqrt(compared[site])
            self._exploding(step, site, norm, weight if settled else None)
            if not norm > self.limits.vanishing * largest:
                self._vanishing(step, site, norm, largest)
            else:
                self._weak.pop(site, None)

    def _vanishing(self, step: int, site: str, norm: float, largest: float) -> None:
        if norm != norm:
            return
        self._weak[site] = times = self._weak.get(site, 0) + 1
        if times >= self.limits.window:
            self._say(
                step,
                site,
                "vanishing",
                f"{site!r}: the gradient vanishes. Its norm is {norm:.3g}, the largest in the model is {largest:.3g}, "
                f"and so it was in {times} measured steps. Normalisation, residual connections or another "
                "activation help.",
            )

    def _exploding(self, step: int, site: str, norm: float, weight: float | None) -> None:
        times, usual = self._usual.get(site, (0, 0.0))
        limit = self.limits.exploding
        if not math.isfinite(norm):
            why = f"its norm is {norm}"
        elif times >= 3 and norm > limit * math.exp(usual):
            why = f"its norm is {norm:.3g}, and usually was {math.exp(usual):.3g}"
        elif weight is not None and norm > limit * weight:
            why = f"its norm is {norm:.3g}, that of the weight {weight:.3g}"
        else:
            if norm > 0:
                share = max(1 / (times + 1), 0.05)
                self._usual[site] = (times + 1, usual + share * (math.log(norm) - usual))
            return
        self._say(
            step,
            site,
            "exploding",
            f"{site!r}: the gradient explodes: {why}. Clip gradients, lower the learning rate, or look for the first "
            "value that is not finite with th.guard.",
        )

    def _say(self, step: int, site: str, kind: str, message: str) -> None:
        if (kind, site) not in self._said:
            self._said.add((kind, site))
            self.rung.append(Alarm(step, site, kind, f"step {step}: {message}"))

    def ring(self, since: int) -> None:
        """Warn of what was found since the list had ``since`` entries."""
        for alarm in self.rung[since:]:
            warnings.warn(alarm.message, TrainingWarning, stacklevel=2)

"""What the statistics of a training run say that nobody wants to read too late: dead units, vanishing and exploding
gradients. Each is said once for each site; many in one step, in one warning."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from torchhook._recording.address import shown
from torchhook._recording.tables import facts
from torchhook._watch.units import Living
from torchhook._words import plural
from torchhook.errors import TrainingWarning, warn

# Some weights are initialized at zero (the second matrix of LoRA, the last layer of a residual branch). While the
# elements are below this, the norm says nothing yet of how large a gradient may be.
_BORN_AT_ZERO = 1e-3
_MANY = 16  # more of one kind in a step are one fault, mostly
_LEARNS_SLOWLY = 0.05  # the share of the newest step in what is usual, once there are many


class Alarm(NamedTuple):
    """One thing that looked wrong."""

    step: int
    site: str
    kind: str
    message: str

    def _repr_html_(self) -> str:
        return facts(f"{self.kind}: {shown(self.site)}", {"step": self.step}, [self.message])._repr_html_()


@dataclass(frozen=True)
class Alarms:
    """When ``watch`` warns.

    >>> Alarms(window=20).window
    20

    Args:
        window: in measured steps: units are dead, and gradients vanish, when it lasts that long.
        vanishing: a gradient vanishes below this times the largest gradient norm that it is compared with.
        exploding: a gradient explodes when it is not finite, or when its norm is over this times that of its weight, if
            that is not near zero as some are initialized, or over this times what it usually was.
        dead_units: whether to look for units of a ReLU that are always zero.
    """

    window: int = 10
    vanishing: float = 1e-6
    exploding: float = 1e3
    dead_units: bool = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window}: expected a number of measured steps, 1 or more.")

    def _repr_html_(self) -> str:
        return facts("When to warn", vars(self))._repr_html_()


class AlarmState:
    """Remembers what it needs of the steps gone by, and warns."""

    def __init__(self, limits: Alarms) -> None:
        self.limits = limits
        self.raised: list[Alarm] = []
        self._said: set[tuple[str, str]] = set()  # once for each site and kind: it rarely goes away by itself
        self._weak: dict[str, int] = {}
        self._usual: dict[str, tuple[int, float]] = {}
        self._alive: dict[tuple[str, tuple[int, int]], tuple[int, NDArray[Any]]] = {}

    def check(
        self,
        step: int,
        sites: Mapping[str, Mapping[str, Any]],
        compared: Mapping[str, int],
        live: Mapping[str, Sequence[Living]],
        parameters: Collection[str],
    ) -> None:
        """Look at a step: its statistics, the sites whose gradient norms can be compared, and which units live."""
        blocked: list[str] = []
        if self.limits.dead_units:
            # Where nothing passes a rectifier, weights before it and right behind it have no gradient. That is the one
            # fault, and said in its one alarm.
            if any(not bool(some.mask.any()) for units in live.values() for some in units):
                blocked = [site for site in compared if sites.get(site, {}).get("grad_norm") == 0]
            # All that do not learn, not only those whose gradients are compared.
            told = [site for site in parameters if sites.get(site, {}).get("grad_norm") == 0] if blocked else []
            self._check_dead_units(step, live, told or blocked)
        self._check_gradients(step, sites, {site: size for site, size in compared.items() if site not in blocked})

    # -- dead units ------------------------------------------------------------------------------

    def _check_dead_units(self, step: int, live: Mapping[str, Sequence[Living]], blocked: list[str]) -> None:
        for site, units in live.items():
            for call, key, mask in units:
                times, before = self._alive.get((site, key), (0, None))
                # A channel count that changes starts over: those were not the same units.
                if before is None or before.shape != mask.shape:
                    times, found = 1, mask
                else:
                    times, found = times + 1, before | mask
                # Each has a window of its own: a layer that is skipped now and then has not been dead for the whole of
                # one.
                if times < self.limits.window:
                    self._alive[site, key] = times, found
                    continue
                self._alive.pop((site, key), None)
                name = site if len(units) == 1 else f"{site}#{call}"
                self._say_dead(step, name, found, [] if bool(found.any()) else blocked)

    def _say_dead(self, step: int, site: str, mask: NDArray[Any], blocked: list[str]) -> None:
        which = (~mask).nonzero()[0].tolist()
        if which:
            units = ", ".join(map(str, which[:8])) + (", …" if len(which) > 8 else "")
            times = self.limits.window
            steps = "the last measured step" if times == 1 else f"each of the last {times} measured steps"
            self._raise_alarm(
                step,
                site,
                "dead",
                f"{site!r}: {len(which)} of {mask.size} units were zero in {steps} that it ran in (units {units})."
                f"{_blocked(blocked)} A lower learning rate, another initialization or a leaky activation keeps units "
                "alive.",
            )

    # -- gradients -------------------------------------------------------------------------------

    def _check_gradients(self, step: int, sites: Mapping[str, Mapping[str, Any]], compared: Mapping[str, int]) -> None:
        """Look at the gradient norms of the sites whose norms can be compared with each other, given their sizes."""
        norms = {
            site: values["grad_norm"] for site, values in sites.items() if site in compared and "grad_norm" in values
        }
        # Beside each other: how large gradients are depends on the loss, which is the same for all.
        largest = max((norm for norm in norms.values() if math.isfinite(norm)), default=0.0)
        for site, norm in norms.items():
            size = sites[site].get("norm")
            settled = size is not None and size >= _BORN_AT_ZERO * math.sqrt(compared[site])
            self._check_exploding(step, site, norm, size if settled else None)
            if math.isnan(norm):
                continue  # neither weak nor recovered
            if norm > self.limits.vanishing * largest:
                self._weak.pop(site, None)
            else:
                self._vanishes(step, site, norms)

    def _vanishes(self, step: int, site: str, norms: Mapping[str, float]) -> None:
        self._weak[site] = times = self._weak.get(site, 0) + 1
        # One small gradient is no alarm: a batch without a rare token, a gate that was shut.
        if times >= self.limits.window:
            beside, advice = _compare(site, norms)
            self._raise_alarm(
                step,
                site,
                "vanishing",
                f"{site!r}: the gradient vanishes. {beside}. It has vanished in {times} measured steps. {advice}",
            )

    def _check_exploding(self, step: int, site: str, norm: float, size: float | None) -> None:
        times, usual = self._usual.get(site, (0, 0.0))
        limit = self.limits.exploding
        if not math.isfinite(norm):
            why = f"its norm is {norm}"
        elif times >= 3 and norm > limit * math.exp(usual):
            why = f"its norm is {norm:.3g}, and usually was {math.exp(usual):.3g}"
        elif size is not None and norm > limit * size:
            why = f"its norm is {norm:.3g}, that of the value itself {size:.3g}"
        else:
            if norm > 0:
                # The mean of logarithms: gradients differ by orders of magnitude, and an outlier must not become usual.
                share = max(1 / (times + 1), _LEARNS_SLOWLY)
                self._usual[site] = (times + 1, usual + share * (math.log(norm) - usual))
            return
        self._raise_alarm(
            step,
            site,
            "exploding",
            f"{site!r}: the gradient explodes: {why}. Clip gradients, lower the learning rate, or look for the first "
            "value that is not finite with th.guard.",
        )

    # -- saying it -------------------------------------------------------------------------------

    def _raise_alarm(self, step: int, site: str, kind: str, message: str) -> None:
        if (kind, site) not in self._said:
            self._said.add((kind, site))
            self.raised.append(Alarm(step, site, kind, f"step {step}: {message}"))

    def warn_since(self, number: int) -> None:
        """Warn of what was found since there were ``number`` alarms."""
        # Not as it is found: a warning may be an error, and the step is to be logged before that ends it.
        by_kind: dict[str, list[Alarm]] = {}
        for alarm in self.raised[number:]:
            by_kind.setdefault(alarm.kind, []).append(alarm)
        for message in _messages(list(by_kind.values())):
            warn(message, TrainingWarning)


def _messages(kinds: list[list[Alarm]]) -> Iterator[str]:
    """What is said of alarms: each by itself, or many of one kind in one message that names the first of them.

    >>> many = [Alarm(3, f"{i}.weight", "vanishing", "step 3: '0.weight': the gradient vanishes.") for i in range(20)]
    >>> print(*_messages([many]))  # doctest: +ELLIPSIS
    step 3: '0.weight': the gradient vanishes. The same goes for 19 others: '1.weight', '2.weight', '3.weight', …; ...
    """
    for alarms in kinds:
        if len(alarms) <= _MANY:
            yield from (alarm.message for alarm in alarms)
        else:
            shown = ", ".join(repr(alarm.site) for alarm in alarms[1:4])
            others = f"The same goes for {len(alarms) - 1} others: {shown}, …"
            yield f"{alarms[0].message} {others}; the alarms of the watch have them all."


def _blocked(sites: list[str]) -> str:
    """What did not learn in the step at which it is said.

    >>> _blocked(["0.weight", "2.weight"])
    " In the last of them, 2 gradients are exactly 0: '0.weight', '2.weight'."
    """
    if not sites:
        return ""
    told = ", ".join(map(repr, sites[:8])) + (", …" if len(sites) > 8 else "")
    what = f"{len(sites)} {plural(len(sites), 'gradient is', 'gradients are')}"
    return f" In the last of them, {what} exactly 0: {told}."


_HELPS = "Normalization, residual connections or another activation help."
_LOOK_AT_THE_LOSS = "Look at the loss: it may be constant, or cut off from here by a clamp, a mask or a factor of 0."


def _compare(site: str, norms: Mapping[str, float]) -> tuple[str, str]:
    """How a gradient compares with the others, and what to do about it.

    >>> _compare("a", {"a": 1e-9, "b": 0.25, "c": 0.125})[0]
    "Its norm is 1e-09, that of 'b' is 0.25, the largest of the 3 that are compared"
    """
    finite = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
    top = max(finite, key=finite.__getitem__)
    unknown = len(norms) - len(finite)
    if finite[top] > 0:
        which = "the largest finite one" if unknown else "the largest"
        beside = f"that of {top!r} is {finite[top]:.3g}, {which} of the {len(norms)} that are compared"
        return f"Its norm is {norms[site]:.3g}, {beside}", _HELPS
    if len(norms) == 1:
        return "Its norm is 0, and there is no other to compare it with", _LOOK_AT_THE_LOSS
    if not unknown:
        return f"Its norm is 0, and so are those of all {len(norms)} that are compared", _LOOK_AT_THE_LOSS
    bad = f"{unknown} {plural(unknown, 'is', 'are')}"
    return f"Its norm is 0; of the {len(norms)} that are compared, {bad} not finite and the rest 0", _LOOK_AT_THE_LOSS

"""Suspicions that were looked into before: masks and infinities that are allowed come again in every run.

Those that led to nothing are looked into again after twice as many runs each time, so that they cost next to nothing
and a fault that hides behind one is found in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

from torchhook._guard.findings import Finding

_ALWAYS = 8
"""So often a fault that comes again in the same way is looked into each time."""


class Known:
    """What came of suspicions. A suspicion is a place, with what was seen there."""

    def __init__(self) -> None:
        self._innocent: set[Hashable] = set()
        self._times = 0
        self._faults: dict[frozenset[Hashable], list[Finding]] = {}
        self._times_of: dict[frozenset[Hashable], int] = {}

    def innocent(self, suspicions: Iterable[Hashable]) -> None:
        """Nothing was found."""
        self._innocent.update(suspicions)

    def faults(self, suspicions: Iterable[Hashable], findings: list[Finding]) -> None:
        """These are what was found."""
        self._faults[frozenset(suspicions)] = findings

    def is_due(self, suspicions: Collection[Hashable]) -> bool:
        """Whether these are to be looked into."""
        if any(one not in self._innocent for one in suspicions):
            return True
        self._times += 1
        return _is_power_of_two(self._times)

    def findings(self, suspicions: Iterable[Hashable]) -> list[Finding] | None:
        """What these are sure to lead to, after many times; ``None`` if that is to be found out."""
        key = frozenset(suspicions)
        if key not in self._faults:
            return None
        times = self._times_of[key] = self._times_of.get(key, 0) + 1
        return None if times < _ALWAYS or _is_power_of_two(times) else self._faults[key]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0

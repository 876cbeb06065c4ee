"""Quantiles of any number of values in little memory, with a bound on the error that always holds.

The sketch is that of Munro and Paterson (1980): full runs of sorted values wait, one for each level; two of a level
are merged, every other value of them is dropped, and the rest, which now stands for twice as many, goes a level up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

RESOLUTION = 2048
"""The values of a run: ranks are right to 0.3 % of a million values, and to 0.5 % of a billion."""


class Sketch:
    """Values ``(n, channels)`` as they come; the quantiles of each channel are exact up to ``resolution`` of them.

    Beyond that, a quantile is a value whose rank is off by ``rank_error`` of the count at most: by no more than
    ``log2(n / resolution) / (2 * resolution)``, whatever the values are and in whatever order they come.

    >>> sketch = Sketch(128)
    >>> sketch.add(torch.arange(1000.0)[:, None])
    >>> abs(float(sketch.quantile(0.5)) - 499.5) / 1000 <= sketch.rank_error <= math.log2(1000 / 128) / 256
    True
    """

    def __init__(self, resolution: int = RESOLUTION) -> None:
        self.resolution = resolution
        self.count = 0
        self.error = 0
        """By so many values a rank may be off: the merge of two runs moves none by more than one of their values."""
        self._runs: dict[int, Tensor] = {}  # (channels, resolution), sorted, by level
        self._rest: list[Tensor] = []  # (channels, any), less than a run together
        self._odd = 0  # a bit for each level: which half is dropped next, so that what they lose cancels

    def add(self, values: Tensor) -> None:
        """Take more values, ``(n, channels)``."""
        self.count += len(values)
        self._keep(values.T.contiguous())

    def merge(self, other: Sketch) -> None:
        """Take what another sketch of the same resolution has seen."""
        self.count += other.count
        self.error += other.error
        for level, run in other._runs.items():
            self._carry(level, run)
        for part in other._rest:
            self._keep(part)

    def _keep(self, values: Tensor) -> None:
        self._rest.append(values)
        if sum(part.shape[1] for part in self._rest) < self.resolution:
            return
        *full, rest = self._cut(torch.cat(self._rest, 1))
        for run in full:
            self._carry(0, run.sort(1).values)
        # A copy: a view would keep all of what it was cut from.
        self._rest = [rest.clone()] if rest.shape[1] else []

    def _cut(self, values: Tensor) -> Sequence[Tensor]:
        whole = values.shape[1] // self.resolution * self.resolution
        return [*values[:, :whole].split(self.resolution, 1), values[:, whole:]]

    def _carry(self, level: int, run: Tensor) -> None:
        while level in self._runs:
            both = torch.cat([self._runs.pop(level), run], 1).sort(1).values
            run = both[:, self._odd >> level & 1 :: 2].contiguous()
            self._odd ^= 1 << level
            self.error += 1 << level
            level += 1
        self._runs[level] = run

    @property
    def rank_error(self) -> float:
        """By such a share of the count the rank of a quantile may be off; 0 where quantiles are exact."""
        # One more for a value between two that were kept.
        return (self.error + 1) / self.count if self.error else 0.0

    def quantile(self, q: float) -> Tensor:
        """The quantile of each channel, between two values by a straight line, as numpy does it; of none, NaN."""
        if not self.count:
            return torch.full((1,), math.nan, dtype=torch.float64)
        values, weights = self.kept()
        values, order = values.double().sort(1)
        ranks = weights.to(values.device)[order].cumsum(1)
        at = q * (self.count - 1)
        low, high = ((ranks <= rank).sum(1, keepdim=True) for rank in (math.floor(at), math.ceil(at)))
        low, high = (values.gather(1, place)[:, 0] for place in (low, high))
        # Between two infinities there is no line.
        return torch.where(low == high, low, low.lerp(high, at - math.floor(at)))

    # -- what is written to a file ---------------------------------------------------------------------

    def kept(self) -> tuple[Tensor, Tensor]:
        """The values that are left, ``(channels, kept)``, and how many each of them stands for."""
        if not self.count:
            return torch.empty(1, 0), torch.empty(0, dtype=torch.int64)
        levels = sorted(self._runs)
        parts = [*(self._runs[level] for level in levels), *self._rest]
        each = [1 << level for level in levels] + [1] * len(self._rest)
        weights = [torch.full((part.shape[1],), weight) for part, weight in zip(parts, each, strict=True)]
        return torch.cat(parts, 1), torch.cat(weights)

    @classmethod
    def of(cls, resolution: int, values: Tensor, weights: Tensor, error: int) -> Sketch:
        """A sketch of what ``kept`` gave, and its error."""
        sketch = cls(resolution)
        sketch.count, sketch.error = int(weights.sum()), error
        for level in range(int(weights.max()).bit_length() if len(weights) else 0):
            own = values[:, weights == 1 << level]
            # The only ones that may be more than a run are single values: a full run of them, and the rest after it.
            if own.shape[1] >= resolution:
                sketch._runs[level], own = own[:, :resolution], own[:, resolution:]
            if own.shape[1]:
                sketch._rest = [own]
        return sketch

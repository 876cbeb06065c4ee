"""Histograms: the range that is worth showing, the counts in its parts, and one of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Histogram(NamedTuple):
    """Counts of values between edges, as ``numpy.histogram`` gives them."""

    counts: list[int]
    edges: list[float]


def histogram(values: Tensor, bins: int, low: float, high: float) -> Histogram:
    """How many values are in each of ``bins`` equal parts of a range; what is outside is not counted.

    >>> histogram(torch.tensor([0.0, 0.1, 1.0, 5.0]), 2, 0.0, 1.0)
    Histogram(counts=[2, 1], edges=[0.0, 0.5, 1.0])
    """
    ends = torch.tensor([low, high], dtype=values.dtype, device=values.device)
    counts = bin_counts(values, ends[0], ends[1], bins)
    return Histogram([int(number) for number in counts.tolist()], _edges(low, high, bins))


def bin_counts(values: Tensor, low: Tensor, high: Tensor, bins: int) -> Tensor:
    """How many values are in each of the equal parts of a range, left on the device."""
    # A range given as numbers would be read from the device, so the values are moved to [0, 1]; by halves, because the
    # whole width of a range of huge values is infinite.
    width = (high / 2 - low / 2).clamp_min(torch.finfo(values.dtype).tiny)
    return torch.histc(torch.add(low / -2, values, alpha=0.5) / width, bins, 0.0, 1.0)


def finite_range(flat: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The least and greatest finite value, left on the device; ``low`` and ``high`` are those of all."""
    # Looking at a number is free on the CPU; elsewhere it would wait for the device.
    if flat.is_cpu and bool((high / 2 - low / 2).isfinite()):
        return low, high
    return (
        flat.nan_to_num(math.inf, math.inf, math.inf).amin(),
        flat.nan_to_num(-math.inf, -math.inf, -math.inf).amax(),
    )


def merged(parts: Sequence[tuple[float, float, Sequence[float]]]) -> Histogram | None:
    """One histogram of several ``(low, high, counts)``: each bin goes where its centre lies, so that totals stay exact.

    >>> merged([(0.0, 2.0, [1, 1]), (2.0, 4.0, [3, 0])])
    Histogram(counts=[2, 3], edges=[0.0, 2.0, 4.0])
    """
    known = [(low, high, [int(number) for number in counts]) for low, high, counts in parts if low <= high]
    if not known:  # nothing is finite
        return None
    bins = len(known[0][2])
    low, high = min(part[0] for part in known), max(part[1] for part in known)
    if len(known) == 1:
        return Histogram(known[0][2], _edges(low, high, bins))
    width = high / bins - low / bins
    total = [0] * bins
    for least, greatest, counts in known:
        own = greatest / bins - least / bins
        for i, number in enumerate(counts):
            where = int((least + (i + 0.5) * own) / width - low / width) if number and width > 0 else 0
            total[min(max(where, 0), bins - 1)] += number
    return Histogram(total, _edges(low, high, bins))


def _edges(low: float, high: float, bins: int) -> list[float]:
    width = high / bins - low / bins
    return [low + i * width for i in range(bins)] + [high]


# -- ranges -------------------------------------------------------------------------------------------


def inner_range(values: NDArray[Any], clip: float) -> tuple[float, float]:
    """Finite values without ``clip`` percent at either end.

    >>> inner_range(np.arange(101.0), 1)
    (1.0, 99.0)
    """
    low, high = np.percentile(values, [clip, 100 - clip])
    return float(low), float(high)


def with_room(low: float, high: float) -> tuple[float, float]:
    """A range that is never empty: around one number, some room.

    >>> with_room(1.0, 3.0), with_room(2.0, 2.0)
    ((1.0, 3.0), (1.5, 2.5))
    """
    if low < high:
        return low, high
    room = max(0.5, abs(low) * 1e-3)
    return low - room, high + room


def with_room_for(bins: int, low: float, high: float) -> tuple[float, float]:
    """A range that so many bins can be told apart in, however large its numbers are."""
    needed = 2 * bins * float(np.spacing(max(abs(low), abs(high))))
    if high - low >= needed:
        return low, high
    middle = low + (high - low) / 2
    return middle - needed / 2, middle + needed / 2

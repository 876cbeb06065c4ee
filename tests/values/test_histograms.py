"""Histograms and their ranges against numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchhook._values.histograms import (
    Histogram,
    bin_counts,
    finite_range,
    histogram,
    inner_range,
    merged,
    with_room,
    with_room_for,
)

INF, NAN = math.inf, math.nan


def uniform(size: int, seed: int = 0) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed))


def counted(values: Tensor, bins: int) -> tuple[float, float, list[float]]:
    low, high = finite_range(values, *torch.aminmax(values))
    return float(low), float(high), bin_counts(values, low, high, bins).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_counts_are_those_of_numpy(dtype: torch.dtype) -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = histogram(values, 16, -2.0, 3.0)
    counts, edges = np.histogram(values.double().numpy(), bins=16, range=(-2.0, 3.0))
    assert np.abs(np.array(found.counts) - counts).sum() <= 2  # values beside an edge
    assert found.edges == pytest.approx(edges.tolist())


def test_both_ends_count_and_what_is_outside_does_not() -> None:
    assert histogram(torch.tensor([-1.0, 0.0, 0.5, 1.0, 1.5, NAN, INF, -INF]), 2, 0.0, 1.0).counts == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "ends", [(-3e38, 3e38), (1e8, 1e8 + 16), (-1e-30, 1e-30), (0.0, 0.1), (1 / 3, 2 / 3), (-1e36, 1e36)]
)
def test_the_greatest_value_is_in_the_last_bin_however_large_or_small_the_range(
    ends: tuple[float, float], dtype: torch.dtype
) -> None:
    low, high = torch.tensor(ends, dtype=dtype).tolist()
    middle = low + (high - low) / 2
    assert histogram(torch.tensor([low, high, high, middle], dtype=dtype), 3, low, high).counts == [1, 1, 2]


def test_the_range_of_the_finite_values_leaves_out_the_others() -> None:
    assert counted(torch.tensor([1.0, NAN, INF, -INF, 3.0]), 2) == (1.0, 3.0, [1.0, 1.0])
    assert counted(torch.tensor([-3e38, 0.0, 3e38]), 2)[2] == [1.0, 2.0]
    assert counted(torch.tensor([2.0, 2.0, NAN]), 4) == (2.0, 2.0, [2.0, 0.0, 0.0, 0.0])


def test_where_nothing_is_finite_there_is_no_histogram() -> None:
    low, high, counts = counted(torch.tensor([NAN, INF, -INF]), 2)
    assert low > high
    assert merged([(low, high, counts)]) is None


def test_one_part_is_as_it_was() -> None:
    assert merged([(0.0, 1.0, [2.0, 3.0])]) == Histogram([2, 3], [0.0, 0.5, 1.0])


def test_parts_are_put_together_to_a_bin_and_lose_nobody() -> None:
    parts = [uniform(1000), uniform(500, 1) * 5 - 2, torch.full((30,), 0.5), torch.full((4,), NAN)]
    found = merged([counted(part, 20) for part in parts])
    assert found is not None
    together = torch.cat(parts[:3]).double().numpy()
    counts, edges = np.histogram(together, bins=20)
    assert sum(found.counts) == 1530
    assert found.edges == pytest.approx(edges.tolist(), rel=1e-6)
    # Each bin of a part went to one bin of the whole: up to that bin, the counts agree.
    assert np.abs(np.cumsum(found.counts) - np.cumsum(counts)).max() <= max(counts)


def test_parts_that_are_one_number_are_put_together() -> None:
    assert merged([(2.0, 2.0, [3, 0]), (2.0, 2.0, [1, 0])]) == Histogram([4, 0], [2.0, 2.0, 2.0])


def test_huge_parts_are_put_together() -> None:
    found = merged([(-1.5e308, -1.5e308, [1, 0]), (1.5e308, 1.5e308, [2, 0])])
    assert found is not None
    assert found.counts == [1, 2]
    assert all(math.isfinite(edge) for edge in found.edges)


def test_the_inner_range_is_that_of_the_percentiles() -> None:
    array: Any = np.random.default_rng(0).normal(size=999)
    assert inner_range(array, 2.5) == (np.percentile(array, 2.5), np.percentile(array, 97.5))
    assert inner_range(array, 0) == (array.min(), array.max())


def test_a_range_of_one_number_has_room_around_it() -> None:
    assert with_room(0.0, 0.0) == (-0.5, 0.5)
    assert with_room(1e20, 1e20) == pytest.approx((0.999e20, 1.001e20))
    assert with_room(-1.0, -0.5) == (-1.0, -0.5)


@pytest.mark.parametrize(("low", "high"), [(1e16, 1e16 + 2), (1e20, 1e20), (-5.0, 5.0), (0.0, 0.0)])
def test_bins_can_be_told_apart(low: float, high: float) -> None:
    wide = with_room_for(80, low, high)
    assert wide[0] <= low <= high <= wide[1]
    assert (np.diff(np.linspace(*wide, 81)) > 0).all()

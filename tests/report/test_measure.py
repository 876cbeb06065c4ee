"""Statistics against numpy and against numbers that are plain to see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchhook._report.measure import BINS, dead_channels, numbers


def test_statistics_are_those_of_numpy() -> None:
    tensor = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)) * 3 + 1
    array = tensor.numpy().astype(np.float64)
    found = numbers(tensor)
    assert found is not None
    assert (found.mean, found.std) == (pytest.approx(array.mean()), pytest.approx(array.std()))
    assert (found.min, found.max) == (pytest.approx(array.min()), pytest.approx(array.max()))
    assert found.norm == pytest.approx(np.linalg.norm(array))
    assert (found.elements, found.nans, found.infs, found.zeros) == (60, 0, 0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_every_dtype_has_statistics(dtype: torch.dtype) -> None:
    found = numbers(torch.tensor([0, 1, 1, 1]).to(dtype))
    assert found is not None
    assert (found.mean, found.zeros, found.max) == (0.75, 0.25, 1.0)


def test_the_histogram_counts_every_finite_value_once() -> None:
    found = numbers(torch.randn(10_000, generator=torch.Generator().manual_seed(0)))
    assert found is not None
    assert len(found.counts) == BINS
    assert sum(found.counts) == 10_000


def test_many_zeros_are_left_out_of_the_histogram_and_said() -> None:
    found = numbers(torch.tensor([0.0] * 50 + [1.0, 2.0, 3.0]))
    assert found is not None
    assert found.without_zeros
    assert sum(found.counts) == 3
    assert found.zeros == pytest.approx(50 / 53)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    found = numbers(torch.tensor([1.0, 3.0, float("nan"), float("inf"), -float("inf")]))
    assert found is not None
    assert (found.mean, found.nans, found.infs, found.max) == (2.0, 1, 2, 3.0)


def test_a_tensor_of_nothing_but_nan_has_counts_only() -> None:
    found = numbers(torch.full((4,), float("nan")))
    assert found is not None
    assert (found.mean, found.counts, found.nans) == (None, [], 4)


def test_a_constant_has_a_histogram_too() -> None:
    found = numbers(torch.full((7,), 2.5))
    assert found is not None
    assert sum(found.counts) == 7
    assert found.low < 2.5 < found.high


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(3, device="meta"), torch.eye(3).to_sparse()])
def test_what_has_no_values_to_read_has_no_statistics(tensor: torch.Tensor) -> None:
    assert numbers(tensor) is None


def test_dead_channels_are_those_that_are_zero_everywhere() -> None:
    maps = torch.rand(2, 6, 4, 4) + 0.1
    maps[:, [1, 4]] = 0
    maps[0, 2] = 0  # alive in the other sample
    assert dead_channels(maps) == (2, 6)
    assert dead_channels(maps[:, :, :1, :1]) == (0, 0)


def test_dead_features_of_tokens_are_found_in_the_last_dim() -> None:
    tokens = torch.rand(2, 20, 5) + 0.1
    tokens[..., 3] = 0
    assert dead_channels(tokens) == (1, 5)


def test_the_histogram_of_the_widest_range_counts_all() -> None:
    found = numbers(torch.tensor([-3e38, -1.0, 1.0, 3e38]))
    assert found is not None
    assert (found.counts[0], found.counts[-1], sum(found.counts)) == (1, 1, 4)


def test_the_histogram_of_a_large_constant_counts_all() -> None:
    found = numbers(torch.full((50,), 1e20))
    assert found is not None
    assert sum(found.counts) == 50
    assert found.low < 1e20 < found.high


def test_the_rows_of_a_nested_tensor_are_taken_together() -> None:
    rows = [torch.arange(4.0).view(2, 2), torch.arange(6.0).view(3, 2)]
    found = numbers(torch.nested.nested_tensor(rows, layout=torch.jagged))
    assert found is not None
    assert (found.elements, found.max, found.mean) == (10, 5.0, pytest.approx(2.1))

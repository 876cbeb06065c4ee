"""Slabs: which of their rows hold what is no number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torchhook._extract.slabs import Slab, bad_rows
from torchhook._features.api import ColumnSpec

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]


def filled(dtype: torch.dtype, ragged: bool, values: dict[int, float]) -> tuple[Slab, torch.Tensor]:
    """A slab of 50 rows of 7 numbers, from the smallest to the largest that the dtype has; some are ``values``."""
    ends = torch.finfo(dtype)
    data = torch.linspace(-0.9, 0.9, 350, dtype=torch.float64).reshape(50, 7) * ends.max
    data[3], data[4] = ends.max, ends.min
    for row, value in values.items():
        data[row, row % 7] = value
    slab = Slab([ColumnSpec("a", dtype, (7,), ragged)], 50, 0, pin=False).begin(0)
    slab.rows = 50
    column = slab.columns["a"]
    if ragged:
        column.data = data.to(dtype)
        column.offsets[:] = torch.arange(51)
        column.filled = 50
    else:
        column.data[:] = data.to(dtype)
    return slab, data.to(dtype).double()


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_with_what_is_no_number_are_found_and_no_others(dtype, ragged):
    slab, _ = filled(dtype, ragged, {})
    assert bad_rows(slab, slab.columns["a"], overflow=True) == []
    slab, stored = filled(dtype, ragged, {0: math.nan, 17: math.inf, 49: -math.inf})
    nan = [row for row in range(50) if bool(stored[row].isnan().any())]
    strange = [row for row in range(50) if not bool(stored[row].isfinite().all())]
    assert 0 in nan
    assert bad_rows(slab, slab.columns["a"], overflow=False) == nan
    assert bad_rows(slab, slab.columns["a"], overflow=True) == strange


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn])
def test_every_pattern_of_bits_of_a_short_float_is_judged_right(dtype):
    numbers = _patterns(dtype)
    slab = Slab([ColumnSpec("a", dtype, ())], len(numbers), 0, pin=False).begin(0)
    slab.columns["a"].data.copy_(numbers)
    slab.rows = len(numbers)
    judged = np.isfinite(numbers.double().numpy())
    strange = np.flatnonzero(~judged).tolist()
    assert bad_rows(slab, slab.columns["a"], overflow=True) == strange
    # Each alone: one that is taken for a number must not pass because of another that is not.
    # By their bits: the oldest torch picks no elements of the shortest floats.
    bits = numbers.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    finite = bits[torch.from_numpy(judged)].view(dtype)
    slab.columns["a"].data[: len(finite)] = finite
    slab.rows = len(finite)
    assert bad_rows(slab, slab.columns["a"], overflow=True) == []
    for row in strange[:: max(1, len(strange) // 100)]:
        slab.columns["a"].data[0], slab.rows = numbers[row], 1
        assert bad_rows(slab, slab.columns["a"], overflow=True) == [0]


def _patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every pattern of bits that a dtype has."""
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    return torch.arange(65536).to(torch.int32).to(torch.uint16).view(dtype)

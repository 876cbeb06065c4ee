"""The kernels of ``watch`` without a GPU: the same calls, the same slots, by numpy and one program after the other."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchhook._watch import ledger, rows

TILE = 1024


class _Kernel:
    """What ``kernels.look`` is: a grid in brackets, then the arguments."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(x: Tensor, slots: Tensor, live: Tensor, numel: int, *layout: int, **constants: Any) -> Any:
            self.launches += 1
            memory = torch.as_strided(x.detach(), (numel,), (1,)).double().numpy()
            for program in range(grid[0]):
                run(memory, slots.numpy(), live.numpy(), program, *layout, **constants)
            return x.dtype  # stands for what was compiled

        return launch


def run(
    memory: Any,
    slots: Any,
    live: Any,
    program: int,
    rows: int,
    rows_each: int,
    length: int,
    channels: int,
    ROWS: int,
    COLUMNS: int,
    WHOLE: bool,
    UNITS: int,
    **options: Any,
) -> None:
    assert ROWS * COLUMNS == TILE
    start, stop = program * rows_each * length, min(min((program + 1) * rows_each, rows) * length, len(memory))
    values = memory[start:stop]
    assert len(values) > 0
    with np.errstate(all="ignore"):
        if not WHOLE:
            slots[program] = (values**2).sum()
            return
        pivot = values[0] if np.isfinite(values[0]) else 0.0
        gaps, numbers = values - pivot, values[~np.isnan(values)]
        ends = np.min(numbers, initial=np.inf), np.max(numbers, initial=-np.inf)
        counts = np.isnan(values).sum(), (values == 0).sum()
        slots[8 * program : 8 * program + 8] = [len(values), pivot, gaps.sum(), (gaps**2).sum(), *ends, *counts]
    at = np.arange(start, stop)[values != 0]
    if UNITS:
        live[at // length % channels if UNITS == 1 else at % length] = 1


class _Merge:
    """What ``kernels.merge`` is."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(slots: Tensor, places: Tensor, found: Tensor, WHOLE: bool, BLOCK: int) -> None:
            assert len(places) == grid[0]
            firsts = places[:, 0].numpy()  # one behind the other, without gaps but those that hold zeros
            if WHOLE:
                found.numpy().reshape(-1, 6)[:] = merged(slots.numpy().reshape(-1, 8), firsts).T
            else:
                found.numpy()[:] = np.add.reduceat(slots.numpy(), firsts)

        return launch


def merged(slots: Any, firsts: Any) -> Any:
    """What the slots of each tensor amount to, from those of all."""
    sizes, pivots, totals, squares, least, greatest, nans, zeros = slots.T
    numbers = np.diff(np.append(firsts, len(slots)))
    with np.errstate(all="ignore"):
        means, size = pivots + totals / sizes, np.add.reduceat(sizes, firsts)
        mean = np.add.reduceat(means * (sizes / np.repeat(size, numbers)), firsts)
        spread = squares - totals * (totals / sizes) + sizes * (means - np.repeat(mean, numbers)) ** 2
        variance = np.add.reduceat(spread / np.repeat(size, numbers), firsts)
    bad = np.add.reduceat(nans, firsts)
    ends = np.minimum.reduceat(least, firsts), np.maximum.reduceat(greatest, firsts)
    low, high = (np.where(bad > 0, np.nan, end) for end in ends)
    return np.array([mean, variance, low, high, size - np.add.reduceat(zeros, firsts), bad])


class Kernels:
    """Stands for the module."""

    TILE, MERGED = TILE, 256

    def __init__(self) -> None:
        self.look, self.merge = _Kernel(), _Merge()

    def launcher(self, compiled: torch.dtype, device: int | None, arguments: tuple[Any, ...]) -> Any:
        """Launches again with other addresses, as a compiled kernel does."""
        numel, _, _, _, channels, _, _, whole, units = arguments

        def launch(programs: int, x: int, slots: int, live: int) -> None:
            values = at(x, compiled, numel)
            places = at(slots, torch.float64, programs * (8 if whole else 1))
            flags = at(live, torch.uint8, channels) if units else places
            constants = zip(("ROWS", "COLUMNS", "WHOLE", "UNITS"), arguments[5:], strict=True)
            self.look[(programs,)](values, places, flags, *arguments[:5], **dict(constants))

        return launch


def at(address: int, dtype: torch.dtype, number: int) -> Tensor:
    """The memory that begins at an address."""
    memory = (ctypes.c_byte * (number * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Tensors on the CPU are given rows, as those on a GPU are."""
    found = Kernels()
    monkeypatch.setitem(sys.modules, "torchhook._watch.kernels", found)  # type: ignore[arg-type]
    monkeypatch.setattr("torchhook._watch.kernels", found, raising=False)
    monkeypatch.setattr(ledger, "has_rows", lambda tensor: True)
    yield found
    rows.works.cache_clear()

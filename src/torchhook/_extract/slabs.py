"""Slabs: preallocated memory for the rows of one shard. The copy into a slab is the only copy a feature makes.

It is the clone that keeps the value from in-place layers, the cast, and on CUDA the transfer: there the slab is
pinned, and the copy runs on a stream of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from torchhook._features.api import IDS, LABELS, ColumnSpec, aligned_empty, shown
from torchhook._values.host_copies import HostCopies
from torchhook.errors import ExtractError

_SATURATES = torch.float8_e4m3fn
"""It has no infinity: a cast to it gives the largest number instead."""
_MOST = 464.0  # rounds to that number, 448; anything larger would have been infinity


def in_range(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value, for a cast to ``dtype``: with NaN where that would silently give another number."""
    if dtype != _SATURATES or value.dtype == dtype or not value.is_floating_point():
        return value
    return torch.where(value.abs() > _MOST, math.nan, value)


class Fixed:
    """Rows of one shape."""

    def __init__(self, spec: ColumnSpec, rows: int, pin: bool) -> None:
        self.spec = spec
        self.data = aligned_empty((rows, *spec.shape), spec.dtype, pin)

    def put(self, at: int, rows: Tensor, copies: HostCopies) -> None:
        copies.copy(rows, into=self.data[at : at + len(rows)])

    def blank(self, at: int) -> None:
        """A row that was skipped: NaN, or zero where the dtype has none."""
        self.data[at] = math.nan if self.spec.dtype.is_floating_point else 0

    def tensors(self, rows: int) -> dict[str, Tensor]:
        return {self.spec.name: self.data[:rows]}

    def row(self, at: int) -> Tensor:
        return self.data[at]


class Ragged:
    """Rows of different lengths, end to end. The memory grows to that of the largest shard so far."""

    def __init__(self, spec: ColumnSpec, rows: int, pin: bool, items: int) -> None:
        self.spec = spec
        self.pin = pin
        self.offsets = torch.zeros(rows + 1, dtype=torch.int64)
        self.filled = 0
        self.data = self._empty(items)

    def _empty(self, items: int) -> Tensor:
        return aligned_empty((items, *self.spec.shape), self.spec.dtype, self.pin)

    def put(self, at: int, items: Tensor, lengths: Sequence[int], copies: HostCopies) -> None:
        """Rows from ``at`` on, replacing any that were put there or later."""
        self._extend(at)
        start = int(self.offsets[at])
        end = start + len(items)
        if end > len(self.data):
            copies.wait()
            grown = self._empty(max(end, len(self.data) * 3 // 2))
            grown[:start] = self.data[:start]
            self.data = grown
        copies.copy(items, into=self.data[start:end])
        self.offsets[at + 1 : at + 1 + len(lengths)] = start + torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        self.filled = at + len(lengths)

    def _extend(self, at: int) -> None:
        """End at row ``at``: forget what is there or later, and leave rows that were passed over empty."""
        if at > self.filled:
            self.offsets[self.filled + 1 : at + 1] = self.offsets[self.filled].clone()
        self.filled = at

    def blank(self, at: int) -> None:
        self._extend(at)
        self._extend(at + 1)

    def tensors(self, rows: int) -> dict[str, Tensor]:
        self._extend(max(rows, self.filled))
        items = int(self.offsets[rows])
        return {self.spec.name: self.data[:items], self.spec.offsets: self.offsets[: rows + 1]}

    def row(self, at: int) -> Tensor:
        return self.data[int(self.offsets[at]) : int(self.offsets[at + 1])]

    def reset(self) -> None:
        self.filled = 0
        self.offsets[0] = 0


class Slab:
    """The columns of one shard, being filled."""

    def __init__(self, specs: Iterable[ColumnSpec], rows: int, row_bytes: int, pin: bool) -> None:
        self.rows = 0
        self.shard = -1
        self.skipped: dict[int, str] = {}
        """Rows of the shard that have no features, and why."""
        self.metadata: dict[str, str] = {}
        self.ready: list[torch.cuda.Event] = []
        self.columns: dict[str, Fixed | Ragged] = {}
        for spec in specs:
            if spec.ragged:
                items = max(1, rows * row_bytes // max(1, spec.item_bytes)) if not spec.text else rows * 32
                self.columns[spec.name] = Ragged(spec, rows, pin, items)
            else:
                self.columns[spec.name] = Fixed(spec, rows, pin)

    def begin(self, shard: int) -> Slab:
        self.shard, self.rows, self.ready = shard, 0, []
        self.skipped.clear()
        self.metadata.clear()
        for column in self.columns.values():
            if isinstance(column, Ragged):
                column.reset()
        return self

    def skip(self, at: int, why: str) -> None:
        self.skipped[at] = why
        for column in self.columns.values():
            column.blank(at)

    def tensors(self) -> dict[str, Tensor]:
        return {name: t for column in self.columns.values() for name, t in column.tensors(self.rows).items()}


def bad_rows(slab: Slab, column: Fixed | Ragged, overflow: bool) -> list[int]:
    """Rows with a NaN in them, or, where a cast may overflow, an infinity."""
    data = column.tensors(slab.rows)[column.spec.name]
    if not data.is_floating_point() or not data.numel():
        return []
    if data.dtype.itemsize == 1:
        data = data.to(torch.float16)  # no reductions for eight bits
    if _looks_finite(data):
        return []
    test = (lambda t: ~torch.isfinite(t)) if overflow else torch.isnan
    if isinstance(column, Fixed):
        found = [i for i in range(slab.rows) if bool(test(data[i].float()).any())]
    else:
        found = [i for i in range(slab.rows) if bool(test(column.row(i).float()).any())]
    return [row for row in found if row not in slab.skipped]


def _looks_finite(data: Tensor) -> bool:
    """One fast pass: the sum of finite numbers is finite, unless it overflows."""
    if data.dtype in (torch.float32, torch.float64):
        # By numpy: torch would start threads of its own for this one, which take the cores from the model.
        with np.errstate(all="ignore"):
            return bool(np.isfinite(data.numpy().sum(dtype=np.float32)))
    return bool(torch.isfinite(data.sum(dtype=torch.float32)))


def check_values(slab: Slab, first_row: int, overflow: bool, skip: bool) -> None:
    """Refuse values that are not numbers, or mark their rows as skipped."""
    for name, column in slab.columns.items():
        if name in (IDS, LABELS):
            continue  # NaN may be what a label says
        bad = bad_rows(slab, column, overflow)
        if not bad:
            continue
        value = bool(torch.isnan(column.row(bad[0]).float()).any())
        what = "NaN" if value else f"infinity after the cast to {column.spec.dtype}"
        if overflow and column.spec.dtype == _SATURATES:
            what, value = f"NaN, or infinity after the cast to {_SATURATES}", False
        if not skip:
            listed = ", ".join(str(first_row + row) for row in bad[:8]) + (", …" if len(bad) > 8 else "")
            remedy = "nan='keep' stores them as they are" if value else "dtype=torch.bfloat16 has the range of float32"
            raise ExtractError(
                f"{shown(name)!r}: {what} in {len(bad)} row{'s' * (len(bad) != 1)} ({listed}). The shard was not "
                f"written. on_error='skip' leaves such rows out; {remedy}."
            )
        for row in bad:
            slab.skipped[row] = f"{what} in {shown(name)!r}"

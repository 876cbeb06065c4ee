"""Slabs: preallocated memory for the rows of one shard. The copy into a slab is the only copy a feature makes.

It is the clone that keeps the value from in-place layers, the cast, and on CUDA the transfer: there the slab is
pinned, and the copy runs on a stream of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from torchhook._features.api import IDS, LABELS, ColumnSpec, aligned_empty, shown
from torchhook._values.elements import SATURATES
from torchhook._values.host_copies import HostCopies
from torchhook._words import plural
from torchhook.errors import ExtractError

NARROW = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
"""A cast to these may overflow."""


# The bits that are all set in what is no finite number of a dtype, and in no other.
_NOT_FINITE = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}
_IN_CACHE = 1 << 17  # items that are looked at together
_LARGEST = {dtype: torch.iinfo(dtype).max for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)}


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

    def replace(self, rows: Mapping[int, Tensor | None]) -> None:
        """Other values for some rows; ``None`` is a number that is no value of such a column."""
        dtype = self.spec.dtype
        none = math.nan if dtype.is_floating_point else -1 if dtype.is_signed else _LARGEST.get(dtype, 0)
        for row, value in rows.items():
            self.data[row] = none if value is None else value


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
            # Copies into the old memory may still be running, and it is moved now.
            copies.wait()
            grown = self._empty(max(end, len(self.data) * 3 // 2))
            grown[:start] = self.data[:start]
            self.data = grown
        copies.copy(items, into=self.data[start:end])
        self.offsets[at + 1 : at + 1 + len(lengths)] = start + torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        self.filled = at + len(lengths)

    # Rows come here twice when their batch has failed and they are run again one by one.
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

    def replace(self, rows: Mapping[int, Tensor | None]) -> None:
        """Other values for some rows; ``None`` is an empty one."""
        # All anew, since those that come after move; it is done only for shards with rows that were skipped.
        empty = self.data[:0]
        held = [rows[row] if row in rows else self.row(row) for row in range(self.filled)]
        parts = [empty if value is None else value for value in held]
        items = torch.cat([empty, *parts])
        if len(items) > len(self.data):
            self.data = self._empty(len(items))
        self.data[: len(items)] = items  # in place: it may be pinned
        self.offsets[1 : self.filled + 1] = torch.tensor([len(part) for part in parts], dtype=torch.int64).cumsum(0)

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
        self.ids: dict[int, Tensor] = {}
        """The ids of those that are known."""
        self.metadata: dict[str, str] = {}
        self.ready: list[torch.cuda.Event] = []
        self.columns: dict[str, Fixed | Ragged] = {}
        for spec in specs:
            if spec.ragged:
                # Guesses, by the first batch and by the length of a path: what is too small grows.
                items = max(1, rows * row_bytes // max(1, spec.item_bytes)) if not spec.text else rows * 32
                self.columns[spec.name] = Ragged(spec, rows, pin, items)
            else:
                self.columns[spec.name] = Fixed(spec, rows, pin)

    def begin(self, shard: int) -> Slab:
        # Rows of one shape are not cleared: each is written, or blanked, before a shard is committed.
        self.shard, self.rows, self.ready = shard, 0, []
        self.skipped.clear()
        self.ids.clear()
        self.metadata.clear()
        for column in self.columns.values():
            if isinstance(column, Ragged):
                column.reset()
        return self

    def skip(self, at: int, why: str, known: Tensor | None = None) -> None:
        self.skipped[at] = why
        if known is not None:
            self.ids[at] = known
        for column in self.columns.values():
            column.blank(at)

    def mark_skipped(self, blanked: Collection[int]) -> None:
        """Give skipped rows their ids, where these are known, and labels that no other row has.

        ``blanked`` are those without values; the others were found to be bad later, and have their ids.
        """
        for name, rows in ((IDS, blanked), (LABELS, self.skipped)):
            column = self.columns.get(name)
            if column is not None and rows:
                column.tensors(self.rows)  # fills the offsets up to the last row
                column.replace({row: self.ids.get(row) if name == IDS else None for row in rows})

    def tensors(self) -> dict[str, Tensor]:
        return {name: t for column in self.columns.values() for name, t in column.tensors(self.rows).items()}


def bad_rows(slab: Slab, column: Fixed | Ragged, overflow: bool) -> list[int]:
    """Rows with a NaN in them, or, where a cast may overflow, an infinity."""
    data = column.tensors(slab.rows)[column.spec.name]
    if not data.is_floating_point() or not data.numel() or _looks_finite(data):
        return []
    test = (lambda t: ~torch.isfinite(t)) if overflow else torch.isnan
    # A few at a time: the answer, and the wider numbers that are asked, take memory.
    step = max(1, _IN_CACHE * len(data) // data.numel())
    found = [test(_wide(part)).reshape(len(part), -1).any(1) for part in data.split(step)]
    items = torch.cat(found).nonzero().squeeze(1)
    if isinstance(column, Ragged):
        items = torch.searchsorted(column.offsets[1 : slab.rows + 1], items, right=True).unique()
    return [row for row in items.tolist() if row not in slab.skipped]


def _wide(data: Tensor) -> Tensor:
    """Of a dtype that can be asked what its numbers are; a wide one stays, or its largest would be infinite."""
    return data if data.dtype.itemsize >= 4 else data.float()


def _looks_finite(data: Tensor) -> bool:
    """One fast pass: the sum of finite numbers is finite, unless it overflows; of short ones the bits tell."""
    # By numpy: torch would start threads of its own for this, which take the cores from the model.
    marks = _NOT_FINITE.get(data.dtype)
    if marks is None:
        with np.errstate(all="ignore"):
            return bool(np.isfinite(data.numpy().sum(dtype=np.float32)))
    bits = data.reshape(-1).view(torch.uint8 if data.dtype.itemsize == 1 else torch.int16).numpy()
    parts = (bits[low : low + _IN_CACHE] & marks for low in range(0, len(bits), _IN_CACHE))
    return all(int(part.max()) < marks for part in parts)


def check_values(slab: Slab, first_row: int, narrow: Collection[str], skip: bool) -> None:
    """Refuse values that are not numbers, or mark their rows as skipped; of ``narrow`` columns, infinities too."""
    for name, column in slab.columns.items():
        if name in (IDS, LABELS):
            continue  # NaN may be what a label says
        overflow = name in narrow
        bad = bad_rows(slab, column, overflow)
        if not bad:
            continue
        value = bool(torch.isnan(_wide(column.row(bad[0]))).any())
        what = "NaN" if value else f"infinity after the cast to {column.spec.dtype}"
        if overflow and column.spec.dtype == SATURATES:
            what, value = f"NaN, or infinity after the cast to {SATURATES}", False
        if not skip:
            listed = ", ".join(str(first_row + row) for row in bad[:8]) + (", …" if len(bad) > 8 else "")
            remedy = "nan='keep' stores them as they are" if value else "dtype=torch.bfloat16 has the range of float32"
            raise ExtractError(
                f"{shown(name)!r}: {what} in {len(bad)} {plural(len(bad), 'row')} ({listed}). The shard was not "
                f"written. on_error='skip' leaves such rows out; {remedy}."
            )
        for row in bad:
            slab.skipped[row] = f"{what} in {shown(name)!r}"

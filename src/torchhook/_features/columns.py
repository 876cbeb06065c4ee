"""One column of a store, indexed like a tensor: by row, slice, list of rows or mask."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchhook._features.manifest import ColumnSpec
from torchhook._features.reading import MappedShard, OpenShards
from torchhook.errors import IncompleteStoreError


class Column:
    """The rows of one column. What is read is a copy: changing it changes nothing here.

    Rows of different lengths come as lists of tensors, text as strings.
    """

    def __init__(
        self, spec: ColumnSpec, rows: int, rows_per_shard: int, open_shards: OpenShards, missing: frozenset[int]
    ) -> None:
        self.spec, self._rows, self._per_shard = spec, rows, rows_per_shard
        self._shards, self._missing = open_shards, missing
        self._tensors: dict[int, Tensor] = {}
        self._offsets: dict[int, Tensor] = {}

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int | None, ...]:
        """``None`` stands for a length that differs from row to row."""
        return (self._rows, *((None,) if self.spec.ragged else ()), *self.spec.shape)

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self._rows))

    def __repr__(self) -> str:
        return f"<{self.spec}, {self._rows:,} rows>"

    def __getitem__(self, key: Any) -> Any:
        if type(key) is int and 0 <= key < self._rows:  # the common case first, and short
            shard, at = divmod(key, self._per_shard)
            tensor = self._tensors.get(shard)
            return tensor[at].clone() if tensor is not None else self._one(shard, at)
        if isinstance(key, slice):
            first, last, step = key.indices(self._rows)
            return self._span(first, max(first, last)) if step == 1 else self.take(list(range(first, last, step)))
        if isinstance(key, Tensor):
            key = key.cpu().numpy()
        if isinstance(key, (list, tuple, range)) or (isinstance(key, np.ndarray) and key.ndim):
            return self.take(numbers(key, self._rows, self.name))
        (row,) = numbers([key], self._rows, self.name)
        return self._one(*divmod(row, self._per_shard))

    # -- reading shards --------------------------------------------------------------------------

    def _shard(self, shard: int) -> Any:
        if shard in self._missing:
            raise IncompleteStoreError(
                f"{self.name!r}: the rows from {shard * self._per_shard} on are in shard {shard}, which is "
                "missing. Run the same extract call again."
            )
        found = self._shards[shard]
        if isinstance(found, MappedShard) and not self.spec.ragged:
            # These hold the maps of their shards open, also those that OpenShards has let go.
            if len(self._tensors) > 4096:
                self._tensors.clear()
            self._tensors[shard] = found.tensor(self.name)
        return found

    def _one(self, shard: int, at: int) -> Any:
        found = self._shard(shard)
        if not self.spec.ragged:
            return found.rows(self.name, at, at + 1)[0].clone()
        return self._ragged(shard, at, at + 1)[0]

    def block(self, shard: int, low: int, high: int) -> Any:
        """Rows of one shard as they lie there: not to be written to."""
        found = self._shard(shard)
        return self._ragged(shard, low, high) if self.spec.ragged else found.rows(self.name, low, high)

    def _ragged(self, shard: int, low: int, high: int) -> list[Any]:
        found = self._shard(shard)
        offsets = self._offsets.get(shard)
        if offsets is None:
            _, shape, _, _ = found.header.span(self.spec.offsets)
            # Cloned: a view of them would keep the map of the whole shard open.
            offsets = self._offsets[shard] = found.rows(self.spec.offsets, 0, shape[0]).clone()
            if len(self._offsets) > 1024:
                self._offsets.pop(next(iter(self._offsets)))
        ends = offsets[low : high + 1].tolist()
        items = found.rows(self.name, ends[0], ends[-1])
        rows = [items[a - ends[0] : b - ends[0]] for a, b in itertools.pairwise(ends)]
        return [bytes(row.numpy()).decode() for row in rows] if self.spec.text else [row.clone() for row in rows]

    def _span(self, first: int, last: int) -> Any:
        if first == last:
            return [] if self.spec.ragged else torch.empty((0, *self.spec.shape), dtype=self.dtype)
        parts = [self.block(shard, low, high) for shard, low, high in self._cuts(first, last)]
        # cat copies a single part too: nobody is given the map itself.
        return [row for part in parts for row in part] if self.spec.ragged else torch.cat(parts)

    def _cuts(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        for shard in range(first // self._per_shard, (last - 1) // self._per_shard + 1):
            start = shard * self._per_shard
            yield shard, max(0, first - start), min(self._per_shard, last - start)

    def take(self, rows: list[int]) -> Any:
        """Rows by number, without the checks of an index: for numbers that are known to be right."""
        if self.spec.ragged:
            return [self._one(*divmod(row, self._per_shard)) for row in rows]
        if not rows:
            return torch.empty((0, *self.spec.shape), dtype=self.dtype)
        if not self._shards.mapped:
            return self._gather_ranges(rows)
        per_shard, known, views = self._per_shard, self._tensors, []
        for row in rows:
            shard = row // per_shard
            if shard not in known:
                self._shard(shard)
            views.append(known[shard][row - shard * per_shard])
        # Rows come in any order and from any shard: views cost nothing, and stack copies each of them once.
        return torch.stack(views)

    def _gather_ranges(self, rows: list[int]) -> Tensor:
        """Neighbours are read together."""
        out = torch.empty((len(rows), *self.spec.shape), dtype=self.dtype)
        order = sorted(range(len(rows)), key=rows.__getitem__)
        at = 0
        while at < len(order):
            first = rows[order[at]]
            end = at + 1
            while end < len(order) and rows[order[end]] <= rows[order[end - 1]] + 1:  # or the same row again
                end += 1
            block = self._span(first, rows[order[end - 1]] + 1)
            out[order[at:end]] = block[[rows[i] - first for i in order[at:end]]]
            at = end
        return out

    # -- whole columns -----------------------------------------------------------------------------

    def blocks(self) -> Iterator[tuple[int, Any]]:
        """First row and rows of each shard in turn, without missing shards: for one pass over everything."""
        for shard in range(-(-self._rows // self._per_shard)):
            if shard not in self._missing:
                first = shard * self._per_shard
                yield first, self.block(shard, 0, min(self._per_shard, self._rows - first))

    def numpy(self) -> np.ndarray[Any, Any]:
        """All rows as an array. bfloat16 and fp8, which numpy lacks, become float32; ragged rows an object array."""
        found = self[:]
        if self.spec.ragged:
            # Made first and filled then: of rows of one length, np.array would make a matrix.
            array = np.empty(len(found), dtype=object)
            array[:] = found if self.spec.text else [as_numpy(row) for row in found]
            return array
        return as_numpy(found)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)


def numbers(key: Any, rows: int, name: str) -> list[int]:
    """The row numbers that a list of them or a mask stands for, of so many rows."""
    found = np.asarray(key.cpu() if isinstance(key, Tensor) else key)
    if found.dtype == bool:
        if found.shape != (rows,):
            raise IndexError(f"{name!r}: a mask of shape {found.shape} for {rows} rows.")
        found = found.nonzero()[0]
    if found.size == 0:
        return []
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(f"{name!r}: rows are chosen by number, slice, list or mask, found {found.dtype} {found.shape}.")
    beyond = found[(found < -rows) | (found >= rows)]
    if beyond.size:
        raise IndexError(f"{name!r}: row {beyond[0]} of {rows}.")
    chosen: list[int] = np.where(found < 0, found + rows, found).tolist()
    return chosen


_NOT_IN_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype in _NOT_IN_NUMPY else tensor).numpy()
    return array

"""One column of a store, indexed like a tensor: by row, slice, list of rows or mask."""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchhook._features.indexing import chosen
from torchhook._features.manifest import IDS, LABELS, ColumnSpec
from torchhook._features.reading import OpenShards
from torchhook._recording.tables import Table
from torchhook._words import counted
from torchhook.errors import BrokenShardError, IncompleteStoreError

if TYPE_CHECKING:
    from torchhook._features.features import Features

_TOGETHER = 1024  # rows that are gathered at once
_MOST_OFFSETS = 1024  # shards whose offsets are remembered


class Column:
    """The rows of one column. What is read is a copy: changing it changes nothing here.

    Rows of different lengths come as lists of tensors, text as strings.
    """

    def __init__(self, features: Features, name: str, open_shards: OpenShards) -> None:
        self._features, self._shards = features, open_shards
        self.spec: ColumnSpec = features.manifest[name]
        self._rows, self._per_shard = len(features), features.manifest.rows_per_shard
        self._missing = frozenset(features.missing)
        self._views, self._used = open_shards.views[name], open_shards.used
        self._offsets: OrderedDict[int, Tensor] = OrderedDict()
        self._direct = open_shards.mapped and not self.spec.ragged

    def __reduce__(self) -> Any:
        # By way of the store: a worker maps the files itself.
        extra = {IDS: "ids", LABELS: "labels"}.get(self.name)
        return (getattr, (self._features, extra)) if extra else (operator.getitem, (self._features, self.name))

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
        return f"<{self.spec}, {counted(self._rows, 'row')}>"

    def _repr_html_(self) -> str:
        return Table(repr(self)[1:-1], [], [])._repr_html_()

    def __getitem__(self, key: Any) -> Any:
        """What a tensor of all rows would give for the same index, as a copy: ``v[3]``, ``v[:, 0]``, ``v[mask]``."""
        if type(key) is int and 0 <= key < self._rows:  # the common case first, and short
            shard, at = divmod(key, self._per_shard)
            return self._view(shard)[at].clone() if self._direct else self._one(shard, at)
        if self.spec.ragged:
            return self._of_ragged(key)
        rows, rest = chosen(key, (self._rows, *self.spec.shape), self.name)
        if rest is None:
            return self._all_of(rows)
        try:
            return self._some_of(rows, rest)
        except IndexError as error:
            raise IndexError(f"{self.name!r}: {error}, of shape {self.shape}.") from error

    def _all_of(self, rows: range | list[int]) -> Any:
        if isinstance(rows, range) and rows.step == 1:
            return self._span(rows.start, rows.stop)
        return self.take(list(rows))

    def _some_of(self, rows: range | list[int], rest: tuple[Any, ...]) -> Tensor:
        neighbors = isinstance(rows, range) and rows.step == 1 and len(rows) > 0
        if neighbors and rest[0] == slice(None) and all(map(_is_plain, rest)):
            # Shard by shard: one token of each row is much less than all of them.
            return torch.cat([part[rest] for part in self._parts(rows[0], rows[-1] + 1)])
        found: Tensor = self._all_of(rows)[rest]
        return found

    def _of_ragged(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        rows, rest = chosen(parts[:1], (self._rows,), self.name)
        if rest is not None and type(rest[0]) is int:  # a single row, which can be indexed on
            row = self._one(*divmod(rows[0], self._per_shard))
            if len(parts) == 1:
                return row
            if not self.spec.text:
                return row[parts[1:]]
        if rest is not None or len(parts) > 1:
            raise TypeError(
                f"{self.name!r}: rows of different lengths, or text, are chosen by number, slice, list or mask."
            )
        return self._all_of(rows)

    # -- reading shards --------------------------------------------------------------------------

    def _shard(self, shard: int) -> Any:
        self._require(shard)
        return self._shards[shard]

    def _require(self, shard: int) -> None:
        if shard in self._missing:
            raise IncompleteStoreError(
                f"{self.name!r}: the rows from {shard * self._per_shard} on are in shard {shard}, which is "
                "missing. Run the same extract call again."
            )

    def _view(self, shard: int) -> Tensor:
        """All rows of a mapped shard, as they lie there."""
        try:
            found = self._views[shard]
            self._used(shard)
        except KeyError:  # not mapped yet, or not any more
            self._require(shard)
            found = self._shards.view(shard, self.name)
        return found

    def _one(self, shard: int, at: int) -> Any:
        return self._ragged(shard, at, at + 1)[0] if self.spec.ragged else self.block(shard, at, at + 1)[0].clone()

    def block(self, shard: int, low: int, high: int) -> Any:
        """Rows of one shard as they lie there: not to be written to."""
        if self.spec.ragged:
            return self._ragged(shard, low, high)
        return self._view(shard)[low:high] if self._direct else self._shard(shard).rows(self.name, low, high)

    def _ragged(self, shard: int, low: int, high: int) -> list[Any]:
        found = self._shard(shard)
        ends = self._ends(shard, found)[low : high + 1].tolist()
        items = found.rows(self.name, ends[0], ends[-1])
        rows = [items[a - ends[0] : b - ends[0]] for a, b in itertools.pairwise(ends)]
        if not self.spec.text:
            return [row.clone() for row in rows]
        try:
            return [bytes(row.numpy()).decode() for row in rows]
        except UnicodeDecodeError as error:
            raise BrokenShardError(f"{found.header.where}: {self.name!r} is no text: altered.") from error

    def _ends(self, shard: int, found: Any) -> Tensor:
        """Where the rows of a shard begin, and the last one ends."""
        ends = self._offsets.get(shard)
        if ends is None:
            count, items = found.header.span(self.spec.offsets)[1][0], found.header.span(self.name)[1][0]
            offsets = found.rows(self.spec.offsets, 0, count)
            if offsets[0] != 0 or offsets[-1] != items or (offsets.diff() < 0).any():
                raise BrokenShardError(f"{found.header.where}: the offsets of {self.name!r} make no sense: altered.")
            # Cloned: a view of them would keep the map of the whole shard open.
            ends = self._offsets[shard] = offsets.clone()
            if len(self._offsets) > _MOST_OFFSETS:
                self._offsets.popitem(last=False)
        return ends

    def _span(self, first: int, last: int) -> Any:
        parts = self._parts(first, last)
        if self.spec.ragged:
            return [row for part in parts for row in part]
        # cat copies a single part too: nobody is given the map itself.
        return torch.cat(list(parts)) if first < last else torch.empty((0, *self.spec.shape), dtype=self.dtype)

    def _parts(self, first: int, last: int) -> Iterator[Any]:
        """Rows ``[first, last)`` as they lie in one shard after the other."""
        for shard in range(first // self._per_shard, -(-last // self._per_shard)) if first < last else ():
            start = shard * self._per_shard
            yield self.block(shard, max(0, first - start), min(self._per_shard, last - start))

    def take(self, rows: list[int]) -> Any:
        """Rows by number, without the checks of an index: for numbers that are known to be right."""
        if self.spec.ragged:
            return [self._one(*divmod(row, self._per_shard)) for row in rows]
        if not self._shards.mapped:
            return self._gather_ranges(rows)
        out, per_shard = torch.empty((len(rows), *self.spec.shape), dtype=self.dtype), self._per_shard
        # In parts: views of rows hold the maps of their shards, and there must not be too many.
        for start in range(0, len(rows), _TOGETHER):
            part = rows[start : start + _TOGETHER]
            # Rows come in any order and from any shard: views cost nothing, and stack copies each of them once.
            views = [self._view(row // per_shard)[row % per_shard] for row in part]
            torch.stack(views, out=out[start : start + len(part)])
        return out

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

    # -- tokens --------------------------------------------------------------------------------------

    @property
    def heads_first(self) -> bool:
        """Whether rows are ``(heads, T, D)``, as the run that made them has seen; maps look the same."""
        return self.name in self._features.manifest.about.get("heads_first", ())

    @property
    def token_shape(self) -> tuple[int, ...]:
        """What one token of a row is: a row itself, if it has no positions."""
        if self.spec.text or (len(self.spec.shape) > 2 and not self.spec.ragged):
            found = "texts" if self.spec.text else f"rows of shape {self.spec.shape}"
            raise TypeError(
                f"{self.name!r}: {found} are no tokens; rows (T, D), (D,), or of different lengths are. Of heads "
                "before tokens, (heads, T, D), extract makes such rows with lengths= (lengths or a mask); else a "
                "transform can."
            )
        return self.spec.shape if self.spec.ragged else self.spec.shape[-1:]

    def token_ends(self, shard: int) -> Tensor:
        """Where the tokens of each row of a shard begin, and where the last ones end; a missing shard has none."""
        if shard in self._missing:
            return torch.zeros(1, dtype=torch.int64)
        if self.spec.ragged:
            return self._ends(shard, self._shard(shard))
        width = self.spec.shape[0] if len(self.spec.shape) == 2 else 1
        return torch.arange(min(self._per_shard, self._rows - shard * self._per_shard) + 1) * width

    def token_count(self, shard: int) -> int:
        """How many tokens a shard has, for which nothing but its header is read."""
        if self.spec.ragged and shard not in self._missing:
            return int(self._shard(shard).header.span(self.name)[1][0])
        return int(self.token_ends(shard)[-1])

    def tokens(self, shard: int, places: Tensor) -> Tensor:
        """Tokens of a shard by their numbers there, in ascending order, as a copy."""
        dims = 2 if len(self.spec.shape) == 2 and not self.spec.ragged else 1
        if self._shards.mapped:
            whole = self._view(shard)
            return (whole.flatten(0, 1) if dims == 2 else whole).index_select(0, places)
        found, starts = self._shard(shard), (places.diff(prepend=places[:1] - 2) > 1).nonzero().squeeze(1)
        runs = torch.tensor_split(places, starts[1:])  # neighbours, and the same again, are read together
        read = [(run, found.rows(self.name, int(run[0]), int(run[-1]) + 1, dims)) for run in runs]
        return torch.cat([part[run - run[0]] for run, part in read])

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


def _is_plain(part: Any) -> bool:
    """Whether a part of an index leaves the order of dims alone, as lists, masks and bools do not."""
    return part is None or part is Ellipsis or (isinstance(part, (int, slice)) and not isinstance(part, bool))


_NOT_IN_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype in _NOT_IN_NUMPY else tensor).numpy()
    return array

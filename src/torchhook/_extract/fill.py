"""From the values of one batch into the slabs of the shards that its rows belong to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook._extract import inputs
from torchhook._extract.forward import parts
from torchhook._extract.slabs import HostCopies, Ragged, Slab, in_range
from torchhook._features.manifest import IDS, LABELS, Column
from torchhook._recording.tensor_file import DTYPES
from torchhook.errors import ExtractError
from torchhook.transforms import Rows

_PLAIN = torch.contiguous_format


class Piece(NamedTuple):
    """Rows ``[low, high)`` of a batch go to a slab, from row ``at`` on."""

    slab: Slab
    at: int
    low: int
    high: int


def pieces(start: int, good: Sequence[int], slabs: dict[int, Slab], rows_per_shard: int) -> list[Piece]:
    """Runs of rows that lie together, both in the batch and in one of the slabs."""
    found: list[Piece] = []
    for shard, slab in slabs.items():
        first = shard * rows_per_shard - start  # where the shard begins, seen from the batch
        low = bisect_left(good, first)
        end = bisect_left(good, first + rows_per_shard)
        while low < end:
            high = _run_end(good, low, end)
            found.append(Piece(slab, good[low] - first, low, high))
            low = high
    return found


def _run_end(numbers: Sequence[int], low: int, end: int) -> int:
    if numbers[end - 1] - numbers[low] == end - 1 - low:
        return end
    high = low + 1
    while numbers[high] == numbers[high - 1] + 1:
        high += 1
    return high


class Sides:
    """The ids, labels and lengths that travel with a batch."""

    def __init__(self, ids: inputs.Part, labels: inputs.Part, lengths: inputs.Part, rows: int | None) -> None:
        self.ids, self.labels, self.lengths = ids, labels, lengths
        for keyword, part in (("ids", ids), ("labels", labels)):
            if _is_table(part) and rows is not None and len(part) != rows:  # type: ignore[arg-type]
                raise ExtractError(f"{keyword}= has {len(part)} values, the data {rows} rows.")  # type: ignore[arg-type]

    def of(self, batch: Any, start: int, good: Sequence[int]) -> dict[str, Any]:
        """Ids and labels of the rows of a batch, as tensors or lists of strings."""
        found = {
            IDS: _chosen(self.ids, batch, start, good, "ids"),
            LABELS: inputs.labels_of(batch)
            if self.labels is None
            else _chosen(self.labels, batch, start, good, "labels"),
        }
        return {name: _plain(name, value, len(good)) for name, value in found.items() if value is not None}

    def mask(self, batch: Any) -> Tensor | None:
        """Which positions of each row count: a mask ``(rows, T)``, or lengths ``(rows,)``."""
        if self.lengths is None or self.lengths is False:
            return None
        return torch.as_tensor(inputs.part_of(batch, self.lengths, "lengths")).cpu()  # type: ignore[arg-type]


def _is_table(part: inputs.Part) -> bool:
    return hasattr(part, "__len__") and not isinstance(part, str)


def _chosen(part: inputs.Part, batch: Any, start: int, good: Sequence[int], keyword: str) -> Any:
    if part is None or part is False:
        return None
    if _is_table(part):
        chosen = [part[start + place] for place in good]  # type: ignore[index]
        return chosen if isinstance(chosen[0], str) else torch.as_tensor(chosen)
    return inputs.part_of(batch, part, keyword)  # type: ignore[arg-type]


def _plain(name: str, value: Any, rows: int) -> Any:
    """A tensor, or a list of strings, with one entry per row."""
    if not isinstance(value, Tensor):
        value = list(value)
        if not all(isinstance(text, str) for text in value):
            value = torch.as_tensor(value)
    if len(value) != rows:
        raise ExtractError(f"{name[1:]}: {len(value)} values for {rows} rows of a batch.")
    return value


def _text(text: str) -> Tensor:
    data = bytearray(text.encode())
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class Fill:
    """Puts what belongs to a batch into its pieces."""

    def __init__(self, columns: Iterable[Column], copies: HostCopies) -> None:
        self.columns = {column.name: column for column in columns}
        self.copies = copies

    def begin(self, into: list[Piece], rows: int, first_row: int, mask: Tensor | None) -> None:
        self.into, self.rows, self.first_row, self.mask = into, rows, first_row, mask

    def sides(self, values: dict[str, Any]) -> None:
        for name in (IDS, LABELS):
            if name in self.columns and name not in values:
                raise ExtractError(f"{name[1:]}: none in the batch, and the first batch had them. {self._where()}")
        for name, value in values.items():
            column = self.columns.get(name)
            if column is None or column.text != isinstance(value, list):
                raise ExtractError(
                    f"{name[1:]}: found from row {self.first_row} on, but not like that in the first batch."
                )
            self._put(column, Rows(map(_text, value)) if column.text else value)

    def features(self, layer: str, value: Any) -> None:
        """Called in the hook of a layer: this is where the one copy is made."""
        seen = 0
        for name, part in parts(layer, value):
            column = self.columns.get(name)
            if column is None:
                raise ExtractError(f"{name!r}: a tensor that was not there in the first batch. {self._where()}")
            self._put(column, part)
            seen += 1
        wanted = sum(name == layer or name.startswith(f"{layer}[") for name in self.columns)
        if seen != wanted:
            raise ExtractError(f"{layer!r}: {seen} tensors where the first batch had {wanted}. {self._where()}")

    def _put(self, column: Column, value: Tensor | Rows) -> None:
        if len(value) != self.rows:
            raise ExtractError(
                f"{column.name!r}: {len(value)} rows for a batch of {self.rows}. {self._where()} {_ROWS_HINT}"
            )
        for kind in {row.dtype for row in value} if isinstance(value, Rows) else (value.dtype,):
            if not _holds(column.dtype, kind):
                raise ExtractError(
                    f"{column.name!r}: {column.dtype} in the first batch, {kind} now, which would lose values. "
                    f"{self._where()} Cast it in a transform, or in the data."
                )
        if not column.ragged:
            if isinstance(value, Rows) or tuple(value.shape[1:]) != column.shape:
                found = "rows of different lengths" if isinstance(value, Rows) else f"{tuple(value.shape[1:])}"
                raise ExtractError(
                    f"{column.name!r}: rows of shape {column.shape} in the first batch, {found} now. {self._where()} "
                    + _RAGGED_HINT
                )
            value = in_range(value, column.dtype)
            # The next layer may overwrite the value before the transfer has read it; a copy on the device costs little.
            safe = value.to(column.dtype, copy=True, memory_format=_PLAIN) if value.is_cuda else value
            for slab, at, low, high in self.into:
                slab.columns[column.name].put(at, safe[low:high], self.copies)  # type: ignore[call-arg]
            return
        for slab, at, low, high in self.into:
            items, lengths = _items(value, low, high, self.mask)
            if tuple(items.shape[1:]) != column.shape:
                raise ExtractError(
                    f"{column.name!r}: items of shape {column.shape} in the first batch, {tuple(items.shape[1:])} now. "
                    + self._where()
                )
            ragged = slab.columns[column.name]
            assert isinstance(ragged, Ragged)
            ragged.put(at, in_range(items, column.dtype), lengths, self.copies)

    def _where(self) -> str:
        return f"Rows {self.first_row} to {self.first_row + self.rows - 1}."


def _holds(column: torch.dtype, kind: torch.dtype) -> bool:
    """Whether values of a dtype can be stored as another. Floats of any width can: what overflows is found later."""
    if kind == column or torch.bool in (kind, column):
        return kind in (column, torch.bool)
    if column.is_floating_point or column.is_complex or kind.is_floating_point or kind.is_complex:
        return torch.can_cast(kind, column)
    wide, narrow = torch.iinfo(column), torch.iinfo(kind)
    return wide.min <= narrow.min and narrow.max <= wide.max


_ROWS_HINT = "Dim 0 must be the rows; a transform can choose or reorder what is kept."
_RAGGED_HINT = (
    "For rows of different lengths say lengths= (a field of the batch, or a function of it: lengths or a mask), "
    "or let the transform return transforms.Rows; else reduce them to one shape, as transforms.pool does."
)


def _items(value: Tensor | Rows, low: int, high: int, mask: Tensor | None) -> tuple[Tensor, list[int]]:
    """Rows of different lengths as one tensor, and their lengths."""
    if isinstance(value, Rows):
        return torch.cat(list(value[low:high])), [len(row) for row in value[low:high]]
    assert mask is not None
    width = value.shape[1]
    if mask.dim() == 1:
        chosen = torch.arange(width) < mask[low:high, None]
    else:
        if mask.shape[1] != width:
            raise ExtractError(f"lengths=: a mask of {mask.shape[1]} positions for values of {width}.")
        chosen = mask[low:high].bool()
    places = chosen.reshape(-1).nonzero().squeeze(1)
    items = value[low:high].flatten(0, 1).index_select(0, places.to(value.device, non_blocking=True))
    return items, chosen.sum(1).tolist()


def columns_of(
    layer: str, value: Any, rows: int, mask: Tensor | None, dtype: torch.dtype | None
) -> list[tuple[Column, int]]:
    """The columns that a layer's value makes, and the bytes of its rows in the first batch."""
    found = []
    for name, part in parts(layer, value):
        if len(part) != rows or (isinstance(part, Tensor) and not part.dim()):
            raise ExtractError(f"{name!r}: {len(part)} rows for a batch of {rows}. {_ROWS_HINT}")
        ragged = isinstance(part, Rows) or (mask is not None and part.dim() >= 3)
        items = _items(part, 0, rows, mask)[0] if ragged else part
        assert isinstance(items, Tensor)
        kind = dtype if dtype is not None and items.is_floating_point() else items.dtype
        if kind not in DTYPES:
            raise ExtractError(f"{name!r}: {kind} has no place in a shard. Cast it in a transform.")
        column = Column(name, kind, tuple(items.shape[1:]), ragged)
        found.append((column, len(items) * column.item_bytes))
    if not found:
        raise ExtractError(f"{layer!r} gives {type(value).__name__}, which has no tensor in it.")
    return found


def side_columns(values: dict[str, Any]) -> list[Column]:
    return [
        Column(name, torch.uint8, (), ragged=True, text=True)
        if isinstance(value, list)
        else Column(name, value.dtype, tuple(value.shape[1:]))
        for name, value in values.items()
    ]

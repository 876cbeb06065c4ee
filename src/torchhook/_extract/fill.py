"""From one batch, its values, ids and labels, into the slabs of the shards that its rows belong to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook._extract import inputs
from torchhook._extract.forward import parts
from torchhook._extract.padding import Said
from torchhook._extract.row_numbers import check_number_of_rows
from torchhook._extract.slabs import Ragged, Slab
from torchhook._features.api import IDS, LABELS, ColumnSpec, shown
from torchhook._recording.tensor_file import DTYPES
from torchhook._values import tree
from torchhook._values.elements import in_range
from torchhook._values.host_copies import HostCopies
from torchhook._values.padding import given
from torchhook.errors import ExtractError, TransformError
from torchhook.transforms import Rows

_PLAIN = torch.contiguous_format  # slabs are; a transfer between two memory formats is no plain copy of bytes


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
    # All together, as nearly always: no need to walk.
    if numbers[end - 1] - numbers[low] == end - 1 - low:
        return end
    high = low + 1
    while numbers[high] == numbers[high - 1] + 1:
        high += 1
    return high


class Extras:
    """The ids, labels and lengths that travel with a batch."""

    def __init__(self, ids: inputs.Part, labels: inputs.Part, lengths: inputs.Part, rows: int | None) -> None:
        self.ids: inputs.Part = ids
        self.labels: inputs.Part = labels
        self.lengths: inputs.Part = lengths
        for keyword, part in (("ids", ids), ("labels", labels), ("lengths", lengths)):
            if inputs.is_table(part) and rows is not None and len(part) != rows:  # type: ignore[arg-type]
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

    def id_of(self, row: int, batch: Any) -> Tensor | None:
        """The id of a row that is skipped, if it can be known: from a table, or from its batch of one row."""
        if self.ids is None or self.ids is False or (batch is None and not inputs.is_table(self.ids)):
            return None
        try:
            chosen = _plain(IDS, _chosen(self.ids, batch, row, [0], "ids"), 1)[0]
        except Exception:  # the user's own function or table: what is wrong with a row may be just its id
            return None
        return _text(chosen) if isinstance(chosen, str) else chosen

    def padding(self, batch: Any, start: int, good: Sequence[int]) -> Said:
        """What ``lengths=`` says about the rows of a batch."""
        if self.lengths is None or self.lengths is False:
            return self.lengths
        value = _chosen(self.lengths, batch, start, good, "lengths")
        # Lengths count positions of what the batch holds: the width of a layer can be checked against that.
        sizes = {size for tensor in tree.tensors(batch) if not tensor.is_nested for size in tensor.shape[1:]}
        try:
            return given("lengths=", value, len(good), sizes)
        except TransformError as error:
            raise ExtractError(str(error)) from error


def _chosen(part: inputs.Part, batch: Any, start: int, good: Sequence[int], keyword: str) -> Any:
    if part is None or part is False:
        return None
    if inputs.is_table(part):
        chosen = [part[start + i] for i in good]  # type: ignore[index]
        return chosen if isinstance(chosen[0], str) else torch.as_tensor(chosen)
    return inputs.part_of(batch, part, keyword)  # type: ignore[arg-type]


def _plain(name: str, value: Any, rows: int) -> Any:
    """A tensor, or a list of strings, with one entry per row."""
    if not isinstance(value, Tensor):
        value = list(value)
        if not all(isinstance(text, str) for text in value):
            value = torch.as_tensor(value)
    if len(value) != rows:
        raise ExtractError(f"{shown(name)}: {len(value)} values for {rows} rows of a batch.")
    return value


def _text(text: str) -> Tensor:
    # Names of files may be any bytes, which Python holds as surrogates: as \xe9, they can be read by everybody.
    try:
        readable = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # surrogates that stand for no byte
        readable = text.encode("utf-8", "backslashreplace").decode()
    data = bytearray(readable.encode())  # torch warns of memory that it must not write to, and takes no empty one
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class Fill:
    """Copies what belongs to a batch into the slabs, checking that it fits the columns of the store.

    ``begin`` says which batch and where it goes; ``extras`` and ``features`` are called for each of its values.
    """

    def __init__(self, specs: Iterable[ColumnSpec], copies: HostCopies) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.copies = copies

    def begin(self, into: list[Piece], rows: int, first_row: int, said: Said) -> None:
        # Kept here, because a hook brings nothing but its site and value.
        self.into, self.rows, self.first_row, self.said = into, rows, first_row, said

    def extras(self, values: dict[str, Any]) -> None:
        """Ids and labels of the batch."""
        for name in (IDS, LABELS):
            if name in self.specs and name not in values:
                raise ExtractError(f"{shown(name)}: none in the batch, and the first batch had them. {self._where()}")
        for name, value in values.items():
            spec = self.specs.get(name)
            if spec is None or spec.text != isinstance(value, list):
                raise ExtractError(
                    f"{shown(name)}: found from row {self.first_row} on, but not like that in the first batch."
                )
            self._put(spec, Rows(map(_text, value)) if spec.text else value)

    def features(self, site: str, value: Any) -> None:
        """Called in the hook of a site: this is where the one copy is made."""
        seen = 0
        for name, part in parts(site, value):
            spec = self.specs.get(name)
            if spec is None:
                raise ExtractError(f"{shown(name)!r}: a tensor that was not there in the first batch. {self._where()}")
            self._put(spec, part)
            seen += 1
        # A slab is used again: what is not filled would still hold the rows of an earlier shard.
        wanted = sum(name == site or name.startswith(f"{site}[") for name in self.specs)
        if seen != wanted:
            raise ExtractError(f"{shown(site)!r}: {seen} tensors where the first batch had {wanted}. {self._where()}")

    def _put(self, spec: ColumnSpec, value: Tensor | Rows) -> None:
        self._check_rows(spec, value)
        if spec.ragged:
            self._put_ragged(spec, value)
        elif isinstance(value, Rows) or tuple(value.shape[1:]) != spec.shape:
            found = "rows of different lengths" if isinstance(value, Rows) else f"{tuple(value.shape[1:])}"
            raise ExtractError(
                f"{shown(spec.name)!r}: rows of shape {spec.shape} in the first batch, {found} now. {self._where()} "
                + _RAGGED_HINT
            )
        else:
            value = in_range(value, spec.dtype)
            # The next layer may overwrite the value before the transfer has read it; a copy on the device costs little.
            safe = value.to(spec.dtype, copy=True, memory_format=_PLAIN) if value.is_cuda else value
            for slab, at, low, high in self.into:
                slab.columns[spec.name].put(at, safe[low:high], self.copies)  # type: ignore[call-arg]

    def _put_ragged(self, spec: ColumnSpec, value: Tensor | Rows) -> None:
        real = None if isinstance(value, Rows) else _real(spec.name, value, self.said)
        for slab, at, low, high in self.into:
            items, lengths = _items(value, low, high, real)
            if tuple(items.shape[1:]) != spec.shape:
                raise ExtractError(
                    f"{shown(spec.name)!r}: items of shape {spec.shape} in the first batch, "
                    f"{tuple(items.shape[1:])} now. {self._where()}"
                )
            ragged = slab.columns[spec.name]
            assert isinstance(ragged, Ragged)
            ragged.put(at, in_range(items, spec.dtype), lengths, self.copies)

    def _check_rows(self, spec: ColumnSpec, value: Tensor | Rows) -> None:
        check_number_of_rows(spec.name, value, self.rows, self._where())
        for dtype in {row.dtype for row in value} if isinstance(value, Rows) else (value.dtype,):
            if not _holds(spec.dtype, dtype):
                raise ExtractError(
                    f"{shown(spec.name)!r}: {spec.dtype} in the first batch, {dtype} now, which would lose values. "
                    f"{self._where()} Cast it in a transform, or in the data."
                )

    def _where(self) -> str:
        return f"Rows {self.first_row} to {self.first_row + self.rows - 1}."


def _holds(stored: torch.dtype, found: torch.dtype) -> bool:
    """Whether values of a dtype can be stored as another. Floats of any width can: what overflows is found later."""
    # First: iinfo knows no bool.
    if found == stored or torch.bool in (found, stored):
        return found in (stored, torch.bool)
    if stored.is_floating_point or stored.is_complex or found.is_floating_point or found.is_complex:
        return torch.can_cast(found, stored)
    wide, narrow = torch.iinfo(stored), torch.iinfo(found)
    return wide.min <= narrow.min and narrow.max <= wide.max


_RAGGED_HINT = (
    "For rows of different lengths say lengths= (a field of the batch, or a function of it: lengths or a mask), "
    "or let the transform return transforms.Rows; else reduce them to one shape, as transforms.pool does."
)


def _real(name: str, value: Tensor, said: Said) -> Tensor:
    """Which positions of the rows of a value are stored."""
    assert said
    try:
        mask = said.at(len(value), value.shape[1])
    except TransformError as error:
        raise ExtractError(f"{shown(name)!r}: {error}") from error
    return torch.ones(value.shape[:2], dtype=torch.bool) if mask is None else mask


def _items(value: Tensor | Rows, low: int, high: int, real: Tensor | None) -> tuple[Tensor, list[int]]:
    """Rows of different lengths as one tensor, and their lengths."""
    if isinstance(value, Rows):
        return torch.cat(list(value[low:high])), [len(row) for row in value[low:high]]
    assert real is not None
    chosen = real[low:high]
    # Counted on the host: value[chosen] would make it wait until the GPU has counted.
    positions = chosen.reshape(-1).nonzero().squeeze(1)
    items = value[low:high].flatten(0, 1).index_select(0, positions.to(value.device, non_blocking=True))
    return items, chosen.sum(1).tolist()


def site_columns(
    site: str, value: Any, rows: int, said: Said, dtype: torch.dtype | None
) -> list[tuple[ColumnSpec, int]]:
    """The columns that a site's value makes, and the bytes of its rows in the first batch."""
    found = []
    for name, part in parts(site, value):
        check_number_of_rows(name, part, rows)
        # (N, C) cannot be told from (N, T): a value of two dims is taken for a pooled one, and stays whole.
        ragged = isinstance(part, Rows) or (bool(said) and part.dim() >= 3)
        real = _real(name, part, said) if ragged and isinstance(part, Tensor) else None
        items = _items(part, 0, rows, real)[0] if ragged else part
        assert isinstance(items, Tensor)
        kept = dtype if dtype is not None and items.is_floating_point() else items.dtype
        if kept not in DTYPES:
            raise ExtractError(f"{shown(name)!r}: {kept} has no place in a shard. Cast it in a transform.")
        spec = ColumnSpec(name, kept, tuple(items.shape[1:]), ragged)
        found.append((spec, len(items) * spec.item_bytes))
    if not found:
        raise ExtractError(f"{shown(site)!r} gives {type(value).__name__}, which has no tensor in it.")
    return found


def extra_columns(values: dict[str, Any]) -> list[ColumnSpec]:
    """The columns of ids and labels."""
    return [
        ColumnSpec(name, torch.uint8, (), ragged=True, text=True)
        if isinstance(value, list)
        else ColumnSpec(name, value.dtype, tuple(value.shape[1:]))
        for name, value in values.items()
    ]

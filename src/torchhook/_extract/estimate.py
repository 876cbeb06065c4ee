"""The first batch, run through the whole model: it tells the columns, the sizes and about how long it takes.

What it gives is kept, so that the run need not do it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar, cast

import torch

from torchhook._extract import inputs
from torchhook._extract.batches import Batch
from torchhook._extract.fill import Extras, extra_columns, site_columns
from torchhook._extract.forward import Forward
from torchhook._extract.one_row import Square, try_one_row
from torchhook._extract.sources import Source
from torchhook._extract.task import FirstBatch
from torchhook._features.api import ColumnSpec, Manifest, shown
from torchhook._recording.address import parse
from torchhook._recording.tables import Table, count, size
from torchhook._values import tree
from torchhook._words import counted
from torchhook.errors import DataWarning, ExtractError, warn

T = TypeVar("T")
SHARD_BYTES = 64 << 20  # so many, times four slabs, is the memory that features take
MOST_ROWS = 1 << 16
"""Small rows would make a shard that takes too long to do again."""
SHARD_SECONDS = 30.0
"""About the most work that is lost when a run is stopped."""
SHARDS_PER_RANK = 4
"""Fewer, and one of them would be a large part of the work, to be lost or waited for."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """What the first batch showed."""

    columns: tuple[ColumnSpec, ...]
    row_bytes: int
    batch_rows: int
    seconds: float
    first: FirstBatch | None
    """``None`` if the batch could not be run as a whole."""

    @property
    def seconds_per_row(self) -> float:
        return self.seconds / self.batch_rows

    def rows_per_shard(self, shard_bytes: int | None, source: Source, ranks: int) -> int:
        """The most rows that fit ``shard_bytes``, as whole batches; by default by time and by ranks, too."""
        batch = source.batch_size or self.batch_rows
        fit = min(MOST_ROWS, (shard_bytes or SHARD_BYTES) // max(1, self.row_bytes)) // batch
        if shard_bytes is None:
            in_time = int(min(MOST_ROWS, SHARD_SECONDS / max(1e-9, self.seconds_per_row))) // batch
            # A power of two: times are never the same twice, and the cut should be, where it can.
            fit = min(fit, 1 << (in_time.bit_length() - 1)) if in_time else 1
            if source.rows is not None:
                fit = min(fit, source.rows // (SHARDS_PER_RANK * ranks) // batch)
        return max(1, fit) * batch


def measure(
    forward: Forward,
    source: Source,
    extras: Extras,
    device: torch.device,
    dtype: torch.dtype | None,
    skip: bool,
    *,
    at: int = 0,
    timed: bool = False,
) -> Measure:
    """Run the first batch from row ``at`` on, and one more where time matters: the first also pays for the start."""
    several = max(1, getattr(source, "options", {}).get("num_workers", 0))  # who load at once, when it goes on
    with contextlib.closing(cast(Generator[Batch, None, None], source.first(at))) as batches:
        found, loading = _loading(lambda: _first(forward, batches, extras, device, dtype, skip))
        found = dataclasses.replace(found, seconds=found.seconds + (loading - found.seconds) / several)
        if timed and found.seconds_per_row * min(source.rows or MOST_ROWS, MOST_ROWS) > SHARD_SECONDS:
            second, loading = _loading(lambda: next(batches, None))
            if second is not None and second.value is not None:
                seconds = _timed(lambda: _quietly(forward, second, device), device) + loading / several
                return dataclasses.replace(found, seconds=seconds / len(second.good) * found.batch_rows)
    return found


def _loading(function: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def _quietly(forward: Forward, batch: Batch, device: torch.device) -> None:
    """Run a batch for its time alone: what is wrong with it is told with its rows, when the run comes to it."""
    with contextlib.suppress(Exception):  # the user's own model
        forward(batch.value, device, lambda site, value: None)


def _first(
    forward: Forward,
    batches: Iterator[Batch],
    extras: Extras,
    device: torch.device,
    dtype: torch.dtype | None,
    skip: bool,
) -> Measure:
    """Run the first batch that loads and runs, or, where rows may be skipped, the first row that does."""
    last: Exception | None = None
    for batch in batches:
        if batch.value is None:
            last = ExtractError(f"no row of the first batch could be loaded: {next(iter(batch.failed.values()))}")
            continue
        try:
            return _measured(forward, batch, extras, device, dtype)
        except ExtractError:
            raise  # no other row would change that
        except Exception as error:
            if not skip:
                raise
            last = error
        # One row tells the columns as well as all of them; the batch itself is left to the run.
        for one in batch.singles():
            with contextlib.suppress(Exception):  # the user's own model, whose error on the batch is the one to tell
                if one.value is not None:
                    found = _measured(forward, one, extras, device, dtype)
                    return dataclasses.replace(
                        found, batch_rows=batch.span, seconds=found.seconds * batch.span, first=None
                    )
    raise last or ExtractError("the data has no rows.")


def _measured(
    forward: Forward, batch: Batch, extras: Extras, device: torch.device, dtype: torch.dtype | None
) -> Measure:
    _tell_unused(forward, batch.value, extras)
    good = batch.good
    said = extras.padding(batch.value, batch.start, good)
    found: dict[str, tuple[ColumnSpec, int]] = {}
    calls: Counter[str] = Counter()
    values: dict[str, Any] = {}

    def look(site: str, value: Any) -> None:
        calls[site] += 1
        for spec, nbytes in site_columns(site, value, len(good), said, dtype):
            found[spec.name] = spec, nbytes
        values[site] = tree.map_tensors(torch.clone, value)  # a layer that comes later may work in place

    # Whole: a layer may run again after the last site was seen, and then its address is not enough.
    square = Square(batch.value, len(good))
    with inputs.explaining(batch.value, forward.model, forward.input_fn):
        seconds = _timed(lambda: forward(batch.value, device, look, stop=False, said=said, see=square.see), device)
    for site, times in calls.items():
        if times > 1:
            first = parse(site).first_call  # of a range, the first of its calls
            one, last = (parse(site).but(call=first + call).shown for call in (0, times - 1))
            raise ExtractError(
                f"{shown(site)!r} runs {times} times in one forward pass: say which call is meant, '{one}' to '{last}'."
            )
    if square.found:
        try_one_row(forward, batch, extras, device)
    # As they were asked for, not as they ran: runs are compared by this list.
    ordered = [c for site in forward.sites for c in found if c == site or c.startswith(f"{site}[")]
    own = extra_columns(extras.of(batch.value, batch.start, good))
    nbytes = sum(nbytes for _, nbytes in found.values())
    columns = (*(found[name][0] for name in dict.fromkeys(ordered)), *own)
    return Measure(columns, -(-nbytes // len(good)), len(good), seconds, FirstBatch(batch, values))


def _tell_unused(forward: Forward, batch: Any, extras: Extras) -> None:
    if forward.input_fn is not None:
        return
    unused = inputs.unused_parts(batch, extras.ids, extras.labels, extras.lengths)
    if unused:
        places = " and ".join(map(str, unused))
        warn(
            f"each batch has {len(batch)} parts, and the model is called with the first: {places} reach neither it nor "
            "the store. input_fn=lambda batch: ... says what to call it with, labels= and ids= what to keep.",
            DataWarning,
        )


def _timed(function: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        # Kernels are only queued when the call returns.
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a run would take. Times are those of one of the first batches, which are slower than the rest."""

    manifest: Manifest
    seconds_per_row: float
    todo: int | None
    """Shards still to do."""
    free: int | None
    """Bytes that are free where the store will be."""

    @property
    def nbytes(self) -> int | None:
        return None if self.manifest.rows is None else self.manifest.rows * self.manifest.row_bytes

    @property
    def seconds(self) -> float | None:
        """For the shards that are still to do."""
        if self.manifest.rows is None or self.todo is None:
            return None
        return min(self.manifest.rows, self.todo * self.manifest.rows_per_shard) * self.seconds_per_row

    def line(self) -> str:
        about = self.manifest
        if self.nbytes is None or self.seconds is None:
            each = f"{size(about.row_bytes)} each, {count(about.rows_per_shard, 0)}rows per shard"
            return f"rows without end in sight, {each}"
        return (
            f"{counted(about.rows or 0, 'row')}, {size(self.nbytes)} in {counted(about.shards or 0, 'shard')}, "
            f"{self.todo} to do: about {_duration(self.seconds)}"
        )

    def table(self) -> Table:
        """The columns, what a row of each is, and what the run would take."""
        notes = [self.line(), f"model: {self.manifest.model}", f"transform: {self.manifest.transform}"]
        if self.free is not None:
            notes.append(f"free on disk: {size(self.free)}")
        rows = [[shown(spec.name), spec.row] for spec in self.manifest.columns]
        return Table("Features to extract", ["column", "row"], rows, notes)

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

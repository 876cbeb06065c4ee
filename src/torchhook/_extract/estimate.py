"""The first batch, run through the whole model: it tells the columns, the sizes and about how long it takes.

What it gives is kept, so that the run need not do it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

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
    took: Callable[[], float]
    """Seconds. A GPU is only begun to be used when the batch is measured: whoever asks waits until it is done."""
    first: FirstBatch | None
    """``None`` if the batch could not be run as a whole."""

    @property
    def seconds(self) -> float:
        return self.took()

    @property
    def seconds_per_row(self) -> float:
        return self.seconds / self.batch_rows

    def rows_per_shard(self, shard_bytes: int | None, source: Source, ranks: int) -> int:
        """The most rows that fit ``shard_bytes``, as whole batches; by default by time and by ranks, too."""
        batch = source.batch_size or self.batch_rows
        if shard_bytes is not None:
            return max(1, self._fit(shard_bytes) // batch) * batch
        fit = self._most(source, ranks)
        if fit > 1:
            in_time = int(min(MOST_ROWS, SHARD_SECONDS / max(1e-9, self.seconds_per_row))) // batch
            # A power of two: times are never the same twice, and the cut should be, where it can.
            fit = min(fit, 1 << (in_time.bit_length() - 1)) if in_time else 1
        return max(1, fit) * batch

    def cut_by_time(self, source: Source, ranks: int) -> bool:
        """Whether the time says how many rows a shard has: not where one batch is as much as fits."""
        return self._most(source, ranks) > 1

    def _most(self, source: Source, ranks: int) -> int:
        """Batches in a shard, whatever time they take."""
        batch = source.batch_size or self.batch_rows
        fit = self._fit(SHARD_BYTES) // batch
        return fit if source.rows is None else min(fit, source.rows // (SHARDS_PER_RANK * ranks) // batch)

    def _fit(self, shard_bytes: int) -> int:
        return min(MOST_ROWS, shard_bytes // max(1, self.row_bytes))


def measure(
    forward: Forward,
    source: Source,
    extras: Extras,
    device: torch.device,
    dtype: torch.dtype | None,
    skip: bool,
    *,
    at: int = 0,
    timed: Callable[[Measure], bool] = lambda found: False,
    meanwhile: Callable[[], None] = lambda: None,
) -> Measure:
    """Run the first batch from row ``at`` on, and one more where time matters: the first also pays for the start.

    ``meanwhile`` is called when the first is under way; nobody waits for a GPU who does not need to know the time.
    """
    several = max(1, getattr(source, "options", {}).get("num_workers", 0))  # who load at once, when it goes on
    with contextlib.closing(cast(Generator[Batch, None, None], source.first(at))) as batches:
        start = time.perf_counter()
        found, running = _first(forward, batches, extras, device, dtype, skip)
        loading = (time.perf_counter() - start - running) / several
        ran = found.took
        found = dataclasses.replace(found, took=lambda: ran() + loading)
        meanwhile()
        if timed(found) and found.seconds_per_row * min(source.rows or MOST_ROWS, MOST_ROWS) > SHARD_SECONDS:
            start = time.perf_counter()
            second = next(batches, None)
            if second is not None and second.value is not None:
                loading = (time.perf_counter() - start) / several
                again = _Timed(lambda: _quietly(forward, second, device), device)
                seconds = (again.seconds() + loading) / len(second.good) * found.batch_rows
                return dataclasses.replace(found, took=lambda: seconds)
    return found


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
) -> tuple[Measure, float]:
    """Run the first batch that loads and runs, or, where rows may be skipped, the first row that does.

    With it come the seconds in which the model was at it and this thread did nothing else.
    """
    last: Exception | None = None
    for batch in batches:
        if batch.value is None:
            last = ExtractError(f"no row of the first batch could be loaded: {next(iter(batch.failed.values()))}")
            continue
        try:
            found, running = _measured(forward, batch, extras, device, dtype)
            # What is wrong with a row may show on the device alone.
            return found, (found.seconds if skip else running)
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
                    found, _ = _measured(forward, one, extras, device, dtype)
                    seconds = functools.partial(operator.mul, found.seconds, batch.span)
                    return dataclasses.replace(found, batch_rows=batch.span, took=seconds, first=None), seconds()
    raise last or ExtractError("the data has no rows.")


def _measured(
    forward: Forward, batch: Batch, extras: Extras, device: torch.device, dtype: torch.dtype | None
) -> tuple[Measure, float]:
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
        ran = _Timed(lambda: forward(batch.value, device, look, stop=False, said=said, see=square.see), device)
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
    measured = Measure(columns, -(-nbytes // len(good)), len(good), ran.seconds, FirstBatch(batch, values))
    return measured, ran.running


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


class _Timed:
    """A pass over a batch. On a GPU it is only under way when this is made: kernels are queued, and nobody waits."""

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        before = None if stream is None else stream.record_event(torch.cuda.Event(enable_timing=True))
        start = time.perf_counter()
        function()
        self.running = time.perf_counter() - start
        """Seconds until the call had returned."""
        if stream is not None and before is not None:
            self._events = before, stream.record_event(torch.cuda.Event(enable_timing=True))

    def seconds(self) -> float:
        """How long it took, which is known when it has ended."""
        if self._events is not None:
            before, after = self._events
            after.synchronize()
            self.running, self._events = before.elapsed_time(after) / 1000, None
        return self.running


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

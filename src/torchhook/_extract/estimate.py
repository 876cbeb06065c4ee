"""The first batch, run through the whole model: it tells the columns, the sizes and about how long it takes.

What it gives is kept, so that the run need not do it again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from torchhook._extract.batches import Batch
from torchhook._extract.fill import Sides, columns_of, side_columns
from torchhook._extract.forward import Forward
from torchhook._extract.sources import Source
from torchhook._extract.task import Head
from torchhook._features.manifest import Column, Plan
from torchhook._recording.tables import Table, count, size
from torchhook._values import tree
from torchhook.errors import ExtractError

SHARD_BYTES = 64 << 20
MOST_ROWS = 1 << 16
"""Small rows would make a shard that takes too long to do again."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """What the first batch showed."""

    columns: tuple[Column, ...]
    row_bytes: int
    batch_rows: int
    seconds: float
    head: Head | None
    """``None`` if the batch could not be run as a whole."""

    def rows_per_shard(self, shard_bytes: int | None, batch_size: int | None) -> int:
        """The most rows that fit, as whole batches."""
        batch = batch_size or self.batch_rows
        fit = min(MOST_ROWS, (shard_bytes or SHARD_BYTES) // max(1, self.row_bytes))
        return max(1, fit // batch) * batch


def measure(
    forward: Forward, source: Source, sides: Sides, device: torch.device, dtype: torch.dtype | None, skip: bool
) -> Measure:
    """Run the first batch that loads and runs, or, where rows may be skipped, the first row that does."""
    last: Exception | None = None
    for batch in source.first():
        if batch.value is None:
            last = ExtractError(f"no row of the first batch could be loaded: {next(iter(batch.failed.values()))}")
            continue
        try:
            return _measured(forward, batch, sides, device, dtype)
        except ExtractError:
            raise  # no other row would change that
        except Exception as error:
            if not skip:
                raise
            last = error
        for one in batch.singles():
            with contextlib.suppress(Exception):
                if one.value is not None:
                    found = _measured(forward, one, sides, device, dtype)
                    return dataclasses.replace(
                        found, batch_rows=batch.span, seconds=found.seconds * batch.span, head=None
                    )
    raise last or ExtractError("the data has no rows.")


def _measured(forward: Forward, batch: Batch, sides: Sides, device: torch.device, dtype: torch.dtype | None) -> Measure:
    good = batch.good
    mask = sides.mask(batch.value)
    found: dict[str, tuple[Column, int]] = {}
    calls: Counter[str] = Counter()
    values: dict[str, Any] = {}

    def look(layer: str, value: Any) -> None:
        calls[layer] += 1
        for column, nbytes in columns_of(layer, value, len(good), mask, dtype):
            found[column.name] = column, nbytes
        values[layer] = tree.map_tensors(torch.clone, value)  # a layer that comes later may work in place

    seconds = _timed(lambda: forward(batch.value, device, look, stop=False), device)
    for layer, times in calls.items():
        if times > 1:
            raise ExtractError(
                f"{layer!r} runs {times} times in one forward pass: say which call is meant, "
                f"'{layer}#0' to '{layer}#{times - 1}'."
            )
    ordered = [c for layer in forward.layers for c in found if c == layer or c.startswith(f"{layer}[")]
    extra = side_columns(sides.of(batch.value, batch.start, good))
    nbytes = sum(nbytes for _, nbytes in found.values())
    columns = (*(found[name][0] for name in dict.fromkeys(ordered)), *extra)
    return Measure(columns, -(-nbytes // len(good)), len(good), seconds, Head(batch, values))


def _timed(function: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a run would take. Times are those of the first batch, which is slower than the rest."""

    plan: Plan
    seconds_per_row: float
    todo: int | None
    """Shards still to do."""
    free: int | None

    @property
    def nbytes(self) -> int | None:
        return None if self.plan.rows is None else self.plan.rows * self.plan.row_bytes

    @property
    def seconds(self) -> float | None:
        """For the shards that are still to do."""
        if self.plan.rows is None or self.todo is None:
            return None
        return min(self.plan.rows, self.todo * self.plan.rows_per_shard) * self.seconds_per_row

    def line(self) -> str:
        plan = self.plan
        if self.nbytes is None or self.seconds is None:
            return (
                f"rows without end in sight, {size(plan.row_bytes)} each, {count(plan.rows_per_shard, 0)}rows per shard"
            )
        return (
            f"{plan.rows:,} rows, {size(self.nbytes)} in {plan.shards} shards, {self.todo} to do: "
            f"about {_duration(self.seconds)}"
        )

    def __str__(self) -> str:
        rows = [[c.name, "text" if c.text else str(c).removeprefix(c.name + " ")] for c in self.plan.columns]
        notes = [self.line(), f"model: {self.plan.model}", f"transform: {self.plan.transform}"]
        if self.free is not None:
            notes.append(f"free on disk: {size(self.free)}")
        return str(Table("Features to extract", ["column", "row"], rows, notes))

    __repr__ = __str__


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

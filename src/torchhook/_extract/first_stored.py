"""The proof that a store is gone on with by the model that began it: its first stored batch, run again and compared.

A fingerprint sees weights, Python code and plain values; not compiled extensions, other libraries or the hardware.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook._extract import fingerprint
from torchhook._extract.batches import Batch
from torchhook._extract.eval_mode import evaluating_on
from torchhook._extract.fill import Fill, pieces
from torchhook._extract.slabs import Slab
from torchhook._extract.sources import Indexed
from torchhook._extract.task import Task
from torchhook._features.api import IDS, LABELS, ColumnSpec, shown
from torchhook._values.host_copies import HostCopies
from torchhook.errors import StoreMismatchError

# Relative to the length of a row: what other kernels, batch sizes and rounding do to a deep network, and little more.
_ALLOWED = {torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.float8_e4m3fn: 0.25, torch.float8_e5m2: 0.5}
_FULL, _ON_CUDA, _AUTOCAST = 1e-3, 1e-2, 4e-2  # CUDA may compute float32 with ten bits (TF32)
_INTEGERS = 0.1  # the largest of nearly equal numbers may be another one


class Difference(NamedTuple):
    """A column whose stored rows are not those of this run."""

    column: str
    size: float
    allowed: float

    def __str__(self) -> str:
        if not self.allowed:
            return f"{self.column}: they are not the same"
        return f"{self.column!r}: they differ by {self.size:.1e} (relative; {self.allowed:.0e} is allowed)"


def check(task: Task, there: Collection[int]) -> None:
    """Run the first batch that is stored again, if there is one, and refuse to go on where it gives something else.

    ``there`` are the shards that were there when the run began.
    """
    if not there or not task.manifest.data.get("repeats", True):
        return
    shard = min(there)
    if not isinstance(task.source, Indexed) and not _same_batch(task, shard):
        return
    with evaluating_on(task.forward.model, task.device) as device:
        found = _again(task, shard, device)
        if found is None:
            return
        fresh, rows = found
        stored = task.store.rows(shard, fresh.rows)
        kept = [row for row in rows if row not in stored.skipped]
        differences = _compared(task, stored.row, _rows_of(fresh), kept, device)
        # A model that draws random numbers is another one each time; then nothing can be proven.
        if differences:
            second = _again(task, shard, device, anew=True)
            restless = second and _compared(task, _rows_of(second[0]), _rows_of(fresh), kept, device)
            names = {one.column for one in restless or ()}
            differences = [one for one in differences if one.column not in names]
    if differences:
        raise StoreMismatchError(_message(task, shard, rows, differences))


def _same_batch(task: Task, shard: int) -> bool:
    """Whether a stream begins with the batch that the shard began with: else the run itself says that it does not."""
    stated = task.store.header(shard, None).metadata.get("check")
    return task.first is not None and stated == fingerprint.of_batch(task.first.batch.value)


def _message(task: Task, shard: int, fresh: list[int], differences: list[Difference]) -> str:
    first, _ = task.manifest.span(shard)
    return (
        f"{task.store.url}: rows {first + fresh[0]} to {first + fresh[-1]} were run again, and are not what is "
        "stored:\n  "
        + "\n  ".join(map(str, differences))
        + f"\nThe store was made with batches of {task.manifest.about.get('batch_size')} rows on "
        f"{task.manifest.about.get('device')}, by {task.manifest.about.get('versions')}. Something that the model "
        "computes with is not the same, and no part of its fingerprint. Extract to another path, or pass resume=False "
        "to begin again there."
    )


# -- running it again -------------------------------------------------------------------------------------


def _again(task: Task, shard: int, device: torch.device, anew: bool = False) -> tuple[Slab, list[int]] | None:
    """A batch at the beginning of a shard as a slab, and the rows of the shard that are in it."""
    measured = None if anew and isinstance(task.source, Indexed) else task.first
    if measured is not None and measured.batch.start == task.manifest.span(shard)[0]:
        batch, values = measured.batch, None if anew else measured.values
    elif isinstance(task.source, Indexed):
        loaded = _load(task.source, *task.manifest.span(shard))
        if loaded is None:
            return None
        batch, values = loaded, None
    else:
        return None  # a stream is read once, and each of its shards knows the batch that it began with
    try:
        return _filled(task, shard, batch, values, device)
    except Exception:
        # The user's own model: rows that it cannot run are what was asked to be skipped, and the run says which.
        if task.skip:
            return None
        raise


def _load(source: Indexed, first: int, last: int) -> Batch | None:
    stop = min(first + source.batch_size, last)
    batch = next(iter(source.here([(first, stop)])), None)
    return None if batch is None or batch.value is None else batch


def _filled(
    task: Task, shard: int, batch: Batch, values: dict[str, Any] | None, device: torch.device
) -> tuple[Slab, list[int]]:
    first, last = task.manifest.span(shard)
    rows = min(batch.start + batch.span, last) - first
    copies = HostCopies()
    slab = Slab(task.manifest.columns, rows, task.manifest.row_bytes, pin=False)
    slab.rows = rows
    fill = Fill(task.manifest.columns, copies)
    into = pieces(batch.start, batch.good, {shard: slab}, task.manifest.rows_per_shard)
    said = task.extras.padding(batch.value, batch.start, batch.good)
    fill.begin(into, len(batch.good), batch.start, said)
    fill.extras(task.extras.of(batch.value, batch.start, batch.good))
    if values is None:
        task.forward(batch.value, device, fill.features, said=said)
    else:
        for site, value in values.items():
            fill.features(site, value)
    copies.wait()
    return slab, [row for row in range(rows) if row + first - batch.start not in batch.failed]


# -- comparing --------------------------------------------------------------------------------------------


Row = Callable[[ColumnSpec, int], Tensor]
"""The value of a column in a row of the shard."""


def _rows_of(slab: Slab) -> Row:
    slab.tensors()  # fills the offsets of rows that were passed over
    return lambda spec, row: slab.columns[spec.name].row(row)


def _compared(task: Task, theirs: Row, mine: Row, rows: list[int], device: torch.device) -> list[Difference]:
    found = []
    for spec in task.manifest.columns:
        allowed = 0.0 if spec.name in (IDS, LABELS) else _allowed(task, spec, device)
        size = _size([theirs(spec, row) for row in rows], [mine(spec, row) for row in rows], exact=not allowed)
        if size > allowed:
            found.append(Difference(shown(spec.name), size, allowed))
    return found


def _size(theirs: list[Tensor], mine: list[Tensor], exact: bool) -> float:
    """How much rows differ: relative to their length, or, of what is exact, the share of numbers that differ."""
    if [value.shape for value in theirs] != [value.shape for value in mine]:
        return math.inf
    if not theirs:
        return 0.0
    if theirs[0].is_floating_point() and not exact:
        return _relative(theirs, mine)
    one, other = (_comparable(torch.cat([value.reshape(-1) for value in values])) for values in (theirs, mine))
    return float((one != other).double().mean()) if one.numel() else 0.0


def _comparable(values: Tensor) -> Tensor:
    """NaN as a number, since it does not equal itself."""
    return values.double().nan_to_num(nan=1e300) if values.is_floating_point() else values


def _allowed(task: Task, spec: ColumnSpec, device: torch.device) -> float:
    if not spec.dtype.is_floating_point:
        return _INTEGERS
    allowed = _ALLOWED.get(spec.dtype, _FULL)
    if "cuda" in (device.type, task.manifest.about.get("device")):
        allowed = max(allowed, _ON_CUDA)
    return max(allowed, _AUTOCAST) if task.manifest.autocast else allowed


def _relative(theirs: list[Tensor], mine: list[Tensor]) -> float:
    """The largest difference of a row, relative to the row; of rows near zero, to the others."""
    sizes, gaps = [], []
    for stored, fresh in zip(theirs, mine, strict=True):
        a, b = stored.double(), fresh.double()
        same = (a == b) | (a.isnan() & b.isnan())  # infinities and NaN that are kept
        gaps.append(float(torch.where(same, 0.0, a - b).norm()))
        sizes.append(float(torch.where(same & ~a.isfinite(), 0.0, a).norm()))
    usual = math.sqrt(sum(size * size for size in sizes if math.isfinite(size)) / max(1, len(sizes)))
    found = [gap / max(size, usual / 100, 1e-30) if gap else 0.0 for gap, size in zip(gaps, sizes, strict=True)]
    # NaN where there was a number, or the other way round.
    return max((math.inf if math.isnan(one) else one for one in found), default=0.0)

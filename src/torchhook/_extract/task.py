"""The shard task: rows ``[k*S, (k+1)*S)`` through the model and into shard ``k``. Every engine runs this."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchhook._extract import fingerprint
from torchhook._extract.batches import Batch
from torchhook._extract.eval_mode import at_rest
from torchhook._extract.fill import Fill, Sides, pieces
from torchhook._extract.forward import Forward
from torchhook._extract.slabs import HostCopies, Slab
from torchhook._extract.sources import Source
from torchhook._extract.writer import Done, Writer
from torchhook._features import shards
from torchhook._features.manifest import Plan
from torchhook._features.storage import Place
from torchhook.errors import ExtractError, note

SLABS = 4
Wanted = Callable[[int], bool]


class Head(NamedTuple):
    """A batch that was run already, and the values of the layers."""

    batch: Batch
    values: dict[str, Any]


@dataclasses.dataclass
class Task:
    """All that a process needs to do shards. It pickles if the model, the data and the functions do."""

    forward: Forward
    source: Source
    sides: Sides
    plan: Plan
    place: Place
    device: torch.device | str | None = None
    skip: bool = False
    check_nan: bool = True
    head: Head | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "head": None}

    def do_shard(self, shard: int) -> Done:
        """Do one shard."""
        done: list[Done] = []
        self.do_shards([shard], done.append)
        return done[0]

    def do_shards(
        self,
        todo: Sequence[int] | Wanted,
        done: Callable[[Done], None] = lambda done: None,
        passed: Callable[[int], None] = lambda rows: None,
    ) -> int:
        """Do the shards of a list, or those of a stream that are wanted, and return the row after the last.

        ``done`` hears of each committed shard, from a writer's thread; ``passed`` of each batch.
        """
        wanted = todo if callable(todo) else set(todo).__contains__
        spans = [] if callable(todo) else [self.plan.span(shard) for shard in todo]
        with at_rest(self.forward.model, self.device) as device:
            writer = Writer(
                self.place,
                self.plan,
                pin=device.type == "cuda",
                slabs=SLABS,
                skip=self.skip,
                check_nan=self.check_nan,
                done=done,
            )
            try:
                end = _Run(self, device, writer, wanted).over(spans, passed)
            except BaseException as error:
                _finish(writer, error)
                raise
            writer.close()
        return end


def _finish(writer: Writer, error: BaseException) -> None:
    """Commit what is full already; the error that ended the run is the one to tell."""
    try:
        writer.close()
    except BaseException as other:
        if other is not error:
            note(error, f"A shard could not be written either: {other}")


class _Run:
    """One pass over batches."""

    def __init__(self, task: Task, device: torch.device, writer: Writer, wanted: Wanted) -> None:
        self.task, self.device, self.writer, self.wanted = task, device, writer, wanted
        self.size = task.plan.rows_per_shard
        self.copies = HostCopies()
        self.fill = Fill(task.plan.columns, self.copies)
        self.open: dict[int, Slab] = {}
        self.head, task.head = task.head, None  # needed once
        self.stored: dict[str, int] | None = None

    def over(self, spans: list[tuple[int, int]], passed: Callable[[int], None]) -> int:
        end = 0
        batches = self.task.source.batches(spans, self.head and self.head.batch)
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:
                note(error, f"Raised while loading the rows after row {end - 1}." if end else "Raised by the data.")
                raise
            if batch is None:
                break
            self._batch(batch)
            end = batch.start + batch.span
            passed(batch.span)
        for shard in sorted(self.open):
            self._submit(shard)  # the last one of a stream is only as long as the stream
        return end

    def _batch(self, batch: Batch) -> None:
        end = batch.start + batch.span
        touched = range(batch.start // self.size, (end - 1) // self.size + 1)
        if len(touched) >= SLABS:
            raise ExtractError(
                f"a batch of {batch.span} rows reaches over {len(touched)} shards of {self.size} rows; it may reach "
                f"over {SLABS - 1} at most. rows_per_shard must be at least half of the largest batch."
            )
        stream = self.task.source.kind == "stream"
        begun = stream and any(k * self.size >= batch.start for k in touched)
        check = fingerprint.of_batch(batch.value) if begun else None
        for shard in touched:
            begins = shard * self.size >= batch.start
            if not self.wanted(shard):
                if begins and check is not None:
                    self._same_order(shard, check)
            elif shard not in self.open:
                self.open[shard] = self.writer.take(shard)
                if check is not None:
                    self.open[shard].metadata["check"] = check
        slabs = {shard: self.open[shard] for shard in touched if shard in self.open}
        if slabs:
            self._features(batch, slabs)
        for shard, slab in slabs.items():
            first, last = self.task.plan.span(shard)
            slab.rows = min(end, last) - first
            if end >= last:
                self._submit(shard)

    def _submit(self, shard: int) -> None:
        slab = self.open.pop(shard)
        slab.ready = self.copies.mark()
        self.writer.submit(slab)

    def _features(self, batch: Batch, slabs: dict[int, Slab]) -> None:
        for place, why in batch.failed.items():
            self._skip(batch.start + place, why, slabs)
        if batch.value is None:
            return
        try:
            self._run(batch, slabs)
        except Exception as error:
            if not self.task.skip:
                note(error, f"Raised by rows {batch.start} to {batch.start + batch.span - 1} of the data.")
                raise
            for one in batch.singles() if batch.span > 1 else ():
                self._features(one, slabs)
            if batch.span == 1:
                self._skip(batch.start, f"{type(error).__name__}: {error}", slabs)

    def _skip(self, row: int, why: str, slabs: dict[int, Slab]) -> None:
        shard, at = divmod(row, self.size)
        if shard in slabs:
            slabs[shard].skip(at, why)

    def _run(self, batch: Batch, slabs: dict[int, Slab]) -> None:
        good, task = batch.good, self.task
        into = pieces(batch.start, good, slabs, self.size)
        if not into:
            return
        self.fill.begin(into, len(good), batch.start, task.sides.mask(batch.value))
        self.fill.sides(task.sides.of(batch.value, batch.start, good))
        if self.head is not None and self.head.batch[:2] == batch[:2]:
            for layer, value in self.head.values.items():
                self.fill.features(layer, value)
            self.head = None
            return
        task.forward(batch.value, self.device, self.fill.features)

    def _same_order(self, shard: int, check: str) -> None:
        """A stream that is resumed must begin with the rows that are stored already."""
        name = shards.name_of(shard)
        if self.stored is None:
            self.stored = self.task.place.sizes(shards.FOLDER)
        found = self.stored.get(name)
        if found is None:
            return  # another rank's, written since or not yet
        header = shards.header(name, lambda a, b: self.task.place.read(name, a, b), found)
        if header.metadata.get("check") != check:
            raise ExtractError(
                f"{self.task.place.url}: from row {shard * self.size} on, the data is not what shard {shard} was made "
                "of. A stream can be resumed only if it repeats its order and its values: turn "
                "shuffling and random augmentation off, or begin again with resume=False."
            )

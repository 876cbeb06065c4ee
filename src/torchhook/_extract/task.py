"""The shard task: rows ``[k*S, (k+1)*S)`` through the model and into shard ``k``. Every engine runs this."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchhook._extract import fingerprint
from torchhook._extract.batches import Batch
from torchhook._extract.eval_mode import evaluating_on
from torchhook._extract.fill import Extras, Fill, pieces
from torchhook._extract.forward import Forward
from torchhook._extract.skips import Skips
from torchhook._extract.slabs import NARROW, Slab
from torchhook._extract.sources import Source
from torchhook._extract.writer import Done, Writer
from torchhook._features.api import Entry, Manifest, Page, Store
from torchhook._values.host_copies import HostCopies
from torchhook.errors import ExtractError, note

SLABS = 4  # one that is being filled, and one for each of three writers
AHEAD = 3
"""So many batches wait for a GPU at most: each of them has memory there, and pinned memory here."""
Wanted = Callable[[int], bool]


class FirstBatch(NamedTuple):
    """The batch that was measured, and the values of its sites, so that it need not be run again."""

    batch: Batch
    values: dict[str, Any]


@dataclasses.dataclass
class Task:
    """All that a process needs to do shards. It pickles if the model, the data and the functions do."""

    forward: Forward
    source: Source
    extras: Extras
    manifest: Manifest
    store: Store
    device: torch.device | str | None = None
    skip: bool = False
    check_nan: bool = True
    skips: Skips = dataclasses.field(default_factory=lambda: Skips(None, None))
    first: FirstBatch | None = None
    page: Page | None = None
    """Where to note the shards that are committed."""

    def __getstate__(self) -> dict[str, Any]:
        # Its values may lie on a GPU that another process has not, and a batch knows its rows by a closure.
        return {**self.__dict__, "first": None, "page": None}

    @property
    def entries(self) -> Sequence[Entry]:
        """The shards that were committed here."""
        return () if self.page is None else self.page.entries

    def note(self, done: Done) -> None:
        """Remember a shard that is committed; what another one has committed first, that one remembers."""
        if self.page is not None and done.ours:
            self.page.add(done.entry)

    def flush(self) -> None:
        """Write down which shards were committed, for whoever opens the store or goes on with it."""
        if self.page is not None:
            self.page.flush()

    def do_shards(
        self,
        todo: Sequence[int] | Wanted,
        done: Callable[[Done], None] = lambda done: None,
        passed: Callable[[int], None] = lambda rows: None,
    ) -> int:
        """Do the shards of a list, or those of a stream that are wanted, and return the row after the last.

        ``done`` hears of each committed shard, from a writer's thread; ``passed`` of each batch.
        """

        def committed(one: Done) -> None:
            self.note(one)
            done(one)

        wanted = todo if callable(todo) else set(todo).__contains__
        spans = [] if callable(todo) else [self.manifest.span(shard) for shard in todo]
        writer = None
        try:
            with evaluating_on(self.forward.model, self.device) as device:
                writer = self._writer(device, committed)
                end = _Run(self, device, writer, wanted).over(spans, passed)
        except BaseException as error:
            if writer is not None:
                _finish(writer, error)
            raise
        # The model is given back while the last shards are written.
        writer.close()
        return end

    def _writer(self, device: torch.device, committed: Callable[[Done], None]) -> Writer:
        return Writer(
            self.store,
            self.manifest,
            pin=device.type == "cuda",
            slabs=SLABS,
            skip=self.skip,
            check_nan=self.check_nan,
            narrow=self._narrow(),
            skips=self.skips,
            done=committed,
        )

    def _narrow(self) -> list[str]:
        """The columns whose numbers were cast to a type that may be too small for them."""
        # What a model computes in half precision itself is what it is.
        of_model = {tensor.dtype for tensor in (*self.forward.model.parameters(), *self.forward.model.buffers())}
        cast = self.manifest.dtype is not None or not self.manifest.autocast
        return [
            spec.name
            for spec in self.manifest.columns
            if spec.dtype in NARROW and (self.manifest.dtype is not None or (cast and spec.dtype not in of_model))
        ]


def _finish(writer: Writer, error: BaseException) -> None:
    """Commit what is full already; the error that ended the run is the one to tell."""
    try:
        writer.close()
    except BaseException as other:  # an interrupt, say: the first error is told, this one with it
        if other is not error:
            note(error, f"A shard could not be written either: {other}")


class _Run:
    """One pass over batches."""

    def __init__(self, task: Task, device: torch.device, writer: Writer, wanted: Wanted) -> None:
        self.task, self.device, self.writer, self.wanted = task, device, writer, wanted
        self.size = task.manifest.rows_per_shard
        self.copies = HostCopies()
        self.fill = Fill(task.manifest.columns, self.copies)
        self.open: dict[int, Slab] = {}
        self.first, task.first = task.first, None  # needed once
        self.stored: dict[int, int] | None = None
        self.started: deque[torch.cuda.Event] = deque()

    def over(self, spans: list[tuple[int, int]], passed: Callable[[int], None]) -> int:
        end = 0
        batches = self.task.source.batches(spans, self.first and self.first.batch)
        while True:
            try:
                # By hand, so that an error of the data is told apart from one of the model.
                batch = next(batches, None)
            except Exception as error:
                note(error, f"Raised while loading the rows after row {end - 1}." if end else "Raised by the data.")
                raise
            if batch is None:
                break
            self._batch(batch)
            end = batch.start + batch.span
            passed(batch.span)
            del batch  # before the next one is loaded
            self._keep_pace()
        for shard in sorted(self.open):
            self._submit(shard)  # the last one of a stream is only as long as the stream
        return end

    def _keep_pace(self) -> None:
        """Stay only a few batches ahead of the device: nothing else would stop a loader that is faster."""
        if self.device.type != "cuda":
            return
        # The oldest event has been waited for, and is used again.
        event = self.started.popleft() if len(self.started) > AHEAD else torch.cuda.Event()
        event.synchronize()
        event.record(torch.cuda.current_stream(self.device))
        self.started.append(event)

    def _batch(self, batch: Batch) -> None:
        end = batch.start + batch.span
        touched = range(batch.start // self.size, (end - 1) // self.size + 1)
        # A batch holds the slabs of all its shards at once: if there were too few, it would wait for itself.
        if len(touched) >= SLABS:
            raise ExtractError(
                f"a batch of {batch.span} rows reaches over {len(touched)} shards of {self.size} rows; it may reach "
                f"over {SLABS - 1} at most. rows_per_shard must be at least half of the largest batch."
            )
        self._open(batch, touched)
        slabs = {shard: self.open[shard] for shard in touched if shard in self.open}
        if slabs:
            self._features(batch, slabs)
        for shard, slab in slabs.items():
            first, last = self.task.manifest.span(shard)
            slab.rows = min(end, last) - first
            if end >= last:
                self._submit(shard)

    def _open(self, batch: Batch, touched: range) -> None:
        """Take slabs for the shards that begin in a batch and are wanted; what a stream has stored must be the same."""
        stream = self.task.source.kind == "stream"
        # Where a shard begins is enough to see another order; all batches would cost a pass over all data.
        begun = [shard for shard in touched if shard * self.size >= batch.start]
        check = fingerprint.of_batch(batch.value) if stream and begun else None
        for shard in touched:
            if self.wanted(shard):
                if shard not in self.open:
                    slab = self.open[shard] = self.writer.take(shard)
                    if check is not None:
                        slab.metadata["check"] = check
            elif check is not None and shard in begun:
                self._same_order(shard, check)

    def _submit(self, shard: int) -> None:
        slab = self.open.pop(shard)
        slab.ready = self.copies.events()  # the writer waits for the transfers; the model goes on
        self.writer.submit(slab)

    def _features(self, batch: Batch, slabs: dict[int, Slab]) -> None:
        for position, why in batch.failed.items():
            self._skip(batch.start + position, why, slabs, None)
        if batch.value is None:
            return
        try:
            self._run(batch, slabs)
        except Exception as error:  # the user's own model: told with the rows that it skips
            if not self.task.skip:
                note(error, f"Raised by rows {batch.start} to {batch.start + batch.span - 1} of the data.")
                raise
            for one in batch.singles() if batch.span > 1 else ():
                self._features(one, slabs)
            if batch.span == 1:
                self._skip(batch.start, f"{type(error).__name__}: {error}", slabs, batch.value)

    def _skip(self, row: int, why: str, slabs: dict[int, Slab], value: Any) -> None:
        shard, at = divmod(row, self.size)
        if shard in slabs:
            self.task.skips.add(row, why)
            slabs[shard].skip(at, why, self.task.extras.id_of(row, value))

    def _run(self, batch: Batch, slabs: dict[int, Slab]) -> None:
        good, task = batch.good, self.task
        into = pieces(batch.start, good, slabs, self.size)
        if not into:
            return
        said = task.extras.padding(batch.value, batch.start, good)
        self.fill.begin(into, len(good), batch.start, said)
        self.fill.extras(task.extras.of(batch.value, batch.start, good))
        # By their places alone: tensors have no plain answer to ==.
        if self.first is not None and self.first.batch[:2] == batch[:2]:
            for site, value in self.first.values.items():
                self.fill.features(site, value)
            self.first = None
            return
        task.forward(batch.value, self.device, self.fill.features, said=said)

    def _same_order(self, shard: int, check: str) -> None:
        """A stream that is resumed must begin with the rows that are stored already."""
        if self.stored is None:
            self.stored = self.task.store.sizes()
        size = self.stored.get(shard)
        if size is None:
            return  # another rank's, written since or not yet
        if self.task.store.header(shard, size).metadata.get("check") != check:
            raise ExtractError(
                f"{self.task.store.url}: from row {shard * self.size} on, the data is not what shard {shard} was made "
                "of. A stream can be resumed only if it repeats its order and its values: turn "
                "shuffling and random augmentation off, or begin again with resume=False."
            )

"""Background writers: full slabs in, committed shards out.

There are few slabs, so a slow disk makes ``take`` wait: that slows the model down instead of filling the memory.
An error in a writer surfaces in the next ``take`` or in ``close``.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Collection
from typing import NamedTuple

from torchhook._extract.skips import Skips
from torchhook._extract.slabs import Slab, check_values
from torchhook._features.api import Entry, Manifest, Store
from torchhook.errors import note


class Done(NamedTuple):
    """A shard that is committed."""

    entry: Entry
    """What the index says of it."""
    ours: bool
    """Whether this writer was the first."""
    first_row: int

    @property
    def shard(self) -> int:
        return self.entry.shard

    @property
    def rows(self) -> int:
        return self.entry.rows

    @property
    def nbytes(self) -> int:
        return self.entry.size

    @property
    def skipped(self) -> dict[int, str]:
        """Rows of the whole data set that were skipped, and why."""
        return {self.first_row + int(row): why for row, why in self.entry.skipped.items()}


class Writer:
    """Commits slabs on a few threads."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        *,
        pin: bool = False,
        slabs: int = 4,
        threads: int = 3,
        skip: bool = False,
        check_nan: bool = True,
        narrow: Collection[str] = (),
        skips: Skips | None = None,
        done: Callable[[Done], None] = lambda done: None,
    ) -> None:
        self._store, self._manifest, self._done = store, manifest, done
        self._pin, self._unmade = pin, slabs
        self._skip, self._check_nan, self._narrow = skip, check_nan, narrow
        self._skips = Skips(None, manifest.rows) if skips is None else skips
        # Without a limit: there are never more slabs than were made.
        self._free: queue.SimpleQueue[Slab | None] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[Slab | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._work, name=f"shard-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def take(self, shard: int) -> Slab:
        """A free slab for ``shard``; waits until there is one."""
        self._raise()
        # Made when needed: pinning memory takes time, and a small data set fills one.
        if self._free.empty() and self._unmade:
            self._unmade -= 1
            about = self._manifest
            rows = about.rows_per_shard if about.rows is None else min(about.rows_per_shard, about.rows)
            return Slab(about.columns, rows, about.row_bytes, self._pin).begin(shard)
        slab = self._free.get()  # a writer may fail while this waits, so that errors are looked for once more
        self._raise()
        assert slab is not None
        return slab.begin(shard)

    def submit(self, slab: Slab) -> None:
        """Commit a full slab; it must not be touched any more."""
        self._full.put(slab)

    def close(self) -> None:
        """Return when everything that was submitted is committed, or raise what went wrong."""
        for _ in self._threads:
            self._full.put(None)
        for thread in self._threads:
            thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (slab := self._full.get()) is not None:
            try:
                self._commit(slab)
            except BaseException as error:
                # The other shards are still written: what is done is done.
                note(error, f"Raised while shard {slab.shard} was written.")
                self._error = self._error or error
            self._free.put(slab)  # after an error too, or take would wait for ever

    def _commit(self, slab: Slab) -> None:
        for event in slab.ready:
            event.synchronize()
        first, _ = self._manifest.span(slab.shard)
        # Here, where the model does not wait for another pass over the rows.
        blanked = list(slab.skipped)
        if self._check_nan:
            check_values(slab, first, self._narrow, self._skip)
        for row in slab.skipped.keys() - set(blanked):
            self._skips.add(first + row, slab.skipped[row])
        slab.mark_skipped(blanked)
        metadata = {"shard": str(slab.shard), "first_row": str(first), "rows": str(slab.rows)}
        metadata |= {**self._manifest.marks, **slab.metadata}
        if slab.skipped:
            # Sorted: rows are skipped in any order, and the same rows must be the same bytes.
            metadata["skipped"] = json.dumps({str(row): slab.skipped[row] for row in sorted(slab.skipped)})
        entry, ours = self._store.commit(slab.shard, slab.tensors(), metadata, self._manifest.version)
        self._done(Done(entry, ours, first))

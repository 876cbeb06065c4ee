"""The progress bar: rows per second, and bytes per second on their way to the disk."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from tqdm import tqdm

from torchhook._extract.writer import Done
from torchhook._features.api import Manifest


class Progress:
    """Hears of rows from the model and of shards from the writers."""

    def __init__(self, manifest: Manifest, rows_done: int, show: bool, text: str) -> None:
        self._lock = threading.Lock()
        self._start = time.perf_counter()
        self.bytes = 0
        self.done: list[Done] = []
        # Without a bar, no tqdm at all: it has a lock that processes share, and a fork may inherit it locked.
        self._bar: Any = None
        if show:
            tqdm.write(f"extract: {text}", file=sys.stderr)
            self._bar = tqdm(total=manifest.rows, initial=rows_done, unit=" rows", unit_scale=True, dynamic_ncols=True)

    def rows(self, rows: int) -> None:
        if self._bar is not None:
            self._bar.update(rows)

    def shard(self, done: Done) -> None:
        with self._lock:
            self.done.append(done)
            self.bytes += done.nbytes
            rate = self.bytes / 1e6 / max(1e-9, time.perf_counter() - self._start)
            if self._bar is not None:
                self._bar.set_postfix_str(f"{rate:.1f} MB/s, shard {done.shard}", refresh=False)
        if done.skipped:
            row, why = next(iter(done.skipped.items()))
            text = f"extract: {len(done.skipped)} rows skipped in shard {done.shard}; row {row}: {why}"
            if self._bar is None:
                print(text, file=sys.stderr)
            else:
                self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

"""How far it is: a bar on a terminal, a line now and then in a log. Rows and bytes per second, and what was skipped."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from tqdm import tqdm

from torchhook._extract.writer import Done
from torchhook._features.api import Manifest
from torchhook._words import counted

LINE_SECONDS = 30.0


class Progress:
    """Hears of rows from the model and of shards from the writers."""

    def __init__(self, manifest: Manifest, rows_done: int, show: bool, text: str) -> None:
        self._lock = threading.Lock()
        self._start = self._told = time.perf_counter()
        self._total, self._before, self._rows = manifest.rows, rows_done, 0
        self.bytes = 0
        self.done: list[Done] = []
        # Without a bar, no tqdm at all: it has a lock that processes share, and a fork may inherit it locked.
        self._bar: Any = None
        self._lines = show and not _draws()
        if show:
            print(f"extract: {text}", file=sys.stderr)
        if show and not self._lines:
            self._bar = tqdm(total=manifest.rows, initial=rows_done, unit=" rows", unit_scale=True, dynamic_ncols=True)

    def rows(self, rows: int) -> None:
        self._rows += rows
        if self._bar is not None:
            self._bar.update(rows)
        elif self._lines and time.perf_counter() - self._told > LINE_SECONDS:
            self._line()

    def _line(self) -> None:
        self._told = time.perf_counter()
        took = max(1e-9, self._told - self._start)
        of = "" if self._total is None else f" of {self._total:,}"
        rates = f"{self._rows / took:,.1f} rows/s, {self.bytes / 1e6 / took:.1f} MB/s"
        print(f"extract: {self._before + self._rows:,}{of} rows, {rates}", file=sys.stderr, flush=True)

    def shard(self, done: Done) -> None:
        with self._lock:
            self.done.append(done)
            self.bytes += done.nbytes
            rate = self.bytes / 1e6 / max(1e-9, time.perf_counter() - self._start)
            if self._bar is not None:
                # Writers' threads leave the drawing to the thread that counts rows.
                self._bar.set_postfix_str(f"{rate:.1f} MB/s, shard {done.shard}", refresh=False)
        if done.skipped:
            row, why = next(iter(done.skipped.items()))
            text = f"extract: {counted(len(done.skipped), 'row')} skipped in shard {done.shard}; row {row}: {why}"
            if self._bar is None:
                print(text, file=sys.stderr)
            else:
                self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._lines and self._rows:
            self._line()


def _draws() -> bool:
    """Whether what is written to stderr can be drawn over: on a terminal, or in a notebook, not in a pipe or a file."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel")

"""How many rows may be skipped: a disk that was unplugged must not make an empty store."""

from __future__ import annotations

import threading
from typing import Any

from torchhook._words import plural
from torchhook.errors import ExtractError

SHARE, LEAST = 0.1, 16
"""Without a word of the user, a tenth of the rows may be skipped; and a few of any data."""


def check(most: Any) -> None:
    """Refuse a limit that is none."""
    fits = isinstance(most, int) and most >= 0 if not isinstance(most, float) else 0 <= most <= 1
    if isinstance(most, bool) or not fits:
        raise ValueError(f"max_skipped={most!r}: give a number of rows, or a share of them from 0.0 to 1.0.")


class Skips:
    """Counts the rows that this process skips, in whatever thread, and raises when there are too many."""

    def __init__(self, most: int | float | None, rows: int | None) -> None:
        self.most, self.rows, self.count, self.seen = most, rows, 0, 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}  # locks do not travel

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def limit(self) -> float:
        """Of a stream, whose end nobody knows, a share of what has come so far."""
        rows = self.rows if self.rows is not None else self.seen
        if self.most is None:
            return max(LEAST, SHARE * rows)
        return self.most * rows if isinstance(self.most, float) else self.most

    def stored(self, count: int) -> None:
        """Rows that earlier calls have skipped count too: else every call could skip as many again."""
        self.count = count
        if self.most is not None and count > self.limit():
            raise ExtractError(
                f"earlier calls have skipped {count} {plural(count, 'row')} of the store, more than "
                f"max_skipped={self.most} allows. retry_skipped=True does them again."
            )

    def add(self, row: int, why: str) -> None:
        with self._lock:
            self.count += 1
            self.seen = max(self.seen, row + 1)
            count = self.count
        if count > self.limit():
            limit = "a tenth, which max_skipped= can change" if self.most is None else f"max_skipped={self.most} allows"
            raise ExtractError(
                f"{count} {plural(count, 'row')} could not be done, of {self.rows or self.seen}: more than {limit}. "
                f"The last is row {row}: {why}. What is committed stays; when the cause is gone, retry_skipped=True "
                "does skipped rows again."
            )

"""Who does which block of shards, told by files in the store: no two living processes do the same rows.

A claim is a file that only one process can create. Its owner writes it anew every few seconds; one that no longer
changes, or whose process is gone from this machine, is dead, and the block belongs to whoever creates the claim's next
generation. Nothing depends on it but the work: a shard that two processes made is committed once all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable

from torchhook._features.api import Storage

BEAT_SECONDS = 10.0
DEAD_SECONDS = 60.0
"""A claim that has not changed for so long, by the clock of the one who looks, has no owner."""
_PREFIX, _MARK = "claim.", "rank0."


def is_one(name: str) -> bool:
    """Whether a file of a store is a claim or a mark."""
    return name.startswith((_PREFIX, _MARK))


def clear(storage: Storage) -> None:
    """Remove the claims and marks of a store that is complete: there is nothing left to claim."""
    for name in filter(is_one, storage.sizes("")):
        storage.remove(name)


# -- is it the same store? ------------------------------------------------------------------------------


def mark(storage: Storage, job: str) -> None:
    """The first rank's sign that this is the store of the job."""
    storage.replace(_MARK + job, json.dumps({"host": socket.gethostname()}).encode())


def unmark(storage: Storage, job: str) -> None:
    storage.remove(_MARK + job)


def marked(storage: Storage, job: str) -> bool:
    """Whether the first rank's sign is here."""
    return _MARK + job in storage.sizes("")


# -- who does what ---------------------------------------------------------------------------------------


class Claims:
    """The claims of this process, and what it has seen of the others'. A context that gives its own ones back."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._me = {"host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8)}
        self._mine: dict[str, str] = {}
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="claims", daemon=True)

    def __enter__(self) -> Claims:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._over.set()
        self._thread.join()
        for key in list(self._mine):
            with contextlib.suppress(Exception):  # an error on the way may be that of the store
                self.release(key)

    def take(self, key: str, files: Iterable[str]) -> bool:
        """Claim ``key``, if it is free or its owner is dead, as the ``files`` of the store show."""
        generations = self._generations(key, files)
        if generations and self._lives(generations[-1]):
            return False
        last = int(generations[-1].rsplit(".", 1)[-1]) if generations else -1
        name = f"{_PREFIX}{key}.{last + 1}"
        if not self._storage.create(name, [self._text()]):
            return False  # another one was quicker
        with self._lock:
            self._mine[key] = name
        return True

    def held(self, key: str, files: Iterable[str]) -> bool:
        """Whether a process that lives has claimed ``key``."""
        generations = self._generations(key, files)
        return bool(generations) and self._lives(generations[-1])

    def release(self, key: str) -> None:
        """Give a claim back: what it was for is done, or given up."""
        with self._lock:
            name = self._mine.pop(key)
        stem, _, generation = name.rpartition(".")
        # The dead ones below it first: while ours is there, nobody takes one of theirs for the latest.
        for number in range(int(generation) + 1):
            self._storage.remove(f"{stem}.{number}")

    def _generations(self, key: str, files: Iterable[str]) -> list[str]:
        stem = f"{_PREFIX}{key}."
        found = [name for name in files if name.startswith(stem) and name.removeprefix(stem).isdecimal()]
        return sorted(found, key=lambda name: int(name.removeprefix(stem)))

    def _lives(self, name: str) -> bool:
        try:
            text = self._storage.read(name)
        except FileNotFoundError:
            return True  # given back since the listing: the next one tells
        now = time.monotonic()
        before, since = self._seen.get(name, (b"", now))
        self._seen[name] = (text, since if text == before else now)
        return now - self._seen[name][1] < DEAD_SECONDS and not self._gone(text)

    def _gone(self, text: bytes) -> bool:
        """Whether the owner was a process of this machine, and is no more."""
        try:
            owner = json.loads(text)
            return owner["host"] == self._me["host"] and not _is_process(int(owner["pid"]))
        except (ValueError, KeyError, TypeError):
            return False  # being written: not every store replaces files whole

    def _text(self) -> bytes:
        return json.dumps({**self._me, "beat": secrets.token_hex(4)}).encode()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            # Under the lock: a claim that was given back must not be written again.
            with self._lock:
                for name in self._mine.values():
                    text = self._text()
                    # Every kind of store has errors of its own; the next beat may come through.
                    with contextlib.suppress(Exception):
                        self._storage.replace(name, text)


def _is_process(pid: int) -> bool:
    if os.name == "nt":
        return True  # signal 0 would end it there; the clock tells
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

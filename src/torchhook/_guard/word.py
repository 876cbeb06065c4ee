"""The word that a rank leaves for the others before it raises: they wait for it, in a collective that it never joins.

No rank can be called out of a collective. But a thread beside it can read what was left in the store of the process
group, and say it, so that whoever looks at the rank that hangs learns which one failed and of what.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from typing import Any

from torch import distributed

from torchhook._torch import sharded
from torchhook.errors import GuardWarning

_KEY = "torchhook/guard"
_EVERY = 0.2  # seconds
_GRACE = 2.0  # seconds for which a rank that raises waits to be heard: with its end, the store may end


class Word:
    """Says what the guards of other ranks found, from ``open`` to ``close``."""

    def __init__(self) -> None:
        self._store: Any = None
        self._closed = threading.Event()

    def open(self) -> None:
        self._store = sharded.rank_store()
        if self._store is None:
            return
        self._store.add(f"{_KEY}/listening", 1)
        # It holds neither the guard nor the model, and ends with the process.
        arguments = (self._store, distributed.get_rank(), self._closed)
        threading.Thread(target=_listen, args=arguments, name="torchhook guard", daemon=True).start()

    def leave(self, finding: str) -> str:
        """Tell the other ranks, and return what to say here; nothing, where there are none."""
        if self._store is None or not distributed.is_initialized():
            return ""
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        with contextlib.suppress(RuntimeError):  # the store is gone, and its rank with it
            self._tell(f"rank {rank}: {finding}", rank)
        return (
            f"  This is rank {rank} of {ranks}. The others will wait for it in their next collective, until the "
            "process group's timeout: let the error end this process, so that its launcher ends theirs."
        )

    def _tell(self, text: str, rank: int) -> None:
        number = self._store.add(f"{_KEY}/numbers", 1)
        self._store.set(f"{_KEY}/{number}", f"{rank} {text}")
        self._store.add(_KEY, 1)
        # This rank hears itself too: all who listen are counted.
        until = time.monotonic() + _GRACE
        while self._store.add(f"{_KEY}/{number}/heard", 0) < self._store.add(f"{_KEY}/listening", 0):
            if time.monotonic() > until:
                break
            time.sleep(0.01)

    def close(self) -> None:
        store, self._store = self._store, None
        self._closed.set()
        if store is not None and distributed.is_initialized():
            with contextlib.suppress(RuntimeError):
                store.add(f"{_KEY}/listening", -1)


# The last word that this process heard, of any guard: a rank may raise before another has opened its own.
_heard: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _listen(store: Any, rank: int, closed: threading.Event) -> None:
    group = distributed.group.WORLD
    with contextlib.suppress(RuntimeError):  # the process group ends before the guard
        while not closed.wait(_EVERY):
            while _heard.get(group, 0) < store.add(_KEY, 0):
                number = _heard[group] = _heard.get(group, 0) + 1
                sender, _, text = store.get(f"{_KEY}/{number}").decode().partition(" ")
                store.add(f"{_KEY}/{number}/heard", 1)
                if int(sender) != rank:
                    _say(text)


def _say(text: str) -> None:
    warnings.warn(
        f"the guard of another rank has raised, and this one may wait for it: {text}", GuardWarning, stacklevel=2
    )

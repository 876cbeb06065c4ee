"""Whether the other ranks do the same: asked before anything for which all of them are needed.

A collective that one rank alone begins waits until the process group gives up, half an hour later. So ranks leave word
in the store of the process group, which nobody waits for, and whoever needs the others looks there first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

from torch import distributed

from torchhook._torch import sharded
from torchhook.errors import SessionError

# Seconds. They have met in the forward pass by then, so that their word is there already, or will never be.
_GRACE = 3.0


class Together:
    """Says to the other ranks that this one does ``what``, from ``open`` to ``close``, and knows whether they do."""

    def __init__(self, what: str) -> None:
        self._key = f"torchhook/{what}"
        self._store: Any = None
        self._is_counted = False
        self._absent: set[int] = set()

    def open(self) -> None:
        self._store = sharded.rank_store()
        self._is_counted = True
        self._count(1)

    def leave(self) -> None:
        """This rank will not come to what all do together any more, unless all ``meet``."""
        if self._is_counted:
            self._is_counted = False
            with contextlib.suppress(RuntimeError):  # the store may be gone, with the rank that kept it
                self._count(-1)

    def close(self) -> None:
        """This rank no longer does it."""
        self.leave()
        self._store = None

    def _count(self, more: int) -> None:
        # One number for all, so that all ranks are asked about at once; one for each, to name those that are missing.
        if self._store is not None:
            mine = self._store.add(f"{self._key}/{distributed.get_rank()}", more)
            if mine == (more > 0):  # the first that it opens, the last that it closes: a rank is counted once
                self._store.add(self._key, more)

    def missing(self, groups: Iterable[Any]) -> list[int]:
        """The ranks of these groups that do not do it, or no longer do."""
        groups = list(groups)
        if self._store is None or not groups or self._store.add(self._key, 0) >= distributed.get_world_size():
            return []
        ranks = {rank for group in groups for rank in distributed.get_process_group_ranks(group)}
        found = [rank for rank in sorted(ranks) if rank != distributed.get_rank() and not self._is_open(rank)]
        self._absent.update(found)
        return found

    def _is_open(self, rank: int) -> bool:
        until = time.monotonic() + (0 if rank in self._absent else _GRACE)
        while not (found := self._store.add(f"{self._key}/{rank}", 0)) > 0 and time.monotonic() < until:
            time.sleep(0.02)
        return bool(found > 0)

    def meet(self, groups: Iterable[Any]) -> bool:
        """Wait a moment for all ranks of these groups to come here too; whether they did.

        Where each comes by itself (to the end of its block) and not by the model's own collectives: one that waited in
        a collective of ours for another that waits in one of the model's would wait forever.
        """
        ranks = {rank for group in groups for rank in distributed.get_process_group_ranks(group)}
        if self._store is None or not ranks:
            return True
        key, all_ = f"{self._key}/meeting {min(ranks)}", len(ranks)
        turn = (self._store.add(key, 1) - 1) // all_
        until = time.monotonic() + _GRACE
        while self._store.add(key, 0) // all_ <= turn:
            if time.monotonic() > until:
                if (self._store.add(key, -1) + 1) % all_:
                    return False
                self._store.add(key, 1)  # the last one came at this very moment
                break
            time.sleep(0.002)
        return True

    def need(self, groups: Iterable[Any], where: str) -> None:
        """Refuse to go on where not all ranks do it.

        Only just before a collective, which would wait for them: without one, a rank may be gone when another asks.
        """
        absent = self.missing(groups)
        if absent:
            raise SessionError(
                f"{where}: it is shared with other ranks, and rank {', '.join(map(str, absent))} has nothing open that "
                "does the same. Open it on every rank; only a capture with gather='local' needs no other."
            )

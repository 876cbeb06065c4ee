"""Who does which shards. The work itself is the shard task, the same for all."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence

from torchhook._extract import claims
from torchhook._extract.claims import Claims
from torchhook._extract.progress import Progress
from torchhook._extract.sources import Stream
from torchhook._extract.task import Task
from torchhook._features.api import Manifest, Store
from torchhook.errors import DataWarning, ExtractError, warn

BLOCKS_PER_RANK = 16
"""A rank takes so many shards at once that there are about as many turns: few claims, and little to wait for."""
MEET_SECONDS = 600.0
"""How long ranks wait for the first one, which may have much to load."""
_POLL_SECONDS = (0.1, 5.0)  # at first, and at most


def local(task: Task, progress: Progress, todo: Sequence[int] | None, there: set[int]) -> int | None:
    """This process does all that is missing; returns the number of rows of a stream."""
    if isinstance(task.source, Stream):
        return task.do_shards(lambda k: k not in there, progress.shard, progress.rows)
    if todo:
        task.do_shards(todo, progress.shard, progress.rows)
    return task.manifest.rows


# -- ranks ------------------------------------------------------------------------------------------


def torchrun(task: Task, progress: Progress, there: set[int], turns: Turns | None) -> int | None:
    """Ranks take blocks of shards, their own first, then what nobody does; they end when all is done."""
    if isinstance(task.source, Stream):
        mark(task.store)
        with Claims(task.store.storage) as claimed:
            return _stream(task, progress, there, claimed, *ranks())
    with contextlib.nullcontext(turns) if turns is not None else Turns(task.store, task.manifest, there) as taken:
        if taken.first_row() is not None:
            mark(task.store)  # after the first claim: the others now see it, too
        for todo in taken:
            task.do_shards(todo, progress.shard, progress.rows)
            task.flush()
    return task.manifest.rows


def blocks(shards: int, world: int) -> list[range]:
    """The shards in blocks that ranks claim.

    >>> blocks(5, 2), len(blocks(10_000, 4))
    ([range(0, 1), range(1, 2), range(2, 3), range(3, 4), range(4, 5)], 65)
    """
    size = max(1, shards // (world * BLOCKS_PER_RANK))
    return [range(first, min(first + size, shards)) for first in range(0, shards, size)]


def _others(cut: list[range], rank: int, world: int) -> list[range]:
    return [block for number, block in reversed(list(enumerate(cut))) if number % world != rank]


class Turns:
    """The shards that this rank does, block by block, each claimed before it is handed out and given back after it.

    It ends when nothing is missing, whoever has done it. A context that gives back what it has not come to.
    """

    def __init__(self, store: Store, manifest: Manifest, there: Collection[int] = ()) -> None:
        rank, world = ranks()
        self._store, self._manifest = store, manifest
        assert manifest.shards is not None
        cut = blocks(manifest.shards, world)
        # What belongs to others from the other end: the last blocks are those that they come to last.
        self._order = [*cut[rank::world], *_others(cut, rank, world)]
        self._there = set(there)
        self._made: set[int] = set()  # and not made again, should they vanish: that is told at the end of the run
        self._claims = Claims(store.storage)
        self._now: tuple[range, list[int]] | None = None

    def __enter__(self) -> Turns:
        self._claims.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._claims.__exit__(*details)

    def first_row(self) -> int | None:
        """Where the work begins, in the block that is claimed now; ``None`` if nothing is left."""
        self._now = self._now or self._next()
        return None if self._now is None else self._manifest.span(self._now[1][0])[0]

    def __iter__(self) -> Iterator[list[int]]:
        while (now := self._now or self._next()) is not None:
            block, todo = self._now = now
            yield todo
            self._made.update(todo)
            self._there.update(todo)
            self._now = None
            self._claims.release(_key(block))

    def _next(self) -> tuple[range, list[int]] | None:
        """Claim a block that lacks shards; waits while all of them are being done by others."""
        storage, pause = self._store.storage, _POLL_SECONDS[0]
        while left := [block for block in self._order if not self._there.issuperset(block)]:
            files = storage.sizes("")
            mine = next((block for block in left if self._claims.take(_key(block), files)), None)
            if mine is None:
                time.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS[1])
            # After the claim, and once for all of its shards: whoever had it before has committed what it gave back.
            self._there = self._made.union(self._store.contents(self._manifest).sizes)
            if mine is not None:
                todo = [shard for shard in mine if shard not in self._there]
                if todo:
                    return mine, todo
                self._claims.release(_key(mine))
        return None


def _key(block: range) -> str:
    return f"{block.start}-{block.stop}"


def _stream(task: Task, progress: Progress, there: set[int], claimed: Claims, rank: int, world: int) -> int | None:
    """Every rank reads all of a stream and does its share; then it waits for the others, since it can read no more."""
    storage, key = task.store.storage, "rank-{}".format
    claimed.take(key(rank), storage.sizes(""))
    # By shard number, not by position in the list of missing ones: ranks that start later see a shorter list.
    rows = task.do_shards(lambda k: k not in there and k % world == rank, progress.shard, progress.rows)
    task.flush()
    whole = dataclasses.replace(task.manifest, rows=rows)
    until = time.monotonic() + claims.DEAD_SECONDS
    while missing := task.store.missing(whole, task.entries):
        files = storage.sizes("")
        if any(claimed.held(key(shard % world), files) for shard in missing if shard % world != rank):
            until = time.monotonic() + claims.DEAD_SECONDS
        elif time.monotonic() > until or all(shard % world == rank for shard in missing):
            break  # nobody is at work on them: told at the end of the run
        time.sleep(_POLL_SECONDS[1] / 5)
    return rows


def ranks() -> tuple[int, int]:
    """Rank and world size, as torchrun and Slurm tell them."""
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    raise ExtractError(
        "engine='torchrun' finds no RANK and WORLD_SIZE in the environment: start the script with "
        "'torchrun --nproc-per-node=N script.py' or with srun, or use engine='local'."
    )


def warn_of_others() -> None:
    """Say to a rank that it does all the work, as the others do; not to the first, which may be the one that calls."""
    rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if rank.isdecimal() and world.isdecimal() and int(rank) > 0 and int(world) > 1:
        warn(
            f"engine='local' in rank {rank} of {world}: every process that calls extract does all of the work. With "
            "engine='torchrun' each does a part; where each has data and a folder of its own, all is well.",
            DataWarning,
        )


# -- do all ranks see the same store? ------------------------------------------------------------------


def job_name() -> str | None:
    """What all ranks of this job know, and those of no other; ``None`` where a rank was started by hand."""
    for names in (
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ):
        if names[0] in os.environ:
            return hashlib.sha256(repr([os.environ.get(name) for name in names]).encode()).hexdigest()[:16]
    return None


def mark(store: Store) -> None:
    """The first rank shows the others that this is the store of their job."""
    job, (rank, world) = job_name(), ranks()
    if job is not None and rank == 0 and world > 1:
        claims.mark(store.storage, job)


def meet(store: Store, say: bool) -> bool:
    """The other ranks wait for that, before any work; whether the first one is at work.

    One that comes late may find that it was, has done everything, and has taken its mark away.
    """
    job, (rank, world) = job_name(), ranks()
    if job is None or rank == 0:
        return False
    start, said = time.monotonic(), not say
    while not claims.marked(store.storage, job):
        manifest = store.manifest()
        if manifest is not None and store.missing(manifest) == []:
            return False
        waited = time.monotonic() - start
        if waited > MEET_SECONDS:
            raise ExtractError(
                f"rank {rank} of {world} does not see in {store.url} what rank 0 writes there. Is it a folder of this "
                "machine alone? Use one that all machines share, or an object store (s3://...). Nothing was done."
            )
        if waited > MEET_SECONDS / 20 and not said:
            print(f"extract: rank {rank} waits for rank 0 to show itself in {store.url}", file=sys.stderr)
            said = True
        time.sleep(_POLL_SECONDS[0])
    return True

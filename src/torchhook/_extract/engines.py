"""Who does which shards. The work itself is the shard task, the same for all."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import time
from collections.abc import Sequence

from torchhook._extract import claims
from torchhook._extract.claims import Claims
from torchhook._extract.progress import Progress
from torchhook._extract.sources import Stream
from torchhook._extract.task import Task
from torchhook._features.api import Store
from torchhook.errors import ExtractError

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


def torchrun(task: Task, progress: Progress, there: set[int]) -> int | None:
    """Ranks take blocks of shards, their own first, then what nobody does; they end when all is done."""
    rank, world = ranks()
    with Claims(task.store.storage) as claimed:
        if isinstance(task.source, Stream):
            return _stream(task, progress, there, claimed, rank, world)
        assert task.manifest.shards is not None
        cut = blocks(task.manifest.shards, world)
        # What belongs to others from the other end: the last blocks are those that they come to last.
        _take_turns(task, progress, there, claimed, [*cut[rank::world], *_others(cut, rank, world)])
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


def _take_turns(task: Task, progress: Progress, there: set[int], claimed: Claims, order: list[range]) -> None:
    storage, pause = task.store.storage, _POLL_SECONDS[0]
    while left := [block for block in order if not there.issuperset(block)]:
        files = storage.sizes("")
        mine = next((block for block in left if claimed.take(_key(block), files)), None)
        if mine is None:
            # All that is missing is being done: by ranks that live, or by one whose claim will turn out to be dead.
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])
        # After the claim, and once for all of its shards: whoever had it before has committed what it gave back.
        there = set(task.store.contents(task.manifest, task.entries).sizes)
        if mine is not None:
            todo = [shard for shard in mine if shard not in there]
            if todo:
                task.do_shards(todo, progress.shard, progress.rows)
                task.flush()
            there.update(todo)
            claimed.release(_key(mine))
            pause = _POLL_SECONDS[0]


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


# -- do all ranks see the same store? ------------------------------------------------------------------


def job_name() -> str | None:
    """What all ranks of this job know, and those of no other; ``None`` where a rank was started by hand."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    if names[0] not in os.environ:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    if names[0] not in os.environ:
        return None
    return hashlib.sha256(repr([os.environ.get(name) for name in names]).encode()).hexdigest()[:16]


def mark(store: Store) -> None:
    """The first rank shows the others that this is the store of their job."""
    job, (rank, world) = job_name(), ranks()
    if job is not None and rank == 0 and world > 1:
        claims.mark(store.storage, job)


def meet(store: Store, say: bool) -> None:
    """The other ranks wait for that, before any work."""
    job, (rank, world) = job_name(), ranks()
    if job is None or rank == 0:
        return
    start, said = time.monotonic(), not say
    while not claims.marked(store.storage, job):
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

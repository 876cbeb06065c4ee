"""Who does which shards. The work itself is the shard task, the same for all."""

from __future__ import annotations

import os

from torchhook._extract.progress import Progress
from torchhook._extract.sources import Stream
from torchhook._extract.task import Task
from torchhook.errors import ExtractError


def local(task: Task, progress: Progress) -> int | None:
    """This process does all that is missing; returns the number of rows of a stream."""
    return _share(task, progress, 0, 1)


def torchrun(task: Task, progress: Progress) -> int | None:
    """Every rank does its share, then what nobody has done yet: a rank that died, or has more left than the others."""
    rank, world = ranks()
    rows = _share(task, progress, rank, world)
    if not isinstance(task.source, Stream):
        # From the other end than the rank that they belong to: two ranks then meet only once.
        for shard in reversed(task.store.missing(task.manifest) or []):
            if shard not in task.store.sizes():
                task.do_shards([shard], progress.shard, progress.rows)
    return rows


def _share(task: Task, progress: Progress, rank: int, world: int) -> int | None:
    there = task.store.sizes()
    # By shard number, not by position in the list of missing ones: ranks that start later see a shorter list.
    if isinstance(task.source, Stream):
        return task.do_shards(lambda k: k not in there and k % world == rank, progress.shard, progress.rows)
    assert task.manifest.shards is not None
    todo = [k for k in range(task.manifest.shards) if k not in there and k % world == rank]
    if todo:
        task.do_shards(todo, progress.shard, progress.rows)
    return task.manifest.rows


def ranks() -> tuple[int, int]:
    """Rank and world size, as torchrun and Slurm tell them."""
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    raise ExtractError(
        "engine='torchrun' finds no RANK and WORLD_SIZE in the environment: start the script with "
        "'torchrun --nproc-per-node=N script.py' or with srun, or use engine='local'."
    )

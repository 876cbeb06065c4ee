"""Who does which shards. The work itself is the shard task, the same for all."""

from __future__ import annotations

import os
from collections.abc import Iterable

from torchhook._extract.progress import Progress
from torchhook._extract.sources import Stream
from torchhook._extract.task import Task
from torchhook._features import shards
from torchhook._features.manifest import Plan
from torchhook._features.storage import Place
from torchhook.errors import ExtractError


def committed(place: Place) -> set[int]:
    """The shards that are there."""
    numbers = (shards.number_of(name) for name in place.sizes(shards.FOLDER))
    return {number for number in numbers if number is not None}


def missing(place: Place, plan: Plan) -> list[int] | None:
    """The shards that are not there; ``None`` while nobody knows how many there will be."""
    if plan.shards is None:
        return None
    there = committed(place)
    return [shard for shard in range(plan.shards) if shard not in there]


def local(task: Task, progress: Progress) -> int | None:
    """This process does all that is missing; returns the number of rows of a stream."""
    return _share(task, progress, 0, 1)


def torchrun(task: Task, progress: Progress) -> int | None:
    """Every rank does its share, then what nobody has done yet: a rank that died, or has more left than the others."""
    rank, world = ranks()
    rows = _share(task, progress, rank, world)
    if not isinstance(task.source, Stream):
        # From the other end than the rank that they belong to: two ranks then meet only once.
        for shard in reversed(missing(task.place, task.plan) or []):
            if shard not in committed(task.place):
                task.do_shards([shard], progress.shard, progress.rows)
    return rows


def _share(task: Task, progress: Progress, rank: int, world: int) -> int | None:
    there = committed(task.place)
    # By shard number, not by place in the list of missing ones: ranks that start later see a shorter list.
    if isinstance(task.source, Stream):
        return task.do_shards(lambda k: k not in there and k % world == rank, progress.shard, progress.rows)
    assert task.plan.shards is not None
    todo = [k for k in range(task.plan.shards) if k not in there and k % world == rank]
    if todo:
        task.do_shards(todo, progress.shard, progress.rows)
    return task.plan.rows


def ranks() -> tuple[int, int]:
    """Rank and world size, as torchrun and Slurm tell them."""
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    raise ExtractError(
        "engine='torchrun' finds no RANK and WORLD_SIZE in the environment: start the script with "
        "'torchrun --nproc-per-node=N script.py' or with srun, or use engine='local'."
    )


def spans(plan: Plan, shards_: Iterable[int]) -> int:
    """How many rows some shards have."""
    return sum(last - first for first, last in map(plan.span, shards_))

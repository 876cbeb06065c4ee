"""``engine="ray"``: Ray Data maps shard numbers over actors that do shard tasks. The only file that knows Ray.

A task is a number, its result a small record; the rows themselves never travel. When an actor dies, Ray starts another
and repeats its task, which is harmless: a shard is committed once, by whoever comes first.
"""

from __future__ import annotations

import json
import math
import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchhook._extract.progress import Progress
from torchhook._extract.task import Task
from torchhook._extract.writer import Done
from torchhook.errors import ExtractError, require


class ShardActor:
    """Holds the model, and does the shards it is told to."""

    def __init__(self, task: Any) -> None:
        self.task: Task = require("ray", "ray").get(task)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        (shard,) = (int(number) for number in batch["shard"])
        try:
            done = self.task.do_shard(shard)
        except Exception as error:
            # As a result: what is raised here, Ray wraps until the user's own error is lost.
            return {"done": [b""], "error": [_pickled(error)]}
        return {"done": [json.dumps(done).encode()], "error": [b""]}


def _pickled(error: Exception) -> bytes:
    text = traceback.format_exc()
    try:
        data = pickle.dumps((error, text))
        pickle.loads(data)  # some errors pickle, and then cannot be made again
        return data
    except Exception:
        return pickle.dumps((ExtractError(text), text))


def on_ray(
    task: Task,
    progress: Progress,
    *,
    actors: int | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    **remote_args: Any,
) -> int | None:
    """Do what is missing on a Ray cluster: the one that is connected, or else a new one here.

    By default there is one actor per GPU, or per two CPUs where there are no GPUs. Other arguments go to
    ``map_batches``.
    """
    ray = require("ray", "ray")
    data = require("ray.data", "ray")
    todo = task.store.missing(task.manifest)
    if not todo:
        return task.manifest.rows
    if not ray.is_initialized():
        ray.init()
    actors, num_cpus, num_gpus = _pool(ray.cluster_resources(), len(todo), actors, num_cpus, num_gpus)
    if num_gpus and task.device is None:
        task.device = "cuda"
    held = ray.put(task)  # an actor that is started again needs it, however late
    tasks = data.from_items([{"shard": shard} for shard in todo], override_num_blocks=len(todo)).map_batches(
        ShardActor,
        fn_constructor_args=(held,),
        batch_size=1,
        compute=data.ActorPoolStrategy(size=actors),
        num_cpus=num_cpus,
        num_gpus=num_gpus or None,
        **remote_args,
    )
    with _quiet(data):
        for row in tasks.iter_rows():
            if row["error"]:
                error, text = pickle.loads(row["error"])
                raise error from ExtractError(f"in a Ray actor:\n{text}")
            shard, rows, nbytes, ours, skipped = json.loads(row["done"])
            progress.rows(rows)
            progress.shard(Done(shard, rows, nbytes, ours, {int(number): why for number, why in skipped.items()}))
    return task.manifest.rows


def _pool(
    there: dict[str, float], tasks: int, actors: int | None, num_cpus: float | None, num_gpus: float | None
) -> tuple[int, float, float]:
    """How many actors, and the CPUs and GPUs of each, where the user leaves it open."""
    gpus, cpus = there.get("GPU", 0.0), there.get("CPU", 0.0)
    if num_gpus is None:
        num_gpus = 1.0 if gpus else 0.0
    if actors is None:
        actors = int(gpus / num_gpus) if num_gpus else max(1, int(cpus) // 2)
    actors = min(actors, tasks)
    return actors, _share_of(cpus, actors, num_cpus), num_gpus


def _share_of(cpus: float, actors: int, num_cpus: float | None) -> float:
    """CPUs per actor. One must stay free, or Ray Data waits for it for ever (ray#44687)."""
    if num_cpus is None:
        return min(1.0, max(0.0, math.floor((cpus - 1) / actors * 100) / 100))
    if num_cpus * actors > cpus - 1:
        raise ExtractError(
            f"{actors} actors of {num_cpus:g} CPUs do not leave one of the cluster's {cpus:g} CPUs free, which Ray "
            "Data needs. Use fewer actors, or a smaller num_cpus (it may be a fraction)."
        )
    return num_cpus


@contextmanager
def _quiet(data: Any) -> Iterator[None]:
    """Without Ray's progress bars: there is one already."""
    context = data.DataContext.get_current()
    before = context.enable_progress_bars
    context.enable_progress_bars = False
    try:
        yield
    finally:
        context.enable_progress_bars = before

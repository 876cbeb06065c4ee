"""``engine="ray"``: Ray Data maps shard numbers over actors that do shard tasks. The only file that knows Ray.

A task is a few numbers, its result a small record; features never travel, and of data in memory only the rows that a
task needs. When an actor dies, Ray starts another and repeats its task, which is harmless: a shard is committed once,
by whoever comes first.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import pickle
import secrets
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchhook._extract import claims
from torchhook._extract.in_memory import InMemory
from torchhook._extract.progress import Progress
from torchhook._extract.sources import Indexed
from torchhook._extract.task import Task
from torchhook._extract.writer import Done
from torchhook._features.api import Entry, Store
from torchhook.errors import ExtractError, require

TASK_SECONDS = 20.0
"""A task costs Ray some 13 ms: shards of less work are dealt out together."""
TASKS_PER_ACTOR = 8
"""As many as make the last ones short to wait for."""


class ShardActor:
    """Holds the model, and does the shards it is told to."""

    def __init__(self, task: Any, dealt: list[list[int]], windows: list[Any], mark: str) -> None:
        # Handed over by reference: the model is stored once for each machine, not sent to every actor.
        self.task: Task = require("ray", "ray").get(task)
        self.dealt, self.windows, self.mark = dealt, windows, mark

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        (number,) = (int(number) for number in batch["task"])
        done: list[Done] = []
        try:
            _require_marked(self.task.store, self.mark)
            if self.windows:
                assert isinstance(self.task.source, Indexed)
                self.task.source.memory = require("ray", "ray").get(self.windows[number])
            self.task.do_shards(self.dealt[number], done.append)
        except Exception as error:
            # As a result: what is raised here, Ray wraps until the user's own error is lost.
            return {"done": [json.dumps(done).encode()], "error": [_pickled(error)]}
        return {"done": [json.dumps(done).encode()], "error": [b""]}


def _pickled(error: Exception) -> bytes:
    text = traceback.format_exc()
    try:
        data = pickle.dumps((error, text))
        pickle.loads(data)  # some errors pickle, and then cannot be made again
        return data
    except Exception:  # a user's error may hold what cannot be sent, a lock or a file: its text can
        return pickle.dumps((ExtractError(text), text))


def on_ray(
    task: Task,
    progress: Progress,
    todo: list[int],
    seconds: float,
    *,
    actors: int | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    **remote_args: Any,
) -> int | None:
    """Do what is missing, shards of so many ``seconds``, on the Ray cluster that is connected, or on a new one here.

    By default there is one actor per GPU, or per two CPUs where there are no GPUs. Other arguments go to
    ``map_batches``.
    """
    ray = require("ray", "ray")
    data = require("ray.data", "ray")
    if not todo:
        return task.manifest.rows
    if not ray.is_initialized():
        ray.init()
    actors, num_cpus, num_gpus = _pool(ray.cluster_resources(), len(todo), actors, num_cpus, num_gpus)
    if num_gpus and task.device is None:
        # Without a number: Ray shows an actor its own GPU only, and that is number 0.
        task.device = "cuda"
    dealt = deal(todo, actors, seconds)
    with _marked(ray, task.store, num_cpus, num_gpus) as mark:
        bare, rows = _apart(task, dealt)
        held = ray.put(bare)  # an actor that is started again needs it, however late
        windows = [ray.put(window) for window in rows]
        # One block for each task: a block is what Ray deals out, and does again when an actor is lost.
        items = [{"task": number} for number in range(len(dealt))]
        tasks = data.from_items(items, override_num_blocks=len(items)).map_batches(
            ShardActor,
            fn_constructor_args=(held, dealt, windows, mark),
            batch_size=1,
            compute=data.ActorPoolStrategy(size=actors),
            num_cpus=num_cpus,
            num_gpus=num_gpus or None,
            **remote_args,
        )
        with _quiet(data):
            for row in tasks.iter_rows():
                _take(task, progress, row)
    return task.manifest.rows


def _take(task: Task, progress: Progress, row: dict[str, Any]) -> None:
    """What a task has done, and the error that it ended with, if it did."""
    for entry, ours, first_row in json.loads(row["done"]):
        done = Done(Entry(*entry), ours, first_row)
        task.note(done)
        progress.rows(done.rows)
        progress.shard(done)
    if row["error"]:
        error, text = pickle.loads(row["error"])
        raise error from ExtractError(f"in a Ray actor:\n{text}")


# -- what goes where ------------------------------------------------------------------------------------


def deal(todo: list[int], actors: int, seconds: float) -> list[list[int]]:
    """Shards in tasks: together as many as take a while, but several tasks for each actor.

    >>> deal([0, 1, 2, 5], 2, 30.0), [len(task) for task in deal(list(range(100)), 2, 0.001)][:2]
    ([[0], [1], [2], [5]], [6, 6])
    """
    most = max(1.0, TASK_SECONDS / max(1e-9, seconds))
    size = max(1, min(int(min(most, len(todo))), len(todo) // (actors * TASKS_PER_ACTOR)))
    return [todo[at : at + size] for at in range(0, len(todo), size)]


def _apart(task: Task, dealt: list[list[int]]) -> tuple[Task, Iterator[InMemory]]:
    """The task without data that lies in memory, and for each task the rows that it needs."""
    source = task.source
    if not isinstance(source, Indexed) or source.memory is None:
        return task, iter(())
    memory, span = source.memory, task.manifest.span
    bare = copy.copy(source)
    bare.dataset = bare.memory = None
    # The rows between two shards of a task go with them: a gap is as long as what was made before.
    windows = (memory.window(span(shards[0])[0], span(shards[-1])[1]) for shards in dealt)
    return dataclasses.replace(task, source=bare), windows


def expected_actors(options: dict[str, Any]) -> int:
    """How many actors there will be, as far as one can say before Ray has started."""
    ray = require("ray", "ray")
    there = ray.cluster_resources() if ray.is_initialized() else {"CPU": float(os.cpu_count() or 1)}
    given = (options.get(name) for name in ("actors", "num_cpus", "num_gpus"))
    return _pool(there, 1 << 30, *given)[0]


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
        # Rounded down: shares that sum to more than there is are never placed.
        return min(1.0, max(0.0, math.floor((cpus - 1) / actors * 100) / 100))
    if num_cpus * actors > cpus - 1:
        raise ExtractError(
            f"{actors} actors of {num_cpus:g} CPUs do not leave one of the cluster's {cpus:g} CPUs free, which Ray "
            "Data needs. Use fewer actors, or a smaller num_cpus (it may be a fraction)."
        )
    return num_cpus


# -- do all machines see the same store? ------------------------------------------------------------------


@contextmanager
def _marked(ray: Any, store: Store, num_cpus: float, num_gpus: float) -> Iterator[str]:
    """A mark in the store that every machine must see, before any work: else its shards would go elsewhere."""
    mark = secrets.token_hex(8)
    claims.mark(store.storage, mark)
    try:
        look = ray.remote(num_cpus=0)(_unmarked)
        asked = [look.options(scheduling_strategy=where).remote(store, mark) for where in _machines(num_cpus, num_gpus)]
        for why in ray.get(asked):
            if why:
                raise ExtractError(why)
        yield mark
    finally:
        claims.unmark(store.storage, mark)


def _machines(num_cpus: float, num_gpus: float) -> Iterator[Any]:
    """The machines of the cluster that can have an actor, as Ray wants to be told."""
    ray, strategies = require("ray", "ray"), require("ray.util.scheduling_strategies", "ray")
    for node in ray.nodes():
        has = node["Resources"]
        if node["Alive"] and has.get("CPU", 0) >= num_cpus and has.get("GPU", 0) >= num_gpus:
            yield strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)


def _unmarked(store: Store, mark: str) -> str:
    """Why this machine cannot take part; nothing if it can."""
    if claims.marked(store.storage, mark):
        return ""
    return (
        f"{socket.gethostname()}, a machine of the Ray cluster, does not see in {store.url} what was written there by "
        "the one that called. Use a folder that all machines share, or an object store (s3://...). No shard was made."
    )


def _require_marked(store: Store, mark: str) -> None:
    # Once more in the actor: machines may join the cluster later.
    why = _unmarked(store, mark)
    if why:
        raise ExtractError(why)


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

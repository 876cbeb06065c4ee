"""A call of ``extract`` in four steps: check what is asked for, prepare, execute, finish.

Until ``execute``, nothing is written: whatever is wrong with the call, the model or the first batch, a store that was
there before is there still.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchhook._core.select import Selector
from torchhook._extract import engines, fingerprint, sources
from torchhook._extract.estimate import Estimate, Measure, measure
from torchhook._extract.eval_mode import evaluating_on
from torchhook._extract.fill import Extras
from torchhook._extract.forward import Forward, Transforms
from torchhook._extract.image_folder import ImageFolder
from torchhook._extract.inputs import Part
from torchhook._extract.progress import Progress
from torchhook._extract.ray import on_ray
from torchhook._extract.sources import Source
from torchhook._extract.task import Task
from torchhook._features.api import Features, Manifest, Store, open_features, versions
from torchhook._recording.tables import size
from torchhook.errors import ExtractError, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a call of ``extract`` asks for; its docstring says what each of these is."""

    model: nn.Module
    data: Any
    sites: Selector
    out: str | os.PathLike[str]
    batch_size: int | None
    transform: Transforms
    run_on: torch.device | str | None
    dtype: torch.dtype | None
    rows_per_shard: int | None
    shard_bytes: int | None
    ids: Part
    labels: Part
    lengths: Part
    input_fn: Callable[[Any], Any] | None
    engine: str
    workers: int | None
    resume: bool
    on_error: str
    nan: str
    progress: bool
    autocast: torch.dtype | bool | None
    engine_options: dict[str, Any]

    @property
    def skip(self) -> bool:
        """Whether rows may be left out."""
        return self.on_error == "skip"


# -- check ------------------------------------------------------------------------------------------


def check(request: Request) -> None:
    """Refuse options that mean nothing, before anything is loaded or run."""
    _one_of("on_error", request.on_error, ("raise", "skip"))
    _one_of("nan", request.nan, ("raise", "keep"))
    _one_of("engine", request.engine, ("local", "torchrun", "ray"))
    if request.rows_per_shard is not None and request.shard_bytes is not None:
        raise ValueError("give rows_per_shard or shard_bytes, not both.")
    for name in ("rows_per_shard", "shard_bytes", "batch_size"):
        number = getattr(request, name)
        if number is not None and number < 1:
            raise ValueError(f"{name}={number}: give a positive number.")
    if request.engine == "ray":
        # Here, and not after the first batch has been loaded and run.
        require("ray", "ray")
    elif request.engine_options:
        raise ValueError(f"engine_options={request.engine_options} are for engine='ray'.")
    if request.engine == "torchrun" and engines.ranks()[1] > 1 and not request.resume and Store(request.out).manifest():
        raise ExtractError("resume=False: ranks would delete each other's shards. Delete the store before they start.")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: use {', '.join(map(repr, allowed))}.")


# -- prepare ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """A run of which everything is decided and nothing is written."""

    request: Request
    store: Store
    task: Task
    todo: list[int] | None
    """Shards that are missing; ``None`` for a stream, whose end nobody knows."""
    estimate: Estimate
    freed: int
    """Bytes of the store that will be replaced."""


def prepare(request: Request) -> Job:
    """Run the first batch, and decide the columns, the rows of a shard, and what is left to do."""
    store = Store(request.out)
    before = store.manifest() if request.resume else None
    forward = Forward(
        request.model,
        request.sites,
        transform=request.transform,
        input_fn=request.input_fn,
        autocast=request.autocast,
    )
    with evaluating_on(request.model, request.run_on) as device:
        source = _source(request, pin=device.type == "cuda")  # from pageable memory, a transfer makes the host wait
        ids = sources.own_ids(source) if request.ids is None else request.ids
        extras = Extras(ids, request.labels, request.lengths, source.rows)
        measured = measure(forward, source, extras, device, request.dtype, request.skip)
    manifest = _manifest(request, forward, source, measured, before)
    task = Task(
        forward,
        source,
        extras,
        manifest,
        store,
        device=request.run_on,
        skip=request.skip,
        check_nan=request.nan == "raise",
        first=measured.first,
    )
    there = store.sizes()
    todo = manifest.missing(there if request.resume else ())
    per_row = measured.seconds / measured.batch_rows
    estimate = Estimate(manifest, per_row, None if todo is None else len(todo), store.free())
    return Job(request, store, task, todo, estimate, freed=0 if request.resume else sum(there.values()))


def _source(request: Request, pin: bool) -> Source:
    data = request.data
    if isinstance(data, (str, os.PathLike)):
        data = ImageFolder.for_model(data, request.model)
    source = sources.source(data, request.batch_size, request.workers, request.skip, pin)
    if request.engine == "ray" and isinstance(source, sources.Stream):
        raise ExtractError("engine='ray' needs data whose rows have numbers: a data set with length and index.")
    return source


def _manifest(
    request: Request, forward: Forward, source: Source, measured: Measure, before: Manifest | None
) -> Manifest:
    """What this run would write. Where the call leaves it open, a store that is there decides."""
    rows_per_shard = request.rows_per_shard
    if rows_per_shard is None and before is not None and request.shard_bytes is None:
        # Else another batch size, or a first batch of longer rows, would cut other shards and be refused.
        rows_per_shard = before.rows_per_shard
    return Manifest(
        columns=measured.columns,
        rows=source.rows,
        rows_per_shard=rows_per_shard or measured.rows_per_shard(request.shard_bytes, source.batch_size),
        sites=tuple(forward.sites),
        model=fingerprint.of_model(request.model),
        transform=fingerprint.of_function(forward.transform),
        input_fn=fingerprint.of_function(request.input_fn),
        lengths=fingerprint.of_function(request.lengths),
        dtype=None if request.dtype is None else str(request.dtype).removeprefix("torch."),
        autocast=None if not request.autocast else str(request.autocast).removeprefix("torch."),
        source=source.kind,
        row_bytes=measured.row_bytes if before is None else before.row_bytes,
        about={"batch_size": source.batch_size or measured.batch_rows, "versions": versions()},
    )


# -- execute ------------------------------------------------------------------------------------------


def execute(job: Job) -> Manifest:
    """Do the shards that are missing; what is returned knows how many rows there are, a stream's too."""
    # First of all: a store must not be deleted for one that does not fit.
    _check_room(job)
    request, store = job.request, job.store
    if not request.resume:
        store.clear()
    agreed = job.task.manifest = store.agree(job.task.manifest)
    # After the two agree: what lies in the store of another run is not ours to remove.
    store.sweep()
    done = 0 if job.todo is None or agreed.rows is None else agreed.rows - agreed.rows_in(job.todo)
    progress = Progress(agreed, done, request.progress, job.estimate.line())
    try:
        rows = _run(job.task, progress, request)
    finally:
        progress.close()
    return dataclasses.replace(agreed, rows=rows)


def _run(task: Task, progress: Progress, request: Request) -> int | None:
    if request.engine == "ray":
        return on_ray(task, progress, **request.engine_options)
    return engines.torchrun(task, progress) if request.engine == "torchrun" else engines.local(task, progress)


def _check_room(job: Job) -> None:
    """Better now than after the hours that it takes to fill the disk."""
    if job.estimate.free is None or job.todo is None:
        return
    manifest = job.task.manifest
    needed = min(manifest.rows or 0, len(job.todo) * manifest.rows_per_shard) * manifest.row_bytes
    free = job.estimate.free + job.freed
    if needed > free:
        raise ExtractError(
            f"about {size(needed)} are still to be written and {size(free)} are free. Make room, or "
            "keep less: transform=transforms.pool('mean'), dtype=torch.float16, fewer sites."
        )


# -- finish -------------------------------------------------------------------------------------------


def finish(job: Job, whole: Manifest) -> Features:
    """Check the shards, write the index, and open what is there: another rank may not be done yet."""
    missing = job.store.finish(whole)
    return open_features(job.request.out, incomplete=bool(missing))

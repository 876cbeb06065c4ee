"""A call of ``extract`` in four steps: check what is asked for, prepare, execute, finish.

Until ``execute``, nothing is written: whatever is wrong with the call, the model or the first batch, a store that was
there before is there still.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from torchhook._core.select import Selector
from torchhook._extract import claims, engines, fingerprint, first_stored, model_code, skips, sources
from torchhook._extract.data_fingerprint import of_data
from torchhook._extract.estimate import Estimate, Measure, measure
from torchhook._extract.eval_mode import evaluating_on
from torchhook._extract.fill import Extras
from torchhook._extract.forward import Forward, Transforms
from torchhook._extract.function_fingerprint import of_function
from torchhook._extract.image_folder import ImageFolder
from torchhook._extract.inputs import Part
from torchhook._extract.progress import Progress
from torchhook._extract.ray import expected_actors, on_ray
from torchhook._extract.sources import Source
from torchhook._extract.task import Task
from torchhook._features.api import Contents, Features, Manifest, Page, Store, open_features, versions
from torchhook._recording.tables import size
from torchhook.errors import ExtractError, IncompleteStoreError, UnrepeatableDataWarning, note, require, warn


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
    lengths: str | int | Callable[[Any], Any] | None
    input_fn: Callable[[Any], Any] | None
    engine: str
    workers: int | None
    resume: bool
    on_error: str
    nan: str
    progress: bool
    autocast: torch.dtype | bool | None
    engine_options: dict[str, Any]
    max_skipped: int | float | None = None
    retry_skipped: bool = False
    dry_run: bool = False

    @property
    def any_cut(self) -> bool:
        """Whether the call leaves open how rows are cut into shards."""
        return self.rows_per_shard is None and self.shard_bytes is None

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
    if request.max_skipped is not None:
        skips.check(request.max_skipped)
        if not request.skip:
            raise ValueError(f"max_skipped={request.max_skipped} is for on_error='skip'.")
    if request.engine == "torchrun" and engines.ranks()[1] > 1 and request.retry_skipped:
        raise ExtractError(
            "retry_skipped=True: ranks would delete each other's shards. Call it once with engine='local'."
        )
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
    there: set[int]
    """Shards that need not be done."""
    todo: list[int] | None
    """Shards that are missing; ``None`` for a stream, whose end nobody knows."""
    estimate: Estimate
    freed: int
    """Bytes of the store that will be replaced."""
    found: Contents | None
    """What the store holds, if the run goes on with it."""
    again: dict[int, dict[str, str]]
    """Shards that are made anew, and which of their rows were skipped."""


def prepare(request: Request) -> Job:
    """Run the first batch, and decide the columns, the rows of a shard, and what is left to do."""
    store = Store(request.out)
    forward = Forward(
        request.model,
        request.sites,
        transform=request.transform,
        input_fn=request.input_fn,
        autocast=request.autocast,
    )
    before = _before(request, store)
    with evaluating_on(request.model, request.run_on) as device:
        source = _source(request, pin=device.type == "cuda")  # from pageable memory, a transfer makes the host wait
        ids = sources.own_ids(source) if request.ids is None else request.ids
        extras = Extras(ids, request.labels, request.lengths, source.rows)
        at = _first_row(request, source, before)
        timed = request.any_cut and before is None
        code = _code(request, forward)
        measured = measure(forward, source, extras, device, request.dtype, request.skip, at=at, timed=timed)
    code = model_code.steady(code, _code(request, forward))
    identity = Identity(code, of_data(source, ids, request.labels), device.type)
    identity.warn()
    manifest = _manifest(request, forward, source, measured, before, identity)
    task = Task(
        forward,
        source,
        extras,
        manifest,
        store,
        device=request.run_on,
        skip=request.skip,
        check_nan=request.nan == "raise",
        skips=skips.Skips(request.max_skipped, source.rows),
        first=measured.first,
    )
    # By the store's own plan: the index is believed of that, and whether this run fits it is asked later.
    found = store.contents(manifest if before is None else before)
    retried = request.retry_skipped and request.resume
    again = {entry.shard: entry.skipped for entry in found.entries([]) if entry.skipped} if retried else {}
    there = set(found.sizes).difference(again) if request.resume else set()
    todo = manifest.missing(there)
    estimate = Estimate(manifest, measured.seconds_per_row, None if todo is None else len(todo), store.free())
    freed = 0 if request.resume else sum(found.sizes.values())
    return Job(request, store, task, there, todo, estimate, freed, found if request.resume else None, again)


def _before(request: Request, store: Store) -> Manifest | None:
    """What the store holds that the run goes on with; ranks first wait until they see the one of their job."""
    before = store.manifest() if request.resume else None
    if request.engine != "torchrun" or request.dry_run:
        return before
    # A rank that comes when all is done finds nobody to wait for.
    if before is None or store.missing(before) != []:
        engines.meet(store, request.progress)
        before = store.manifest()
    return before


def _first_row(request: Request, source: Source, before: Manifest | None) -> int:
    """Where the work of this process begins: what is measured there need not be run again, here or by another rank."""
    size = request.rows_per_shard or (before and before.rows_per_shard)
    if request.engine != "torchrun" or not size or not source.rows:
        return 0
    if before is not None and Store(request.out).sizes():
        return 0
    rank, world = engines.ranks()
    cut = engines.blocks(-(-source.rows // size), world)
    return cut[rank].start * size if rank < len(cut) else 0


def _ranks(request: Request) -> int:
    """How many processes share the work."""
    if request.engine == "torchrun":
        return engines.ranks()[1]
    return expected_actors(request.engine_options) if request.engine == "ray" else 1


def _source(request: Request, pin: bool) -> Source:
    data = request.data
    if isinstance(data, (str, os.PathLike)):
        data = ImageFolder.for_model(data, request.model)
    source = sources.source(data, request.batch_size, request.workers, request.skip, pin)
    if request.engine == "ray" and isinstance(source, sources.Stream):
        raise ExtractError("engine='ray' needs data whose rows have numbers: a data set with length and index.")
    return source


def _code(request: Request, forward: Forward) -> dict[str, str]:
    functions = {"transform": forward.transform, "input_fn": request.input_fn, "lengths": request.lengths}
    return model_code.facts(forward.index, functions)


class Identity(NamedTuple):
    """What is known of the code and of the data, beside the numbers of the model."""

    code: dict[str, str]
    data: dict[str, Any]
    device: str

    def warn(self) -> None:
        if not self.data.get("repeats", True):
            warn(
                "row 0 or one of the other rows that were read twice was not the same: the data is another one each "
                "time (random augmentation?). The features are stored as they come; that a resumed run "
                "has the same data, and the same model, cannot be checked.",
                UnrepeatableDataWarning,
            )


def _manifest(
    request: Request,
    forward: Forward,
    source: Source,
    measured: Measure,
    before: Manifest | None,
    identity: Identity,
) -> Manifest:
    """What this run would write. Where the call leaves it open, a store that is there decides."""
    rows_per_shard = request.rows_per_shard
    if rows_per_shard is None and before is not None and request.shard_bytes is None:
        # Else another batch size, or a first batch of longer rows, would cut other shards and be refused.
        rows_per_shard = before.rows_per_shard
    return Manifest(
        columns=measured.columns,
        rows=source.rows,
        rows_per_shard=rows_per_shard or measured.rows_per_shard(request.shard_bytes, source, _ranks(request)),
        sites=tuple(forward.sites),
        model=fingerprint.of_model(request.model),
        transform=of_function(forward.transform, values=False),
        input_fn=of_function(request.input_fn, values=False),
        lengths=of_function(request.lengths, values=False),
        dtype=None if request.dtype is None else str(request.dtype).removeprefix("torch."),
        autocast=None if not request.autocast else str(request.autocast).removeprefix("torch."),
        source=source.kind,
        row_bytes=measured.row_bytes if before is None else before.row_bytes,
        code=identity.code,
        data=identity.data,
        about={
            "batch_size": source.batch_size or measured.batch_rows,
            "device": identity.device,
            "begun": int(time.time()),
            "versions": versions(),
        },
    )


# -- execute ------------------------------------------------------------------------------------------


def execute(job: Job) -> Manifest:
    """Do the shards that are missing; what is returned knows how many rows there are, a stream's too."""
    # First of all: a store must not be deleted for one that does not fit.
    _check_room(job)
    request, store = job.request, job.store
    if not request.resume:
        store.clear()
    mine = job.task.manifest
    agreed = job.task.manifest = store.agree(mine, request.any_cut, job.found, _retried(job))
    if agreed.rows_per_shard != mine.rows_per_shard:  # another process was first, and cuts them in its own way
        job = dataclasses.replace(job, there=set(), todo=store.missing(agreed))
    # After the two agree: what lies in the store of another run is not ours to remove.
    store.sweep()
    store.discard(job.again)
    if request.engine != "torchrun" or engines.ranks()[0] == 0:  # one rank is enough to prove it
        first_stored.check(job.task, job.there)
    done = 0 if job.todo is None or agreed.rows is None else agreed.rows - agreed.rows_in(job.todo)
    progress = Progress(agreed, done, request.progress, job.estimate.line())
    job.task.page = Page(store.storage)
    try:
        rows = _run(job, progress)
    except BaseException as error:
        if agreed is mine:
            store.withdraw(mine)
        job.task.flush()  # else the next run would have to ask every shard what it is
        if isinstance(error, KeyboardInterrupt):
            _tell_kept(error, request.out)
        raise
    finally:
        progress.close()
    return dataclasses.replace(agreed, rows=rows)


def _retried(job: Job) -> list[int]:
    """The rows that are tried again, by their numbers in the data."""
    size = job.task.manifest.rows_per_shard
    return [shard * size + int(row) for shard, rows in job.again.items() for row in rows]


def _run(job: Job, progress: Progress) -> int | None:
    request = job.request
    if request.engine == "ray":
        seconds = job.estimate.seconds_per_row * job.task.manifest.rows_per_shard
        return on_ray(job.task, progress, job.todo or [], seconds, **request.engine_options)
    if request.engine == "torchrun":
        engines.mark(job.store)
        return engines.torchrun(job.task, progress, job.there)
    return engines.local(job.task, progress, job.todo, job.there)


def kept(out: str | os.PathLike[str]) -> tuple[int, int | None]:
    """How many rows a store has by now, and how many it will have, if one knows."""
    store = Store(out)
    found = store.manifest()
    if found is None:
        return 0, None
    return sum(entry.rows for entry in store.contents(found).entries([])), found.rows


def _tell_kept(error: BaseException, out: str | os.PathLike[str]) -> None:
    with contextlib.suppress(Exception):  # the interrupt is what matters
        rows, total = kept(out)
        note(error, f"{rows:,}{'' if total is None else f' of {total:,}'} rows are kept in {os.fspath(out)}.")


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
    """Check that every shard is there, write the index, and open the store."""
    missing = job.store.finish(whole, job.task.entries)
    if missing:
        job.task.flush()
        raise _incomplete(job, whole, missing)
    if job.request.engine == "torchrun":
        claims.clear(job.store.storage)
    return open_features(job.request.out)


_WHY = {
    "local": "They were written, and then moved or deleted while the run went on.",
    "torchrun": "A rank was killed or never came, or wrote to another folder: do all machines share this one?",
    "ray": "The workers have written them, but not here: do all machines of the cluster share this folder?",
}


def _incomplete(job: Job, whole: Manifest, missing: list[int]) -> IncompleteStoreError:
    first = whole.span(missing[0])[0]
    together = next((i for i, shard in enumerate(missing) if shard != missing[0] + i), len(missing))
    rows = f"rows {first} to {whole.span(missing[together - 1])[1] - 1}" + " and others" * (together < len(missing))
    return IncompleteStoreError(
        f"{job.store.url}: {rows} are not there at the end of the run ({len(missing)} of {whole.shards} shards). "
        f"{_WHY[job.request.engine]} The same call again does only what is missing."
    )

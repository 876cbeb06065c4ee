"""A call of ``extract``, once it is known to mean something, in three steps: prepare, execute, finish.

Until ``execute``, nothing is written: whatever is wrong with the call, the model or the first batch, a store that was
there before is there still.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torchhook._extract import completion, data_fingerprint, engines, first_stored, skips, sources
from torchhook._extract.estimate import Estimate, Measure, measure
from torchhook._extract.eval_mode import evaluating_on
from torchhook._extract.fill import Extras
from torchhook._extract.forward import Forward
from torchhook._extract.function_fingerprint import of_function
from torchhook._extract.identity import Identity, Looked
from torchhook._extract.image_folder import opened
from torchhook._extract.inputs import is_table
from torchhook._extract.progress import Progress
from torchhook._extract.ray import expected_actors, on_ray
from torchhook._extract.request import Request
from torchhook._extract.sources import Source
from torchhook._extract.special_tokens import special_ids, without
from torchhook._extract.task import Task
from torchhook._features.api import Contents, Features, Manifest, Page, Store, versions
from torchhook._recording.tables import size
from torchhook.errors import ExtractError

S = TypeVar("S")
T = TypeVar("T")


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
    measured: Measure
    estimate: Callable[[], Estimate]
    """Asked for where it is told: it knows how long the first batch took, and waits for its end."""
    free: int | None
    """Bytes that are free where the store will be."""
    freed: int
    """Bytes of the store that will be replaced."""
    found: Contents | None
    """What the store holds, if the run goes on with it."""
    again: dict[int, dict[str, str]]
    """Shards that are made anew, and which of their rows were skipped."""
    turns: engines.Turns | None
    """What a rank has claimed already."""


def prepare(request: Request, stack: contextlib.ExitStack) -> Job | None:
    """Run the first batch, and decide the columns, the rows of a shard, and what is left to do.

    ``None`` for a rank that comes to a run of which the others have done everything. ``stack`` ends with the call.
    """
    store = Store(request.out)
    forward = _forward(request)
    before, turns = _before(request, store, stack)
    at = _first_row(request, before) if turns is None else turns.first_row()
    if at is None:
        return None
    with evaluating_on(request.model, request.run_on) as device:
        source = _source(request, pin=device.type == "cuda")  # from pageable memory, a transfer makes the host wait
        ids = sources.own_ids(source) if request.ids is None else request.ids
        extras = Extras(ids, request.labels, request.lengths, source.rows)
        # By the store's own plan: the index is believed of that, and whether this run fits it is asked later.
        found = None if before is None else store.contents(before)
        at = at if source.rows is not None and at < source.rows and not (turns is None and found and found.sizes) else 0
        data = data_fingerprint.begun(source, ids, request.labels, request.lengths)

        def first() -> tuple[Looked, Measure]:
            looked = Looked(forward.index, _functions(request, forward))
            return looked, measure(
                forward,
                source,
                extras,
                device,
                request.dtype,
                request.skip,
                at=at,
                timed=lambda found: before is None and _time_matters(request, source, found),
                meanwhile=looked.again,
            )

        (looked, measured), told = _beside(device, first, lambda: stack.enter_context(data))
    identity = Identity.of(request.model, looked, told, device)
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
    if found is None:
        found = store.contents(manifest)
    _check_dry_run(request, store, before, manifest, found)
    if request.replaces or before is not None or found.sizes:
        measured.took()  # what is wrong with the first batch may show at its end, and nothing must be gone then
    return _left_to_do(request, task, measured, found, turns)


def _left_to_do(request: Request, task: Task, measured: Measure, found: Contents, turns: engines.Turns | None) -> Job:
    """The job, by what the store holds."""
    store, manifest = task.store, task.manifest
    retried = request.retry_skipped and not request.replaces
    again = {entry.shard: entry.skipped for entry in found.entries([]) if entry.skipped} if retried else {}
    there = set() if request.replaces else set(found.sizes).difference(again)
    if request.skip:
        task.skips.stored(sum(len(entry.skipped) for shard, entry in found.known.items() if shard in there))
    todo = manifest.missing(there)
    free, left = store.free(), None if todo is None else len(todo)
    freed = sum(found.sizes.values()) if request.replaces else 0
    held = None if request.replaces else found
    return Job(
        request,
        store,
        task,
        there,
        todo,
        measured,
        lambda: Estimate(manifest, measured.seconds_per_row, left, free),
        free,
        freed,
        held,
        again,
        turns,
    )


def _forward(request: Request) -> Forward:
    special = special_ids(request.model, request.drop_special)
    return Forward(
        request.model,
        request.sites,
        transform=request.transform,
        input_fn=request.input_fn,
        autocast=request.autocast,
        # Who leaves special tokens out leaves padding out, too.
        cuts=special is not None and request.lengths is not False,
        special=special,
        by_row=special is not None,
    )


def _check_dry_run(
    request: Request, store: Store, before: Manifest | None, manifest: Manifest, found: Contents
) -> None:
    """Refuse what the run itself would refuse: else the sizes of two runs would be mixed."""
    if request.dry_run and before is not None:
        store.fits(manifest, before, request.any_cut, found)


def _before(
    request: Request, store: Store, stack: contextlib.ExitStack
) -> tuple[Manifest | None, engines.Turns | None]:
    """What the store holds that the run goes on with; ranks first wait until they see the one of their job.

    They claim their first block here: what is measured of it need not be run again, by this rank or another.
    """
    met = request.engine == "torchrun" and not request.dry_run and engines.meet(store, request.progress)
    before = None if request.replaces else store.manifest()
    if not met or before is None or before.shards is None:
        return before, None
    return before, stack.enter_context(engines.Turns(store, before))


def _first_row(request: Request, before: Manifest | None) -> int:
    """Where the work of a rank begins that was started by hand, if one can know."""
    size = request.rows_per_shard or (before and before.rows_per_shard)
    return engines.ranks()[0] * size if request.engine == "torchrun" and size else 0


def _ranks(request: Request) -> int:
    """How many processes share the work."""
    if request.engine == "torchrun":
        return engines.ranks()[1]
    return expected_actors(request.engine_options) if request.engine == "ray" else 1


def _source(request: Request, pin: bool) -> Source:
    data = opened(request.data, request.model)
    source = sources.source(data, request.batch_size, request.workers, request.skip, pin)
    if request.engine == "ray" and isinstance(source, sources.Stream):
        raise ExtractError("engine='ray' needs data whose rows have numbers: a data set with length and index.")
    return source


def _beside(device: torch.device, first: Callable[[], S], begin: Callable[[], T]) -> tuple[S, T]:
    """Run the first batch, and begin something that takes cores for a while: before it, if a GPU leaves them free."""
    begun = begin() if device.type == "cuda" else None
    ran = first()  # its time is measured
    return ran, begin() if begun is None else begun


def _time_matters(request: Request, source: Source, found: Measure) -> bool:
    """Whether anybody needs to know how long a batch takes: who cuts the rows, or whoever is told."""
    if not request.any_cut:
        return False
    told = request.progress or request.dry_run or request.engine == "ray"
    return told or found.cut_by_time(source, _ranks(request))


def _functions(request: Request, forward: Forward) -> dict[str, Any]:
    """What runs beside the model."""
    return {
        "transform": forward.transform,
        "input_fn": request.input_fn,
        "lengths": None if is_table(request.lengths) else request.lengths,
    }


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
        model=identity.model,
        transform=of_function(forward.transform, values=False),
        input_fn=of_function(request.input_fn, values=False),
        lengths=("one for each row" if is_table(request.lengths) else of_function(request.lengths, values=False))
        + without(forward.special),
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
            "tensors": identity.tensors,
            "heads_first": forward.heads_first(measured.columns),
            **sources.told(source, request.labels is None),
        },
    )


# -- execute ------------------------------------------------------------------------------------------


def execute(job: Job) -> Manifest:
    """Do the shards that are missing; what is returned knows how many rows there are, a stream's too."""
    # First of all: a store must not be deleted for one that does not fit.
    _check_room(job)
    request, store = job.request, job.store
    if request.replaces:
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
    job.task.page = Page(store.storage)
    try:
        line = job.estimate().line() if request.progress else ""
        with contextlib.closing(Progress(agreed, done, request.progress, line)) as progress:
            rows = _run(job, progress)
    except BaseException as error:
        if agreed is mine:
            store.withdraw(mine)
        job.task.flush()  # else the next run would have to ask every shard what it is
        if isinstance(error, KeyboardInterrupt):
            completion.tell_kept(error, request.out)
        raise
    return dataclasses.replace(agreed, rows=rows)


def _retried(job: Job) -> list[int]:
    """The rows that are tried again, by their numbers in the data."""
    size = job.task.manifest.rows_per_shard
    return [shard * size + int(row) for shard, rows in job.again.items() for row in rows]


def _run(job: Job, progress: Progress) -> int | None:
    request = job.request
    if request.engine == "ray":
        seconds = job.measured.seconds_per_row * job.task.manifest.rows_per_shard
        return on_ray(job.task, progress, job.todo or [], seconds, **request.engine_options)
    if request.engine == "torchrun":
        return engines.torchrun(job.task, progress, job.there, job.turns)
    return engines.local(job.task, progress, job.todo, job.there)


def _check_room(job: Job) -> None:
    """Better now than after the hours that it takes to fill the disk."""
    if job.free is None or job.todo is None:
        return
    manifest = job.task.manifest
    needed = min(manifest.rows or 0, len(job.todo) * manifest.rows_per_shard) * manifest.row_bytes
    free = job.free + job.freed
    if needed > free:
        raise ExtractError(
            f"about {size(needed)} are still to be written and {size(free)} are free. Make room, or "
            "keep less: transform=transforms.pool('mean'), dtype=torch.float16, fewer sites."
        )


# -- finish -------------------------------------------------------------------------------------------


def finish(job: Job, whole: Manifest) -> Features:
    """Check that every shard is there, write the index, and open the store."""
    return completion.finish(job.store, job.task, whole, job.request.engine)

"""``extract``: the features of a whole data set, to disk, every row exactly once."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchhook._core.select import Selector
from torchhook._extract import engines, fingerprint, sources
from torchhook._extract.estimate import Estimate, measure
from torchhook._extract.eval_mode import at_rest
from torchhook._extract.fill import Sides
from torchhook._extract.forward import Forward, Transforms
from torchhook._extract.image_folder import ImageFolder
from torchhook._extract.inputs import Part
from torchhook._extract.progress import Progress
from torchhook._extract.task import Task
from torchhook._features import manifest, shards, storage
from torchhook._features.api import Features, open_features
from torchhook._features.index import check_rows, read_headers, write_index
from torchhook._recording.tables import size
from torchhook.errors import ExtractError, require

_ENGINES = ("local", "torchrun", "ray")


def extract(
    model: nn.Module,
    data: Any,
    layers: Selector,
    out: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    transform: Transforms = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    rows_per_shard: int | None = None,
    shard_bytes: int | None = None,
    ids: Part = None,
    labels: Part = None,
    lengths: str | int | Callable[[Any], Any] | None = None,
    input_fn: Callable[[Any], Any] | None = None,
    engine: str = "local",
    workers: int | None = None,
    resume: bool = True,
    on_error: str = "raise",
    nan: str = "raise",
    progress: bool = True,
    autocast: torch.dtype | bool | None = None,
    dry_run: bool = False,
    engine_options: dict[str, Any] | None = None,
) -> Features | Estimate:
    """Write what passes the layers, for every row of ``data``, to a feature store at ``out``, and open it.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     features = extract(model, torch.ones(10, 3), "0", folder, progress=False)
    ...     features["0"].shape
    (10, 4)

    ``data`` is a data set, a ``DataLoader``, a tensor of rows, an iterable of batches (of rows, with ``batch_size``),
    or the path of a folder of images. Killed and called again, it does only the shards that are missing; a store of
    another model, layer list, transform or row count is refused.

    ``transform`` is what is kept of each value (``transforms.pool("mean")``; a dict gives one per layer). ``ids`` and
    ``labels`` are a key or position in the batch, a function of it, or one value per row; labels in the usual places
    are found without. ``lengths`` (lengths or a mask, from the batch) cuts ``(N, T, ...)`` values to rows of their own
    length. ``input_fn`` turns a batch into what the model is called with. ``on_error="skip"`` leaves rows out that
    cannot be loaded, run, or hold a NaN (``nan="keep"`` stores NaNs). ``engine`` is ``"local"``, ``"torchrun"`` (each
    rank calls this) or ``"ray"``. ``dry_run=True`` returns an estimate and writes nothing.
    """
    _one_of("on_error", on_error, ("raise", "skip"))
    _one_of("nan", nan, ("raise", "keep"))
    _one_of("engine", engine, _ENGINES)
    if rows_per_shard is not None and shard_bytes is not None:
        raise ValueError("give rows_per_shard or shard_bytes, not both.")
    for name, number in (("rows_per_shard", rows_per_shard), ("shard_bytes", shard_bytes), ("batch_size", batch_size)):
        if number is not None and number < 1:
            raise ValueError(f"{name}={number}: give a positive number.")
    if isinstance(data, (str, os.PathLike)):
        data = ImageFolder.for_model(data, model)
    skip = on_error == "skip"
    place = storage.place(out)
    before = manifest.load(place)
    _check_engine(engine, engine_options, replaces=before is not None and not resume)
    old = sum(place.sizes(shards.FOLDER).values()) if not resume else 0
    before = before if resume else None
    forward = Forward(model, layers, transform=transform, input_fn=input_fn, autocast=autocast)
    with at_rest(model, device) as where:
        source = sources.source(data, batch_size, workers, skip, pin=where.type == "cuda")
        if engine == "ray" and isinstance(source, sources.Stream):
            raise ExtractError("engine='ray' needs data whose rows have numbers: a data set with length and index.")
        sides = Sides(_ids_of(source) if ids is None else ids, labels, lengths, source.rows)
        measured = measure(forward, source, sides, where, dtype, skip)
    if rows_per_shard is None:
        known = before.rows_per_shard if before is not None and shard_bytes is None else None
        rows_per_shard = known or measured.rows_per_shard(shard_bytes, source.batch_size)
    mine = manifest.Plan(
        columns=measured.columns,
        rows=source.rows,
        rows_per_shard=rows_per_shard,
        layers=tuple(forward.layers),
        model=fingerprint.of_model(model),
        transform=fingerprint.of_function(transform),
        input_fn=fingerprint.of_function(input_fn),
        lengths=fingerprint.of_function(lengths),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        autocast=None if not autocast else str(autocast).removeprefix("torch."),
        source=source.kind,
        row_bytes=before.row_bytes if before is not None else measured.row_bytes,
        about={"batch_size": source.batch_size or measured.batch_rows, "versions": manifest.versions()},
    )
    todo = engines.missing(place, mine) if resume or mine.shards is None else list(range(mine.shards))
    per_row = measured.seconds / measured.batch_rows
    estimate = Estimate(mine, per_row, None if todo is None else len(todo), place.free())
    if dry_run:
        return estimate
    _room(estimate, old)
    if not resume:
        _clear(place)  # not earlier: whatever was wrong, the old store would be gone
    agreed = manifest.agree(place, mine)
    if isinstance(place, storage.Folder):
        place.sweep(shards.FOLDER)
    task = Task(forward, source, sides, agreed, place, device, skip, nan == "raise", measured.head)
    done_rows = 0 if todo is None or mine.rows is None else mine.rows - engines.spans(mine, todo)
    bar = Progress(agreed, done_rows, progress, estimate.line())
    try:
        rows = _run(engine, task, bar, engine_options or {})
    finally:
        bar.close()
    entries = read_headers(place)
    agreed = dataclasses.replace(agreed, rows=rows)
    check_rows(place, agreed, entries)
    if mine.rows is None and (before is None or before.rows != rows):  # a stream has come to its end
        place.replace(manifest.NAME, agreed.to_json().encode())
    left = engines.missing(place, agreed)
    if not left:
        write_index(place, entries)
    place.warm(shards.FOLDER)
    return open_features(out, incomplete=bool(left))


def _run(engine: str, task: Task, bar: Progress, options: dict[str, Any]) -> int | None:
    if engine == "ray":
        on_ray = importlib.import_module("torchhook._extract.ray").on_ray
        return on_ray(task, bar, **options)  # type: ignore[no-any-return]
    return engines.torchrun(task, bar) if engine == "torchrun" else engines.local(task, bar)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: use {', '.join(map(repr, allowed))}.")


def _check_engine(engine: str, options: dict[str, Any] | None, replaces: bool) -> None:
    if engine == "ray":
        require("ray", "ray")
    elif options:
        raise ValueError(f"engine_options={options} are for engine='ray'.")
    if engine == "torchrun" and engines.ranks()[1] > 1 and replaces:
        raise ExtractError("resume=False: ranks would delete each other's shards. Delete the store before they start.")


def _ids_of(source: sources.Source) -> Any:
    """Ids that a data set brings along: its own, or the paths of an image folder in torchvision's manner."""
    if isinstance(source, sources.Stream):
        return None
    dataset = source.dataset
    samples = getattr(dataset, "samples", None)
    if isinstance(dataset, ImageFolder):
        ids = dataset.ids
    elif isinstance(samples, list) and samples and isinstance(samples[0], tuple) and isinstance(samples[0][0], str):
        ids = [sample[0] for sample in samples]
    else:
        return None
    return [ids[row] for row in source.order] if len(ids) == len(dataset) else None


def _clear(place: storage.Place) -> None:
    if manifest.load(place) is None:
        return
    # The plan goes last: while it is there, what is left is a store that lacks shards.
    for name in place.sizes(shards.FOLDER):
        if shards.number_of(name) is not None:
            place.remove(name)
    place.remove("index.json")
    place.remove(manifest.NAME)


def _room(estimate: Estimate, old: int) -> None:
    """Better now than after the hours that it takes to fill the disk. ``old`` bytes will be freed before."""
    todo = estimate.todo
    if estimate.free is None or todo is None:
        return
    rows = min(estimate.plan.rows or 0, todo * estimate.plan.rows_per_shard)
    needed = rows * estimate.plan.row_bytes
    if needed > estimate.free + old:
        raise ExtractError(
            f"about {size(needed)} are still to be written and {size(estimate.free + old)} are free. Make room, or "
            "keep less: transform=transforms.pool('mean'), dtype=torch.float16, fewer layers."
        )

"""``extract``: the features of a whole data set, to disk, every row exactly once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchhook._core.per_site import Transforms
from torchhook._core.select import Selector
from torchhook._extract import job
from torchhook._extract.completion import kept
from torchhook._extract.estimate import Estimate
from torchhook._extract.eval_mode import evaluating_on, random_numbers_kept
from torchhook._extract.image_folder import SUFFIXES, ImageFolder
from torchhook._extract.inputs import Part
from torchhook._extract.passes import Passes
from torchhook._extract.request import Request, check
from torchhook._extract.special_tokens import Drop
from torchhook._features.api import Features, Folder, Store, absolute, open_features
from torchhook.errors import ExtractError

__all__ = [
    "SUFFIXES",
    "Drop",
    "Estimate",
    "ImageFolder",
    "Part",
    "Passes",
    "evaluating_on",
    "extract",
    "kept",
    "random_numbers_kept",
]


def extract(
    model: nn.Module,
    data: Any,
    sites: Selector,
    out: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    transform: Transforms = None,
    run_on: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    rows_per_shard: int | None = None,
    shard_bytes: int | None = None,
    ids: Part = None,
    labels: Part = None,
    lengths: Part = None,
    drop_special: Drop = False,
    input_fn: Callable[[Any], Any] | None = None,
    engine: str = "local",
    workers: int | None = None,
    resume: bool = True,
    on_error: str = "raise",
    max_skipped: int | float | None = None,
    retry_skipped: bool = False,
    nan: str = "raise",
    progress: bool = True,
    autocast: torch.dtype | bool | None = None,
    dry_run: bool = False,
    engine_options: dict[str, Any] | None = None,
) -> Features | Estimate:
    """Write what passes the sites, for every row of ``data``, to a feature store at ``out``, and open it.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     features = extract(model, torch.ones(10, 3), "0", folder, progress=False)
    ...     features["0"].shape
    (10, 4)

    Killed and called again, it does only the shards that are missing; a store of another model, other code, list of
    sites, transform or data is refused, and the first stored batch is run again to prove that they are the same.

    The model runs in evaluation mode and without gradients, each batch as far as the last site that is needed. Its
    modes, buffers, gradients and device are afterwards as they were, and so are the random numbers of torch, numpy and
    Python (called from another thread than the main one, the random numbers are left to the main thread).

    Args:
        model: The model; it may be in any mode and on any device.
        data: A data set, a ``DataLoader``, rows as a tensor or a mapping of tensors, an iterable of batches (of rows,
            with ``batch_size``), a list that can only hold the one or the other, or the path of a folder of images.
        sites: What to keep, by any selector: an address (``"layer4"``, ``"fc:input"``, ``"(model)"``), a glob, a
            module type, a list of these, …
        out: A folder, or a URL that fsspec knows (``s3://…``).
        batch_size: Rows for each call of the model; by default the loader's, or 32.
        transform: What is kept of each value (``transforms.pool("mean")``): one for all sites, or a mapping from
            selectors to transforms, in which a site's own address comes first. By default the whole value.
        run_on: The device that the model and the batches are moved to; by default where the model is.
        dtype: Floating-point values are stored as this; by default as they are.
        rows_per_shard: Rows in each file; by default whole batches, at most 64 MiB and half a minute, in four or more.
        shard_bytes: Bytes in each file, about, and no more than 65,536 rows, in place of that rule.
        ids: A name for each row: a key or position in the batch, a function of it, or one value for every row. By
            default those that the data set has, as image folders do.
        labels: As ``ids``. By default those in the usual places of a batch; ``False`` leaves them out.
        lengths: What is padding, and cuts ``(N, T, ...)`` values to rows of their own length: a key or position in the
            batch, or a function of it, that gives lengths ``(N,)`` or a mask ``(N, T)``, or one number for every row.
            By default rows stay whole, and transforms leave out what the model's own attention mask says;
            with ``False`` nothing is taken for padding. Where heads come before tokens, ``(N, heads, T, D)`` becomes
            rows ``(T, heads, D)``.
        drop_special: Special tokens to leave out, by their ids (``tokenizer.all_special_ids``); ``True`` for those that
            the model's configuration names. ``(N, T, ...)`` values are then cut to rows of the tokens that are left,
            without padding, as ``stream`` takes them; ``[]`` leaves out padding alone. Transforms see the tokens that
            are left, and everywhere positions are counted among them. What the model itself makes of all tokens of a
            row, ``(N, D)``, stays as it is.
        input_fn: From a batch to what the model is called with: a tuple is the positional arguments, a dict the keyword
            arguments, anything else the one argument. By default the usual structures are understood.
        engine: ``"local"``, ``"torchrun"`` (each rank calls this), or ``"ray"``.
        workers: Processes that load the data; by default the loader's, or none.
        resume: Whether to go on with a store that is there; ``False`` replaces it.
        on_error: ``"raise"``, or ``"skip"`` to leave rows out that cannot be loaded, cannot be run, or hold a NaN: they
            keep their ids, their labels are -1 (NaN, empty), and ``features.skipped`` says why.
        max_skipped: With ``on_error="skip"``, so many rows, or such a share of them (a float), may be skipped in each
            process; by default a tenth, or 16 of few rows.
        retry_skipped: Whether to make shards again whose rows were skipped: what was wrong may be right by now.
        nan: ``"raise"`` at a NaN (and at an infinity that the cast to ``dtype`` made), or ``"keep"`` to store it.
        progress: Whether to show a progress bar, or, where stderr is no terminal, a line now and then.
        autocast: Run under ``torch.autocast`` with this dtype, or with its own choice for ``True``.
        dry_run: Measure the first batch, return an ``Estimate``, and write nothing.
        engine_options: For Ray: ``actors``, ``num_cpus`` and ``num_gpus`` of each, and options of ``map_batches``.
    """
    _check_out(out)
    request = Request(
        model=model,
        data=data,
        sites=sites,
        out=absolute(out),  # at once: workers, and code of the user's, may have or go to another folder
        batch_size=batch_size,
        transform=transform,
        run_on=run_on,
        dtype=dtype,
        rows_per_shard=rows_per_shard,
        shard_bytes=shard_bytes,
        ids=ids,
        labels=labels,
        lengths=lengths,
        drop_special=drop_special,
        input_fn=input_fn,
        engine=engine,
        workers=workers,
        resume=resume,
        on_error=on_error,
        max_skipped=max_skipped,
        retry_skipped=retry_skipped,
        nan=nan,
        progress=progress,
        autocast=autocast,
        engine_options=engine_options or {},
        dry_run=dry_run,
    )
    check(request)
    # Around the preparation too: the first batch is loaded and run there, and both may draw random numbers.
    with random_numbers_kept(), contextlib.ExitStack() as stack:
        prepared = job.prepare(request, stack)
        if prepared is None:  # a rank that came when the others had done everything
            return open_features(request.out)
        if dry_run:  # only execute writes
            return prepared.estimate()
        whole = job.execute(prepared)
        return job.finish(prepared, whole)


def _check_out(out: Any) -> None:
    if not isinstance(out, (str, os.PathLike)):
        raise TypeError(
            f"out={out!r}: give the path of a folder for the feature store, or a URL (s3://…). Features of a data set "
            "go to disk. For a few batches in memory: output, rec = th.capture(model, sites).run(batch)."
        )
    storage = Store(absolute(out)).storage
    if isinstance(storage, Folder):
        # Other files in the folder are left alone, and do no harm.
        root = storage.root
        above = next((path for path in (root, *root.parents) if path.exists()), root)
        if above.is_file():
            raise ExtractError(
                f"out={os.fspath(out)!r}: {above} is a file. Give the path of a folder for the feature store."
            )

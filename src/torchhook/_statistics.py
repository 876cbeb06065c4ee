"""``statistics``: numbers of what passes the sites, over a whole data set, in one pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchhook._core.per_site import Transforms
from torchhook._core.select import Selector
from torchhook._extract.api import Drop, Part, Passes, evaluating_on, random_numbers_kept
from torchhook._features.api import check_options
from torchhook._recording.statistics import Options, SiteStatistics, Statistics
from torchhook._values.quantiles import RESOLUTION
from torchhook._values.running import PER, Block, Running
from torchhook.errors import ExtractError


def statistics(
    model: nn.Module,
    data: Any,
    sites: Selector,
    *,
    per: str = "channel",
    covariance: bool = False,
    quantiles: Sequence[float] = (),
    top: int = 0,
    transform: Transforms = None,
    lengths: Part = None,
    drop_special: Drop = False,
    channel: int | None = None,
    first_row: int = 0,
    resolution: int = RESOLUTION,
    batch_size: int | None = None,
    input_fn: Callable[[Any], Any] | None = None,
    run_on: torch.device | str | None = None,
    workers: int | None = None,
    autocast: torch.dtype | bool | None = None,
) -> Statistics:
    """Mean, variance, ends, kurtosis, quantiles and top rows of the sites over all of ``data``; nothing is stored.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    >>> found = statistics(model, torch.ones(10, 3), "1", quantiles=[0.5])
    >>> found["1"].count, found["1"].max.shape
    (10, torch.Size([4]))

    One pass in double precision and constant memory. Padding is left out. What ranks or runs have found of parts of
    the data adds up (``one + other``) to what one pass over all of it finds: counts, ends and top rows exactly, the
    others up to rounding. ``min`` and ``max`` are those of ``torch.ao.quantization``'s observers.

    The model runs as in ``extract``: in evaluation mode, without gradients, and afterwards it is as it was.

    Args:
        model: The model; it may be in any mode and on any device.
        data: As ``extract`` takes it; a ``DataLoader`` may shuffle.
        sites: What to look at, by any selector.
        per: ``"channel"``: numbers for each channel, over all rows and positions. ``"tensor"``: one number of all
            values. ``"token"``: numbers for each position of a row, counted among the tokens that are left, without
            padding and special ones.
        covariance: Whether to take the covariance of the channels, too.
        quantiles: Shares of the values, from 0 to 1. They are exact for up to ``resolution`` values; of more, their
            ranks are off by ``log2(n / resolution) / (2 * resolution)`` of the count ``n`` at most, which is 0.3 % for
            a million values; ``rank_error`` says by how much in truth.
        top: So many rows with the largest values are remembered for each channel, and at which positions these are,
            counted as above. Rows are numbered as they come: those of a loader that shuffles, in its order.
        transform: Changes what is looked at, as in ``extract``.
        lengths: What is padding, as in ``extract``; by default what the model's own attention mask says.
        drop_special: Special tokens to leave out, as in ``extract``: by their ids, or ``True`` for those of the model's
            configuration.
        channel: The channel dim of a row: by default the first of maps ``(C, H, W)``, else the last.
        first_row: The number of the first row of ``data``, where it is a part of a larger one.
        resolution: Values that are kept for quantiles, for each level of their sketch.
        batch_size: Rows for each call of the model; by default the loader's, or 32.
        input_fn: From a batch to what the model is called with, as in ``extract``.
        run_on: The device that the model and the batches are moved to; by default where the model is.
        workers: Processes that load the data; by default the loader's, or none.
        autocast: Run under ``torch.autocast`` with this dtype, or with its own choice for ``True``.
    """
    options = _checked(per, covariance, quantiles, top, resolution)
    passes = Passes(
        model,
        data,
        sites,
        transform=transform,
        batch_size=batch_size,
        lengths=lengths,
        drop_special=drop_special,
        input_fn=input_fn,
        workers=workers,
        autocast=autocast,
        channel=channel,
        maps=True,
    )
    running: dict[str, Running] = {}

    def take(name: str, block: Block) -> None:
        own = running.setdefault(name, options.running())
        before = None if own.moments is None else len(own.moments.mean)
        if per == "channel" and before is not None and block.tokens.shape[1] != before:
            raise ExtractError(f"{name!r}: {before} channels in the first batch, {block.tokens.shape[1]} now.")
        own.add(block._replace(rows=block.rows + first_row))

    rows = 0
    with (
        random_numbers_kept(),
        evaluating_on(model, run_on) as device,
        contextlib.closing(passes.epoch(pin=device.type == "cuda")) as batches,
    ):
        for batch in batches:
            passes.run(batch, device, take)
            rows += batch.span
    return Statistics({name: _result(name, running[name], options) for name in passes.ordered(running)}, options, rows)


def _result(name: str, running: Running, options: Options) -> SiteStatistics:
    if running.moments is None:
        raise ExtractError(f"{name!r}: there is no value that is neither padding nor special.")
    return SiteStatistics(running.on_host(), options.quantiles)


def _checked(per: str, covariance: bool, quantiles: Sequence[float], top: int, resolution: int) -> Options:
    if per not in PER:
        raise ValueError(f"per={per!r}: use {', '.join(map(repr, PER))}.")
    if covariance and per != "channel":
        raise ValueError(f"covariance=True is that of channels, and per={per!r}: say per='channel'.")
    check_options(quantiles, top, resolution)
    wanted = tuple(float(q) for q in quantiles)
    return Options(per, covariance, wanted, top, resolution if wanted else 0)

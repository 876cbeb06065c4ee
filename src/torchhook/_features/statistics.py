"""Statistics of a site over the whole data set, in one pass and in little memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchhook._values.quantiles import RESOLUTION
from torchhook._values.running import Block, Running
from torchhook.errors import ExtractError

if TYPE_CHECKING:
    from torchhook._features.features import Features


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Per channel; values at all positions of all rows count."""

    count: int
    mean: Tensor
    std: Tensor
    min: Tensor
    max: Tensor
    kurtosis: Tensor
    """3 for a normal distribution."""
    covariance: Tensor | None
    quantiles: dict[float, Tensor]
    rank_error: float
    """By such a share of the count the ranks of the quantiles may be off; 0 if they are exact."""
    top_rows: Tensor | None
    """The rows with the largest values, ``(channels, k)``, best first; a row counts by its largest position."""
    top_values: Tensor | None


def statistics(
    features: Features,
    site: str,
    *,
    channel: int | None = None,
    covariance: bool = False,
    quantiles: Sequence[float] = (),
    top: int = 0,
    resolution: int = RESOLUTION,
) -> Statistics:
    """One pass over a site. ``channel`` is the channel dim of a row: the first of ``(C, H, W)``, else the last.

    Quantiles are exact for up to ``resolution`` positions; of more, ``rank_error`` says how far ranks may be off.
    """
    values = features[site]
    if 0 in values.spec.shape:
        raise ExtractError(f"{site!r}: rows of shape {values.spec.shape} hold no values.")
    running = Running("channel", covariance=covariance, top=top, resolution=resolution if quantiles else 0)
    dims = len(values.spec.shape) + values.spec.ragged
    channel = (0 if dims == 3 else dims - 1) if channel is None else channel % max(1, dims)
    skipped = set(features.skipped)
    for first, block in values.blocks():
        # Rows that were skipped hold NaN or zeros, and would spoil every number.
        rows = [i for i in range(len(block)) if first + i not in skipped]
        numbers = torch.tensor([first + i for i in rows], dtype=torch.int64)
        if isinstance(block, Tensor):
            chosen = block if len(rows) == len(block) else block[rows]
            for start in range(0, len(chosen), 1024):  # in parts: a shard whose channels move would be copied whole
                part = chosen[start : start + 1024]
                part = part[:, None] if part.dim() == 1 else part.movedim(channel + 1, -1)
                _add(running, part.reshape(len(part), -1, part.shape[-1]), numbers[start : start + 1024])
        else:
            _add_ragged(running, [block[i] for i in rows], numbers, channel)
    if running.moments is None:
        raise ExtractError(f"{site!r}: no row has features.")
    return _result(running, quantiles)


def _add(running: Running, block: Tensor, rows: Tensor) -> None:
    """Take a block of ``(rows, positions, channels)``."""
    positions = torch.arange(block.shape[1])
    tokens = block.reshape(-1, block.shape[-1])
    running.add(Block(tokens, rows.repeat_interleave(len(positions)), positions.repeat(len(rows))))


def _add_ragged(running: Running, rows: list[Tensor], numbers: Tensor, channel: int) -> None:
    flat = [row[:, None] if row.dim() == 1 else row.movedim(channel, -1).flatten(0, -2) for row in rows]
    counts = torch.tensor([len(row) for row in flat], dtype=torch.int64)
    if int(counts.sum()):
        positions = torch.cat([torch.arange(len(row)) for row in flat])
        filled = [row for row in flat if len(row)]  # an empty row has lost its channels
        running.add(Block(torch.cat(filled), numbers.repeat_interleave(counts), positions))


def _result(running: Running, quantiles: Sequence[float]) -> Statistics:
    assert running.moments is not None
    return Statistics(
        running.moments.size,
        running.mean,
        running.variance().sqrt(),
        running.min,
        running.max,
        running.kurtosis(),
        running.matrix(),
        {q: running.quantile(q) for q in quantiles},
        running.rank_error,
        None if running.top is None else running.top.rows,
        None if running.top is None else running.top.values,
    )

"""Statistics of a site over the whole data set, in one pass and in little memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchhook._recording.statistics import SiteStatistics
from torchhook._values.quantiles import RESOLUTION
from torchhook._values.running import Block, Running
from torchhook.errors import ExtractError

if TYPE_CHECKING:
    from torchhook._features.columns import Column
    from torchhook._features.features import Features


def check_options(quantiles: Sequence[float], top: int, resolution: int) -> None:
    """Refuse what means nothing, before anything is read or run."""
    if isinstance(quantiles, (int, float)):
        raise TypeError(f"quantiles={quantiles}: give a list of shares, quantiles=[{quantiles}].")
    if not all(0 <= q <= 1 for q in quantiles):
        raise ValueError(f"quantiles={list(quantiles)}: they are shares of the values, from 0 to 1.")
    if resolution < 2:
        raise ValueError(f"resolution={resolution}: give a number of values, 2 or more.")
    if top < 0:
        raise ValueError(f"top={top}: give a number of rows, 0 or more.")


def statistics(
    features: Features,
    site: str,
    *,
    channel: int | None = None,
    covariance: bool = False,
    quantiles: Sequence[float] = (),
    top: int = 0,
    resolution: int = RESOLUTION,
) -> SiteStatistics:
    """One pass over a site, with the numbers that ``torchhook.statistics`` gives of the same tokens."""
    check_options(quantiles, top, resolution)
    values = features[site]
    if 0 in values.spec.shape:
        raise ExtractError(f"{site!r}: rows of shape {values.spec.shape} hold no values.")
    running = Running("channel", covariance=covariance, top=top, resolution=resolution if quantiles else 0)
    channel = _channel(values, channel)
    skipped = set(features.skipped)
    for first, block in values.blocks():
        # Rows that were skipped hold NaN or zeros, and would spoil every number.
        rows = [i for i in range(len(block)) if first + i not in skipped]
        numbers = torch.tensor([first + i for i in rows], dtype=torch.int64)
        if isinstance(block, Tensor):
            chosen = block if len(rows) == len(block) else block[rows]
            for start in range(0, len(chosen), 1024):  # in parts: a shard whose channels move would be copied whole
                part = chosen[start : start + 1024]
                assert channel is not None
                part = part[:, None] if part.dim() == 1 else part.movedim(channel + 1, -1)
                _add(running, part.reshape(len(part), -1, part.shape[-1]), numbers[start : start + 1024])
        else:
            _add_ragged(running, [block[i] for i in rows], numbers, channel)
    if running.moments is None:
        raise ExtractError(f"{site!r}: no row has features.")
    return SiteStatistics(running, quantiles)


def _channel(values: Column, channel: int | None) -> int | None:
    """The channel dim of a row; ``None`` if all dims of a token are channels."""
    ragged, shape = values.spec.ragged, values.shape[1:]
    if channel is None:
        if ragged:
            return None
        if values.heads_first:
            raise ExtractError(
                f"{values.name!r}: rows of shape {shape} are heads before tokens, (heads, T, D), and no maps. Extract "
                "with lengths=, which stores rows of tokens (T, heads, D), or say channel=: the dim of a row."
            )
        return 0 if len(shape) == 3 else len(shape) - 1
    dims = max(1, len(shape))  # a row that is a number has one channel
    fits = -dims <= channel < dims
    if not fits or (ragged and len(shape) > 1 and channel % dims == 0):
        why = ", of which the first differs from row to row" if ragged and fits else ""
        raise ValueError(f"channel={channel}: a row has the shape {shape}{why}.")
    return channel % dims


def _add(running: Running, block: Tensor, rows: Tensor) -> None:
    """Take a block of ``(rows, positions, channels)``."""
    positions = torch.arange(block.shape[1])
    tokens = block.reshape(-1, block.shape[-1])
    running.add(Block(tokens, rows.repeat_interleave(len(positions)), positions.repeat(len(rows))))


def _add_ragged(running: Running, rows: list[Tensor], numbers: Tensor, channel: int | None) -> None:
    filled = [(row, number) for row, number in zip(rows, numbers.tolist(), strict=True) if len(row)]
    if not filled:  # an empty row has lost its channels
        return
    parts = [_items(row, channel) for row, _ in filled]
    positions = [torch.arange(len(part)).repeat_interleave(part.shape[1]) for part in parts]
    counts = torch.tensor([len(part) for part in positions])
    own = torch.tensor([number for _, number in filled]).repeat_interleave(counts)
    running.add(Block(torch.cat([part.flatten(0, 1) for part in parts]), own, torch.cat(positions)))


def _items(row: Tensor, channel: int | None) -> Tensor:
    """``(items, values of one item, channels)`` of a row."""
    if row.dim() == 1:
        return row[:, None, None]
    if channel is None:
        return row.flatten(1)[:, None]
    last = row.movedim(channel, -1)
    return last.reshape(len(row), -1, last.shape[-1])

"""Statistics of a site over the whole data set, in one pass and in little memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchhook._values.moments import Moments, merged
from torchhook.errors import ExtractError

if TYPE_CHECKING:
    from torchhook._features.features import Features

_SAMPLE = 1 << 14


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Per channel; values at all positions of all rows count."""

    count: int
    mean: Tensor
    std: Tensor
    min: Tensor
    max: Tensor
    covariance: Tensor | None
    quantiles: dict[float, Tensor]
    """Of a uniform sample of positions, all of them where they are no more than the sample."""
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
    sample: int = _SAMPLE,
) -> Statistics:
    """One pass over a site. ``channel`` is the channel dim of a row: the first of ``(C, H, W)``, else the last."""
    values = features[site]
    if 0 in values.spec.shape:
        raise ExtractError(f"{site!r}: rows of shape {values.spec.shape} hold no values.")
    running = _Running(covariance, bool(quantiles), top, sample)
    dims = len(values.spec.shape) + values.spec.ragged
    channel = (0 if dims == 3 else dims - 1) if channel is None else channel % max(1, dims)
    skipped = set(features.skipped)
    for first, block in values.blocks():
        rows = [i for i in range(len(block)) if first + i not in skipped]
        numbers = torch.tensor([first + i for i in rows])
        if isinstance(block, Tensor):
            chosen = block if len(rows) == len(block) else block[rows]
            for start in range(0, len(chosen), 1024):  # in parts: a shard in double would be large
                part = chosen[start : start + 1024].double()
                part = part[:, None] if part.dim() == 1 else part.movedim(channel + 1, -1)
                running.add(part.reshape(len(part), -1, part.shape[-1]), numbers[start : start + 1024])
        else:
            for i, number in zip(rows, numbers, strict=True):
                if len(block[i]):
                    row = block[i].double()
                    row = row[:, None] if row.dim() == 1 else row.movedim(channel, -1)
                    running.add(row.reshape(1, -1, row.shape[-1]), number[None])
    if running.moments is None:
        raise ExtractError(f"{site!r}: no row has features.")
    return running.result(running.moments, quantiles)


class _Running:
    """What is known so far. Blocks are ``(rows, positions, channels)``."""

    def __init__(self, covariance: bool, quantiles: bool, top: int, sample: int) -> None:
        self.covariance, self.quantiles, self.top, self.sample = covariance, quantiles, top, sample
        self.moments: Moments | None = None
        self.min: Any = None
        self.max: Any = None
        self.kept: Tensor | None = None
        self.keys = torch.empty(0)
        self.generator = torch.Generator().manual_seed(0)
        self.top_values: Tensor | None = None
        self.top_rows: Tensor | None = None

    def add(self, block: Tensor, rows: Tensor) -> None:
        flat = block.reshape(-1, block.shape[-1])
        if not len(flat):
            return
        mean = flat.mean(0)
        centred = flat - mean
        squares = centred.T @ centred if self.covariance else (centred * centred).sum(0)
        moments = Moments(len(flat), mean, squares)
        self.moments = moments if self.moments is None else merged([self.moments, moments])
        low, high = flat.amin(0), flat.amax(0)
        self.min = low if self.min is None else torch.minimum(self.min, low)
        self.max = high if self.max is None else torch.maximum(self.max, high)
        if self.quantiles:
            self._sample(flat)
        if self.top:
            self._top(block.amax(1), rows)

    def _sample(self, flat: Tensor) -> None:
        """Every position draws a number; those with the smallest numbers stay: a uniform sample of any length."""
        keys = torch.rand(len(flat), generator=self.generator)
        kept = flat if self.kept is None else torch.cat([self.kept, flat])
        keys = torch.cat([self.keys, keys])
        if len(keys) > self.sample:
            keys, chosen = keys.topk(self.sample, largest=False)
            kept = kept[chosen]
        self.kept, self.keys = kept, keys

    def _top(self, best: Tensor, rows: Tensor) -> None:
        values, numbers = best.T, rows.expand(best.shape[1], -1)
        if self.top_values is not None and self.top_rows is not None:
            values = torch.cat([self.top_values, values], 1)
            numbers = torch.cat([self.top_rows, numbers], 1)
        self.top_values, order = values.topk(min(self.top, values.shape[1]), dim=1)
        self.top_rows = numbers.gather(1, order)

    def result(self, moments: Moments, quantiles: Sequence[float]) -> Statistics:
        unbiased = moments.squares / max(1, moments.size - 1)
        variance = unbiased.diagonal() if self.covariance else unbiased
        found = {}
        if self.kept is not None:
            for q in quantiles:
                found[q] = self.kept.quantile(q, dim=0)
        return Statistics(
            moments.size,
            moments.mean,
            variance.sqrt(),
            self.min,
            self.max,
            unbiased if self.covariance else None,
            found,
            self.top_rows,
            self.top_values,
        )

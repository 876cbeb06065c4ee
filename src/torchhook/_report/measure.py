"""The statistics and the histogram of one tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchhook._report.facts import Numbers
from torchhook._values.layout import Layout, guess
from torchhook._watch.statistics import flatten, measurable

BINS = 48
_SAMPLE = 20_000  # a quantile needs a sort, and more values hardly move it
_MANY_ZEROS = 0.1
_FEW_POSITIONS = 16  # with fewer, a channel that is zero everywhere says nothing


def numbers(tensor: Tensor, layout: Layout | None = None) -> Numbers | None:
    """Statistics of a tensor, or ``None`` if it has no values to look at; its shape tells the layout if nothing else.

    >>> found = numbers(torch.tensor([0.0, 1.0, 2.0, float("nan")]))
    >>> found.mean, found.nans, found.elements
    (1.0, 1, 4)
    """
    if not measurable(tensor):
        return None
    flat = flatten(tensor)
    nans, size = int(flat.isnan().sum()), flat.numel()
    finite = flat.isfinite()
    good = flat if bool(finite.all()) else flat[finite]
    infs = size - nans - good.numel()
    dead, channels = dead_channels(tensor, layout)
    if not good.numel():
        return Numbers(size, None, None, None, None, None, 0.0, nans, infs, [], 0.0, 0.0, False)
    zeros = int((good == 0).sum())
    hides = zeros / size > _MANY_ZEROS and zeros < good.numel()
    counts, low, high = _histogram(good[good != 0] if hides else good)
    wide = good.double() if good.numel() < 1 << 22 else good
    return Numbers(
        elements=size,
        mean=float(wide.mean()),
        std=float(wide.std(correction=0)),
        min=float(good.min()),
        max=float(good.max()),
        norm=float(wide.norm()),
        zeros=zeros / size,
        nans=nans,
        infs=infs,
        counts=counts,
        low=low,
        high=high,
        without_zeros=hides,
        dead=dead,
        channels=channels,
    )


def _histogram(values: Tensor) -> tuple[list[int], float, float]:
    sample = values[:: max(1, values.numel() // _SAMPLE)]
    ends = torch.tensor([0.001, 0.999], dtype=sample.dtype, device=sample.device)
    low, high = sample[:_SAMPLE].quantile(ends).tolist()
    if not low < high:
        low, high = float(values.min()), float(values.max())
    if not low < high:
        room = max(0.5, abs(low) * 1e-3)
        low, high = low - room, high + room
    counts = torch.histc(values.clamp(low, high), BINS, low, high)
    return [int(count) for count in counts.tolist()], low, high


def dead_channels(tensor: Tensor, layout: Layout | None = None) -> tuple[int, int]:
    """How many channels are zero at every position of every sample, and how many channels there are."""
    if tensor.dim() < 3 or tensor.is_quantized or tensor.is_complex():
        return 0, 0
    channels = tensor.movedim((layout or guess(tensor.shape)).channels, 0).flatten(1)
    if channels.shape[0] == 1 or channels.shape[1] < _FEW_POSITIONS:
        return 0, 0
    return int((channels == 0).all(1).sum()), channels.shape[0]


def rms(tensor: Tensor | None) -> float | None:
    """The root mean square of a tensor."""
    if tensor is None or not measurable(tensor):
        return None
    flat = flatten(tensor)
    found = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) / math.sqrt(flat.numel())
    return found if found == found and abs(found) != float("inf") else None


def dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

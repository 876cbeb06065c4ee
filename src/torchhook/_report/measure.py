"""The statistics and the histogram of one tensor, as a report shows them."""

from __future__ import annotations

from torch import Tensor

from torchhook._report.facts import Numbers
from torchhook._values.elements import flatten, measurable
from torchhook._values.finite import finite
from torchhook._values.histograms import histogram, inner_range, with_room
from torchhook._values.layout import Layout, guess
from torchhook._values.statistics import summary
from torchhook._values.subclasses import local, packed

BINS = 48
_SAMPLE = 20_000  # a percentile needs a sort, and more values hardly move it
_CLIP = 0.1
_MANY_ZEROS = 0.1
_FEW_POSITIONS = 16  # with fewer, a channel that is zero everywhere says nothing


def numbers(tensor: Tensor, layout: Layout | None = None) -> Numbers | None:
    """Statistics of a tensor, or ``None`` if it has no values to look at; its shape tells the layout if nothing else.

    >>> import torch
    >>> found = numbers(torch.tensor([0.0, 1.0, 2.0, float("nan")]))
    >>> found.mean, found.nans, found.elements
    (1.0, 1, 4)
    """
    tensor = packed(tensor)
    if not measurable(tensor):
        return None
    tensor = local(tensor)
    part = finite(flatten(tensor))
    found, good = summary(part), part.values
    infs = found.pos_infs + found.neg_infs
    dead, channels = dead_channels(tensor, layout)
    if not good.numel():
        return Numbers(found.size, None, None, None, None, None, 0.0, found.nans, infs, [], 0.0, 0.0, False)
    # Zeros after a ReLU would be one bar, with all others too low to be seen. If all are zero, they are all there is.
    hides = found.zeros / found.size > _MANY_ZEROS and found.zeros < good.numel()
    counts, low, high = _histogram(good[good != 0] if hides else good)
    return Numbers(
        elements=found.size,
        mean=found.mean,
        std=found.std,
        min=found.min,
        max=found.max,
        norm=found.norm,
        zeros=found.zeros / found.size,
        nans=found.nans,
        infs=infs,
        counts=counts,
        low=low,
        high=high,
        without_zeros=hides,
        dead=dead,
        channels=channels,
    )


def _histogram(values: Tensor) -> tuple[list[int], float, float]:
    """Of all values, the few beyond the range counted in its outermost bins."""
    # Every n-th and none by chance: this is inside the model's run, whose random numbers must not move.
    sample = values[:: max(1, values.numel() // _SAMPLE)][:_SAMPLE]
    low, high = inner_range(sample.cpu().numpy(), _CLIP)
    # Nearly all values are one: the few that are not still have a width.
    if not low < high:
        low, high = float(values.min()), float(values.max())
    low, high = with_room(low, high)
    return histogram(values.clamp(low, high), BINS, low, high).counts, low, high


def dead_channels(tensor: Tensor, layout: Layout | None = None) -> tuple[int, int]:
    """How many channels are zero at every position of every sample, and how many channels there are."""
    if tensor.dim() < 3 or tensor.is_quantized or tensor.is_complex():
        return 0, 0
    channels = tensor.movedim((layout or guess(tensor.shape)).channels, 0).flatten(1)
    if channels.shape[0] == 1 or channels.shape[1] < _FEW_POSITIONS:
        return 0, 0
    return int((channels == 0).all(1).sum()), channels.shape[0]

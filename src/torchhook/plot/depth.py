"""``statistics`` and ``gradient_flow``: one number after another, through the depth of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from torchhook._recording.records import Recording
from torchhook._values.finite import finite
from torchhook._values.histograms import inner_range
from torchhook._values.statistics import summary
from torchhook.plot import style
from torchhook.plot.values import Array, Source, Value, values


def statistics(
    source: Source,
    sites: str | Iterable[str] | None = None,
    *,
    title: str | None = None,
    ax: Any = None,
    fig: Any = None,
) -> Any:
    """Mean, spread and share of zeros of every layer, in the order in which they ran.

    >>> import torch
    >>> figure = statistics({"a": torch.randn(9), "b": torch.randn(9)})

    The band is one standard deviation either side of the mean, the thin lines are the 1st and 99th percentile. A layer
    with NaN or infinite values is marked in red, and its numbers are those of its finite values.
    """
    found = values(source, sites)
    figure = style.canvas(_width(len(found)), 4.8, ax, fig)
    if ax is None:
        grid = figure.add_gridspec(2, 1, height_ratios=[3, 1.1])
        upper = figure.add_subplot(grid[0])
        lower = figure.add_subplot(grid[1], sharex=upper)
    else:
        # One axes was given and two are needed: both are set into it, and the user's layout stays.
        ax.set_axis_off()
        upper, lower = ax.inset_axes((0, 0.36, 1, 0.64)), ax.inset_axes((0, 0, 1, 0.28))
    x = np.arange(len(found))
    mean, std, low, high, zeros, whole = _Spread(*np.array([_spread(value) for value in found]).T)
    colors = style.palette(upper)
    upper.fill_between(x, mean - std, mean + std, color=colors.blue, alpha=0.22, linewidth=0, label="± 1 std")
    upper.plot(x, low, color=colors.blue, linewidth=0.7, alpha=0.6, label="1st, 99th percentile")
    upper.plot(x, high, color=colors.blue, linewidth=0.7, alpha=0.6)
    upper.plot(x, mean, color=colors.blue, linewidth=1.6, marker="o", markersize=3, label="mean")
    style.chart(upper, y="value")
    upper.tick_params(labelbottom=False)
    _robust_scale(upper, np.stack([low, high, mean - std, mean + std]))
    lower.bar(x, zeros, color=colors.soft, width=0.7, alpha=0.75)
    lower.set_ylim(0, 1)
    style.chart(lower, y="zeros")
    lower.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    # Insets do not share an axis, so both are told.
    upper.set_xlim(-0.7, len(found) - 0.3)
    lower.set_xlim(-0.7, len(found) - 0.3)
    style.names(lower, [value.name for value in found])
    _mark(upper, lower, np.flatnonzero(whole == 0).tolist(), "NaN or Inf")
    head = "Activations over depth" if title is None else title
    style.legend(upper, beside=head)
    style.title(upper, head)
    return figure


def gradient_flow(
    source: Source,
    sites: str | Iterable[str] | None = None,
    *,
    title: str | None = None,
    ax: Any = None,
    fig: Any = None,
) -> Any:
    """How large the gradient is at every layer: its mean and its largest magnitude, on a logarithmic scale.

    >>> import torch
    >>> figure = gradient_flow({"first": torch.randn(9) * 1e-6, "last": torch.randn(9)})

    Takes a recording of ``:grad`` sites, or a dict: ``{n: p.grad for n, p in model.named_parameters()}``. The first
    layer is on the left. Layers whose gradient is all zero, or has NaN in it, are marked in red.
    """
    found = values(source, sites)
    gradients = [value for value in found if value.name.endswith(":grad")]
    # A recording may hold activations as well, in which case only gradients are meant.
    found = gradients or found
    # Who lists sites has put them in order, and so has a dict of parameters.
    if isinstance(source, Recording) and sites is None:
        found.reverse()  # gradients arrive from the last layer to the first
    figure, ax = style.single(_width(len(found)), 3.9, ax, fig)
    x = np.arange(len(found))
    mean, top, whole = np.array([_size(value) for value in found]).T
    # Bars on a logarithmic axis cannot begin at zero.
    floor = min((m for m in mean if m > 0), default=1e-12) / 10
    colors = style.palette(ax)
    ax.bar(x, np.maximum(top, floor) - floor, bottom=floor, color=colors.blue, alpha=0.22, width=0.8, label="largest")
    ax.bar(x, np.maximum(mean, floor) - floor, bottom=floor, color=colors.blue, alpha=0.9, width=0.8, label="mean")
    ax.set_yscale("log")
    ax.set_ylim(floor, max(top.max(), floor * 10) * 2)
    style.chart(ax, y="|gradient|")
    ax.set_xlim(-0.7, len(found) - 0.3)
    style.names(ax, [value.name.removesuffix(":grad") for value in found])
    _mark(ax, ax, np.flatnonzero((top == 0) | (whole == 0)).tolist(), "zero, NaN or Inf")
    head = "Gradient flow" if title is None else title
    style.legend(ax, beside=head)
    style.title(ax, head)
    return figure


class _Spread(NamedTuple):
    """How the finite values of a layer, or of one layer after another, are spread."""

    mean: Any
    std: Any
    low: Any
    high: Any
    zeros: Any
    whole: Any
    """Whether all values are finite."""


def _spread(value: Value) -> _Spread:
    part = finite(value.tensor)
    found, good = summary(part), part.values
    if not good.numel():
        return _Spread(np.nan, np.nan, np.nan, np.nan, np.nan, False)
    low, high = inner_range(good.double().numpy(), 1)
    return _Spread(found.mean, found.std, low, high, found.zeros / good.numel(), not part.bad)


def _size(value: Value) -> tuple[float, float, bool]:
    """The mean and the largest magnitude of the finite values, and whether all are."""
    part = finite(value.tensor.abs())
    found = summary(part)
    return found.mean or 0.0, found.max or 0.0, not part.bad


def _width(count: int) -> float:
    return min(max(0.16 * count + 2.2, 5.6), 14)


def _robust_scale(ax: Any, numbers: Array) -> None:
    """A logarithmic scale either side of zero where the largest layers would press others into a line.

    ``numbers`` are several for each layer.
    """
    finite = np.where(np.isfinite(numbers), numbers, 0.0)
    reach = np.abs(finite).max(0)
    reach = reach[reach > 0]
    # The lower quartile: a model with a few small layers has always been drawn well enough on a plain scale.
    if not reach.size or reach.max() <= 25 * np.percentile(reach, 25):
        return
    # Down to the smaller layers, but not to the last: six powers of ten either side are what a chart has room for.
    least = math.floor(math.log10(max(np.percentile(reach, 5), reach.max() * 1e-6)))
    ax.set_yscale("symlog", linthresh=10.0**least)
    most = math.ceil(math.log10(reach.max()))
    both = 2 if (finite < 0).any() and (finite > 0).any() else 1
    # matplotlib labels every power, and close to zero one over the other.
    room = max(int(style.size(ax)[1] / (2.2 * style.SMALL / 72) / both), 2)
    step = math.ceil((most - least + 1) / room)
    powers = range(most, least - 1, -step)
    ticks = [sign * 10.0**power for sign in (-1, 1) for power in powers]
    low, high = float(finite.min()), float(finite.max())
    shown = [0.0, *(tick for tick in ticks if 1.3 * low <= tick <= 1.3 * high)]
    ax.set_yticks(shown, [_power(tick) for tick in shown])
    ax.minorticks_off()


def _power(value: float) -> str:
    if 0.01 <= abs(value) <= 1000 or value == 0:
        return f"{value:g}".replace("-", "−")
    sign = "−" if value < 0 else ""
    return f"{sign}$10^{{{round(math.log10(abs(value)))}}}$"


def _mark(ax: Any, labels: Any, places: list[int], meaning: str) -> None:
    red = style.palette(ax).red
    for n, place in enumerate(places):
        ax.axvspan(place - 0.45, place + 0.45, color=red, alpha=0.16, linewidth=0, label=meaning if not n else None)
    # The ticks are not all layers: of many, some have no label.
    for tick, place in zip(labels.get_xticklabels(), labels.get_xticks(), strict=False):
        if int(place) in places:
            tick.set_color(red)

"""``histogram``: how the values of a layer are spread; of many layers, one ridge each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from torchhook._values.finite import finite
from torchhook._values.histograms import histogram as count
from torchhook._values.histograms import with_room_for
from torchhook._values.statistics import summary
from torchhook._words import counted
from torchhook.plot import style
from torchhook.plot.values import Array, Source, Value, flaws, limits, values


def histogram(
    source: Source,
    sites: str | Iterable[str] | None = None,
    *,
    bins: int = 80,
    clip: float = 0.1,
    log: bool = False,
    title: str | None = None,
    ax: Any = None,
    fig: Any = None,
) -> Any:
    """The distribution of one value, or of several below each other on one scale.

    >>> import torch
    >>> figure = histogram(torch.randn(1000))

    The axis leaves out ``clip`` percent at either end, and the picture says how much that is. ``log`` is for counts.
    """
    if bins < 1:
        raise ValueError(f"bins={bins}: give a positive number.")
    found = values(source, sites)
    if len(found) == 1:
        return _single(found[0], bins, clip, log, title, ax, fig)
    return _ridges(found, bins, clip, log, title, ax, fig)


def _single(value: Value, bins: int, clip: float, log: bool, title: str | None, ax: Any, fig: Any) -> Any:
    figure, ax = style.single(5.6, 3.2, ax, fig)
    # In double precision edges stay apart that single precision would round to one number.
    part = finite(value.tensor.double())
    found, good = summary(part), part.values
    low, high = with_room_for(bins, *limits(good.numpy(), clip))
    heights, edges = count(good, bins, low, high)
    ax.stairs(heights, edges, fill=True, color=style.palette(ax).blue, alpha=0.85)
    style.chart(ax, "value", "count")
    # Without a positive number, a logarithmic scale warns.
    if log and any(heights):
        ax.set_yscale("log")
    if found.mean is not None and found.std is not None:
        if low <= found.mean <= high:
            ax.axvline(found.mean, color=style.palette(ax).amber, linewidth=1.2)
        zeros, outside = found.zeros / good.numel(), good.numel() - sum(heights)
        notes = [f"mean {style.number(found.mean)}", f"std {style.number(found.std)}"]
        notes += [f"{zeros:.0%} zeros"] if zeros >= 0.005 else []
        notes += [f"{outside / good.numel():.1%} outside"] if outside else []
        notes += [said] if (said := flaws(value.tensor.numpy())) else []
        ax.text(0.985, 0.96, "\n".join(notes), transform=ax.transAxes, ha="right", va="top", fontsize=style.SMALL,
                color=style.palette(ax).soft, linespacing=1.5)  # fmt: skip
    style.title(ax, value.name if title is None else title)
    return figure


def _ridges(found: list[Value], bins: int, clip: float, log: bool, title: str | None, ax: Any, fig: Any) -> Any:
    figure, ax = style.single(7.2, min(max(0.3 * len(found) + 1.1, 2.6), 14), ax, fig)
    # One layer with huge values must not press all the others into a line: the median layer sets the scale.
    spans = np.array([limits(value.tensor.numpy(), clip) for value in found])
    # A range above zero is drawn from zero on, the one value that layers have in common.
    low, high = min(float(np.percentile(spans[:, 0], 15)), 0.0), float(np.percentile(spans[:, 1], 85))
    low, high = with_room_for(bins, low, high if high > low else low + 1)
    edges = np.linspace(low, high, bins + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    colors = style.colormap("viridis")(np.linspace(0.08, 0.82, len(found)))
    for row, value in enumerate(found):
        heights = _heights(count(value.tensor.double(), bins, low, high).counts, log)
        # Downwards, so that the first layer is on top; later ones are drawn over the feet of earlier ones.
        base = -float(row)
        ax.fill_between(middle, base, base + heights, color=colors[row], alpha=0.85, linewidth=0, zorder=row + 2)
        ax.plot(middle, base + heights, color=style.palette(ax).paper, linewidth=0.8, zorder=row + 2)
    style.chart(ax, "value", grid="x")
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.margins(x=0)
    # The highest a ridge gets is 1.6, see ``_heights``.
    ax.set_ylim(-len(found) + 0.6, 1.9)
    style.names(
        ax, [value.name + _mark(value) for value in found], "y", width=36, places=[-i for i in range(len(found))]
    )
    ax.tick_params(axis="y", labelcolor=style.palette(ax).ink)
    style.title(ax, counted(len(found), "layer") if title is None else title)
    return figure


def _heights(counts: list[int], log: bool) -> Array:
    heights: Array = np.log1p(counts) if log else np.array(counts, float)
    # A spike (the zeros of a ReLU) may stand out, but not make the rest vanish.
    top = max(float(np.percentile(heights, 97)), float(heights.max()) / 6, 1e-12)
    return np.minimum(heights / top, 1.6)


def _mark(value: Value) -> str:
    said = flaws(value.tensor.numpy())
    return f" ({said})" if said else ""

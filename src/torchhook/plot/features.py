"""``feature_maps``: what the channels of a layer look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from torchhook.plot import style
from torchhook.plot.values import Array, Maps, Source, chosen, flaws, limits, maps, number, values

_REDUCTIONS = {
    "mean": lambda array: array.mean(0),
    "max": lambda array: array.max(0),
    "norm": lambda array: np.sqrt((array**2).sum(0)),
}


def feature_maps(
    source: Source,
    sites: str | Sequence[str] | None = None,
    *,
    reduce: str | None = None,
    sample: int = 0,
    channels: int | Sequence[int] = 24,
    layout: str | None = None,
    grid: Sequence[int] | None = None,
    columns: int | None = None,
    cmap: str = "viridis",
    clip: float | None = None,
    title: str | None = None,
    ax: Any = None,
    fig: Any = None,
) -> Any:
    """A picture for each channel of one layer, or, with ``reduce``, one for each layer.

    >>> import torch
    >>> figure = feature_maps(torch.randn(1, 8, 14, 14))
    >>> len(figure.axes)
    8

    Maps are drawn pixel by pixel; of a vector, each value is a stripe, and the title says so. Tokens are laid out on
    their grid, and maps with their channels last are turned: a recording knows them by their layer, and otherwise
    56 × 56 × 96 looks like them, the equal sides being those of the map, which the title then says.

    Args:
        source: A recording, a value, or several by name.
        sites: Which of them; by default all.
        reduce: ``"norm"`` is how strong the channels are together, ``"mean"`` their average, in which those of opposite
            sign cancel, ``"max"`` the largest. Several layers are reduced to their norms unless said otherwise.
        sample: Which example of the batch.
        channels: How many are shown at most, spread evenly; or which.
        layout: ``"channels_first"``, ``"channels_last"`` or ``"tokens"``, where it is taken for another.
        grid: Rows and columns of the tokens, where their number does not tell.
        columns: How many pictures stand side by side.
        cmap: The colors, by the name that matplotlib has for them.
        clip: Percent of the values that colors leave out at either end: 1, or none of a mean, unless said otherwise.
        title: Another heading; with ``""`` none.
        ax: Where to draw, instead of a figure of its own.
        fig: A figure to draw in.
    """
    found = values(source, sites)
    if reduce is not None and reduce not in _REDUCTIONS:
        raise ValueError(f"reduce={reduce!r}: use {', '.join(map(repr, _REDUCTIONS))} or None.")
    if len(found) > 1 or reduce is not None:
        # Without a word: the norm. Before an activation, signs cancel in a mean, and of deep layers noise is left.
        pictures = [(v.name, _reduced(maps(v, sample, layout, grid), reduce or "norm")) for v in found]
        # Averaged over channels, outliers are rare, and the whole range is worth its colors.
        head = ""
        clip = (0.0 if reduce == "mean" else 1.0) if clip is None else clip
    else:
        value = found[0]
        seen = maps(value, sample, layout, grid)
        shown = _channels(len(seen.array), channels)
        pictures = [(str(i) if len(seen.array) > 1 else "", Maps(seen.array[i], flat=seen.flat)) for i in shown]
        some = f"{len(shown)} of {len(seen.array)} channels" if len(seen.array) > 1 else ""
        head = " · ".join(part for part in (value.name, some, seen.assumed, seen.note) if part)
        clip = 1.0 if clip is None else clip
    # One long vector among the layers must not stretch all panels.
    shape = float(np.median([_aspect(m) for _, m in pictures]))
    head = head if title is None else title
    figure, axes = style.panels(
        len(pictures),
        ax,
        fig,
        side=1.9 if len(pictures) <= 12 else 1.25,
        columns=columns,
        shape=shape,
        head=bool(head),
        titles=any(name or _remark(picture) for name, picture in pictures),
    )
    for (name, picture), panel in zip(pictures, axes, strict=True):
        style.title(panel, style.caption(panel, name, _remark(picture)), small=True)
        _draw(panel, picture, cmap, clip)
    if head and ax is None:
        style.heading(figure, head)
    elif head:
        style.title(ax, head)
    return figure


def _draw(ax: Any, picture: Maps, cmap: str, clip: float) -> None:
    low, high = limits(picture.array, clip)
    ax.imshow(
        np.where(np.isfinite(picture.array), picture.array, np.nan),
        cmap=style.colormap(cmap),
        vmin=low,
        vmax=high,
        # matplotlib's default smooths at some sizes; a pixel is a value, of a channel or of a whole layer.
        interpolation="nearest",
        # Square pixels would make a hairline of a vector.
        aspect="auto" if picture.flat else "equal",
    )
    style.quiet(ax)


def _reduced(seen: Maps, reduce: str) -> Maps:
    # A norm over one channel would take its sign away.
    array: Array = seen.array[0] if len(seen.array) == 1 else _REDUCTIONS[reduce](seen.array)
    # Above one panel of many there is room for a word only.
    return seen._replace(array=array, note="vector" if seen.flat and len(array) == 1 else seen.note)


def _remark(picture: Maps) -> str:
    # Stripes look like a map of something, unless a word says that they are none.
    what = picture.note if picture.flat else ""
    return ", ".join(part for part in (what, picture.assumed, flaws(picture.array)) if part)


def _channels(count: int, wanted: int | Sequence[int]) -> list[int]:
    most = number(wanted)
    if most is None:
        return chosen(cast("Sequence[int]", wanted), count, "channels")
    if most < 1:
        raise ValueError(f"channels={wanted}: give a positive number, or a list of channels.")
    # Not the first ones: after a concatenation they are all of one branch.
    return [int(i) for i in np.linspace(0, count - 1, min(count, most)).round()]


def _aspect(picture: Maps) -> float:
    height, width = picture.array.shape
    return 2.5 if picture.flat else width / height

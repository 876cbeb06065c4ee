"""``attention``: who looks where. Heads side by side, weights on words, weights on an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from torchhook._values.images import pixels
from torchhook._values.layout import guess, over_image
from torchhook._words import counted
from torchhook.plot import style
from torchhook.plot.overlay import draw
from torchhook.plot.values import Array, Source, Value, chosen, flaws, limits, number, one

_LETTER = 0.62 / 72  # the width of a monospaced letter in inches, for each point of its size
_LINE = 2.5 / 72
_PAGE = 12  # inches
_SLIM, _FLAT = 0.6, 0.25  # the least width of a panel by its height, and the least height by its width
_WORD = "#1f2430"  # on a patch of color of its own, which is light on any background


def attention(
    source: Source,
    sites: str | None = None,
    *,
    sample: int = 0,
    heads: int | Sequence[int] | None = None,
    tokens: Sequence[str] | None = None,
    image: Any = None,
    query: int | None = None,
    grid: Sequence[int] | None = None,
    padding: bool = False,
    cmap: str = "magma",
    alpha: float = 0.65,
    title: str | None = None,
    ax: Any = None,
    fig: Any = None,
) -> Any:
    """The attention maps of one layer, head by head.

    >>> import torch
    >>> figure = attention(torch.rand(1, 3, 9, 9).softmax(-1))

    Takes what ``th.attention`` returns, with the one of its ``sites`` to show, a map (batch × heads × queries × keys),
    or a rollout (batch × queries × keys). Where there is one query, as in a step of a generation, or ``query`` chooses
    one, each head is a line. ``tokens`` names queries and keys; with ``query`` the words themselves are shaded by how
    much that query looks at them. ``image`` draws what ``query`` (the class token, unless said otherwise)
    looks at over the image; ``grid`` is that of the patches, where their number and the image do not tell it. ``heads``
    picks some heads, or one. Tokens at the ends that no query looks at are padding, and left out unless ``padding``
    keeps them.
    """
    value = one(source, sites)
    weights, labels = _chosen_heads(_weights(value, sample), heads)
    if query is not None and not -weights.shape[1] <= query < weights.shape[1]:
        raise IndexError(f"query={query}: there are {weights.shape[1]}.")
    cut = slice(None) if padding or image is not None else _real(weights)
    if tokens is not None and len(tokens) == weights.shape[2]:
        tokens = tokens[cut]
    whole, weights, query = weights.shape[2], *_cut(weights, cut, query)
    if image is not None:
        figure = _on_image(weights, labels, image, sample, query, grid, cmap, alpha, ax, fig)
    elif tokens is not None and query is not None:
        figure = _on_words(weights, labels, tokens, query, ax, fig)
    elif query is not None or weights.shape[1] == 1:
        figure = _lines(weights[:, query or 0], labels, tokens, cmap, ax, fig)
    else:
        figure = _grid(weights, labels, tokens, cmap, ax, fig)
    left = f"{weights.shape[2]} of {whole} tokens, without padding" if weights.shape[2] < whole else ""
    head = " · ".join(part for part in (value.name, left) if part) if title is None else title
    if head and ax is None:
        style.heading(figure, head)
    elif head:
        style.title(ax, head)
    return figure


def _weights(value: Value, sample: int) -> Array:
    """Heads × queries × keys of one sample."""
    tensor = value.tensor
    if tensor.dim() == 2:
        tensor = tensor[None, None]
    if tensor.dim() == 3:
        tensor = tensor[:, None]
    if tensor.dim() != 4:
        raise ValueError(f"attention maps are batch × heads × queries × keys, found shape {tuple(tensor.shape)}.")
    if not -len(tensor) <= sample < len(tensor):
        raise IndexError(f"sample={sample}: there are {len(tensor)}.")
    array: Array = tensor[sample].numpy()
    return array


def _chosen_heads(weights: Array, heads: int | Sequence[int] | None) -> tuple[Array, list[str]]:
    """The maps of some heads, and what these are called."""
    # By ``number`` and not isinstance: a head may be counted by numpy or torch.
    wanted = range(len(weights)) if heads is None else [heads] if number(heads) is not None else heads
    shown = chosen(cast("Sequence[int]", wanted), len(weights), "heads")
    return weights[shown], [f"head {h}" if len(weights) > 1 else "" for h in shown]


def _real(weights: Array) -> slice:
    """The keys from the first to the last that any query looks at."""
    known = np.nan_to_num(weights)
    # A query that may look at nothing, as padding before a text, is spread evenly over all keys, or over none.
    asks = np.ptp(known, axis=2) > 0
    looked_at = np.flatnonzero((known * asks[:, :, None]).sum((0, 1)))
    return slice(int(looked_at[0]), int(looked_at[-1]) + 1) if looked_at.size else slice(None)


def _cut(weights: Array, cut: slice, query: int | None) -> tuple[Array, int | None]:
    """The maps without what lies outside, of keys, and of queries where these are the same tokens."""
    queries, keys = weights.shape[1:]
    kept = weights[:, :, cut]
    if queries != keys or kept.shape[2] == keys:
        return kept, query
    start = cut.start or 0
    if query is not None:
        query = query % queries - start
        if not 0 <= query < kept.shape[2]:
            raise IndexError(
                f"query={query + start} is padding, which no token looks at: give padding=True to keep it."
            )
    return kept[:, cut], query


def _lines(weights: Array, labels: list[str], tokens: Sequence[str] | None, cmap: str, ax: Any, fig: Any) -> Any:
    """What one query looks at: heads × keys."""
    heads, keys = weights.shape
    _check_names(tokens, keys)
    width, height = min(max(0.22 * keys + 1.6, 4.2), _PAGE), 0.24 * heads + (0.9 if tokens is None else 1.5)
    figure = style.canvas(width, min(height, _PAGE), ax, fig)
    panel = figure.add_subplot() if ax is None else ax
    # As in a grid of heads: up to a top of each one's own, or one that looks at a single token would darken the others.
    tops = [limits(line, clip=1)[1] for line in weights]
    scaled = weights / np.array(tops)[:, None] if heads > 1 else weights
    shown = panel.imshow(np.where(np.isfinite(scaled), scaled, np.nan), cmap=style.colormap(cmap), vmin=0,
                         vmax=1 if heads > 1 else tops[0], interpolation="nearest", aspect="auto")  # fmt: skip
    style.quiet(panel)
    ink = style.palette(panel).ink
    said = [" · ".join(p for p in (label, f"to {style.number(top)}", flaws(line)) if p)
            for label, top, line in zip(labels, tops, weights, strict=True)]  # fmt: skip
    if heads > 1:
        style.names(panel, said, "y")
        panel.tick_params(axis="y", length=0, labelcolor=ink)
    else:
        style.title(panel, " · ".join(part for part in (labels[0], flaws(weights)) if part), small=True)
        panel.set_ylabel("query", fontsize=style.LABEL, color=ink)
    if tokens is not None:
        style.names(panel, list(tokens), "x", width=12)
        panel.tick_params(axis="x", rotation=90, length=0, labelcolor=ink)
    panel.set_xlabel("key", fontsize=style.LABEL, color=ink)
    if ax is None:
        style.colorbar(panel, shown, "weight", ends=("0", "top") if heads > 1 else None)
    return figure


def _check_names(tokens: Sequence[str] | None, keys: int) -> None:
    if tokens is not None and len(tokens) != keys:
        raise ValueError(f"{counted(len(tokens), 'token')} cannot name {counted(keys, 'key')}.")


def _grid(weights: Array, labels: list[str], tokens: Sequence[str] | None, cmap: str, ax: Any, fig: Any) -> Any:
    queries, keys = weights.shape[1:]
    _check_names(tokens, keys)
    # With a cache there may be few queries of many keys: cells are as high as they are wide only as far as that goes.
    shape = min(max(keys / queries, _SLIM), 1 / _FLAT)
    alone, columns = len(weights) == 1, math.ceil(math.sqrt(len(weights) / max(shape, 1)))
    # The lowest row and the first column have the labels for all; of many heads no figure grows beyond a page.
    side = 1.9 if tokens is None else max(min(0.22 * keys + 0.9, 7, _PAGE / columns), 1.9)
    side = max(side, 4) if alone else side
    if shape > 1:  # a side is that of the height then, of which there are more rows
        stretch, rows = min(shape, style.WIDEST), math.ceil(len(weights) / columns)
        side = min(max(side / stretch, 1.9), _PAGE / columns / stretch, (_PAGE / rows - 0.3) * shape / stretch)
    figure, axes = style.panels(len(weights), ax, fig, side, columns, shape, bar=True)
    for i, (panel, one_head, label) in enumerate(zip(axes, weights, labels, strict=True)):
        # Zero means the same in every head. The top is each one's own, and clipped: a first token that takes nearly all
        # would leave the rest black.
        _, high = limits(one_head, clip=1)
        # An infinity would be drawn as the largest weight; as NaN it has a color of its own.
        shown = panel.imshow(np.where(np.isfinite(one_head), one_head, np.nan), cmap=style.colormap(cmap), vmin=0,
                             vmax=high, interpolation="nearest",
                             aspect="equal" if shape == keys / queries else "auto")  # fmt: skip
        style.quiet(panel)
        top = "" if alone else f"to {style.number(high)}"
        style.title(panel, " · ".join(p for p in (label, top, flaws(one_head)) if p), small=True)
        if tokens is not None:
            if i >= len(weights) - columns:
                style.names(panel, list(tokens), "x", width=12)
                panel.tick_params(axis="x", rotation=90, length=0, labelcolor=style.palette(panel).ink)
            # With a cache there are fewer queries than keys, and tokens name the keys.
            if i % columns == 0 and queries == keys:
                style.names(panel, list(tokens), "y", width=12)
                panel.tick_params(axis="y", length=0, labelcolor=style.palette(panel).ink)
        if alone and ax is None:
            style.colorbar(panel, shown, "weight")
        if i >= len(weights) - columns:
            panel.set_xlabel("key", fontsize=style.LABEL, color=style.palette(panel).ink)
        if i % columns == 0:
            panel.set_ylabel("query", fontsize=style.LABEL, color=style.palette(panel).ink)
    if not alone and ax is None:
        # One bar for all: the same colors, each head's up to a number of its own, which stands above it.
        style.colorbar(axes[0], style.scale(0, 1, cmap), "weight", over=axes, ends=("0", "top"))
    return figure


def _on_words(weights: Array, labels: list[str], tokens: Sequence[str], query: int, ax: Any, fig: Any) -> Any:
    keys = weights.shape[2]
    _check_names(tokens, keys)
    words = [style.elide(token, 18) for token in tokens]
    figure, axes = style.panels(len(weights), ax, fig, columns=1)
    letters: float = style.LABEL
    if ax is None and fig is None:
        width, lines = 7.6, _wrapped(words, 7.6 / (_LETTER * letters) - 3)
        figure.set_size_inches(width, (_LINE * letters * len(lines) + 0.34) * len(weights) + 0.5)
        # Panels are compressed, which is for pictures of fixed proportions; text has none.
        figure.set_layout_engine("constrained")
    else:
        width, height = style.size(axes[0])
        lines = _wrapped(words, width / (_LETTER * letters) - 3)
        # The user's axes stays as it is: the letters give way, to a size that can still be told to be text.
        while _LINE * letters * len(lines) > height and letters > 3:
            letters -= 0.5
            lines = _wrapped(words, width / (_LETTER * letters) - 3)
    room = width / (_LETTER * letters)
    cmap = style.colormap("Oranges")
    for panel, one_head, label in zip(axes, weights, labels, strict=True):
        row = np.nan_to_num(one_head[query])
        # A row without any weight, of a query that is masked out, is no reason to divide by zero.
        top = float(row.max()) or 1.0
        panel.set_xlim(0, room)
        panel.set_ylim(len(lines), 0)
        panel.set_axis_off()
        ink = style.palette(panel).ink
        if label:
            panel.set_title(label, fontsize=style.SMALL, color=style.palette(panel).soft, loc="left", pad=2)
        for i, line in enumerate(lines):
            for index, start in line:
                # Only where queries are the tokens themselves is one of these words the one that asks.
                asked = index == query % weights.shape[1] and weights.shape[1] == keys
                strength = float(row[index]) / top
                panel.text(start, i + 0.5, words[index], fontsize=letters, family="monospace", va="center",
                           color="white" if strength > 0.7 else _WORD, fontweight="bold" if asked else "normal",
                           bbox={"boxstyle": "round,pad=0.25", "facecolor": cmap(0.85 * strength),
                                 "edgecolor": ink if asked else "none", "linewidth": 1.0})  # fmt: skip
    return figure


def _wrapped(words: Sequence[str], width: float) -> list[list[tuple[int, float]]]:
    """Lines of words, each with its index and where it starts."""
    lines: list[list[tuple[int, float]]] = [[]]
    at = 1.0
    for i, word in enumerate(words):
        if at + len(word) > width and lines[-1]:
            lines.append([])
            at = 1.0
        lines[-1].append((i, at))
        # One letter between words, and the padding of two boxes.
        at += len(word) + 1.8
    return lines


def _on_image(
    weights: Array,
    labels: list[str],
    image: Any,
    sample: int,
    query: int | None,
    grid: Sequence[int] | None,
    cmap: str,
    alpha: float,
    ax: Any,
    fig: Any,
) -> Any:
    keys = weights.shape[2]
    # One image stands for any sample.
    pictures = pixels(image)
    picture = pictures[sample if len(pictures) > 1 else 0]
    high, wide = picture.shape[:2]
    layout = over_image(keys, (high, wide)) if grid is None else guess((1, keys, 1), "tokens", grid)
    if layout is None:
        raise ValueError(
            f"image: {keys} tokens lie on no even grid over an image of {high}×{wide}. Give tokens=[…] instead if they "
            "are words, or grid=(rows, columns) if they are parts of the image."
        )
    # Without a class token nobody asks for all: what every query looks at, on average.
    rows = weights[:, query] if query is not None else weights[:, 0] if layout.prefix else weights.mean(1)
    side = 3.4 if len(weights) == 1 else 1.9
    figure, axes = style.panels(len(weights), ax, fig, side, titles=any(labels), bar=True)
    for panel, row, label in zip(axes, rows, labels, strict=True):
        heat = row[layout.prefix :].reshape(layout.grid)
        # Clipped a little, as in a grid of heads: one patch that takes nearly all would leave the others dark.
        colors = draw(panel, picture, heat, alpha, cmap, clip=0.5)
        low, high = colors.get_clim()
        span = f"{style.number(low)} to {style.number(high)}" if len(weights) > 1 else ""
        style.title(panel, " · ".join(part for part in (label, span) if part), small=True)
    if ax is None and len(weights) == 1:
        style.colorbar(axes[0], colors, "weight", beyond="max" if limits(heat, 0)[1] > high else "neither")
    elif ax is None:
        style.colorbar(axes[0], style.scale(0, 1, cmap), "weight", over=axes, ends=("low", "top"))
    return figure

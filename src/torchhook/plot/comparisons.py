"""``diff`` and ``sweep``: the pictures of what ``th.diff`` and ``th.sweep`` return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torchhook._recording.differences import Diff, agreement
from torchhook._recording.sweeps import Sweep
from torchhook._words import counted, plural
from torchhook.errors import require
from torchhook.plot import style
from torchhook.plot.values import limits


def _color(colors: style.Palette, status: str) -> str:
    return {"same": colors.blue, "differs": colors.red}.get(status, colors.amber)


def diff(difference: Diff, *, title: str | None = None, ax: Any = None, fig: Any = None) -> Any:
    """The relative error of every site on a logarithmic scale, with the place where the two first part.

    >>> import torch
    >>> from torchhook._recording.differences import Row
    >>> figure = diff(Diff([Row("a", "a", "same", 0.0, 0.0, 1.0), Row("b", "b", "differs", 1.0, 0.5, 0.2)]))
    """
    rows = list(difference)
    if not rows:
        raise ValueError("the diff is empty: there is nothing to draw.")
    figure, ax = style.single(min(max(0.16 * len(rows) + 2.2, 5.6), 14), 3.9, ax, fig)
    errors = [row.relative for row in rows]
    positive = [e for e in errors if math.isfinite(e) and e > 0]
    # A logarithmic axis has no zero: what is bit for bit the same stands on the floor, hollow.
    floor = 10 ** (math.floor(math.log10(min(positive, default=1e-8))) - 1)
    ceiling = 10 ** math.ceil(math.log10(max(positive, default=1.0)) + 0.3)
    colors = style.palette(ax)
    for i, row in enumerate(rows):
        color = _color(colors, row.status)
        if math.isfinite(row.relative):
            height = min(max(row.relative, floor), ceiling)
            ax.plot([i, i], [floor, height], color=color, linewidth=1.6, alpha=0.45, solid_capstyle="butt")
            ax.plot(
                i, height, "o", color=color, markersize=4, markerfacecolor=colors.paper if row.relative == 0 else color
            )
        else:
            ax.plot(i, ceiling, "x", color=color, markersize=6, markeredgewidth=1.6, clip_on=False)
    ax.set_yscale("log")
    ax.set_ylim(floor / 1.5, ceiling * 1.5)
    style.chart(ax, y="relative error")
    ax.set_xlim(-0.7, len(rows) - 0.3)
    style.names(ax, [row.site or "(model)" for row in rows])
    first = difference.first
    if first is not None:
        place = next(i for i, row in enumerate(rows) if row is first)
        right = place < len(rows) * 0.6
        ax.axvline(place, color=colors.ink, linewidth=0.8, linestyle=(0, (4, 3)))
        label = f"first: {style.elide(first.site or '(model)', 48)}"
        ax.annotate(label, (place, 1), xycoords=("data", "axes fraction"),
                    xytext=(5 if right else -5, -2), textcoords="offset points", ha="left" if right else "right",
                    va="top", fontsize=style.SMALL, color=colors.ink)  # fmt: skip
    wrong = sum(not row.ok for row in rows)
    verdict = agreement(rows) if first is None else f"{wrong} of {counted(len(rows), 'site')} differ"
    head = f"{difference.title or 'Diff'}: {verdict}" if title is None else title
    _legend(ax, {row.status for row in rows if row.relative != 0}, any(row.relative == 0 for row in rows), head)
    style.title(ax, head)
    return figure


def _legend(ax: Any, statuses: set[str], exact: bool, beside: str) -> None:
    lines, colors = require("matplotlib.lines", "viz"), style.palette(ax)
    entries = [(status, _color(colors, status), "o") for status in sorted(statuses & {"same", "differs"}, reverse=True)]
    if others := sorted(statuses - {"same", "differs"}):
        entries.append((", ".join(others), colors.amber, "x"))
    # Made by hand: every site is a line of its own, and would be an entry of its own.
    handles = [lines.Line2D([], [], color=c, marker=m, linestyle="", markersize=4.5, label=s) for s, c, m in entries]
    if exact:
        handles.append(lines.Line2D([], [], color=colors.blue, marker="o", linestyle="", markersize=4.5,
                                    markerfacecolor=colors.paper, label="bit for bit"))  # fmt: skip
    style.legend(ax, handles, beside)


def sweep(
    result: Sweep,
    *,
    tokens: Sequence[str] | None = None,
    corrupted_tokens: Sequence[str] | None = None,
    normalized: bool = True,
    title: str | None = None,
    ax: Any = None,
    fig: Any = None,
) -> Any:
    """What each patch does, as a heat map of sites by positions: white changes nothing, blue brings the clean run back.

    ``tokens`` names the positions; with ``corrupted_tokens``, those of the other prompt, both stand where they differ.
    ``normalized=False`` shows the metric itself, and so does a sweep whose metric is the same for both inputs. A site
    that has no such position is left gray.
    """
    # Where corruption changed nothing, there is no share of it to bring back.
    share = normalized and result.clean != result.corrupted
    # numpy has no bfloat16.
    shown = (result.normalized if share else result.values).detach().cpu().double().numpy()
    columns = shown.shape[1]
    labels = ["whole"] if result.positions is None else [str(position) for position in result.positions]
    if tokens is not None:
        if (
            result.positions is None
            or result.over != "position"
            or not all(-len(tokens) <= p < len(tokens) for p in result.positions)
        ):
            raise ValueError(f"{counted(len(tokens), 'token')} cannot name {counted(columns, result.over)}.")
        labels = _named(tokens, corrupted_tokens, result.positions or [])
    elif corrupted_tokens is not None:
        raise ValueError("corrupted_tokens= names what differs from tokens=: give both.")
    width, height = min(max(0.3 * columns + 3, 4.6), 14), min(max(0.22 * len(result.sites) + 1.5, 2.6), 13)
    figure, ax = style.single(width, height, ax, fig)
    low, high = limits(shown, clip=0.5, center=share)
    # Noise must look faint: the colors reach at least from -1 to 1, however little the patches did.
    if share:
        low, high = min(low, -1.0), max(high, 1.0)
    # No flaw here, as NaN is elsewhere: the site has no such position.
    cmap = style.colormap("RdBu" if share else "viridis").with_extremes(bad=style.palette(ax).faint)
    image = ax.imshow(shown, cmap=cmap, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    style.chart(ax, result.over, grid=None)
    ax.spines[:].set_visible(False)
    style.names(ax, labels, "x", width=14)
    style.names(ax, [site or "(model)" for site in result.sites], "y")
    style.colorbar(ax, image, "0 corrupted, 1 clean" if share else "metric")
    if title is None:
        sites = f"Patching {len(result.sites)} {plural(len(result.sites), 'site')}"
        # Always in two lines: names of sites take what room they need, and one line ended anywhere between its numbers.
        title = f"{sites}\nclean {result.clean:.4g}, corrupted {result.corrupted:.4g}"
        if normalized and not share:
            title = f"{sites}: nothing to bring back\nclean and corrupted are both {result.clean:.4g}"
    style.title(ax, title)
    return figure


def _named(tokens: Sequence[str], others: Sequence[str] | None, positions: list[int]) -> list[str]:
    """The token at each position; both, where two prompts differ."""
    if others is None:
        return [tokens[p] for p in positions]
    if len(others) != len(tokens):
        raise ValueError(f"corrupted tokens: {len(others)}, clean ones: {len(tokens)}. Give as many of both.")
    return [tokens[p] if tokens[p] == others[p] else f"{tokens[p]} / {others[p]}" for p in positions]

"""How pictures look: sizes, colors, type, color bars, labels. Set on the artists themselves, never in rcParams."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from torchhook.errors import require

Axes: TypeAlias = Any
Figure: TypeAlias = Any


class Palette(NamedTuple):
    """The colors of text and lines on one kind of background."""

    ink: str
    soft: str
    faint: str
    blue: str
    amber: str
    red: str
    paper: str


_LIGHT = Palette("#1f2430", "#6b7280", "#e5e7eb", "#3457b1", "#d08a1d", "#c8372d", "#ffffff")
_DARK = Palette("#e8eaf0", "#9aa3b2", "#3a4150", "#7d9cf0", "#e3ab4f", "#f07167", "#0f1117")
BAD = "#f3c9c5"  # NaN: no colormap has it
TITLE, LABEL, SMALL = 11, 9, 7.5
WIDEST = 2.5
_MOST_LABELS = 64


def palette(where: Axes | Figure) -> Palette:
    """The colors that can be read where an axes or figure is: a user's own may be dark."""
    matplotlib = require("matplotlib", "viz")
    # What is transparent shows what is behind it.
    behind = [where.figure, where.figure.figure, *([where] if hasattr(where, "get_xlim") else [])]
    faces = [matplotlib.colors.to_rgba(part.get_facecolor()) for part in behind]
    red, green, blue, _ = next((face for face in faces if face[3] >= 0.5), (1, 1, 1, 1))
    return _DARK if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else _LIGHT


def canvas(
    width: float,
    height: float,
    ax: Axes | None = None,
    fig: Figure | None = None,
    layout: Literal["constrained", "compressed"] = "constrained",
) -> Figure:
    """The figure to draw in: the one given, or a new one."""
    require("matplotlib", "viz")
    if ax is not None and fig is not None:
        raise TypeError("give ax= or fig=, not both.")
    if ax is not None:
        return ax.figure
    if fig is not None:
        # An empty one that nobody said how to lay out: with fixed margins, the names of layers are cut off.
        if hasattr(fig, "set_layout_engine") and fig.get_layout_engine() is None and not fig.axes:
            fig.set_layout_engine(layout)
        return fig
    # Not above: the class derives from matplotlib's, which is loaded when the first picture is drawn.
    from torchhook.plot.picture import Picture

    return Picture(width, height, layout)


def single(width: float, height: float, ax: Axes | None, fig: Figure | None) -> tuple[Figure, Axes]:
    """A figure and one axes in it."""
    figure = canvas(width, height, ax, fig)
    return figure, figure.add_subplot() if ax is None else ax


def panels(
    count: int,
    ax: Axes | None,
    fig: Figure | None,
    side: float = 1.5,
    columns: int | None = None,
    shape: float = 1.0,
    *,
    head: bool = True,
    titles: bool = True,
    bar: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure and ``count`` equal axes in a grid, set into ``ax`` if given; ``shape`` is their width by height.

    There is room for a heading, for a title above each panel and for a color bar, where they are asked for.
    """
    columns = min(count, columns or columns_for(count))
    rows = math.ceil(count / columns)
    wide, high = (side * min(shape, WIDEST), side * min(shape, WIDEST) / shape) if shape > 1 else (side * shape, side)
    # Inches, for a figure of our own: a little air around each panel, and a line each for title and heading.
    width, height = columns * (wide + 0.1) + 0.55 * bar, rows * (high + (0.26 if titles else 0.1)) + 0.32 * head
    figure = canvas(max(width, 2.2), height, ax, fig, "compressed")
    if ax is None:
        grid = figure.add_gridspec(rows, columns)
        return figure, [figure.add_subplot(grid[i // columns, i % columns]) for i in range(count)]
    # Insets, in an axes that is the user's: a grid in the figure would lie over its other axes.
    ax.set_axis_off()
    width, height = 1 / columns, 1 / rows
    gap = 0.08 if count > 1 else 0.0
    return figure, [
        ax.inset_axes(
            (
                i % columns * width + gap * width / 2,
                1 - (i // columns + 1) * height,
                width * (1 - gap),
                height * (1 - gap),
            )
        )
        for i in range(count)
    ]


def columns_for(count: int) -> int:
    """How many panels go side by side."""
    if count <= 4:
        return count
    # Full rows first, 4 × 4 and not 5 + 5 + 5 + 1; then more wide than high, as screens and pages of text are.
    best = math.sqrt(count * 1.4)
    some = range(min(math.ceil(math.sqrt(count)), 10), min(math.ceil(math.sqrt(count * 2.5)), 10) + 1)
    return min(some, key=lambda columns: (-count % columns, abs(columns - best)))


def colormap(name: str) -> Any:
    """A colormap that shows NaN in a color of its own."""
    return require("matplotlib", "viz").colormaps[name].with_extremes(bad=BAD)


def title(ax: Axes, text: str, small: bool = False) -> None:
    """The title of a chart; a small one, of one panel of several, or of a picture that may be one of several."""
    # Laid out, a chart is a little wider.
    text = text if small else _wrapped(text, 1.15 * size(ax)[0])
    ax.set_title(
        text, fontsize=SMALL if small else TITLE, color=palette(ax).ink, loc="left" if not small else "center", pad=4
    )


def heading(figure: Figure, text: str) -> None:
    """A title above all panels of a figure."""
    figure.suptitle(_wrapped(text, figure.get_size_inches()[0]), fontsize=TITLE, color=palette(figure).ink)


def _wrapped(text: str, width: float) -> str:
    """A title in as many lines as it needs at its size, which is the same in every picture."""
    letters = max(int(width / (0.56 * TITLE / 72)), 12)
    return "\n".join(line for part in text.split("\n") for line in textwrap.wrap(part, letters) or [""])


def quiet(ax: Axes) -> None:
    """An axes for a picture: no ticks, a hairline around."""
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set(color=palette(ax).faint, linewidth=0.6)


def chart(ax: Axes, x: str = "", y: str = "", grid: str | None = "y") -> None:
    """An axes for a chart: two spines, a faint grid behind."""
    colors = palette(ax)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set(color=colors.soft, linewidth=0.7)
    ax.tick_params(which="both", labelsize=SMALL, colors=colors.soft, labelcolor=colors.ink, width=0.7, length=3)
    ax.tick_params(which="minor", length=1.5)
    # The default draws the grid over bars.
    ax.set_axisbelow(True)
    if grid is not None:
        ax.grid(axis=grid, color=colors.faint, linewidth=0.7)
    ax.set_xlabel(x, fontsize=LABEL, color=colors.ink)
    ax.set_ylabel(y, fontsize=LABEL, color=colors.ink)


def scale(low: float, high: float, cmap: str) -> Any:
    """What a color bar shows: colors and their numbers, without a picture of its own."""
    matplotlib = require("matplotlib", "viz")
    return matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(low, high), colormap(cmap))


def colorbar(
    ax: Axes,
    mappable: Any,
    label: str = "",
    over: Sequence[Axes] | None = None,
    ends: tuple[str, str] | None = None,
    beyond: Literal["neither", "max", "min", "both"] = "neither",
) -> None:
    """A thin color bar beside an axes, or beside all panels; ``ends`` are words where it has no numbers.

    ``beyond`` points at the ends that values lie outside of.
    """
    # The aspect is height by width: a bar along three rows would be three times as thick.
    rows = 1 if over is None else len({round(a.get_position().y0, 3) for a in over})
    bar = ax.figure.colorbar(
        mappable, ax=ax if over is None else list(over), fraction=0.05, pad=0.02, aspect=22 * rows, extend=beyond
    )
    bar.outline.set_visible(False)
    colors = palette(ax)
    bar.ax.tick_params(labelsize=SMALL, colors=colors.soft, labelcolor=colors.ink, width=0.7, length=2)
    bar.set_label(label, fontsize=LABEL, color=colors.ink)
    low, high = mappable.get_clim()
    # The ends, which tell what the colors reach to, and what of the usual ticks does not run into them.
    inner = [tick for tick in bar.get_ticks() if low + 0.08 * (high - low) < tick < high - 0.08 * (high - low)]
    ticks, labels = [low, *inner, high], [number(tick) for tick in (low, *inner, high)]
    bar.set_ticks([low, high] if ends else ticks, labels=list(ends or labels))
    bar.ax.minorticks_off()


def elide(name: str, width: int = 28) -> str:
    """A name that fits: components shrink to a letter and their number, from the left, before anything is left out.

    >>> elide("vit.encoder.layer.11.attention.attention.query")
    'v.e.l.11.a.attention.query'
    """
    parts = name.split(".")
    for i in range(len(parts) - 1):
        if len(".".join(parts)) <= width:
            break
        letters = parts[i].lstrip("_")
        digits = "".join(c for c in letters if c.isdigit())
        parts[i] = digits if letters[:1].isdigit() else letters[:1] + digits
    short = ".".join(parts)
    if len(short) <= width:
        return short
    half = max((width - 1) // 2, 1)
    return f"{short[: max(width - 1 - half, 1)]}…{short[-half:]}"


def size(ax: Axes) -> tuple[float, float]:
    """Width and height of an axes in inches, as far as they are known before the figure is laid out."""
    locator = ax.get_axes_locator()
    if locator is not None:  # an inset has no place of its own until it is asked for
        ax.apply_aspect(locator(ax, None))
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi


def caption(ax: Axes, name: str, note: str = "") -> str:
    """A small title that is no wider than its panel."""
    # An estimate, here and below: a letter is about half as wide as its size in points, of which 72 are an inch. To
    # measure it, the figure would have to be drawn.
    letters = int(size(ax)[0] / (0.55 * SMALL / 72))
    return " · ".join(part for part in (elide(name, max(letters - len(note), 5)), note) if part)


def names(
    ax: Axes, labels: Sequence[str], axis: str = "x", width: int = 28, places: Sequence[float] | None = None
) -> None:
    """Label the places of an axis (0, 1, 2, …), leaving labels out evenly where there are more than fit."""
    places = range(len(labels)) if places is None else places
    letters = SMALL if len(labels) <= 40 else SMALL - 1.5
    room = max(int(size(ax)[0 if axis == "x" else 1] / (1.3 * letters / 72)), 2)
    step = math.ceil(len(labels) / min(room, _MOST_LABELS))
    ticks = list(range(0, len(labels), step))
    shown = [elide(labels[i], width) for i in ticks]
    if axis == "x":
        # By the longest, since all have the same room.
        upright = (max(map(len, shown), default=0) + 1) * len(shown) * 0.6 * letters / 72 <= size(ax)[0]
        ax.set_xticks([places[i] for i in ticks], shown, rotation=0 if upright else 90, fontsize=letters)
    else:
        ax.set_yticks([places[i] for i in ticks], shown, fontsize=letters)


def legend(ax: Axes, handles: Sequence[Any] | None = None, beside: str = "") -> None:
    """A legend above the right end of a chart, where there is room for it beside the title; else inside."""
    options: dict[str, Any] = {} if handles is None else {"handles": handles}
    labels = ax.get_legend_handles_labels()[1] if handles is None else [handle.get_label() for handle in handles]
    # Letters of the legend, with its handles and gaps, and those of the title. Laid out, the chart is a little wider.
    wide = sum(0.55 * len(label) + 3.2 for label in labels) * SMALL / 72 + 0.6 * len(beside) * TITLE / 72
    if size(ax)[0] >= max(4.2, wide / 1.15):
        options |= {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 4, "borderaxespad": 0.1, "frameon": False}
    else:
        options |= {
            "loc": "best",
            "frameon": True,
            "framealpha": 0.8,
            "edgecolor": "none",
            "facecolor": palette(ax).paper,
        }
    ax.legend(fontsize=SMALL, labelcolor=palette(ax).ink, handlelength=1.2, columnspacing=1.2, **options)


def number(value: float) -> str:
    """A number in three digits.

    >>> number(0.00012345), number(12.0)
    ('1.23e-04', '12')
    """
    if value == 0 or not math.isfinite(value) or 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1e3 else f"{value:.0f}"
    return f"{value:.2e}"

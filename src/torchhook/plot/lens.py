"""``lens``: the picture of what ``th.lens`` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchhook._recording.lenses import Lens
from torchhook._words import counted
from torchhook.plot import style


def lens(
    result: Lens,
    *,
    sample: int = 0,
    tokens: Sequence[str] | None = None,
    positions: Sequence[int] | None = None,
    title: str | None = None,
    ax: Any = None,
    fig: Any = None,
) -> Any:
    """The token on top at each site and position, colored by its probability; the last site is above.

    >>> import torch
    >>> figure = lens(Lens(["@resid_post.0", "@resid_post.1"], lambda site: torch.randn(1, 3, 9), top=1))

    ``sample`` is the row of the batch, ``positions`` those to show (all, unless said otherwise), ``tokens`` the input's
    own tokens, which name the columns.
    """
    rows, count = result.tokens.shape[1:3]
    if not -rows <= sample < rows:
        raise ValueError(f"sample={sample}: the lens has {counted(rows, 'row')}.")
    if outside := [p for p in positions or () if not -count <= p < count]:
        raise ValueError(f"positions {outside} are out of range: the lens has {counted(count, 'position')}.")
    shown = list(range(count)) if positions is None else [range(count)[p] for p in positions]
    if tokens is not None and len(tokens) != count:
        raise ValueError(f"{counted(len(tokens), 'token')} cannot name {counted(count, 'position')}.")
    sites = list(range(len(result.sites)))[::-1]
    values = result.probabilities[sites][:, sample, shown, 0].double().numpy()
    words = [[_word(result.name(int(result.tokens[i, sample, p, 0]))) for p in shown] for i in sites]
    width, height = min(max(0.75 * len(shown) + 2.4, 4.6), 16), min(max(0.3 * len(sites) + 1.5, 2.6), 13)
    figure, ax = style.single(width, height, ax, fig)
    cmap = style.colormap("Blues")
    image = ax.imshow(values, cmap=cmap, vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
    style.chart(ax, "position", grid=None)
    ax.spines[:].set_visible(False)
    style.names(ax, [str(p) if tokens is None else tokens[p] for p in shown], "x", width=12)
    style.names(ax, [result.sites[i] for i in sites], "y")
    style.colorbar(ax, image, "probability")
    room = 0.9 * 72 * style.size(ax)[0] / max(len(shown), 1)
    for y, line in enumerate(words):
        for x, word in enumerate(line):
            # White on dark, and only what fits its cell.
            text = _fitting(word, room / 4.2)
            ax.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if values[y, x] > 0.5 else "black")
    style.title(ax, title or f"Lens: the token on top at {counted(len(sites), 'site')} of the stream")
    return figure


def _word(text: str) -> str:
    """A token in one line; a dollar sign would begin a formula."""
    return text.replace("\n", "↵").replace("$", r"\$").strip(" ") or "␣"


def _fitting(word: str, characters: float) -> str:
    room = max(int(characters), 1)
    return word if len(word) <= room else word[: room - 1] + "…"

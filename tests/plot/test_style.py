"""What holds for every picture: whose figure it is, what is left alone, what fits."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchhook import plot
from torchhook._recording.differences import Diff, Row
from torchhook._recording.sweeps import Sweep
from torchhook.errors import MissingExtraError
from torchhook.plot import style

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("matplotlib.style")  # which importing matplotlib alone does not bring
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

LAYERS = {f"encoder.layers.encoder_layer_{i}.self_attention.out_proj": torch.randn(50) for i in range(60)}
ROWS = [Row(name, name, "same" if i < 30 else "differs", 1e-3, 1e-7 * (i + 1), 1.0) for i, name in enumerate(LAYERS)]
TOKENS = [f"token{i}" for i in range(60)]

PICTURES: dict[str, Callable[..., Any]] = {
    "feature_maps": lambda **o: plot.feature_maps(torch.rand(1, 6, 8, 8), **o),
    "feature_maps of layers": lambda **o: plot.feature_maps(LAYERS, **o),
    "histogram": lambda **o: plot.histogram(torch.randn(100), **o),
    "histogram of layers": lambda **o: plot.histogram(LAYERS, **o),
    "statistics": lambda **o: plot.statistics(LAYERS, **o),
    "gradient_flow": lambda **o: plot.gradient_flow(LAYERS, **o),
    "attention": lambda **o: plot.attention(torch.rand(1, 4, 9, 9).softmax(-1), **o),
    "attention on words": lambda **o: plot.attention(torch.rand(1, 2, 60, 60), tokens=TOKENS, query=3, **o),
    "attention with words": lambda **o: plot.attention(torch.rand(1, 2, 60, 60), tokens=TOKENS, **o),
    "attention on an image": lambda **o: plot.attention(torch.rand(1, 3, 50, 50), image=torch.rand(1, 3, 32, 32), **o),
    "diff": lambda **o: plot.diff(Diff(ROWS, "Diff"), **o),
    "sweep": lambda **o: plot.sweep(Sweep(torch.rand(60, 60), list(LAYERS), list(range(60)), 1.0, 0.0), **o),
    "overlay": lambda **o: plot.overlay(torch.rand(2, 3, 16, 16), torch.rand(2, 4, 4), **o),
}


@pytest.fixture(params=PICTURES)
def picture(request: pytest.FixtureRequest) -> Callable[..., Any]:
    torch.manual_seed(0)
    return PICTURES[request.param]


def test_a_figure_is_returned_that_pyplot_does_not_know(picture: Callable[..., Any]) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    settings = dict(matplotlib.rcParams)
    figure = picture()
    figure.canvas.draw()
    assert isinstance(figure, Figure)
    assert pyplot.get_fignums() == []
    assert dict(matplotlib.rcParams) == settings


def test_a_given_figure_or_axes_is_drawn_in(picture: Callable[..., Any]) -> None:
    mine = Figure(figsize=(8, 8))
    assert picture(fig=mine) is mine
    assert mine.axes
    other = Figure(figsize=(8, 8))
    ax = other.add_subplot(1, 2, 1)
    assert picture(ax=ax) is other
    other.canvas.draw()
    with pytest.raises(TypeError, match="not both"):
        picture(ax=ax, fig=other)


@pytest.mark.parametrize("where", ["own", "small axes"])
def test_labels_do_not_overlap(picture: Callable[..., Any], where: str) -> None:
    figure = picture() if where == "own" else picture(ax=Figure(figsize=(4, 3)).add_subplot())
    figure.canvas.draw()
    for ax in [*figure.axes, *(inset for parent in figure.axes for inset in parent.child_axes)]:
        for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
            boxes = [label.get_window_extent() for label in labels if label.get_text() and label.get_visible()]
            for before, after in itertools.pairwise(boxes):
                across = min(before.x1, after.x1) - max(before.x0, after.x0)
                down = min(before.y1, after.y1) - max(before.y0, after.y0)
                assert min(across, down) <= 1.0


def test_everything_is_inside_the_figure(picture: Callable[..., Any]) -> None:
    figure = picture()
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    for ax in figure.axes:
        box = ax.get_tightbbox()
        assert box is None or (box.x0 >= -2 and box.y0 >= -2 and box.x1 <= width + 2 and box.y1 <= height + 2)


def test_a_notebook_shows_the_figure() -> None:
    assert plot.histogram(torch.randn(10))._repr_png_().startswith(b"\x89PNG")


def test_long_names_stay_different_when_they_are_shortened() -> None:
    assert style.elide("short") == "short"
    assert style.elide("_blocks.12._depthwise_conv.static_padding") == "b.12.d.static_padding"
    assert len({style.elide(name) for name in LAYERS}) == len(LAYERS)
    assert all(len(style.elide(name)) <= 28 for name in LAYERS)
    assert len(style.elide("x" * 99, 20)) == 20


def test_of_too_many_labels_some_are_left_out_evenly() -> None:
    ax = Figure().add_subplot()
    style.names(ax, [str(i) for i in range(1000)])
    assert len(ax.get_xticks()) <= 64
    assert len({b - a for a, b in itertools.pairwise(ax.get_xticks())}) == 1


def test_matplotlib_is_not_loaded_before_the_first_picture() -> None:
    code = "import sys, torchhook, torchhook.plot, torchhook._cam.api; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install matplotlib pillow \(torchhook"):
        plot.histogram(torch.randn(10))


def test_a_long_title_takes_two_lines_and_keeps_its_size() -> None:
    short, long = plot.histogram(torch.randn(9), title="short"), plot.histogram(torch.randn(9), title="a word " * 20)
    titles = [
        next(t for t in figure.axes[0].get_children() if t is figure.axes[0]._left_title) for figure in (short, long)
    ]
    assert titles[0].get_fontsize() == titles[1].get_fontsize()
    assert "\n" in titles[1].get_text()
    long.canvas.draw()
    assert titles[1].get_window_extent().x1 <= long.bbox.x1
    one, two = (plot.overlay(torch.rand(n, 3, 8, 8), torch.rand(n, 4, 4), titles=["a"] * n) for n in (1, 2))
    assert one.axes[0].title.get_fontsize() == two.axes[0].title.get_fontsize()


# -- dark and light ------------------------------------------------------------------------------------


def _brightness(color: Any) -> float:
    red, green, blue, _ = matplotlib.colors.to_rgba(color)
    return 0.3 * red + 0.59 * green + 0.11 * blue


def _letters(figure: Any) -> list[Any]:
    """What is written outside of the axes: titles and labels of axes and ticks."""
    figure.canvas.draw()
    found = [t for ax in figure.axes for t in (ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label)]
    found += [t for ax in figure.axes for at, axis in enumerate((ax.xaxis, ax.yaxis)) for t in _tick_labels(axis, at)]
    return [t for t in found if t.get_text() and t.get_visible()]


def _tick_labels(axis: Any, at: int) -> list[Any]:
    """Those that are drawn: a logarithmic axis also has some beyond its ends, more or less by matplotlib's version."""
    low, high = sorted(axis.get_view_interval())
    inside = [t for t in axis.get_ticklabels() if low <= t.get_position()[at] <= high]
    assert inside or not axis.get_ticklabels()
    return inside


VALUE = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(0))
DRAWN: dict[str, Callable[..., Any]] = {
    "feature_maps": lambda **k: plot.feature_maps({"a": VALUE}, **k),
    "histogram": lambda **k: plot.histogram({"a": VALUE}, **k),
    "ridges": lambda **k: plot.histogram({"a": VALUE, "b": VALUE}, **k),
    "statistics": lambda **k: plot.statistics({"a": VALUE, "b": VALUE}, **k),
    "gradient_flow": lambda **k: plot.gradient_flow({"a": VALUE, "b": VALUE * 0}, **k),
    "attention": lambda **k: plot.attention(VALUE.softmax(-1), tokens=list("abcdefghi"), **k),
    "overlay": lambda **k: plot.overlay(torch.rand(1, 3, 9, 9), VALUE[0, :1], titles=["a"], **k),
    "diff": lambda **k: plot.diff(
        Diff([Row("a", "a", "same", 0.0, 0.0, 1.0), Row("b", "b", "differs", 1.0, 0.5, 0.2)]), **k
    ),
}


@pytest.mark.parametrize("theirs", [True, False], ids=["the user's figure", "a figure of our own"])
@pytest.mark.parametrize("look", ["dark_background", "default"])
@pytest.mark.parametrize("name", DRAWN)
def test_letters_can_be_read_on_what_is_behind_them(name: str, look: str, theirs: bool) -> None:
    with matplotlib.style.context(look):
        given = {"fig": matplotlib.figure.Figure(figsize=(7, 5))} if theirs else {}
        figure = DRAWN[name](**given)
        letters = _letters(figure)
    behind = _brightness(figure.get_facecolor())
    assert (behind < 0.2) == (look == "dark_background")
    assert letters
    assert [t.get_text() for t in letters if abs(_brightness(t.get_color()) - behind) < 0.35] == []
    # A chart's own face does not differ from that of its figure either.
    assert {_brightness(ax.get_facecolor()) for ax in figure.axes} == {behind}


@pytest.mark.parametrize("name", ["sweep", "diff", "statistics", "histogram of layers"])
def test_in_an_empty_figure_of_the_user_nothing_is_cut_off(name: str) -> None:
    figure = Figure(figsize=(7, 5))
    PICTURES[name](fig=figure)
    FigureCanvasAgg(figure).draw()  # of the others, none lays out
    whole = figure.bbox
    for letters in _letters(figure):
        box = letters.get_window_extent()
        assert box.x0 >= whole.x0 - 1, letters
        assert box.y0 >= whole.y0 - 1, letters


def test_a_figure_that_is_laid_out_already_stays_so() -> None:
    figure = Figure(figsize=(7, 5), layout="tight")
    plot.histogram(VALUE, fig=figure)
    assert type(figure.get_layout_engine()).__name__ == "TightLayoutEngine"
    figure = Figure(figsize=(7, 5))
    figure.add_subplot(1, 2, 1)
    plot.histogram(VALUE, fig=figure)
    assert figure.get_layout_engine() is None


def test_a_transparent_figure_is_taken_for_what_its_axes_are() -> None:
    figure = matplotlib.figure.Figure(facecolor="none")
    ax = figure.add_subplot(facecolor="black")
    assert _brightness(style.palette(ax).ink) > 0.5
    assert _brightness(style.palette(figure).ink) < 0.5


def test_a_figure_of_our_own_is_never_transparent() -> None:
    with matplotlib.rc_context({"figure.facecolor": "none"}):
        assert plot.histogram(VALUE).get_facecolor() == (1, 1, 1, 1)

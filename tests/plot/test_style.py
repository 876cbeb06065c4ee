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

"""Statistics and gradients over depth."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchhook as th
from torchhook.plot import gradient_flow, histogram, statistics, style

pytest.importorskip("matplotlib")


def labels(ax: object) -> list[str]:
    return [label.get_text() for label in ax.get_xticklabels()]  # type: ignore[attr-defined]


def test_statistics_show_mean_and_zeros_in_order() -> None:
    values = {"a": torch.tensor([0.0, 2.0]), "b": torch.tensor([0.0, 0.0, 3.0])}
    upper, lower = statistics(values).axes
    assert upper.lines[-1].get_ydata().tolist() == [1.0, 1.0]
    assert [bar.get_height() for bar in lower.patches] == pytest.approx([0.5, 2 / 3])
    assert labels(lower) == ["a", "b"]


def test_a_layer_with_nan_is_red() -> None:
    upper, lower = statistics({"a": torch.randn(5), "b": torch.full((3,), float("nan"))}).axes
    colors = [label.get_color() for label in lower.get_xticklabels()]
    assert colors[0] != colors[1]
    assert "NaN or Inf" in [t.get_text() for t in upper.get_legend().get_texts()]


def test_one_huge_layer_does_not_flatten_the_others() -> None:
    ordinary = {str(i): torch.randn(50) for i in range(20)}
    assert statistics(ordinary).axes[0].get_yscale() == "linear"
    assert statistics({**ordinary, "huge": torch.randn(50) * 1e6}).axes[0].get_yscale() == "symlog"


@pytest.mark.parametrize("smallest", [-3, -7, -20])
def test_small_layers_are_no_line_and_the_labels_of_the_scale_do_not_overlap(smallest: int) -> None:
    """Over many powers of ten, most layers being small."""
    places = np.linspace(1, smallest, 12)
    figure = statistics({str(i): torch.randn(99) * 10.0**place for i, place in enumerate(places)})
    figure.canvas.draw()
    upper = figure.axes[0]
    boxes = sorted((t.get_window_extent() for t in upper.get_yticklabels()), key=lambda box: box.y0)
    assert len(boxes) >= 5
    assert all(above.y0 > below.y1 for below, above in itertools.pairwise(boxes))
    # How high the band of each layer is drawn, of the six powers of ten that there is room for.
    top = upper.transData.transform(np.column_stack([np.arange(12), upper.lines[1].get_ydata()]))[:, 1]
    zero = upper.transData.transform((0, 0))[1]
    assert (top - zero)[places > -4].min() > 0.03 * upper.bbox.height


def test_gradient_flow_shows_the_gradients_of_a_recording_from_the_first_layer_to_the_last() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    with th.capture(model, "*:grad", "0") as recording:
        model(torch.randn(5, 3)).sum().backward()
    (ax,) = gradient_flow(recording).axes
    assert labels(ax) == ["0", "1", "2"]
    assert ax.get_yscale() == "log"
    tops = [bar.get_y() + bar.get_height() for bar in ax.patches[-3:]]
    assert tops[2] == pytest.approx(float(recording["2:grad"].abs().mean()))


def test_gradient_flow_marks_layers_without_gradient() -> None:
    parameters = {"alive": torch.randn(9), "dead": torch.zeros(9), "broken": torch.tensor([float("nan"), 1.0])}
    (ax,) = gradient_flow(parameters).axes
    colors = [label.get_color() for label in ax.get_xticklabels()]
    assert colors[1] == colors[2] != colors[0]


def test_gradients_that_are_all_zero_can_be_drawn() -> None:
    figure = gradient_flow({"a": torch.zeros(3), "b": torch.zeros(3)})
    figure.canvas.draw()
    assert figure.axes


def test_parameters_without_gradient_are_left_out() -> None:
    (ax,) = gradient_flow({"a": torch.ones(3), "b": None}).axes
    assert labels(ax) == ["a"]


def test_huge_values_have_statistics() -> None:
    values = {"a": torch.tensor([-3e38, 3e38]), "b": torch.full((64,), 1e20), "c": torch.tensor([0.0, 2.0])}
    upper = statistics(values).axes[0]
    np.testing.assert_allclose(upper.lines[-1].get_ydata(), [0, 1e20, 1], rtol=1e-6)
    # The standard deviation of -3e38 and 3e38 is 3e38.
    band = upper.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(3e38, rel=1e-6)


def test_an_exploding_gradient_has_its_bar() -> None:
    figure = gradient_flow({"w": torch.full((64, 64), 1e36), "v": torch.ones(4)})
    figure.canvas.draw()
    ax = figure.axes[0]
    tops = [bar.get_height() + bar.get_y() for bar in ax.patches]
    np.testing.assert_allclose(tops, [1e36, 1, 1e36, 1], rtol=1e-6)
    assert ax.get_ylim()[1] == pytest.approx(2e36, rel=1e-6)


@pytest.mark.parametrize("draw", [statistics, gradient_flow])
@pytest.mark.parametrize("title", [None, "The activations of a model with quite a long name, on a cat"])
def test_the_legend_leaves_the_title_alone(draw: Any, title: str | None) -> None:
    values = {"a": torch.randn(50), "b": torch.tensor([1.0, float("nan")]), "c": torch.randn(50)}
    figure = draw(values, title=title)
    figure.canvas.draw()
    ax = figure.axes[0]
    head, legend = ax._left_title.get_window_extent(), ax.get_legend().get_window_extent()
    assert not head.overlaps(legend)


def test_small_ticks_look_like_the_others() -> None:
    figure = gradient_flow({"a": torch.tensor([0.2, 0.5]), "b": torch.tensor([0.3, 0.9])})
    figure.canvas.draw()
    axis = figure.axes[0].yaxis
    sizes = {tick.label1.get_fontsize() for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())}
    assert sizes == {style.SMALL}


class Block(nn.Module):
    """As in every ResNet: one ReLU for two places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.relu = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.conv2(self.relu(self.conv1(x))) + x)


def test_a_module_that_is_used_again_stands_where_it_ran(tmp_path: Path) -> None:
    model, ran = Block(), ["conv1", "relu#0", "conv2", "relu#1"]
    with th.capture(model, "*", "*:grad") as rec:
        model(torch.rand(1, 2, 4, 4)).sum().backward()
    with th.capture(model, "*") as forward, torch.no_grad():
        model(torch.rand(1, 2, 4, 4))
    # What is read back from a file has the same order.
    for recording, flow in ((forward, rec), (th.load(forward.save(tmp_path / "f")), th.load(rec.save(tmp_path / "r")))):
        assert labels(statistics(recording).axes[1]) == ran
        assert labels(gradient_flow(flow).axes[0]) == ran
        assert [t.get_text() for t in histogram(recording).axes[0].get_yticklabels()] == ran

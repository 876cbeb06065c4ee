"""Statistics and gradients over depth."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchhook as th
from torchhook.plot import gradient_flow, statistics

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

"""Histograms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchhook.plot import histogram, style

pytest.importorskip("matplotlib")


def text(figure: Any) -> str:
    return "\n".join(t.get_text() for ax in figure.axes for t in ax.texts)


def test_the_heights_are_the_counts() -> None:
    values = torch.tensor([0.0, 0.1, 0.1, 0.9, 1.0])
    figure = histogram(values, bins=2, clip=0)
    heights, edges, _ = figure.axes[0].patches[0].get_data()
    assert heights.tolist() == [3, 2]
    assert edges.tolist() == pytest.approx([0.0, 0.5, 1.0])


def test_outliers_are_left_out_and_counted() -> None:
    values = torch.cat([torch.rand(9999), torch.tensor([1e9])])
    figure = histogram(values)
    assert figure.axes[0].get_xlim()[1] < 2
    assert "0.2% outside" in text(figure) or "0.1% outside" in text(figure)


def test_numbers_are_written_beside() -> None:
    figure = histogram(torch.tensor([0.0, 0.0, 1.0, 3.0, float("nan")]))
    assert "mean 1" in text(figure)
    assert "50% zeros" in text(figure)
    assert "20% NaN" in text(figure)


@pytest.mark.parametrize("fill", [2.0, float("nan"), float("inf")])
def test_constant_and_broken_values_can_be_drawn(fill: float) -> None:
    broken = torch.full((2, 3), fill)
    for source in (broken, {"a": broken, "b": torch.randn(5)}, {"a": broken, "b": broken}):
        for log in (False, True):
            histogram(source, log=log).canvas.draw()
    assert len(histogram({"a": broken, "b": broken}).axes[0].lines) == 2


def test_several_layers_are_ridges_on_one_scale_in_order() -> None:
    figure = histogram({"first": torch.randn(500), "second": torch.randn(500), "huge": torch.randn(500) * 1e6})
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["first", "second", "huge"]
    assert len(ax.lines) == 3


def test_a_layer_with_nan_says_so() -> None:
    figure = histogram({"a": torch.tensor([np.nan, 1.0, 2.0, 3.0]), "b": torch.randn(5)})
    assert figure.axes[0].get_yticklabels()[0].get_text() == "a (25% NaN)"


def test_bins_are_positive() -> None:
    with pytest.raises(ValueError, match="bins=0"):
        histogram(torch.randn(5), bins=0)


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ([1e8, 1e8 + 8, 1e8 + 8, 1e8 + 16], [1, 2, 1]),
        ([1e20] * 5, [5]),
        ([-3e38, 0.0, 3e38, 3e38], [1, 1, 2]),
        ([-1e36, 1e36], [1, 1]),
    ],
)
def test_huge_values_are_counted(values: list[float], counts: list[int]) -> None:
    figure = histogram(torch.tensor(values), clip=0)
    heights, edges, _ = figure.axes[0].patches[0].get_data()
    assert [h for h in heights.tolist() if h] == counts
    assert (np.diff(edges) > 0).all()
    assert f"mean {style.number(float(np.mean(np.float32(values), dtype=np.float64)))}" in text(figure)
    histogram({"a": torch.tensor(values), "b": torch.tensor(values)}).canvas.draw()


def test_doubles_that_hardly_differ_have_bins_too() -> None:
    figure = histogram(torch.tensor([1e16, 1e16 + 2], dtype=torch.float64))
    assert figure.axes[0].patches[0].get_data()[0].sum() == 2

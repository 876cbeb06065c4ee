"""Pictures of diffs and sweeps."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from torchhook import plot
from torchhook._diff.api import diff
from torchhook._recording.differences import Diff, Row
from torchhook._recording.sweeps import Sweep
from torchhook._sweep.api import sweep

pytest.importorskip("matplotlib")


def texts(ax: object) -> list[str]:
    return [t.get_text() for t in ax.texts]  # type: ignore[attr-defined]


def test_the_first_divergence_is_marked() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    port = copy.deepcopy(model)
    nn.init.zeros_(port[2].bias)
    (ax,) = plot.diff(diff(model, port, torch.ones(1, 3))).axes
    assert texts(ax) == ["first: 2"]
    assert ax.get_yscale() == "log"
    assert ax.get_title(loc="left").endswith("2 of 4 sites differ")


def test_two_that_are_the_same_are_drawn_so() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    (ax,) = plot.diff(diff(model, model, torch.ones(1, 3))).axes
    assert texts(ax) == []
    assert "all the same" in ax.get_title(loc="left")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["bit for bit"]


def test_sites_without_a_number_are_crosses() -> None:
    rows = [Row("a", "a", "same", 0, 1e-7, 1), Row("b", "b", "shape"), Row("c", "c", "differs", math.inf, math.inf, 0)]
    figure = plot.diff(Diff(rows))
    figure.canvas.draw()
    (ax,) = figure.axes
    assert sum(line.get_marker() == "x" for line in ax.lines) == 2
    with pytest.raises(ValueError, match="empty"):
        plot.diff(Diff([]))


def test_a_sweep_is_a_heat_map_of_the_normalized_effect() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    result = sweep(model, torch.ones(1, 5, 2), torch.zeros(1, 5, 2), torch.sum, sites="*", progress=False)
    figure = plot.sweep(result)
    (image,) = figure.axes[0].images
    np.testing.assert_allclose(image.get_array(), result.normalized.numpy(), rtol=1e-6)
    assert image.norm.vmin == -image.norm.vmax
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["0", "1", "2"]


@pytest.fixture
def result() -> Sweep:
    values = torch.tensor([[0.0, 1.0, math.nan], [0.5, -1.0, 2.0]])
    return Sweep(values, ["h.0", "h.1"], [0, 1, 2], 1.0, 0.0)


def test_the_title_of_a_sweep_breaks_between_its_parts() -> None:
    figure = plot.sweep(Sweep(torch.ones(6, 7), list("abcdef"), list(range(7)), 1.2345, -0.0003125))
    assert figure.axes[0].get_title(loc="left") == "Patching 6 sites\nclean 1.234, corrupted -0.0003125"


def test_positions_can_have_names(result: Sweep) -> None:
    ax = plot.sweep(result, tokens=["the", "cat", "sat"]).axes[0]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["the", "cat", "sat"]
    with pytest.raises(ValueError, match="2 tokens cannot name 3 positions"):
        plot.sweep(result, tokens=["the", "cat"])


def test_both_tokens_stand_where_two_prompts_differ(result: Sweep) -> None:
    ax = plot.sweep(result, tokens=["the", "cat", "sat"], corrupted_tokens=["the", "dog", "sat"]).axes[0]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["the", "cat / dog", "sat"]
    with pytest.raises(ValueError, match="corrupted tokens: 2, clean ones: 3"):
        plot.sweep(result, tokens=["the", "cat", "sat"], corrupted_tokens=["the", "dog"])
    with pytest.raises(ValueError, match="give both"):
        plot.sweep(result, corrupted_tokens=["the", "dog", "sat"])


def test_a_metric_that_is_the_same_for_both_is_said() -> None:
    figure = plot.sweep(Sweep(torch.ones(2, 1), ["a", "b"], None, 1.5, 1.5))
    title = figure.axes[0].get_title(loc="left").replace("\n", " ")
    assert title == "Patching 2 sites: nothing to bring back clean and corrupted are both 1.5"
    asked = plot.sweep(Sweep(torch.ones(2, 1), ["a", "b"], None, 1.5, 1.5), normalized=False)
    assert "nothing" not in asked.axes[0].get_title(loc="left")


def test_a_color_bar_says_where_its_colors_end(result: Sweep) -> None:
    figure = plot.sweep(result, normalized=False)
    (image,) = figure.axes[0].images
    ticks = [float(t.get_text().replace("\u2212", "-")) for t in figure.axes[1].get_yticklabels()]
    assert (ticks[0], ticks[-1]) == pytest.approx((image.norm.vmin, image.norm.vmax), rel=0.01)
    assert ticks == sorted(ticks)


def test_a_position_that_is_not_there_is_gray(result: Sweep) -> None:
    (image,) = plot.sweep(result, normalized=False).axes[0].images
    assert np.isnan(np.asarray(image.get_array())[0, 2]) or np.ma.is_masked(image.get_array())
    red, green, blue, _ = image.cmap(np.ma.masked_invalid([math.nan]))[0]
    assert max(red, green, blue) - min(red, green, blue) < 0.05


@pytest.mark.parametrize(
    "made",
    [
        Sweep(torch.full((2, 1), math.nan), ["a", "b"], None, 1.0, 0.0),
        Sweep(torch.ones(1, 1), ["a"], None, 1.0, 1.0),
        Sweep(torch.zeros(3, 2), ["a", "b", ""], [0, 5], 1.0, 0.0),
    ],
    ids=["all NaN", "clean is corrupted", "nothing changes"],
)
def test_hard_sweeps_can_be_drawn(made: Sweep) -> None:
    figure = plot.sweep(made)
    figure.canvas.draw()
    assert figure.axes[0].images

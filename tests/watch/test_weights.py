"""How far a step moved the parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.watch.helpers import X, mlp
from torchhook._watch import weights
from torchhook._watch.api import watch


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_update_ratio_is_how_far_the_optimizer_went(kind: Any) -> None:
    model = mlp()
    optimizer = kind(model.parameters(), lr=1e-2)
    expected = []
    with watch(model, every=2) as w:
        for step in range(4):
            before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
            optimizer.zero_grad()
            (model(X) ** 2).sum().backward()
            optimizer.step()
            if step % 2 == 0:
                after = dict(model.named_parameters())
                expected.append({n: ((after[n] - b).norm() / b.norm()).item() for n, b in before.items()})
    assert [shot.step for shot in w.history] == [0, 2]
    for shot, ratios in zip(w.history, expected, strict=True):
        for name, ratio in ratios.items():
            assert shot.sites[name]["update_ratio"] == pytest.approx(ratio, rel=1e-4), name


def test_a_parameter_of_many_pieces_moves_as_far_as_one_of_few() -> None:
    model = nn.Sequential(nn.Linear(700, 500, bias=False))
    with watch(model) as w:
        model(torch.ones(1, 700))
        before = model[0].weight.detach().double().clone()
        with torch.no_grad():
            model[0].weight.add_(torch.randn(500, 700), alpha=1e-3)
    moved = (model[0].weight.double() - before).norm() / before.norm()
    assert w.last["0.weight"]["update_ratio"] == pytest.approx(moved.item(), rel=1e-4)
    assert w.last["0.weight"]["norm"] == pytest.approx(before.norm().item(), rel=1e-5)


def test_zero_weights_have_an_infinite_ratio_when_they_move_and_none_when_they_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    nn.init.zeros_(model[0].bias)
    with watch(model, alarms=False) as w:
        model(torch.ones(1, 2))
        w.flush()
        model(torch.ones(1, 2))
        model[0].bias.data += 1
    assert [shot.sites["0.bias"]["update_ratio"] for shot in w.history] == [0.0, math.inf]


def test_a_lazy_module_is_watched_once_it_has_shapes() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    with watch(model) as w:
        for _ in range(2):
            model(torch.ones(3, 5)).sum().backward()
    assert "0.weight" not in w.history[0].sites
    weight = model[0].weight
    assert w.last["0.weight"]["norm"] == pytest.approx(weight.norm().item(), rel=1e-4)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters on the CPU go together, as those on a GPU do."""
    monkeypatch.setattr(weights, "_goes_together", lambda tensor: type(tensor) in weights._PLAIN)


def test_parameters_that_go_together_are_those_of_each_step_whatever_becomes_of_them(together: None) -> None:
    model = mlp()
    expected: list[dict[str, float]] = []
    with watch(model, alarms=False) as w:
        for step in range(8):
            if step == 2:
                model[0].weight.data = model[0].weight.data.clone() * 2  # another memory
            if step == 3:
                model[2].requires_grad_(False)
            if step == 5:
                model[5].weight = nn.Parameter(torch.randn(5, 64))
            before = {n: p.detach().double().clone() for n, p in model.named_parameters() if p.requires_grad}
            model(X)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 0.1 * (step + 1))
            w.flush()  # what is changed between the steps belongs to none
            after = dict(model.named_parameters())
            expected.append({n: ((after[n] - b).norm() / b.norm()).item() for n, b in before.items()})
    for shot, ratios in zip(w.history, expected, strict=True):
        found = {site: values["update_ratio"] for site, values in shot.sites.items() if "update_ratio" in values}
        assert found == pytest.approx(ratios, rel=1e-5), shot.step


def test_a_parameter_that_changes_its_kind_within_a_step_has_no_ratio_in_it(together: None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with watch(model, alarms=False) as w:
        for step in range(4):
            model(torch.ones(1, 2))
            if step == 1:
                model[1].weight.data = torch.zeros(2, 3)
                w.flush()
                model[1].weight.data = torch.ones(2, 2)
    assert ["update_ratio" in shot.sites["1.weight"] for shot in w.history] == [True, False, True, True]
    assert all("update_ratio" in shot.sites["0.weight"] for shot in w.history)

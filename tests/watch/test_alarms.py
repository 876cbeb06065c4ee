"""What is warned about, when, and that healthy training is left alone."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracle import warned
from tests.watch.helpers import X, mlp
from torchhook._watch.alarms import Alarms
from torchhook._watch.api import watch
from torchhook.errors import TrainingWarning


def deep(activation: type[nn.Module], gain: float = 1.0, depth: int = 20) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(16, 16), activation()]
        with torch.no_grad():
            layers[-2].weight.mul_(gain)  # type: ignore[operator]
    return nn.Sequential(*layers)


def alarms_of(model: nn.Module, x: Tensor, steps: int = 12, **options: Any) -> tuple[list[str], list[Any]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch(model, **options) as w:
            for _ in range(steps):
                model.zero_grad()
                (model(x) ** 2).sum().backward()
    assert all(issubclass(c.category, TrainingWarning) for c in caught)
    assert [str(c.message) for c in caught] == [alarm.message for alarm in w.alarms]
    return [str(c.message) for c in caught], w.alarms


def test_dead_units_are_named_once_after_a_whole_window() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].bias[[2, 5]] = -100
    messages, alarms = alarms_of(model, X, steps=9, alarms=Alarms(window=3))
    assert len(messages) == 1
    assert "2 of 8 units" in messages[0]
    assert "(units 2, 5)" in messages[0]
    assert (alarms[0].site, alarms[0].kind, alarms[0].step) == ("1", "dead", 2)


def test_units_that_live_once_in_the_window_are_not_dead() -> None:
    model = nn.Sequential(nn.ReLU())
    low, high = -torch.ones(2, 4), torch.tensor([[1.0, -1, -1, -1], [-1, 1, 1, 1]])
    with watch(model, alarms=Alarms(window=4)) as w:
        for step in range(12):
            model(high if step % 4 == 3 else low)
    assert w.alarms == []
    assert [shot.sites["0"]["dead"] for shot in w.history][:4] == [1.0, 1.0, 1.0, 0.0]


def test_a_dead_rectifier_is_one_alarm_that_names_what_it_blocks() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 5), nn.Linear(5, 2)]
    nn.init.constant_(layers[1].bias, -100.0)
    model = nn.Sequential(*layers)
    messages, alarms = alarms_of(model, torch.rand(2, 3), steps=7, alarms=Alarms(window=3))
    assert [(alarm.site, alarm.kind, alarm.step) for alarm in alarms] == [("2", "dead", 2)]
    assert (
        "4 of 4 units were zero in each of the last 3 measured steps that it ran in (units 0, 1, 2, 3)" in messages[0]
    )
    zero = [f"{name!r}" for name, p in model.named_parameters() if not p.grad.any()]
    assert zero == ["'0.weight'", "'0.bias'", "'1.weight'", "'1.bias'", "'3.weight'"]
    assert f"In the last of them, 5 gradients are exactly 0: {', '.join(zero)}." in messages[0]


def test_a_rectifier_that_is_not_judged_hides_no_gradient_that_vanishes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.constant_(model[0].bias, -100.0)
    for options in ({"alarms": Alarms(window=2, dead_units=False)}, {"alarms": Alarms(window=2), "exclude": "1"}):
        _, alarms = alarms_of(model, torch.rand(2, 3), steps=3, **options)
        assert [(alarm.site, alarm.kind) for alarm in alarms] == [("0.weight", "vanishing"), ("2.weight", "vanishing")]


def test_gradients_that_vanish_beside_a_living_rectifier_are_said_one_by_one() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.zeros_(model[2].weight)
    with torch.no_grad():
        model[0].bias += 1.0
    _, alarms = alarms_of(model, torch.rand(2, 3), steps=3, alarms=Alarms(window=2))
    assert [(alarm.site, alarm.kind) for alarm in alarms] == [("0.weight", "vanishing")]


def test_a_layer_that_is_skipped_is_dead_only_after_a_window_of_its_own() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()
            self.other = nn.Identity()

        def forward(self, x: Tensor, run: bool) -> Tensor:
            return self.relu(x) if run else self.other(x)

    model = Sometimes()
    with warned() as seen, watch(model, alarms=Alarms(window=3)) as w:
        for step in range(8):
            model(-torch.ones(2, 4), step % 3 == 0)
    assert [(alarm.site, alarm.step) for alarm in w.alarms] == [("relu", 6)]
    assert len(seen) == 1


def test_weights_that_begin_at_zero_do_not_explode_but_may_later() -> None:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(self.a(x))

    torch.manual_seed(0)
    model, x = Adapter(), torch.randn(8, 64)
    model.a.requires_grad_(False)
    optimizer = torch.optim.SGD(model.b.parameters(), lr=1e-6)

    def train(steps: int, factor: float) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            ((model(x) - 3).square().sum() * factor).backward()
            optimizer.step()

    w = watch(model).open()
    train(5, 1.0)
    w.flush()
    assert model.b.weight.grad.norm() > 1.0  # a thousand times the least norm that a weight was taken to have
    assert w.alarms == []
    optimizer.param_groups[0]["lr"] = 0.0
    train(1, 1e4)
    with pytest.warns(TrainingWarning, match=r"'b.weight': the gradient explodes: .* usually was"):
        w.close()


def test_vanishing_gradients_are_found_in_a_deep_sigmoid_network_at_its_early_layers() -> None:
    messages, alarms = alarms_of(deep(nn.Sigmoid), torch.randn(4, 16))
    assert {alarm.kind for alarm in alarms} == {"vanishing"}
    sites = [int(alarm.site.split(".")[0]) for alarm in alarms]
    assert 0 in sites
    assert max(sites) < 30
    assert len(messages) == len(set(sites))


def test_exploding_gradients_are_found_when_they_are_large_sudden_or_not_finite() -> None:
    _, alarms = alarms_of(deep(nn.Identity, gain=40.0, depth=6), torch.randn(4, 16), steps=1)
    assert {alarm.kind for alarm in alarms} == {"exploding"}
    model = mlp()
    for factors, message in (((1, 1, 1, 1, 1000), "usually was"), ((math.nan,), "its norm is nan")):
        w = watch(model, "5", alarms=Alarms(exploding=100)).open()
        for factor in factors:
            model.zero_grad()
            (model(X).sum() * factor * 1e-3).backward()
        with pytest.warns(TrainingWarning, match=message):
            w.close()


class Parallel(nn.Module):
    """Three weights whose gradients are those factors, to the sign."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(2, 2)) for _ in factors)
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        return sum((weight * factor).sum() for weight, factor in zip(self.weights, self.factors, strict=True)) * x


@pytest.mark.parametrize(
    ("factors", "sites", "sentence"),
    [
        ((0, 0, 0), "012", "Its norm is 0, and so are those of all 3 that are compared. "),
        ((1.5, 0, 1), "1", "Its norm is 0, that of 'weights.0' is 3, the largest of the 3 that are compared. "),
        ((1, 1e-9), "1", "Its norm is 2e-09, that of 'weights.0' is 2, the largest of the 2 that are compared. "),
        ((math.nan, 0, 2), "1", "Its norm is 0, that of 'weights.2' is 4, the largest finite one of the 3 that are"),
        ((math.nan, 0), "1", "Its norm is 0; of the 2 that are compared, 1 is not finite and the rest 0. "),
        ((math.inf, 0, math.nan, 0), "13", "Its norm is 0; of the 4 that are compared, 2 are not finite and the rest"),
        ((0,), "0", "Its norm is 0, and there is no other to compare it with. "),
    ],
)
def test_what_is_said_of_a_vanishing_gradient_is_true(factors: tuple[float, ...], sites: str, sentence: str) -> None:
    with warned() as seen:
        with watch(model := Parallel(*factors), "(model)", alarms=Alarms(window=2)) as w:
            for _ in range(3):
                model.zero_grad()
                model(torch.ones(())).backward()
    found = [alarm for alarm in w.alarms if alarm.kind == "vanishing"]
    assert [alarm.site for alarm in found] == [f"weights.{i}" for i in sites]
    for alarm in found:
        gradient = model.get_parameter(alarm.site).grad
        assert float(f"{gradient.norm().item():.3g}") == float(re.search(r"norm is ([\d.e-]+\d|\d)", alarm.message)[1])
        assert sentence in alarm.message
        assert "It has vanished in 2 measured steps." in alarm.message
    assert {w.filename for w in seen} == {__file__}


@pytest.mark.parametrize("weights", [16, 17, 54])
def test_many_of_one_kind_in_a_step_are_one_warning_and_an_alarm_for_each_site(weights: int) -> None:
    model = Parallel(*[0.0] * weights)
    with warned() as seen, watch(model, "(model)", alarms=Alarms(window=2)) as w:
        for _ in range(4):
            model.zero_grad()
            model(torch.ones(())).backward()
    assert [(a.site, a.kind, a.step) for a in w.alarms] == [(f"weights.{i}", "vanishing", 1) for i in range(weights)]
    assert len(seen) == (weights if weights <= 16 else 1)
    if weights > 16:
        said = str(seen[0].message)
        assert said.startswith(w.alarms[0].message)
        assert f"The same goes for {weights - 1} others: 'weights.1', 'weights.2', 'weights.3', …" in said


def test_an_output_that_is_compared_is_not_called_a_weight() -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.full((4,), 0.5, requires_grad=True)
    with pytest.warns(TrainingWarning, match="its norm is 2e[+]04, that of the value itself 1[.]") as caught:
        with watch(model, "0"):
            (model(x) * 1e4).sum().backward()
    assert [w.filename for w in caught] == [__file__]


def test_healthy_training_raises_no_alarm() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(weights=None, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    with watch(model, alarms=Alarms(window=3)) as w:
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert [alarm for alarm in w.alarms if alarm.kind != "dead"] == []


def test_alarms_can_be_left_out() -> None:
    messages, alarms = alarms_of(deep(nn.Sigmoid), torch.randn(4, 16), alarms=False)
    assert messages == [] == alarms

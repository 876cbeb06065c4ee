"""Where the units of a layer are in its output."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracle import warned
from torchhook._watch.alarms import Alarms
from torchhook._watch.api import watch
from torchhook.errors import TrainingWarning


def test_units_of_tokens_are_in_the_last_dim_and_functional_ones_count_too() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x)

    model = Net()
    x = torch.ones(2, 5, 3)
    x[..., 1] = -1
    with pytest.warns(TrainingWarning, match=r"'/relu': 1 of 3 units .* \(units 1\)"):
        with watch(model, "/relu", alarms=Alarms(window=1)):
            model(x)


def dead_channel(conv: nn.Module, channel: int) -> nn.Module:
    with torch.no_grad():
        conv.weight[channel] = 0  # type: ignore[operator, index]
        conv.bias[channel] = -1  # type: ignore[operator, index]
    return conv


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@pytest.mark.parametrize(
    ("layers", "shape", "dead"),
    [
        ([dead_channel(nn.Conv1d(2, 4, 3), 1), nn.ReLU()], (8, 2, 10), (1, 4)),
        ([dead_channel(nn.Conv1d(2, 4, 3), 1), nn.MaxPool1d(2), nn.ReLU()], (8, 2, 10), (1, 4)),
        ([nn.Conv1d(2, 4, 1), dead_channel(nn.BatchNorm1d(4), 2), nn.ReLU()], (8, 2, 10), (2, 4)),
        ([dead_channel(nn.Conv1d(2, 4, 3), 1), nn.ReLU()], (2, 10), (1, 4)),
        ([dead_channel(nn.Conv2d(2, 4, 3), 3), nn.ReLU()], (2, 8, 10), (3, 4)),
        ([dead_channel(nn.Linear(6, 5), 4), nn.ReLU()], (8, 7, 6), (4, 5)),
        ([nn.Conv1d(2, 6, 1), Transposed(), dead_channel(nn.Linear(6, 5), 4), nn.ReLU()], (8, 2, 7), (4, 5)),
        ([dead_channel(nn.Linear(6, 5), 4), nn.ReLU()], (8, 3, 4, 6), (4, 5)),
    ],
)
def test_units_are_where_the_layer_before_has_them(
    layers: list[nn.Module], shape: tuple[int, ...], dead: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    x = torch.randn(shape) * 10
    site = str(len(layers) - 1)
    with pytest.warns(TrainingWarning, match=rf"1 of {dead[1]} units .* \(units {dead[0]}\)"):
        with watch(model, site, gradients=False, parameters=False, alarms=Alarms(window=1)) as w:
            model(x)
    assert w.last[site]["dead"] == 1 / dead[1]


def test_padded_times_are_no_dead_units_and_unknown_units_are_not_judged() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 4, 1, bias=False), nn.ReLU(), Transposed(), nn.ReLU())
    x = torch.randn(8, 1, 10)
    x[..., 7:] = 0
    with watch(model, alarms=Alarms(window=1)) as w:
        model(x).sum().backward()
    assert w.last["1"]["dead"] == 0.0
    assert "dead" not in w.last["3"]
    assert w.alarms == []


@pytest.mark.filterwarnings("ignore")  # torch says that it will change these
def test_values_that_have_no_shape_or_no_plain_numbers_do_not_end_the_training() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    rows = [torch.randn(2, 4), torch.randn(5, 4)]
    with watch(model):
        model(torch.nested.nested_tensor(rows))
        model(torch.nested.nested_tensor(rows, layout=torch.jagged))
    quantized = torch.quantize_per_tensor(torch.tensor([[-1.0, 0.0, 2.0], [-1.0, 1.0, 2.0]]), 0.1, 10, torch.quint8)
    rectifier = nn.Sequential(nn.ReLU())
    with watch(rectifier) as w:
        rectifier(quantized)
    assert w.last["0"]["dead"] == pytest.approx(1 / 3)


class Shared(nn.Module):
    """One rectifier behind two layers, whose units live or not by their biases."""

    def __init__(self, first: list[float], second: list[float], loops: int = 1) -> None:
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(3, len(first)), nn.ReLU(), nn.Linear(len(first), len(second))
        self.loops = loops
        for layer, bias in ((self.a, first), (self.b, second)):
            nn.init.zeros_(layer.weight)
            layer.bias.data = torch.tensor(bias)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.loops):
            hidden = self.relu(self.a(x))
        return self.relu(self.b(hidden))


@pytest.mark.parametrize("statistics", [["dead", "mean"], ["dead"]])
@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([1.0, 1.0, 1.0], [-9.0, -9.0, -9.0], {"relu#1": "3 of 3"}),
        ([-9.0, 1.0, 1.0], [1.0, -9.0, 1.0], {"relu#0": "1 of 3 units .*units 0", "relu#1": "1 of 3 units .*units 1"}),
        ([1.0, 1.0], [-9.0, -9.0, -9.0, 1.0], {"relu#1": "3 of 4"}),
        ([-9.0, -9.0], [1.0, 1.0, 1.0], {"relu#0": "2 of 2"}),
        ([1.0, 1.0], [1.0, 1.0], {}),
    ],
)
def test_a_rectifier_that_is_called_behind_two_layers_has_the_units_of_both(
    first: list[float], second: list[float], said: dict[str, str], statistics: list[str]
) -> None:
    model, x = Shared(first, second), torch.randn(4, 3)
    with warned(), watch(model, "relu", statistics=statistics, alarms=Alarms(window=3)) as w:
        for _ in range(4):
            model(x).sum().backward()
    units = [bias > 0 for bias in first + second]
    assert w.last["relu"]["dead"] == units.count(False) / len(units)
    assert [(a.site, a.kind, a.step) for a in w.alarms] == [(site, "dead", 2) for site in said]
    for alarm in w.alarms:
        assert re.search(said[alarm.site], alarm.message)


def test_calls_behind_the_same_layer_have_the_same_units() -> None:
    model = Shared([-9.0, 1.0], [1.0, -9.0, 1.0], loops=3)  # the rectifier is called 4 times
    with warned(), watch(model, alarms=Alarms(window=2)) as w:
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
    assert w.last["relu"]["dead"] == 2 / 5
    assert [a.site for a in w.alarms if a.kind == "dead"] == ["relu#0", "relu#3"]


def test_units_that_live_in_another_call_of_the_model_or_of_the_layer_in_this_step_are_alive() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0].weight.data, model[0].bias.data = torch.eye(2), torch.zeros(2)
    with watch(model, steps="manual", alarms=Alarms(window=2)) as w:
        for _ in range(4):
            model(torch.tensor([[1.0, -1.0]])).sum().backward()
            model(torch.tensor([[-1.0, 1.0]])).sum().backward()
            w.step()
    assert [shot.sites["1"]["dead"] for shot in w.history] == [0.0] * 4
    assert w.alarms == []


def test_several_calls_of_the_model_in_a_step_are_told_apart_from_several_calls_in_it() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:  # no layer says whose units these are
            return self.relu(self.relu(x) - 10)

    model = Twice()
    with warned(), watch(model, steps="manual", gradients=False, alarms=Alarms(window=2)) as w:
        for _ in range(4):
            model(torch.tensor([[1.0, -1.0]]))
            model(torch.tensor([[-1.0, 1.0]]))
            w.step()
    assert [shot.sites["relu"]["dead"] for shot in w.history] == [0.5] * 4
    assert [a.site for a in w.alarms] == ["relu#1"]


def test_the_same_layer_is_not_said_to_have_made_what_came_of_its_units() -> None:
    class Again(Shared):
        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.relu(self.a(x)) - 10)

    model = Again([1.0, 1.0], [1.0])
    with warned(), watch(model, "relu", alarms=Alarms(window=2)) as w:
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
    assert w.last["relu"]["dead"] == 0.5
    assert [a.site for a in w.alarms] == ["relu#1"]


def test_a_window_goes_on_where_each_step_has_a_session_of_its_own() -> None:
    model = Shared([1.0, 1.0], [-9.0, -9.0])
    with warned(), watch(model, "relu", "b:input", alarms=Alarms(window=3)) as w:
        for _ in range(4):
            model(torch.randn(4, 3)).sum().backward()
    assert [(a.site, a.step) for a in w.alarms if a.kind == "dead"] == [("relu#1", 2)]


def test_the_second_rectifier_of_a_residual_block_is_the_one_that_is_named() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(weights=None, num_classes=10)
    nn.init.constant_(model.layer2[1].bn2.bias, -1e4)
    with warned(), watch(model, alarms=Alarms(window=2)) as w:
        for _ in range(3):
            model(torch.rand(2, 3, 32, 32)).sum().backward()
    assert w.last["layer2"]["zeros"] == 1.0
    assert w.last["layer2.1.relu"]["dead"] == 0.5
    dead = [alarm for alarm in w.alarms if alarm.kind == "dead" and "128 of 128" in alarm.message]
    assert dead[0].site == "layer2.1.relu#1"

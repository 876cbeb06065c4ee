"""Where the units of a layer are in its output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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

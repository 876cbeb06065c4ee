"""``count_parameters`` and ``model_summary``."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import torchhook as th
from tests.classic.toys import PARAMETERS, RULE, Net, printed


def test_parameters_are_counted_once_even_when_tied(net: Net) -> None:
    assert th.count_parameters(net) == PARAMETERS == sum(p.numel() for p in net.parameters())
    net.fc1.bias.requires_grad_(False)
    assert th.count_parameters(net, trainable_only=True) == PARAMETERS - 40
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = tied[0].weight
    assert th.count_parameters(tied) == 15
    with pytest.raises(TypeError, match=r"^'model' must be a torch\.nn\.Module, found str\.$"):
        th.count_parameters("resnet18")  # type: ignore[arg-type]


def test_a_model_summary_lists_every_layer_with_its_own_parameters_as_version_0_2_7_does(capsys) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 20)
            self.block = nn.Sequential(nn.Linear(20, 20), nn.ReLU())
            self.head = nn.Linear(20, 100, bias=False)
            self.head.weight = self.embed.weight
            self.block[0].bias.requires_grad_(False)
            self.again = self.head

    th.model_summary(Tied())
    wide = "=" * 80
    expected = [
        wide,
        "Model Summary: Tied",
        RULE,
        "Total Parameters: 2.42 K",
        "Trainable Parameters: 2.40 K",
        "Non-trainable Parameters: 20.00",
        RULE,
        "Layer Name                               Total Params         Trainable Params",
        wide,
        "embed                                    2.00 K               2.00 K",
        "block                                    0.00                 0.00",
        "  block.0                                420.00               400.00",
        "  block.1                                0.00                 0.00",
        "head                                     2.00 K               2.00 K",
        wide,
    ]
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == expected


def test_a_model_summary_can_be_cut_at_a_depth_and_leave_out_layers_without_parameters(net: Net) -> None:
    def names(*args: Any) -> list[str]:
        lines = printed(th.model_summary, net, *args).splitlines()[9:-1]
        return [line.split()[0] for line in lines]

    assert names() == ["fc1", "relu", "head", "head.0", "head.1"]
    assert names(0) == ["fc1", "relu", "head"]
    assert names(-1, False) == ["fc1", "head.0"]

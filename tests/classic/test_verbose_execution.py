"""``VerboseExecution`` prints what the layers give."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.classic.toys import Net


def test_verbose_execution_prints_one_line_for_each_direct_child(net: Net, x: Tensor, capsys) -> None:
    output = th.VerboseExecution(net)(x)
    assert capsys.readouterr().out == (
        "fc1: torch.Size([2, 40])\nrelu: torch.Size([2, 40])\nhead: torch.Size([2, 3])\n"
    )
    assert torch.equal(output, net(x))
    assert capsys.readouterr().out == ""


def test_verbose_execution_goes_deeper_and_says_more_on_request(net: Net, x: Tensor) -> None:
    lines: list[str] = []
    th.VerboseExecution(net, depth=2, dtype=True, time=True, print=lines.append)(x)
    assert [re.sub(r"\d+\.\d\d ms$", "T ms", line) for line in lines] == [
        "fc1: torch.Size([2, 40]) torch.float32 T ms",
        "relu: torch.Size([2, 40]) torch.float32 T ms",
        "head.0: torch.Size([2, 3]) torch.float32 T ms",
        "head.1: torch.Size([2, 3]) torch.float32 T ms",
        "head: torch.Size([2, 3]) torch.float32 T ms",
    ]


def test_verbose_execution_shows_structured_outputs_and_lines_before_an_error(capsys) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.fails = nn.LSTM(3, 4), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Any:
            return self.fails(self.lstm(x))

    with pytest.raises(TypeError):
        th.VerboseExecution(Odd())(torch.rand(5, 3))
    assert capsys.readouterr().out == "lstm: ((5, 4), ((1, 4), (1, 4)))\n"

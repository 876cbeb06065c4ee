"""The model of the tests of the classic names, and what they look at it with."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

RULE = "-" * 80
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Net(nn.Module):
    """The value of ``fc1`` is overwritten by the layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(30, 40)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Sequential(nn.Linear(40, 3), nn.Softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.fc1(x)))


PARAMETERS = 30 * 40 + 40 + 40 * 3 + 3


def clean(model: nn.Module) -> bool:
    return not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def printed(function: Any, *args: Any) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        function(*args)
    return out.getvalue()

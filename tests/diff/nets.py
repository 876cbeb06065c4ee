"""The model of the tests of ``diff``: layers that run twice, work in place, and add around others."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(x)))
        y = self.conv2(x)
        y += x
        y = self.relu(y)
        return self.fc(self.drop(y.mean((2, 3))))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def image(size: int = 8) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))

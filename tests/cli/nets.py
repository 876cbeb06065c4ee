"""Models that a command line can name: ``tests.cli.nets:small``."""

from __future__ import annotations

import time

import torch
from torch import nn


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )


def other() -> nn.Module:
    model = small()
    nn.init.zeros_(model[4].bias)
    return model


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x.flatten(1)[:, :4] * 2


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("two\nlines")


ready = small()
number = 3


def text() -> str:
    return "no model"

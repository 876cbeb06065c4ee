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
        time.sleep(0.06)
        return x.flatten(1)[:, :4] * 2


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("two\nlines")


class Attention(nn.Module):
    """As timm writes it: the dropout is there, and the fused call has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attn_drop = nn.Linear(8, 24), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x)


ready = small()
number = 3


def text() -> str:
    return "no model"

"""Small models with something to see in a report."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Photo(nn.Module):
    """A small classifier whose activations are overwritten in place, with a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.unused = nn.Linear(2, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        return self.head(self.pool(x).flatten(1))


class Text(nn.Module):
    """Tokens in, attention inside, classes out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(input_ids)).mean(1))


class Broken(nn.Module):
    """Dead channels, a NaN, a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.relu = nn.ReLU()
        self.again = self.relu
        self.bad = nn.Conv2d(8, 4, 3)
        with torch.no_grad():
            self.conv.bias[:3] = -100.0
            self.bad.weight[0] = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        return self.bad(self.relu(self.conv(x))).mean((2, 3))


def deep(blocks: int = 340) -> nn.Module:
    """A thousand layers and more."""
    torch.manual_seed(0)
    block = [nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU()) for _ in range(blocks)]
    return nn.Sequential(*block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))

"""Train a sparse autoencoder on a stream of activations, then splice it into the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torchhook as th


class Autoencoder(nn.Module):
    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(width, features), nn.Linear(features, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x).relu())


def trained(model: nn.Module, data: Any, site: str, features: int, epochs: int = 4, batch: int = 256) -> Autoencoder:
    stream = th.stream(model, data, site, buffer=16 * batch, batch=batch)
    learner = Autoencoder(next(iter(stream)).shape[-1], features)
    optimizer = torch.optim.Adam(learner.parameters(), lr=3e-3)
    for _ in range(epochs):
        for x in stream:
            loss = (learner(x) - x).pow(2).mean() + 1e-4 * learner.encode(x).relu().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return learner


@torch.no_grad()
def spliced(model: nn.Module, ids: Tensor, site: str, learner: Autoencoder) -> Any:
    """The model's output with what the autoencoder makes of the site in its place."""
    with th.edit(model, {site: learner}):
        return model(ids)

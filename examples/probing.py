"""In which layer can something be read off? A linear probe for each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import torchhook as th
from torchhook import transforms


def accuracies(
    model: nn.Module, data: Tensor | Mapping[str, Tensor], labels: Tensor, sites: str, out: str | Path
) -> dict[str, float]:
    """How often a ridge regression on the mean of a layer's tokens finds the label, on the second half of the rows."""
    features = th.extract(model, data, sites, out, transform=transforms.pool("mean"), progress=False)
    half, classes = len(labels) // 2, torch.nn.functional.one_hot(labels).double()
    found = {}
    for site in features:
        x = torch.as_tensor(features[site][:]).double()
        x = torch.cat([(x - x[:half].mean(0)) / (x[:half].std(0) + 1e-6), torch.ones(len(x), 1)], dim=1)
        gram = x[:half].T @ x[:half] + torch.eye(x.shape[1])
        weights = torch.linalg.solve(gram, x[:half].T @ classes[:half])
        found[site] = float(((x[half:] @ weights).argmax(1) == labels[half:]).float().mean())
    return found

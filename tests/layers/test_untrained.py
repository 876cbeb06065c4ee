"""Whether a model still has the weights that it was made with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.language_models import ENDS, made
from tests.report.nets import Photo, Text
from torchhook import demo
from torchhook._core.index import Index
from torchhook._layers.api import untrained


def gpt2() -> nn.Module:
    return made("gpt2", **ENDS)


@pytest.mark.parametrize("build", [gpt2, Photo, Text, lambda: nn.Sequential(nn.Linear(16, 16))])
def test_random_weights_are_said(build: object) -> None:
    model = build()  # type: ignore[operator]
    assert untrained(Index(model))


def test_a_few_steps_of_training_end_the_random_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    assert not untrained(Index(model))


def test_trained_weights_are_told() -> None:
    assert not untrained(Index(demo.efficientnet_lite0()))
    assert not untrained(Index(nn.Sequential(nn.ReLU())))  # nothing that could tell


def test_a_trained_backbone_with_a_new_head_is_trained() -> None:
    model = Photo()
    with torch.no_grad():
        model.stem[1].weight.uniform_(0.5, 1.5)
    assert not untrained(Index(model))

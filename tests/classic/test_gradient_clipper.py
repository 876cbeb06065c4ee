"""``gradient_clipper`` clamps every gradient as it is computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.classic.toys import Net


def test_every_gradient_is_clamped_as_it_is_computed(net: Net, x: Tensor) -> None:
    (net(x).log().sum() * 100).backward()
    expected = {name: p.grad.clamp(-0.5, 0.5) for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    assert th.gradient_clipper(net, 0.5) is net
    (net(x).log().sum() * 100).backward()
    assert any((g.abs() == 0.5).any() for g in expected.values())
    for name, p in net.named_parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, expected[name])


def test_frozen_and_tied_parameters_are_no_obstacle_to_clipping() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    th.gradient_clipper(model, 0.1)
    (model(torch.ones(1, 2)).sum() * 100).backward()
    assert model[0].weight.grad.abs().max().item() == pytest.approx(0.1)
    assert model[0].bias.grad is None

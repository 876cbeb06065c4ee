"""Gradients are limited as PyTorch's own clipping would limit them, for as long as the session is open."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchhook as th
from tests.oracle import hooks_on


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)) * 10


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_every_element_is_clamped() -> None:
    model, twin = net(), net()
    twin(X).pow(2).sum().backward()
    expected = [g.clamp(-0.5, 0.5) for g in gradients(twin)]
    with th.clip_gradients(model, 0.5):
        model(X).pow(2).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))


@pytest.mark.parametrize("steps", [1, 3])
def test_the_norm_is_that_of_clip_grad_norm_after_each_backward_pass(steps: int) -> None:
    model, twin = net(), net()
    for _ in range(steps):
        twin(X).pow(2).sum().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.5)
    with th.clip_gradients(model, norm=1.5):
        for _ in range(steps):
            model(X).pow(2).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))
    assert torch.stack([g.norm() for g in gradients(model)]).norm() <= 1.5 + 1e-5


def test_a_tied_weight_is_clipped_once_and_a_frozen_one_left_alone() -> None:
    model = net()
    model.append(nn.Linear(4, 8))
    model[3].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    with th.clip_gradients(model, 0.25):
        (model[:3](X).pow(2).sum() + model[3](X).pow(2).sum()).backward()
    assert model[0].weight.grad.abs().max() == 0.25
    assert model[2].bias.grad is None


def failing_backward(model: nn.Sequential) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    handle = model[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(X).pow(2).sum().backward()
    handle.remove()
    model.zero_grad()


def test_a_backward_pass_that_fails_does_not_end_the_clipping() -> None:
    model, twin = net(), net()
    twin(X).pow(2).sum().backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 1.5)
    with th.clip_gradients(model, norm=1.5):
        failing_backward(model)
        model(X).pow(2).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))


@pytest.mark.shows("Checkpointing: clipping of gradients")
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_norm_is_limited_once_when_parts_are_computed_again(reentrant: bool) -> None:
    def run(model: nn.Sequential) -> None:
        x = X.clone().requires_grad_()
        x = checkpoint(model[:1], x, use_reentrant=reentrant)
        x = checkpoint(model[1:2], x, use_reentrant=reentrant)
        model[2](x).pow(2).sum().backward()

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    twin(X).pow(2).sum().backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 1.5)
    with th.clip_gradients(model, norm=1.5):
        run(model)
    for found, expected in zip(gradients(model), gradients(twin), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{"value": 0.25}, {"norm": 1.5}])
def test_layers_that_are_unfrozen_new_or_lazy_are_limited_too(options: dict[str, float]) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8), nn.Linear(8, 3))
    model[1:].requires_grad_(False)
    with th.clip_gradients(model, **options):
        model(X)
        model.requires_grad_(True)
        model[2].weight = nn.Parameter(torch.ones(3, 8))
        twin = copy.deepcopy(model)
        for _ in range(2):
            model(X).pow(2).sum().backward()
            model.zero_grad()
        model(X).pow(2).sum().backward()
    twin(X).pow(2).sum().backward()
    if "norm" in options:
        nn.utils.clip_grad_norm_(twin.parameters(), options["norm"])
    else:
        nn.utils.clip_grad_value_(twin.parameters(), options["value"])
    assert len(gradients(model)) == 6
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))
    assert hooks_on(model) == []
    assert all(not p._backward_hooks for p in model.parameters())


def test_as_a_handle_it_works_until_it_is_removed() -> None:
    model, before = net(), hooks_on(net())
    handle = th.clip_gradients(model, 0.5).open()
    model(X).pow(2).sum().backward()
    assert max(g.abs().max() for g in gradients(model)) == 0.5
    handle.remove()
    model.zero_grad()
    model(X).pow(2).sum().backward()
    assert max(g.abs().max() for g in gradients(model)) > 0.5
    assert hooks_on(model) == before
    assert all(not p._backward_hooks for p in model.parameters())


def test_autograd_grad_is_clamped_and_leaves_no_gradient() -> None:
    model = net()
    with th.clip_gradients(model, 0.5):
        (grad,) = torch.autograd.grad(model(X).pow(2).sum(), [model[0].weight])
    assert grad.abs().max() == 0.5
    assert model[0].weight.grad is None


def test_a_copy_of_a_clipped_model_is_not_clipped() -> None:
    model = net()
    with th.clip_gradients(model, 0.5):
        twin = copy.deepcopy(model)
        twin(X).pow(2).sum().backward()
    assert max(g.abs().max() for g in gradients(twin)) > 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "a value or norm="),
        ({"value": 1.0, "norm": 1.0}, "one of the two"),
        ({"value": 0.0}, "positive limit, found 0.0"),
        ({"norm": -1.0}, "positive limit, found -1.0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        th.clip_gradients(net(), **arguments)

"""Inside the transforms of ``torch.func``, where tensors are wrappers: what is behind them is looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vmap

import torchhook as th
from torchhook.errors import GuardError

# Torch itself, when forward gradients are first asked for.
# What torch.func.hessian says of torch itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning"),
]
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
either = pytest.mark.parametrize("thorough", [False, True], ids=["quick", "thorough"])


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - 10).log()


def net(*last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), *last, nn.Linear(4, 2))


def loss(model: nn.Module) -> Callable[..., Tensor]:
    return lambda parameters, x: functional_call(model, parameters, (x,)).pow(2).sum()


RUN: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap": lambda model, x: vmap(model)(x),
    "vmap of another dim": lambda model, x: vmap(model, in_dims=1)(x.T.contiguous()),
    "nested vmap": lambda model, x: vmap(vmap(model))(x[None]),
    "grad": lambda model, x: grad(loss(model))(dict(model.named_parameters()), x),
    "gradients of samples": lambda model, x: vmap(grad(loss(model)), in_dims=(None, 0))(
        dict(model.named_parameters()), x
    ),
    "jacrev": lambda model, x: jacrev(model)(x[2]),
    "hessian": lambda model, x: hessian(lambda v: model(v).pow(2).sum())(x[2]),
}
transforms = pytest.mark.parametrize("how", RUN)


@either
@transforms
def test_what_made_a_nan_is_found(how: str, thorough: bool) -> None:
    model = net(Log())
    with (
        pytest.raises(GuardError, match=r"^'2/log#0' made \d+ NaN out of finite inputs"),
        th.guard(model, thorough=thorough),
    ):
        RUN[how](model, X)


@either
@transforms
def test_a_nan_in_the_input_is_found(how: str, thorough: bool) -> None:
    model, x = net(), X.clone()
    x[2, 0] = float("nan")
    with pytest.raises(GuardError, match="an input of the model already holds it"), th.guard(model, thorough=thorough):
        RUN[how](model, x)


@either
@transforms
def test_a_guard_that_finds_nothing_changes_nothing(how: str, thorough: bool) -> None:
    model = net()
    expected = RUN[how](model, X)
    with th.guard(model, thorough=thorough) as guard:
        found = RUN[how](model, X)
    assert not guard.findings
    torch.testing.assert_close(found, expected)


@transforms
@pytest.mark.parametrize("statistics", [None, ["histogram"]], ids=["statistics", "histograms"])
def test_a_watch_changes_nothing(how: str, statistics: list[str] | None) -> None:
    model = net()
    expected = RUN[how](model, X)
    options = {} if statistics is None else {"statistics": statistics}
    with th.watch(model, every=1, log=None, **options) as watch:
        found = RUN[how](model, X)
    torch.testing.assert_close(found, expected)
    assert watch.last


def test_a_watch_measures_the_values_of_all_samples() -> None:
    model = net()
    value = model[0](X).detach()
    with th.watch(model, every=1, log=None) as watch:
        vmap(model)(X)
    found = watch.last["0"]
    assert found["mean"] == pytest.approx(value.mean().item(), abs=1e-6)
    assert found["std"] == pytest.approx(value.std(correction=0).item(), rel=0.05)
    assert (found["min"], found["max"]) == pytest.approx((value.min().item(), value.max().item()))

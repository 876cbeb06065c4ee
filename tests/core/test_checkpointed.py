"""Operations in checkpointed functions and modules are edited again, and their gradients heard, wherever and in
whichever thread the backward pass computes them again. The judge is the same model without checkpoints.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchhook as th
from torchhook import edits
from torchhook.errors import RecomputeWarning, SessionError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
either = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
threads = pytest.mark.parametrize("elsewhere", [False, True], ids=["own thread", "another thread"])


def again(function: Callable[..., Any], x: Tensor, reentrant: bool | None) -> Any:
    return function(x) if reentrant is None else checkpoint(function, x, use_reentrant=reentrant)


class Block(nn.Module):
    """Two sums, a tanh and a layer; checkpointed as a whole, as its own forward, in part, or one inside another."""

    def __init__(self, how: str, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.reentrant, self.layer, self.inner = how, reentrant, nn.Linear(4, 4), nn.Tanh()

    def end(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.add(y, torch.tanh(self.inner(y) * 2)) * y

    def body(self, x: Tensor) -> Tensor:
        x = torch.add(x, x.sin())
        return again(self.end, x, self.reentrant) if self.how in ("the end", "nested") else self.end(x)

    def forward(self, x: Tensor) -> Tensor:
        return again(self.body, x, self.reentrant) if self.how in ("forward", "nested") else self.body(x)


class Net(nn.Module):
    def __init__(self, how: str, reentrant: bool | None) -> None:
        super().__init__()
        self.block, self.how, self.reentrant = Block(how, reentrant), how, reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = again(self.block, x, self.reentrant) if self.how == "module" else self.block(x)
        return (self.block(y) if self.how == "twice" else y).square().sum()


# torch says so of a reentrant checkpoint inside another, whose first run has no gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
HOW = pytest.mark.parametrize("how", ["module", "forward", "the end", "nested"])
SITES = ["block/tanh", "block/tanh:input", "block/add(0)", "block/add(1)", "block/add", "block/mul"]


def backward(loss: Tensor, elsewhere: bool) -> None:
    if not elsewhere:
        loss.backward()
        return
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def gradients(net: Net, site: str, elsewhere: bool) -> tuple[Tensor, ...]:
    x = X.clone().requires_grad_()
    with th.edit(net, {site: lambda value: value * 0.5 if isinstance(value, Tensor) else value}):
        backward(net(x), elsewhere)
    assert x.grad is not None
    return x.grad, *(p.grad for p in net.parameters() if p.grad is not None)


@pytest.mark.shows("Checkpointing: edits of operations, also of a module that checkpoints its own forward")
@either
@threads
@HOW
@pytest.mark.parametrize("site", SITES)
def test_operations_are_edited_again(how: str, site: str, reentrant: bool, elsewhere: bool) -> None:
    found = gradients(Net(how, reentrant), site, elsewhere)
    wanted = gradients(Net(how, None), site, False)
    torch.testing.assert_close(found, wanted)


@either
@threads
@HOW
@pytest.mark.parametrize("site", ["block/tanh", "block/add(1)"])
def test_gradients_of_operations_are_heard(how: str, site: str, reentrant: bool, elsewhere: bool) -> None:
    found = []
    for net in (Net(how, reentrant), Net(how, None)):
        with th.capture(net, f"{site}:grad", site) as rec:
            backward(net(X.clone().requires_grad_()), elsewhere)
        found.append((rec[f"{site}:grad"], rec[site]))
    torch.testing.assert_close(*found)


@either
def test_a_backward_pass_inside_of_a_module_edits_again_too(reentrant: bool) -> None:
    class Trains(nn.Module):
        def __init__(self, net: Net) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            self.net(x).backward()
            return x

    found = []
    for net in (Net("forward", reentrant), Net("forward", None)):
        x = X.clone().requires_grad_()
        with th.edit(net, {"block/tanh": edits.scale(0.5)}):
            Trains(net)(x)
        found.append(x.grad)
    torch.testing.assert_close(*found)


@either
def test_a_session_that_is_over_edits_nothing_and_said_so(reentrant: bool) -> None:
    net, x = Net("forward", reentrant), X.clone().requires_grad_()
    with pytest.warns(RecomputeWarning, match="block/tanh"):
        with th.edit(net, {"block/tanh": edits.scale(1.0)}):
            loss = net(x)
    loss.backward()
    other = X.clone().requires_grad_()
    Net("forward", None)(other).backward()
    torch.testing.assert_close(x.grad, other.grad)


@either
def test_a_module_inside_of_the_checkpointed_function_is_not_taken_for_it(reentrant: bool) -> None:
    """The inner tanh is a module's own: an edit of the block's does not touch it."""
    seen: list[int] = []
    net = Net("forward", reentrant)
    with th.edit(net, {"block/tanh": lambda value: seen.append(1) or value}):  # type: ignore[func-returns-value]
        net(X.clone().requires_grad_()).backward()
    assert len(seen) == 2  # once in each pass


def test_a_torch_that_does_not_say_what_it_runs_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchhook import _torch

    monkeypatch.setattr(_torch.checkpoints, "_RUNS_AGAIN", ())
    net = Net("forward", False)
    with pytest.raises(SessionError, match="block/tanh cannot be edited here"):
        th.run(net, X.clone().requires_grad_(), edit={"block/tanh": edits.scale(0.5)})

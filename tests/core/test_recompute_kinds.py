"""Checkpoints of every kind: older than the session, made by hooks, opened inside, with values that pass through."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchhook as th
from torchhook import edits
from torchhook._core import recompute
from torchhook.errors import NeverRanWarning, SessionError

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
either = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def leaf(x: Tensor = X) -> Tensor:
    return x.clone().requires_grad_()


class Layered(nn.Module):
    """A layer and a tanh, checkpointed or not; a session may be opened inside."""

    def __init__(self, reentrant: bool | None, inside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.reentrant, self.inside = nn.Linear(3, 3), reentrant, inside

    def segment(self, x: Tensor) -> Tensor:
        if not self.inside:
            return torch.tanh(self.layer(x))
        with th.edit(self.layer, {"": edits.scale(3.0)}):
            return torch.tanh(self.layer(x))

    def forward(self, x: Tensor) -> Tensor:
        y = self.segment(x) if self.reentrant is None else checkpoint(self.segment, x, use_reentrant=self.reentrant)
        return y.sum()


# -- sessions and segments of different age -----------------------------------------------------------------------


@pytest.mark.shows("Checkpointing: a backward pass of a forward pass before the session")
@either
@pytest.mark.parametrize("calls", [0, 1, 2], ids=lambda calls: f"{calls} calls inside")
def test_what_ran_before_the_session_is_recomputed_as_it_ran(reentrant: bool, calls: int) -> None:
    plain, model = Layered(None), Layered(reentrant)
    plain(leaf()).backward()
    loss = model(leaf())
    ignored = pytest.warns(NeverRanWarning) if not calls else warnings.catch_warnings()
    with ignored, th.edit(model, {"layer": edits.scale(3.0)}):
        for _ in range(calls):
            model(leaf())
        loss.backward()
    torch.testing.assert_close(model.layer.weight.grad, plain.layer.weight.grad)


@either
def test_both_kinds_of_calls_in_one_backward_pass_are_told_apart(reentrant: bool) -> None:
    plain, model = Layered(None), Layered(reentrant)
    (plain(leaf()) + torch.tanh(3 * plain.layer(X + 1)).sum()).backward()
    before = model(leaf())
    with th.edit(model, {"layer": edits.scale(3.0)}):
        (before + model(leaf(X + 1))).backward()
    torch.testing.assert_close(model.layer.weight.grad, plain.layer.weight.grad)


@either
def test_a_session_that_a_segment_opens_edits_its_recomputation_too(reentrant: bool) -> None:
    plain, model = Layered(None, inside=True), Layered(reentrant, inside=True)
    for net in (plain, model):
        net(leaf()).backward()
    torch.testing.assert_close(model.layer.weight.grad, plain.layer.weight.grad)


def test_a_segment_that_is_no_longer_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "_REMEMBERED", 3)
    model = Layered(reentrant=False)
    with th.edit(model, {"layer": edits.scale(3.0)}):
        losses = [model(leaf()) for _ in range(5)]
        losses[-1].backward()
        with pytest.raises(SessionError, match=r"^more than 3 checkpointed segments ran before .* Run backward"):
            losses[0].backward()
        losses.clear()  # nothing waits for a backward pass that will not come


# -- modules that checkpoint themselves by hooks ------------------------------------------------------------------


class Repeats(nn.Module):
    """A part that runs several times, and a part of it too; each may checkpoint itself."""

    def __init__(self, *composed: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.outer = nn.Sequential(inner, nn.Linear(3, 3), inner)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.distributed._composable import checkpoint as compose
        for name in composed:
            compose(self.get_submodule(name))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.outer(x))).sum()


@pytest.mark.shows("Checkpointing: modules that checkpoint themselves by hooks (composable)")
@pytest.mark.parametrize("composed", [["outer"], ["outer.0"], ["outer", "outer.0"]], ids=str)
@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=str)
def test_a_module_that_checkpoints_itself_is_edited_again_call_by_call(composed: list[str], order: list[int]) -> None:
    plain, model = Repeats(), Repeats(*composed)
    for net in (plain, model):
        with th.edit(net, {"outer.0.0": lambda value, site: value * (1 + site.call)}):
            losses = [net(leaf(X + k)) for k in range(2)]
            for k in order:
                losses[k].backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@either
def test_a_module_that_checkpoints_itself_inside_a_checkpoint_is_edited_again(reentrant: bool) -> None:
    plain, model = Repeats(), Repeats("outer.0")
    with th.edit(plain, {"outer.0.0": lambda value, site: value * (1 + site.call)}):
        plain(leaf()).backward()
    with th.edit(model, {"outer.0.0": lambda value, site: value * (1 + site.call)}):
        checkpoint(model, leaf(), use_reentrant=reentrant).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


# -- what passes through ------------------------------------------------------------------------------------------


class PassesOn(nn.Module):
    """Uses a bias and hands it on, as the blocks of T5 do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.layer(x) + bias), bias


class Stack(nn.Module):
    """One bias through several checkpointed blocks, and used once more at the end."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias, self.blocks = nn.Linear(3, 3), nn.ModuleList(PassesOn() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias(x)
        for block in self.blocks:
            run = block if self.reentrant is None else partial(checkpoint, block, use_reentrant=self.reentrant)
            x, bias = run(x, bias)
        return (x * bias).square().sum()


def by_hand(model: Stack) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """The gradients of each block, with a copy of the bias wherever a gradient is to be told apart from others."""
    x, bias, held = leaf(), model.bias(X), []
    x.retain_grad()
    for block in model.blocks:
        used, passed = bias.view_as(bias), bias.view_as(bias)
        entered = bias
        y = torch.tanh(block.layer(x) + used)
        held.append({"grad": (y, passed), "grad_input": (x, entered)})
        x, bias = y, passed
    loss = (x * bias).square().sum()
    return [{port: torch.autograd.grad(loss, of, retain_graph=True) for port, of in block.items()} for block in held]


@pytest.mark.shows("Checkpointing: gradients of what a module passes through")
@either
@pytest.mark.parametrize("port", ["grad", "grad_input", "grad_total"])
def test_a_tensor_that_a_checkpointed_block_passes_through_has_its_gradient(reentrant: bool, port: str) -> None:
    model = Stack(reentrant)
    with th.capture(model, f"blocks.*:{port}") as rec:
        model(leaf()).backward()
    for k, expected in enumerate(by_hand(model)):
        (found,) = rec.all(f"blocks.{k}:{port}")
        if port == "grad_total":
            # All uses of one tensor: without checkpoints, and in those of the newer kind, every block has the same one.
            shared = by_hand(model)[k if reentrant else 0]["grad_input"][1]
            torch.testing.assert_close(tuple(found), (expected["grad"][0], shared))
        else:
            torch.testing.assert_close(tuple(getattr(found, "args", found)), expected[port])


@either
def test_the_gradient_of_what_is_passed_through_can_be_edited(reentrant: bool) -> None:
    plain, model = Stack(None), Stack(reentrant)
    for net in (plain, model):
        with th.edit(net, {"blocks.1:grad": edits.at("1", edits.scale(5.0))}):
            net(leaf()).backward()
    torch.testing.assert_close(model.bias.weight.grad, plain.bias.weight.grad)
    bare = Stack(None)
    bare(leaf()).backward()
    assert not torch.allclose(model.bias.weight.grad, bare.bias.weight.grad)


def test_a_value_in_a_block_without_gradients_is_no_checkpoint() -> None:
    """It is on a graph, and stays on it: nothing will run it again."""

    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.same = nn.Linear(3, 3), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            with torch.no_grad():
                y = self.same(y)
            return y * 3

    model = Quiet()
    for port in ("grad", "grad_total", "grad_input"):
        with th.capture(model, f"same:{port}") as rec:
            model(X).sum().backward()
        assert torch.equal(rec[f"same:{port}"], torch.full_like(X, 3)), port

"""What passes between the layers on two ranks, against bare hooks in a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.activations import GRADIENTS, SITES
from tests.distributed.models import Net, batch, loss, net
from tests.distributed.ranks import Results

pytestmark = pytest.mark.slow
KINDS = ["ddp", "fsdp1", "fsdp2"]


@pytest.fixture(scope="module")
def found(results: Callable[[str], Results]) -> Results:
    return results("tests.distributed.activations")


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def by_hand(x: Tensor) -> dict[str, Tensor]:
    """What passes, written out without a hook on any module."""
    model = net()
    first, second = model.blocks
    a = first.a(x)
    hidden = torch.relu(a)
    middle = x + first.b(hidden)
    last = second(middle)
    into_head = last.view_as(last)
    output = model.head(into_head)
    for tensor in (a, last, into_head):
        tensor.retain_grad()
    loss(output).backward()
    values = [a, hidden, middle, last, output, output]
    gradients = [a.grad, last.grad, into_head.grad]
    assert all(grad is not None for grad in gradients)
    return dict(zip([*SITES, *GRADIENTS], [value.detach() for value in (*values, *gradients)], strict=True))


def grads(model: Net) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole() -> Net:
    model = net()
    loss(model(batch())).backward()
    return model


@pytest.mark.shows("Sharded training: captures of activations and their gradients")
@pytest.mark.parametrize("kind", KINDS)
def test_activations_and_their_gradients_are_those_of_the_ranks_batch(found: Results, kind: str) -> None:
    for (captured, after), x in zip(found[f"captured_{kind}"], batch().chunk(2), strict=True):
        close(captured, by_hand(x))
        close(after, grads(whole()))


@pytest.mark.shows("Sharded training: edits of activations")
@pytest.mark.parametrize("kind", KINDS)
def test_edited_activations_give_the_outputs_and_gradients_of_a_single_process(found: Results, kind: str) -> None:
    model = net()
    first, second = model.blocks
    first.a.register_forward_hook(lambda _, __, output: output + torch.arange(10.0))
    second.b.register_forward_pre_hook(lambda _, args: args[0].clamp(-1, 1))
    second.register_forward_hook(lambda _, __, output: output * 0.5)
    first.b.register_forward_hook(lambda _, __, output: output.register_hook(lambda grad: 2 * grad) and None)
    output = model(batch())
    loss(output).backward()
    for (edited, after), part in zip(found[f"edited_{kind}"], output.detach().chunk(2), strict=True):
        close(edited, part)
        close(after, grads(model))


@pytest.mark.shows("Sharded training: one rank alone that captures")
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_alone_captures_and_guards_and_nobody_waits(found: Results, kind: str) -> None:
    (nothing, first), (captured, second) = found[f"one_rank_captures_{kind}"]
    assert nothing == {}
    close(captured, by_hand(batch().chunk(2)[1]))
    close([first, second], [grads(whole())] * 2)

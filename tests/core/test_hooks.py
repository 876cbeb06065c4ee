"""What is registered, and taken away again, whatever happens."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from tests import models
from tests.oracle import in_threads, stance
from torchhook._core import hooks
from torchhook._core.boundaries import EnterTap, LeaveTap
from torchhook._core.hooks import Attachment
from torchhook._core.scope import Scope
from torchhook._core.taps import InputTap, OutputTap


def test_an_attachment_undoes_everything_in_reverse_and_only_once() -> None:
    attachment, undone = Attachment(), []
    for i in range(3):
        attachment.defer(lambda i=i: undone.append(i))
    attachment.remove()
    attachment.remove()
    assert undone == [2, 1, 0]


def test_an_attachment_leaves_out_torchscript_which_takes_no_hooks() -> None:
    scope = Scope()
    scripted, attachment = models.scripted(nn.ReLU()), Attachment()
    for tap in (OutputTap("out", scope), InputTap("in", scope), EnterTap(print), LeaveTap(print)):
        attachment.attach(tap, scripted)
    assert scripted(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    attachment.remove()


@pytest.mark.parametrize("at", range(3))
def test_an_interrupt_while_removing_lets_the_rest_go_first(at: int) -> None:
    attachment, undone = Attachment(), set()
    interrupts = [KeyboardInterrupt()]

    def undo(i: int) -> None:
        if i == at and interrupts:
            raise interrupts.pop()
        undone.add(i)

    for i in range(3):
        attachment.defer(lambda i=i: undo(i))
    with pytest.raises(KeyboardInterrupt):
        attachment.remove()
    assert undone == {0, 1, 2}


def test_one_that_cannot_be_undone_does_not_keep_the_others() -> None:
    attachment, undone = Attachment(), []

    def fail() -> None:
        raise RuntimeError("never")

    attachment.defer(lambda: undone.append(1))
    attachment.defer(fail)
    with pytest.raises(RuntimeError, match="never"):
        attachment.remove()
    assert undone == [1]


# -- the stance of the compiler ---------------------------------------------------------------


def test_the_first_one_in_forces_eager_and_the_last_one_out_restores_it() -> None:
    assert stance() == "default"
    first, second = hooks.eager_stance.hold(), hooks.eager_stance.hold()
    assert stance() == "force_eager"
    first()
    first()
    assert stance() == "force_eager"
    second()
    assert stance() == "default"
    third = hooks.eager_stance.hold()
    assert stance() == "force_eager"
    third()
    assert stance() == "default"


def test_holders_in_many_threads_are_counted() -> None:
    assert stance() == "default"
    meet = threading.Barrier(4)

    def work() -> None:
        for _ in range(20):
            release = hooks.eager_stance.hold()
            meet.wait(30)
            release()
            meet.wait(30)

    in_threads(*[work] * 4)
    assert not hooks.eager_stance._holders
    assert stance() == "default"


def test_a_scope_is_eager_where_it_was_entered_and_other_threads_compile_nothing_new() -> None:
    scope = Scope()
    release = hooks.eager_stance.hold(scope=scope)
    assert stance() == "eager_on_recompile"
    scope.enter()
    assert (stance(), *in_threads(stance)) == ("force_eager", "eager_on_recompile")
    everywhere = hooks.eager_stance.hold()
    assert in_threads(stance) == ["force_eager"]
    everywhere()
    assert in_threads(stance) == ["eager_on_recompile"]
    release()
    assert (stance(), *in_threads(stance)) == ("default", "default")
    scope.leave()


def test_a_recomputation_on_one_of_autograds_threads_is_eager() -> None:
    """Those belong to no context, and may repeat a call of the session's own."""
    release, seen = hooks.eager_stance.hold(scope=Scope()), []
    x = torch.ones(1, requires_grad=True)
    (x * 2).register_hook(lambda grad: seen.append(stance()))
    y = x * 2
    y.register_hook(lambda grad: seen.append(stance()))
    y.sum().backward()
    release()
    assert seen == ["force_eager"]


def test_on_gradient_replaces_the_gradient_until_it_is_removed() -> None:
    x = torch.ones(2, requires_grad=True)
    handle = hooks.on_gradient(x, lambda grad: grad * 3)
    (x * 1).sum().backward()
    handle.remove()
    first: Tensor = x.grad.clone()
    (x * 1).sum().backward()
    assert first.tolist() == [3.0, 3.0]
    assert x.grad.tolist() == [4.0, 4.0]

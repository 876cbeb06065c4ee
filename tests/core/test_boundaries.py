"""Taps that say when a call of a module begins, and when it is over."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
from torch import nn

from tests.oracle import hooks_on
from torchhook._core.boundaries import AfterAllTap, EnterTap, LeaveTap
from torchhook._core.hooks import Attachment
from torchhook._core.scope import Repetition, Scope, repetition


def test_enter_and_leave_surround_the_module_also_when_it_raises() -> None:
    order: list[Any] = []

    class Fails(nn.Module):
        def forward(self, fail: bool) -> None:
            order.append("forward")
            if fail:
                raise ValueError("failed")

    module = Fails()
    module.register_forward_hook(lambda *_: order.append("user"))
    attachment = Attachment()
    attachment.attach(EnterTap(lambda m: order.append("enter")), module)
    attachment.attach(LeaveTap(lambda m: order.append("leave")), module)
    module(False)
    assert order == ["enter", "forward", "leave", "user"]
    order.clear()
    with pytest.raises(ValueError, match="failed"):
        module(True)
    assert order == ["enter", "forward", "leave"]
    attachment.remove()
    assert len(module._forward_hooks) == 1
    assert not module._forward_hooks_always_called


def test_what_comes_after_all_comes_behind_hooks_that_are_there_already() -> None:
    order: list[str] = []
    module, attachment = nn.Identity(), Attachment()
    module.register_forward_hook(lambda *_: order.append("user"))
    attachment.attach(AfterAllTap(lambda m: order.append("over"), Scope()), module)
    module(1)
    assert order == ["user", "over"]
    attachment.remove()
    assert len(hooks_on(module)) == 1


def test_a_repetition_ends_no_call() -> None:
    ended: list[str] = []
    module, attachment, before, later = nn.Identity(), Attachment(), Scope(), Scope()
    attachment.attach(AfterAllTap(lambda m: ended.append("before"), before), module)
    attachment.attach(AfterAllTap(lambda m: ended.append("later"), later), module)

    def repeats() -> None:
        repetition.set(Repetition(frozenset({before})))
        module(1)

    contextvars.copy_context().run(repeats)
    assert ended == ["later"]  # a session that was opened inside of it
    module(1)
    assert ended == ["later", "before", "later"]
    attachment.remove()

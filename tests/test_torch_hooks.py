"""Hooks that are put where PyTorch puts them: the same as registered ones, and gone without a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import torchhook as th
from tests.oracle import hooks_on
from torchhook._torch import hooks
from torchhook._torch.hooks import Undo, put_after, put_before, take_away


def test_hooks_are_put_directly_with_this_torch() -> None:
    assert hooks.is_direct


@pytest.mark.parametrize("direct", [True, False])
def test_they_run_in_the_order_of_registration_among_others_and_go_alone(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "is_direct", direct)
    module, called, undo = nn.Identity(), list[Any](), Undo()
    module.register_forward_hook(lambda *_: called.append("theirs"))
    put_after(undo, module, lambda m, args, output: called.append(("after", args, output)))
    put_before(undo, module, lambda m, args, kwargs: called.append(("before", args, kwargs)))
    module.register_forward_hook(lambda *_: called.append("theirs, later"))
    module(3)
    assert called == [("before", (3,), {}), "theirs", ("after", (3,), 3), "theirs, later"]
    for last in undo:
        take_away(last)
        take_away(last)  # twice does no harm
    called.clear()
    module(3)
    assert called == ["theirs", "theirs, later"]
    assert not module._forward_pre_hooks_with_kwargs


def test_keys_are_torchs_own_so_that_none_is_given_out_twice() -> None:
    module, undo = nn.Identity(), Undo()
    keys = []
    for _ in range(3):
        keys.append(module.register_forward_hook(lambda *_: None).id)
        put_after(undo, module, lambda *_: None)
    assert len(module._forward_hooks) == 6
    assert RemovableHandle.next_id > max(module._forward_hooks)
    for last in undo:
        take_away(last)
    assert list(module._forward_hooks) == keys


def test_a_class_that_registers_in_a_way_of_its_own_is_asked_to() -> None:
    class Careful(nn.Linear):
        asked = 0

        def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
            type(self).asked += 1
            return super().register_forward_hook(*args, **kwargs)

        def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
            type(self).asked += 1
            return super().register_forward_pre_hook(*args, **kwargs)

    model = nn.Sequential(Careful(2, 2))
    with th.capture(model, "0", "0:input") as rec:
        model(torch.ones(1, 2))
    assert Careful.asked == 2
    assert rec["0"].shape == (1, 2)
    assert hooks_on(model) == []


def test_where_torch_keeps_hooks_in_another_way_they_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignored(self: nn.Module, x: Tensor) -> Tensor:  # a torch whose modules look for their hooks elsewhere
        return x

    with monkeypatch.context() as patch:
        patch.setattr(nn.Identity, "__call__", ignored)
        assert not hooks._works()
    assert hooks._works()
    monkeypatch.setattr(hooks, "is_direct", False)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    x = torch.randn(3, 2)
    with th.capture(model, "0", "1:input") as rec:
        model(x)
    assert torch.equal(rec["0"], model[0](x))
    assert hooks_on(model) == []

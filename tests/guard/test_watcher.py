"""Nothing but the findings changes: results, graphs, hooks and random numbers stay as without a guard."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.guard.faults import around, at_zero, one_zero, ones
from tests.oracle import assert_same, snapshot
from torchhook._guard.api import guard
from torchhook.errors import GuardError


@pytest.mark.shows("Checkpointing: guard")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_followed(reentrant: bool) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](checkpoint(self[1], self[0](x), use_reentrant=reentrant))

    for bad in (False, True):
        model = Checkpointed(*at_zero(lambda x: x.exp().sub(1).sqrt())(bad))
        with guard(model, action="record") as g:
            model(ones()).sum().backward()
        assert [(f.site.path, f.site.op, f.phase) for f in g.findings] == [("1", "sqrt", "backward")] * bad


@pytest.mark.shows("Gradient modes: guard under double backward")
def test_double_backward_and_retained_graphs_are_clean() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = ones().requires_grad_()
    with guard(model) as g:
        output = model(x).sum()
        (grad,) = torch.autograd.grad(output, x, create_graph=True)
        (output + grad.square().sum()).backward()
    assert g.findings == []


def boom(kind: type[BaseException]) -> Callable[[Tensor], Tensor]:
    def raises(x: Tensor) -> Tensor:
        raise kind("from the model")

    return raises


EXITS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], type[BaseException] | None]] = {
    "success": (lambda: around(lambda x: x + 1), lambda m: m(ones()).sum().backward(), None),
    "finding forward": (lambda: around(lambda x: x / 0), lambda m: m(ones()), GuardError),
    "finding backward": (lambda: at_zero(lambda x: x.sqrt())(True), lambda m: m(ones()).sum().backward(), GuardError),
    "the model's error": (lambda: around(boom(KeyError)), lambda m: m(ones()), KeyError),
    "an interrupt": (lambda: around(boom(KeyboardInterrupt)), lambda m: m(ones()), KeyboardInterrupt),
}


@pytest.mark.parametrize("name", EXITS)
def test_nothing_is_left_behind(name: str) -> None:
    build, use, error = EXITS[name]
    built = build()
    model, twin = copy.deepcopy(built), copy.deepcopy(built)
    with contextlib.suppress(KeyError, KeyboardInterrupt):
        use(twin)  # what the model itself changes, such as gradients
    if error is None:
        with guard(model):
            use(model)
    else:
        with pytest.raises(error):
            with guard(model):
                use(model)
    if name not in ("finding forward", "finding backward"):
        assert_same(snapshot(twin), snapshot(model), name)
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert torch._C._len_torch_function_stack() == 0
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_dropped_guard_takes_its_hooks_along() -> None:
    model = around(lambda x: x.log())
    g = guard(model).open()
    output = model(one_zero(False))
    ref = weakref.ref(g)
    del g
    gc.collect()
    assert ref() is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model(one_zero(True))
    output.sum().backward()


def test_a_graph_outlives_the_guard_unwatched() -> None:
    model = at_zero(lambda x: x.sqrt())(True)
    with guard(model) as g:
        output = model(ones())
    output.sum().backward()
    assert g.findings == []
    assert not model[0].weight.grad.isfinite().all()


def test_a_graph_is_freed_as_without_a_guard() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    gc.disable()
    try:
        with guard(model):
            output = model(ones())
            ref = weakref.ref(output)
            del output
            assert ref() is None
    finally:
        gc.enable()


def test_random_numbers_and_results_stay_the_same() -> None:
    built = nn.Sequential(
        nn.Linear(4, 64), nn.Dropout(0.5), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 2)
    )
    model, twin = copy.deepcopy(built), copy.deepcopy(built)
    x = torch.randn(8, 4)
    torch.manual_seed(3)
    expected = twin(x)
    expected.sum().backward()
    torch.manual_seed(3)
    with guard(model):
        found = model(x)
        found.sum().backward()
    assert torch.equal(expected, found)
    assert_same(snapshot(twin), snapshot(model), "the model")


def test_a_custom_function_that_a_module_returns_is_blamed_for_its_own_backward() -> None:
    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * float("nan")

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Spoils.apply(x)

    model = nn.Sequential(nn.Linear(3, 3), Layer(), nn.Linear(3, 2))
    with guard(model, action="record") as g:
        model(torch.ones(1, 3)).sum().backward()
    assert [finding.site for finding in g.findings] == ["1/Spoils:grad_input"]

"""Operations that the dispatcher tells of: heard as a mode hears them, whatever else is on, and nothing stays on."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import torchhook as th
from tests.language_models import small_gpt2
from tests.oracle import in_threads
from torchhook import edits
from torchhook._core import site_operations
from torchhook._torch import dispatcher
from torchhook.errors import NeverRanWarning

OP = "scaled_dot_product_attention"
X = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))


def is_told() -> bool:
    """Whether the dispatcher tells of calls in this thread."""
    return dispatcher._key is not None and dispatcher._is_on(dispatcher._key)


@pytest.fixture(autouse=True)
def nothing_left_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Some other test may have imported torch's causal biases, with which the dispatcher is not asked.
    monkeypatch.delitem(sys.modules, "torch.nn.attention.bias", raising=False)
    assert dispatcher.can_tell({OP})
    yield
    assert not _get_current_function_mode_stack()
    assert not is_told()


class Attends(nn.Module):
    """Notes by itself what attention gives it, before it is overwritten, and how it was listened to."""

    def __init__(self, before: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.before = before
        self.right: list[Tensor] = []
        self.told: list[bool] = []

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.before(x * self.weight)
        found = F.scaled_dot_product_attention(x, x.relu(), x, attn_mask=mask)
        self.told.append(is_told())
        self.right.append(found.detach().clone())
        return found.mul_(2) if not found.requires_grad else found * 2


def learned(before: Callable[[Tensor], Tensor] = lambda x: x) -> Attends:
    """One whose calls the dispatcher tells of from now on."""
    model = Attends(before)
    with torch.no_grad(), th.capture(model, f"/{OP}"):
        model(X)
    model.right.clear()
    model.told.clear()
    return model


def assert_right(rec: th.Recording, model: Attends, address: str = f"/{OP}") -> None:
    found = rec.all(address)
    assert len(found) == len(model.right) > 0
    assert all(torch.equal(one, right) for one, right in zip(found, model.right, strict=True))


def test_a_mode_hears_the_first_call_and_the_dispatcher_tells_of_the_others() -> None:
    model = Attends()
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        for factor in (1, 2, 3):
            model(X * factor)
    assert_right(rec, model)
    with torch.no_grad(), th.capture(model, f"/{OP}", max_records=2) as newest:
        for factor in (4, 5, 6):
            model(X * factor)
    assert all(torch.equal(*pair) for pair in zip(newest.all(f"/{OP}"), model.right[-2:], strict=True))
    assert model.told == [False, True, True, True, True, True]


@pytest.mark.parametrize("around", [
    contextlib.nullcontext,
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.device("cpu"),
    torch._C.DisableTorchFunctionSubclass,
], ids=["grad", "no_grad", "inference", "autocast", "device", "no subclasses"])  # fmt: skip
def test_whatever_is_on_the_values_are_right(around: Any) -> None:
    model = learned()
    with around(), th.capture(model, f"/{OP}") as rec:
        model(X)
    assert_right(rec, model)


def test_gradients_flow_as_without_a_session() -> None:
    model, twin = learned(), Attends()
    with th.capture(model, f"/{OP}", keep="live") as rec:
        model(X).square().sum().backward(retain_graph=True)
    assert model.told == [True]
    twin(X).square().sum().backward()
    assert torch.equal(model.weight.grad, twin.weight.grad)  # type: ignore[arg-type]
    (through,) = torch.autograd.grad(rec[f"/{OP}"].sum(), model.weight, allow_unused=True)
    assert through is not None


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_inside_vmap_the_call_is_heard_once() -> None:
    model = learned()
    weights = {"weight": model.weight.detach()}

    def call(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,))

    model.forward = lambda x: F.scaled_dot_product_attention(x, x.relu(), x) * 2  # type: ignore[method-assign,assignment]
    with th.capture(model, f"/{OP}") as rec:
        torch.func.vmap(call)(X)
    assert rec[f"/{OP}"].shape == X.shape
    torch.testing.assert_close(rec[f"/{OP}"], F.scaled_dot_product_attention(X, X.relu(), X))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_is_kept_once(reentrant: bool) -> None:
    model = learned()
    x = X.clone().requires_grad_()
    with th.capture(model, f"/{OP}") as rec:
        checkpoint(lambda x: model(x).exp().exp(), x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(rec[f"/{OP}"], model.right[0])
    assert rec.recomputed == {f"/{OP}": 1}


def test_threads_are_told_of_their_own_calls() -> None:
    model = learned()

    def run(number: int) -> None:
        with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
            outputs = [model(X + 20 * number + step) for step in range(20)]
        assert all(torch.equal(2 * one, other) for one, other in zip(rec.all(f"/{OP}"), outputs, strict=True))

    in_threads(*[functools.partial(run, number) for number in range(4)])


def test_calls_of_another_thread_are_not_recorded_and_counted() -> None:
    model = learned()
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        model(X)
        in_threads(lambda: model(X * 2))
    assert torch.equal(rec[f"/{OP}"], model.right[0])


def test_of_two_sessions_one_that_hears_of_all_and_one_that_is_told_both_are_right() -> None:
    model = learned()
    with torch.no_grad(), th.capture(model, f"/{OP}") as told, th.capture(model, "/relu", f"/{OP}:input") as all_of_it:
        model(X)
    assert_right(told, model)
    x = X * model.weight.detach()
    assert torch.equal(all_of_it["/relu"], x.relu())
    assert torch.equal(all_of_it[f"/{OP}:input"].args[0], x)


def test_sessions_take_turns_as_those_of_a_mode_do() -> None:
    model = learned()
    with torch.no_grad():
        with (
            th.capture(model, f"/{OP}") as before,
            th.edit(model, {f"/{OP}": edits.scale(3.0)}),
            th.capture(model, f"/{OP}") as after,
        ):
            output = model(X)
        unedited = Attends()
        unedited(X)
    assert torch.equal(before[f"/{OP}"], unedited.right[0])
    assert torch.equal(after[f"/{OP}"], unedited.right[0] * 3)
    assert torch.equal(output, unedited.right[0] * 6)


class Swallows(TorchFunctionMode):
    """Attends by itself, by twice the value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[2] * 2 if func is F.scaled_dot_product_attention else func(*args, **(kwargs or {}))


def test_the_mode_of_somebody_else_around_a_model_has_its_say() -> None:
    model = learned()
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec, Swallows():
        model(X)
    assert torch.equal(model.right[0], X * 2)
    assert_right(rec, model)


def test_a_mode_inside_of_a_module_that_makes_the_call_go_away_is_told_of() -> None:
    model = learned()
    model.forward = lambda x: swallowed(x)  # type: ignore[method-assign,assignment]

    def swallowed(x: Tensor) -> Tensor:
        with Swallows():
            return F.scaled_dot_product_attention(x, x, x)

    with pytest.warns(NeverRanWarning, match=f"ran no '{OP}'"), th.capture(model, f"/{OP}"):
        assert torch.equal(model(X), X * 2)


class Halves(Tensor):
    """A class with a say: attention among its tensors gives half of the first."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return args[0].as_subclass(Tensor) / 2
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("place", ["position", "keyword"])
def test_a_class_of_tensors_that_attends_in_its_own_way_is_heard_after_plain_ones(place: str) -> None:
    model = learned()
    strange = X.as_subclass(Halves)
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        model(X)
        model(strange) if place == "position" else model(x=strange)
        model(X)
    assert model.told == [True, False, True]
    assert torch.equal(model.right[1], X / 2)
    assert_right(rec, model)


def test_one_that_was_first_heard_of_such_a_class_is_listened_to_by_a_mode() -> None:
    model = Attends(before=lambda x: x.as_subclass(Halves))
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        model(X)
        model(X)
    assert model.told == [False, False]
    assert_right(rec, model)


def test_causal_biases_are_heard_by_a_mode() -> None:
    model = learned()
    from torch.nn.attention.bias import causal_lower_right

    mask: Any = causal_lower_right(4, 4)
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        model(X, mask)
        model(X)
    assert model.told == [False, False]
    assert_right(rec, model)


def test_a_module_that_attends_no_more_says_so_and_is_listened_to_anew() -> None:
    model = learned()
    model.forward = lambda x: x + 1  # type: ignore[method-assign,assignment]
    with pytest.warns(NeverRanWarning, match=f"ran no '{OP}' in this session, as it had before"):
        with th.capture(model, f"/{OP}") as rec:
            model(X)
    assert len(rec) == 0
    model.forward = lambda x: F.scaled_dot_product_attention(x, x, x)  # type: ignore[method-assign,assignment]
    with th.capture(model, f"/{OP}") as rec:
        model(X)
    assert torch.equal(rec[f"/{OP}"], F.scaled_dot_product_attention(X, X, X))


def test_what_multi_head_attention_calls_is_its_own() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            m = self.inner
            x = F.scaled_dot_product_attention(x, x, x)
            given = (x, x, x, 8, 2, m.in_proj_weight, m.in_proj_bias, None, None, False, 0.0, m.out_proj.weight)
            return F.multi_head_attention_forward(*given, m.out_proj.bias, need_weights=False)[0]

    model, x = Both().eval(), X[0]
    right = F.scaled_dot_product_attention(x, x, x)
    for _ in range(3):
        with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
            model(x)
        assert torch.equal(rec[f"/{OP}"], right)


def test_modules_inside_of_each_other_hear_of_their_own_calls() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attends()

        def forward(self, x: Tensor) -> Tensor:
            x = F.scaled_dot_product_attention(x, x, x)
            x = self.inner(x)
            return F.scaled_dot_product_attention(x, x, x) + 1

    model = Outer()
    with torch.no_grad():
        first = F.scaled_dot_product_attention(X, X, X)
        for sites in ([f"/{OP}"], [f"/{OP}", f"inner/{OP}"], [f"inner/{OP}"], [f"/{OP}", f"inner/{OP}"]):
            model.inner.right.clear()
            with th.capture(model, sites) as rec:
                model(X)
            last = model.inner.right[0] * 2
            if f"/{OP}" in sites:
                a, b = rec.all(f"/{OP}")
                assert torch.equal(a, first)
                assert torch.equal(b, F.scaled_dot_product_attention(last, last, last))
            if f"inner/{OP}" in sites:
                assert_right(rec, model.inner, f"inner/{OP}")


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_on(kind: type[BaseException]) -> None:
    def raises(x: Tensor) -> Tensor:
        if state["raise"]:
            raise kind
        return x

    state = {"raise": False}
    model = learned(raises)
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        model(X)
        state["raise"] = True
        with pytest.raises(kind):
            model(X)
        state["raise"] = False
        model(X)
    assert_right(rec, model)


def test_an_error_of_attention_itself_passes_unchanged() -> None:
    model = learned()
    with th.capture(model, f"/{OP}") as rec:
        with pytest.raises(RuntimeError) as found:
            model(X, torch.zeros(3, 3, 3))
        assert not is_told()
        model(X)
    with pytest.raises(RuntimeError) as right:
        F.scaled_dot_product_attention(X, X, X, attn_mask=torch.zeros(3, 3, 3))
    assert str(found.value) == str(right.value)
    assert_right(rec, model)


def test_a_pass_may_end_in_a_call() -> None:
    model = nn.Sequential(learned(), nn.Flatten())
    _, rec = th.run(model, X, capture=f"0/{OP}", stop=True)
    assert rec.stopped
    assert torch.equal(rec[f"0/{OP}"], F.scaled_dot_product_attention(X, X.relu(), X))
    assert not is_told()


def test_a_copy_is_not_taken_for_its_original() -> None:
    model = learned()
    other = copy.deepcopy(model)
    with torch.no_grad(), th.capture(other, f"/{OP}") as rec:
        other(X)
        other(X)
    assert other.told == [False, True]
    assert_right(rec, other)


def test_what_our_own_hooks_compute_is_not_heard() -> None:
    model = learned()

    def transform(value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(value, value, value)

    with torch.no_grad(), th.capture(model, f"/{OP}", transform=transform) as rec:
        model(X)
    (right,) = model.right
    assert torch.equal(rec[f"/{OP}"], transform(right))


def test_a_language_model_that_generates_is_told_of_step_by_step() -> None:
    model, _ = small_gpt2(eos_token_id=None)
    ids = torch.arange(5)[None]
    right: list[Tensor] = []
    projection = model.get_submodule("transformer.h.1.attn.c_proj")
    handle = projection.register_forward_pre_hook(lambda module, args: right.append(args[0].clone()))
    site = f"transformer.h.1.attn/{OP}"
    with torch.no_grad(), th.capture(model, site) as rec:
        model.generate(ids, max_new_tokens=4, do_sample=False)  # type: ignore[operator]
    handle.remove()
    assert site_operations._plain.get(model.get_submodule("transformer.h.1.attn"))
    found = [value.transpose(1, 2).flatten(2) for value in rec.all(site)]
    assert len(found) == len(right) == 4
    assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))
    assert [record.step for record in rec.records(site)] == [0, 1, 2, 3]

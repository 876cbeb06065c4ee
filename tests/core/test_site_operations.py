"""Attention as a site, in whatever way a model comes to call it: true, each call once, and nothing stays on."""

from __future__ import annotations

import contextlib
import copy
import functools
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
from torchhook.errors import NeverRanWarning

OP = "scaled_dot_product_attention"
X = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def nothing_left_on() -> Iterator[None]:
    yield
    assert not _get_current_function_mode_stack()


class Attends(nn.Module):
    """Notes by itself what attention gives it, before it is overwritten."""

    def __init__(self, before: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.before = before
        self.right: list[Tensor] = []

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.before(x * self.weight)
        found = F.scaled_dot_product_attention(x, x.relu(), x, attn_mask=mask)
        self.right.append(found.detach().clone())
        return found.mul_(2) if not found.requires_grad else found * 2


class Around(nn.Module):
    """Attends before and after another that attends, which it calls in a block."""

    def __init__(self, block: Callable[[], Any] = contextlib.nullcontext) -> None:
        super().__init__()
        self.inner, self.block = Attends(), block

    def forward(self, x: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(x, x, x)
        with self.block():
            x = self.inner(x)
        return F.scaled_dot_product_attention(x, x, x) + 1


def assert_right(rec: th.Recording, model: Attends, address: str = f"/{OP}") -> None:
    found = rec.all(address)
    assert len(found) == len(model.right) > 0
    assert all(torch.equal(one, right) for one, right in zip(found, model.right, strict=True))


def test_every_call_is_kept_session_after_session() -> None:
    model = Attends()
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        for factor in (1, 2, 3):
            model(X * factor)
    assert_right(rec, model)
    with torch.no_grad(), th.capture(model, f"/{OP}", max_records=2) as newest:
        for factor in (4, 5, 6):
            model(X * factor)
    assert all(torch.equal(*pair) for pair in zip(newest.all(f"/{OP}"), model.right[-2:], strict=True))


@pytest.mark.parametrize("around", [
    contextlib.nullcontext,
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.device("cpu"),
    torch._C.DisableTorchFunctionSubclass,
], ids=["grad", "no_grad", "inference", "autocast", "device", "no subclasses"])  # fmt: skip
def test_whatever_is_on_the_values_are_right(around: Any) -> None:
    model = Attends()
    with around(), th.capture(model, f"/{OP}") as rec:
        model(X)
    assert_right(rec, model)


def test_gradients_flow_as_without_a_session() -> None:
    model, twin = Attends(), Attends()
    with th.capture(model, f"/{OP}", keep="live") as rec:
        model(X).square().sum().backward(retain_graph=True)
    twin(X).square().sum().backward()
    assert torch.equal(model.weight.grad, twin.weight.grad)  # type: ignore[arg-type]
    (through,) = torch.autograd.grad(rec[f"/{OP}"].sum(), model.weight, allow_unused=True)
    assert through is not None


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_inside_vmap_the_call_is_heard_once() -> None:
    model = Attends()
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
    model = Attends()
    x = X.clone().requires_grad_()
    with th.capture(model, f"/{OP}") as rec:
        checkpoint(lambda x: model(x).exp().exp(), x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(rec[f"/{OP}"], model.right[0])
    assert rec.recomputed == {f"/{OP}": 1}


def test_threads_hear_of_their_own_calls() -> None:
    model = Attends()

    def run(number: int) -> None:
        with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
            outputs = [model(X + 20 * number + step) for step in range(20)]
        assert all(torch.equal(2 * one, other) for one, other in zip(rec.all(f"/{OP}"), outputs, strict=True))

    in_threads(*[functools.partial(run, number) for number in range(4)])


def test_calls_of_another_thread_are_not_recorded_and_counted() -> None:
    model = Attends()
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        model(X)
        in_threads(lambda: model(X * 2))
    assert torch.equal(rec[f"/{OP}"], model.right[0])


def test_two_sessions_on_different_sites_are_both_right() -> None:
    model = Attends()
    with torch.no_grad(), th.capture(model, f"/{OP}") as alone, th.capture(model, "/relu", f"/{OP}:input") as both:
        model(X)
    assert_right(alone, model)
    x = X * model.weight.detach()
    assert torch.equal(both["/relu"], x.relu())
    assert torch.equal(both[f"/{OP}:input"].args[0], x)


def test_sessions_take_turns_around_an_edit() -> None:
    model = Attends()
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
    model = Attends()
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec, Swallows():
        model(X)
    assert torch.equal(model.right[0], X * 2)
    assert_right(rec, model)


def test_a_mode_inside_of_a_module_that_makes_the_call_go_away_is_reported() -> None:
    model = Attends()
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
    model = Attends()
    strange = X.as_subclass(Halves)
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        model(X)
        model(strange) if place == "position" else model(x=strange)
        model(X)
    assert torch.equal(model.right[1], X / 2)
    assert_right(rec, model)


@pytest.mark.parametrize("way", ["made inside", "in a list", "an attribute", "beside plain ones"])
@pytest.mark.parametrize("kind", ["answers", "wraps"])
def test_a_class_with_a_say_is_heard_however_it_comes_there(way: str, kind: str) -> None:
    strange: type[Tensor] = Halves if kind == "answers" else Doubles

    class Takes(nn.Module):
        q: Tensor | None = None

        def forward(self, x: Any, own: bool = False) -> list[Tensor]:
            if isinstance(x, list):
                x = x[0]
            q = self.q if self.q is not None else x.as_subclass(strange) if own else x
            right.append(F.scaled_dot_product_attention(q, x, x))
            if own and way == "beside plain ones":
                right.append(F.scaled_dot_product_attention(x, x, x))
            return right

    model, right = Takes(), list[Tensor]()
    for _ in range(2):
        right.clear()
        with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
            model(X)
            if way == "in a list":
                model([X.as_subclass(strange)])
            elif way == "an attribute":
                model.q = X.as_subclass(strange)
                model(X)
                model.q = None
            else:
                model(X, own=True)
            model(X)
        found = rec.all(f"/{OP}")
        assert [type(one) for one in found] == [type(one) for one in right]
        assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))


class Doubles(Tensor):
    """A class whose attention is twice that of plain tensors, which it calls for it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [one.as_subclass(Tensor) if isinstance(one, Doubles) else one for one in args]
        if func is F.scaled_dot_product_attention:
            return func(*plain, **(kwargs or {})) * 2
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_jagged_tensors_made_inside_are_kept_as_they_are() -> None:
    right: list[Tensor] = []

    class Packs(nn.Module):
        def forward(self, x: Tensor, lengths: list[int] | None = None) -> Tensor:
            q = x
            if lengths is not None:
                rows = [x[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths)]
                q = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
            right.append(F.scaled_dot_product_attention(q, q, q))
            return right[-1]

    model = Packs()
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        for lengths in (None, [4, 3], None):
            model(X, lengths)
    found = rec.all(f"/{OP}")
    assert [one.is_nested for one in found] == [False, True, False]
    assert torch.equal(found[1].values(), right[1].values())  # type: ignore[operator]


def test_the_mode_of_a_user_that_is_on_for_a_part_of_a_module_comes_off_again() -> None:
    model = Around(lambda: torch.device("meta"))
    for sites in ([f"/{OP}"], [f"/{OP}", f"inner/{OP}"], [f"/{OP}", f"inner/{OP}:input"]):
        with torch.no_grad(), th.capture(model, sites) as rec:
            model(X)
        assert len(rec.all(f"/{OP}")) == 2
        assert torch.empty(1).device.type == "cpu"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_what_no_function_of_python_calls_is_no_site_in_any_session() -> None:
    inside = torch.jit.script(scripted)

    class Also(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.ops.aten.scaled_dot_product_attention.default(x, x, x)
            return F.scaled_dot_product_attention(x, x, x) + inside(x) + y

    model = Also()
    for _ in range(3):
        with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
            model(X)
        assert torch.equal(rec[f"/{OP}"], F.scaled_dot_product_attention(X, X, X))


def scripted(x: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_causal_biases_are_heard_of() -> None:
    from torch.nn.attention.bias import causal_lower_right

    model, mask = Attends(), causal_lower_right(4, 4)
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        model(X)
        model(X, mask)
    assert_right(rec, model)


def test_a_module_that_attends_no_more_says_what_it_runs() -> None:
    model = Attends()
    with torch.no_grad(), th.capture(model, f"/{OP}"):
        model(X)
    model.forward = lambda x: x.relu() + 1  # type: ignore[method-assign,assignment]
    with pytest.warns(NeverRanWarning, match=f"ran no '{OP}'. There are: 'relu', 'add'"):
        with th.capture(model, f"/{OP}") as rec:
            model(X)
    assert len(rec) == 0


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
    model = Around()
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
    model = Attends(raises)
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        model(X)
        state["raise"] = True
        with pytest.raises(kind):
            model(X)
        state["raise"] = False
        model(X)
    assert_right(rec, model)


def test_an_error_of_attention_itself_passes_unchanged() -> None:
    model = Attends()
    with th.capture(model, f"/{OP}") as rec:
        with pytest.raises(RuntimeError) as found:
            model(X, torch.zeros(3, 3, 3))
        model(X)
    with pytest.raises(RuntimeError) as right:
        F.scaled_dot_product_attention(X, X, X, attn_mask=torch.zeros(3, 3, 3))
    assert str(found.value) == str(right.value)
    assert_right(rec, model)


def test_a_pass_may_end_in_a_call() -> None:
    model = nn.Sequential(Attends(), nn.Flatten())
    _, rec = th.run(model, X, capture=f"0/{OP}", stop=True)
    assert rec.stopped
    assert torch.equal(rec[f"0/{OP}"], F.scaled_dot_product_attention(X, X.relu(), X))


def test_a_copy_is_not_taken_for_its_original() -> None:
    model = Attends()
    other = copy.deepcopy(model)
    with torch.no_grad(), th.capture(other, f"/{OP}") as rec:
        other(X)
        other(X)
    assert_right(rec, other)


def test_what_our_own_hooks_compute_is_not_heard() -> None:
    model = Attends()

    def transform(value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(value, value, value)

    with torch.no_grad(), th.capture(model, f"/{OP}", transform=transform) as rec:
        model(X)
    (right,) = model.right
    assert torch.equal(rec[f"/{OP}"], transform(right))


def test_a_language_model_that_generates_is_heard_step_by_step() -> None:
    model, _ = small_gpt2(eos_token_id=None)
    ids = torch.arange(5)[None]
    right: list[Tensor] = []
    projection = model.get_submodule("transformer.h.1.attn.c_proj")
    handle = projection.register_forward_pre_hook(lambda module, args: right.append(args[0].clone()))
    site = f"transformer.h.1.attn/{OP}"
    with torch.no_grad(), th.capture(model, site) as rec:
        model.generate(ids, max_new_tokens=4, do_sample=False)  # type: ignore[operator]
    handle.remove()
    found = [value.transpose(1, 2).flatten(2) for value in rec.all(site)]
    assert len(found) == len(right) == 4
    assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))
    assert [record.step for record in rec.records(site)] == [0, 1, 2, 3]

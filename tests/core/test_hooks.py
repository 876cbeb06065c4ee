"""Taps one by one: what they count, pass on and leave behind."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import in_threads, stance
from torchhook._core import hooks
from torchhook._core.gradients import GradTap
from torchhook._core.hooks import Attachment, TensorHandles
from torchhook._core.scope import Scope, Stop, active
from torchhook._core.taps import CustomTap, EnterTap, InputTap, LeaveTap, OutputTap, Tap, as_arguments, as_value
from torchhook._values.tree import Inputs


@pytest.fixture
def scope() -> Iterator[Scope]:
    scope = Scope()
    scope.enter()
    yield scope
    scope.leave()


# -- scopes -----------------------------------------------------------------------------------


def test_scopes_are_entered_and_left_in_any_order() -> None:
    before = active.get()
    one, two = Scope(), Scope()
    one.enter()
    two.enter()
    one.leave()
    assert active.get() == before | {two}
    one.leave()
    two.leave()
    assert active.get() == before


def test_a_scope_is_not_seen_in_another_thread_and_is_seen_in_a_copied_context(scope: Scope) -> None:
    seen = in_threads(lambda: scope in active.get())
    contextvars.copy_context().run(lambda: seen.append(scope in active.get()))
    assert seen == [False, True]


def test_stop_is_no_exception_that_a_model_would_catch() -> None:
    assert not issubclass(Stop, Exception)
    assert Stop(scope := Scope()).scope is scope


# -- taps -------------------------------------------------------------------------------------


def test_a_tap_counts_then_edits_in_order_then_shows_the_result_to_its_keeps() -> None:
    tap = Tap("here")
    seen: list[Any] = []
    tap.edits += [lambda v, call: [*v, f"first {call}"], lambda v, call: [*v, "second"]]
    tap.keeps += [lambda v, call: seen.append((v, call)), lambda v, call: seen.append((v, call))]
    assert tap.take([]) == ["first 0", "second"]
    assert tap.take(["x"]) == ["x", "first 1", "second"]
    assert seen == [(["first 0", "second"], 0)] * 2 + [(["x", "first 1", "second"], 1)] * 2
    assert tap.ran == 2


def test_a_tap_without_edits_returns_the_very_value() -> None:
    value = object()
    assert Tap("here").take(value) is value


def test_an_output_tap_that_changes_nothing_tells_pytorch_nothing(scope: Scope) -> None:
    tap = OutputTap("here", scope)
    tap.keeps.append(lambda v, call: None)
    assert tap(nn.Identity(), (), "value") is None
    tap.edits.append(lambda v, call: v)
    assert tap(nn.Identity(), (), "value") is None
    tap.edits.append(lambda v, call: v.upper())
    assert tap(nn.Identity(), (), "value") == "VALUE"


def test_an_output_can_be_none(scope: Scope) -> None:
    tap, seen = OutputTap("here", scope), []
    tap.keeps.append(lambda v, call: seen.append(v))
    assert tap(nn.Identity(), (), None) is None
    assert seen == [None]


@pytest.mark.parametrize("kind", [OutputTap, InputTap])
def test_a_call_from_outside_the_scope_is_only_counted(kind: Any) -> None:
    tap = kind("here", Scope())
    tap.edits.append(lambda v, call: pytest.fail("edited"))
    tap.keeps.append(lambda v, call: pytest.fail("kept"))
    assert tap(nn.Identity(), (1,), {}) is None
    assert (tap.ran, tap.elsewhere) == (0, 1)


@pytest.mark.parametrize("kind", [OutputTap, InputTap])
def test_a_tap_without_a_scope_takes_every_call(kind: Any) -> None:
    tap = kind("here", None)
    in_threads(lambda: tap(nn.Identity(), (1,), {}))
    assert (tap.ran, tap.elsewhere) == (1, 0)


@pytest.mark.parametrize(
    ("args", "kwargs", "value"),
    [
        ((1,), {}, 1),
        ((), {}, Inputs((), {})),
        ((1, 2), {}, Inputs((1, 2), {})),
        ((1,), {"k": 2}, Inputs((1,), {"k": 2})),
        ((), {"k": 2}, Inputs((), {"k": 2})),
        (((1, 2),), {}, (1, 2)),
        ((None,), {}, None),
    ],
)
def test_one_positional_argument_passes_as_itself_and_all_else_as_inputs(args: Any, kwargs: Any, value: Any) -> None:
    assert as_value(args, kwargs) == value
    assert type(as_value(args, kwargs)) is type(value)
    assert as_arguments(as_value(args, kwargs)) == (args, kwargs)


def test_an_input_tap_gives_pytorch_the_arguments_to_go_on_with(scope: Scope) -> None:
    tap = InputTap("here", scope)
    assert tap(nn.Identity(), (1,), {}) is None
    tap.edits.append(lambda v, call: v * 10 if isinstance(v, int) else Inputs((0,), v.kwargs))
    assert tap(nn.Identity(), (1,), {}) == ((10,), {})
    assert tap(nn.Identity(), (1, 2), {"k": 3}) == ((0,), {"k": 3})


def test_attached_taps_see_and_change_a_real_module(scope: Scope) -> None:
    module = nn.Identity()
    before, after, seen = InputTap("in", scope), OutputTap("out", scope), []
    before.edits.append(lambda v, call: v + 1)
    after.edits.append(lambda v, call: v * 2)
    before.keeps.append(lambda v, call: seen.append(("in", v)))
    after.keeps.append(lambda v, call: seen.append(("out", v)))
    handles = [before.attach(module), after.attach(module)]
    assert module(3) == 8
    assert seen == [("in", 4), ("out", 8)]
    for handle in handles:
        handle.remove()
    assert module(3) == 3
    assert not any(d for key, d in vars(module).items() if "hooks" in key and d)


def test_a_custom_tap_passes_what_its_function_makes_of_the_call_and_never_changes_the_output(scope: Scope) -> None:
    module, seen = nn.Identity(), []
    tap = CustomTap("here", scope, lambda m, args, output: (m, args, output) if output else None)
    tap.keeps.append(lambda v, call: seen.append((v, call)))
    handle = tap.attach(module)
    assert [module(1), module(0), module(2)] == [1, 0, 2]
    assert seen == [((module, (1,), 1), 0), ((module, (2,), 2), 1)]
    handle.remove()


def test_a_custom_tap_leaves_the_function_alone_outside_of_its_scope() -> None:
    ran = []
    tap = CustomTap("here", Scope(), lambda m, args, output: ran.append(1))
    tap(nn.Identity(), (), 1)
    assert ran == []
    assert tap.elsewhere == 1


def test_enter_and_leave_surround_the_module_also_when_it_raises() -> None:
    order: list[Any] = []

    class Fails(nn.Module):
        def forward(self, fail: bool) -> None:
            order.append("forward")
            if fail:
                raise ValueError("failed")

    module = Fails()
    module.register_forward_hook(lambda *_: order.append("user"))
    handles = [
        EnterTap(lambda m: order.append("enter")).attach(module),
        LeaveTap(lambda m: order.append("leave")).attach(module),
    ]
    module(False)
    assert order == ["enter", "forward", "leave", "user"]
    order.clear()
    with pytest.raises(ValueError, match="failed"):
        module(True)
    assert order == ["enter", "forward", "leave"]
    for handle in handles:
        handle.remove()
    assert len(module._forward_hooks) == 1
    assert not module._forward_hooks_always_called


def test_a_copied_or_unpickled_tap_is_a_do_nothing_of_the_standard_library(scope: Scope) -> None:
    taps = [Tap("t"), OutputTap("o", scope), InputTap("i", scope), CustomTap("c", scope, print), EnterTap(print)]
    for tap in [*taps, LeaveTap(print), GradTap("g", scope, TensorHandles())]:
        for twin in (copy.deepcopy(tap), pickle.loads(pickle.dumps(tap))):
            assert twin.__func__ is contextlib.nullcontext.__exit__
            assert twin(nn.Identity(), (1,), {}) is None
            assert twin(nn.Identity(), (1,)) is None


# -- recomputation ----------------------------------------------------------------------------


def test_a_call_inside_a_backward_pass_is_edited_again_and_not_kept_again() -> None:
    tap, edited, kept = Tap("here"), [], []
    tap.edits.append(lambda v, call: edited.append(call) or v)
    tap.keeps.append(lambda v, call: kept.append(call))
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        tap.take(x)
    y = x * 2
    y.register_hook(lambda grad: ([tap.take(x) for _ in range(3)], None)[1])
    y.sum().backward()
    assert edited == [0, 1, 2, 2, 1, 0]
    assert kept == [0, 1, 2]
    assert (tap.ran, tap.recomputed) == (3, 3)


def test_a_first_call_inside_a_backward_pass_is_a_call_like_any_other() -> None:
    tap, kept = Tap("here"), []
    tap.keeps.append(lambda v, call: kept.append(call))
    x = torch.ones(2, requires_grad=True)
    (y := x * 2).register_hook(lambda grad: (tap.take(x), None)[1])
    y.sum().backward()
    assert kept == [0]
    assert tap.recomputed == 0


# -- gradients --------------------------------------------------------------------------------


def grad_tap(scope: Scope, handles: TensorHandles | None = None) -> tuple[GradTap, list[Any]]:
    tap, kept = GradTap("here", scope, handles or TensorHandles()), []
    tap.keeps.append(lambda v, call: kept.append((call, v)))
    return tap, kept


def test_the_gradient_of_a_tensor_arrives_with_its_call() -> None:
    tap, kept = grad_tap(Scope())
    x = torch.ones(2, requires_grad=True)
    first, second = x * 2, x * 3
    tap.watch(first, 0)
    tap.watch(second, 1)
    (first * 5 + second * 7).sum().backward()
    assert sorted((call, grad.tolist()) for call, grad in kept) == [(0, [5.0, 5.0]), (1, [7.0, 7.0])]


def test_the_gradient_is_the_one_before_a_write_in_place() -> None:
    tap, kept = grad_tap(Scope())
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    y = x * 1
    tap.watch(y, 0)
    y.mul_(3).relu_()
    y.sum().backward()
    assert kept[0][1].tolist() == [3.0, 0.0]


def test_an_edit_of_a_gradient_takes_its_place() -> None:
    tap, kept = grad_tap(Scope())
    tap.edits.append(lambda grad, call: grad * 100)
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    tap.watch(y, 0)
    y.sum().backward()
    assert kept[0][1].tolist() == [100.0, 100.0]
    assert x.grad.tolist() == [200.0, 200.0]


def test_the_gradients_of_a_nested_value_arrive_in_its_structure() -> None:
    tap, kept = grad_tap(Scope())
    x = torch.ones(2, requires_grad=True)
    value = {"a": (x * 2, None), "b": torch.ones(1), "c": x * 3}
    tap.watch(value, 0)
    (value["a"][0].sum() + value["c"].sum() * 4).backward()
    assert len(kept) == 1
    got = kept[0][1]
    assert got["a"][0].tolist() == [1.0, 1.0]
    assert got["a"][1] is None
    assert got["b"] is None
    assert got["c"].tolist() == [4.0, 4.0]


def test_a_value_that_needs_no_gradient_is_counted() -> None:
    tap, kept = grad_tap(Scope())
    tap.watch(torch.ones(2), 0)
    tap.watch(("text", None), 1)
    assert tap.without_grad == {0, 1}
    assert kept == []


def test_nothing_arrives_once_the_session_is_closed() -> None:
    scope = Scope()
    tap, kept = grad_tap(scope)
    tap.edits.append(lambda grad, call: grad * 100)
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    tap.watch(y, 0)
    tap.watch((y, x * 1), 1)
    scope.closed = True
    y.sum().backward()
    assert kept == []
    assert x.grad.tolist() == [2.0, 2.0]


def test_a_graph_that_waits_for_a_gradient_is_freed_without_the_garbage_collector() -> None:
    tap, _ = grad_tap(Scope())
    x = torch.ones(2, requires_grad=True)
    gc.disable()
    try:
        y = x * 2
        tap.watch(y, 0)
        tap.watch({"a": y}, 1)
        gone = weakref.ref(y)
        del y
        assert gone() is None
    finally:
        gc.enable()


def test_handles_remove_every_hook_and_forget_those_whose_graph_is_gone() -> None:
    handles = TensorHandles()
    tap, kept = grad_tap(Scope(), handles)
    x = torch.ones(2, requires_grad=True)
    for call in range(2000):
        tap.watch(x * 2, call)
    assert len(handles._handles) < 1000
    y = x * 2
    tap.watch(y, 2000)
    handles.remove()
    y.sum().backward()
    assert kept == []
    assert handles._handles == []


# -- attachments ------------------------------------------------------------------------------


def test_an_attachment_undoes_everything_in_reverse_and_only_once() -> None:
    attachment, undone = Attachment(), []
    for i in range(3):
        attachment.defer(lambda i=i: undone.append(i))
    attachment.remove()
    attachment.remove()
    assert undone == [2, 1, 0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_attachment_leaves_out_torchscript_which_takes_no_hooks(scope: Scope) -> None:
    scripted, attachment = torch.jit.script(nn.ReLU()), Attachment()
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
    assert hooks.eager_stance._holders == 0
    assert stance() == "default"


def test_on_gradient_replaces_the_gradient_until_it_is_removed() -> None:
    x = torch.ones(2, requires_grad=True)
    handle = hooks.on_gradient(x, lambda grad: grad * 3)
    (x * 1).sum().backward()
    handle.remove()
    first: Tensor = x.grad.clone()
    (x * 1).sum().backward()
    assert first.tolist() == [3.0, 3.0]
    assert x.grad.tolist() == [4.0, 4.0]

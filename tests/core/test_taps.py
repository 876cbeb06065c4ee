"""Taps one by one: what they count, pass on and leave behind."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.oracle import in_threads
from torchhook._core.boundaries import EnterTap, LeaveTap
from torchhook._core.gradients import GradTap
from torchhook._core.hooks import Attachment
from torchhook._core.scope import Scope
from torchhook._core.taps import CustomTap, InputTap, OutputTap, Tap, as_arguments, as_value
from torchhook._values.tree import Inputs


@pytest.fixture
def scope() -> Iterator[Scope]:
    scope = Scope()
    scope.enter()
    yield scope
    scope.leave()


def test_a_tap_counts_then_edits_in_order_then_shows_the_result_to_its_looks() -> None:
    tap = Tap("here")
    seen: list[Any] = []
    tap.edits = [lambda v, call: [*v, f"first {call}"], lambda v, call: [*v, "second"]]
    tap.looks = [lambda v, call: seen.append((v, call)), lambda v, call: seen.append((v, call))]
    assert tap.take([]) == ["first 0", "second"]
    assert tap.take(["x"]) == ["x", "first 1", "second"]
    assert seen == [(["first 0", "second"], 0)] * 2 + [(["x", "first 1", "second"], 1)] * 2
    assert tap.ran == 2


def test_a_tap_without_edits_returns_the_very_value() -> None:
    value = object()
    assert Tap("here").take(value) is value


def test_an_output_tap_that_changes_nothing_tells_pytorch_nothing(scope: Scope) -> None:
    tap = OutputTap("here", scope)
    tap.add_look(lambda v, call: None)
    assert tap(nn.Identity(), (), "value") is None
    tap.add_edit(lambda v, call: v)
    assert tap(nn.Identity(), (), "value") is None
    tap.add_edit(lambda v, call: v.upper())
    assert tap(nn.Identity(), (), "value") == "VALUE"


def test_an_output_can_be_none(scope: Scope) -> None:
    tap, seen = OutputTap("here", scope), []
    tap.add_look(lambda v, call: seen.append(v))
    assert tap(nn.Identity(), (), None) is None
    assert seen == [None]


@pytest.mark.parametrize("kind", [OutputTap, InputTap])
def test_a_call_from_outside_the_scope_is_only_counted(kind: Any) -> None:
    tap = kind("here", Scope())
    tap.add_edit(lambda v, call: pytest.fail("edited"))
    tap.add_look(lambda v, call: pytest.fail("kept"))
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
    tap.add_edit(lambda v, call: v * 10 if isinstance(v, int) else Inputs((0,), v.kwargs))
    assert tap(nn.Identity(), (1,), {}) == ((10,), {})
    assert tap(nn.Identity(), (1, 2), {"k": 3}) == ((0,), {"k": 3})


def test_attached_taps_see_and_change_a_real_module(scope: Scope) -> None:
    module = nn.Identity()
    before, after, seen = InputTap("in", scope), OutputTap("out", scope), []
    before.add_edit(lambda v, call: v + 1)
    after.add_edit(lambda v, call: v * 2)
    before.add_look(lambda v, call: seen.append(("in", v)))
    after.add_look(lambda v, call: seen.append(("out", v)))
    attachment = Attachment()
    attachment.attach(before, module)
    attachment.attach(after, module)
    assert module(3) == 8
    assert seen == [("in", 4), ("out", 8)]
    attachment.remove()
    assert module(3) == 3
    assert not any(d for key, d in vars(module).items() if "hooks" in key and d)


def test_a_custom_tap_passes_what_its_function_makes_of_the_call_and_never_changes_the_output(scope: Scope) -> None:
    module, seen = nn.Identity(), []
    tap = CustomTap("here", scope, lambda m, args, output: (m, args, output) if output else None)
    tap.add_look(lambda v, call: seen.append((v, call)))
    attachment = Attachment()
    attachment.attach(tap, module)
    assert [module(1), module(0), module(2)] == [1, 0, 2]
    assert seen == [((module, (1,), 1), 0), ((module, (2,), 2), 1)]
    attachment.remove()


def test_a_custom_tap_leaves_the_function_alone_outside_of_its_scope() -> None:
    ran = []
    tap = CustomTap("here", Scope(), lambda m, args, output: ran.append(1))
    tap(nn.Identity(), (), 1)
    assert ran == []
    assert tap.elsewhere == 1


def test_a_copied_or_unpickled_tap_is_a_do_nothing_of_the_standard_library(scope: Scope) -> None:
    taps = [Tap("t"), OutputTap("o", scope), InputTap("i", scope), CustomTap("c", scope, print), EnterTap(print)]
    for tap in [*taps, LeaveTap(print), GradTap("g", scope)]:
        for twin in (copy.deepcopy(tap), pickle.loads(pickle.dumps(tap))):
            assert twin.__func__ is contextlib.nullcontext.__exit__
            assert twin(nn.Identity(), (1,), {}) is None
            assert twin(nn.Identity(), (1,)) is None


# -- recomputation ----------------------------------------------------------------------------


def test_a_call_inside_a_backward_pass_is_edited_again_and_not_kept_again() -> None:
    tap, edited, kept = Tap("here"), [], []
    tap.add_edit(lambda v, call: edited.append(call) or v)
    tap.add_look(lambda v, call: kept.append(call))
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
    tap.add_look(lambda v, call: kept.append(call))
    x = torch.ones(2, requires_grad=True)
    (y := x * 2).register_hook(lambda grad: (tap.take(x), None)[1])
    y.sum().backward()
    assert kept == [0]
    assert tap.recomputed == 0


@pytest.mark.parametrize("kind", [OutputTap, InputTap])
def test_what_is_being_compiled_elsewhere_does_not_meet_the_session(kind: Any) -> None:
    # The compiler may be in the middle of a model when another thread opens a session on it.
    scope, linear, x = Scope(), nn.Linear(2, 2), torch.ones(1, 2)
    scope.runs_eagerly = True
    attachment = Attachment()
    attachment.attach(kind("fc", scope), linear)
    assert torch.equal(torch.compile(linear, fullgraph=True, backend="eager")(x), linear(x))
    attachment.remove()

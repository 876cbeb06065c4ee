"""A site that never ran is reported on exit with its likely cause: in a warning, in ``missing``, and on reading."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchhook as th
from tests import models
from tests.oracle import in_threads, warned
from torchhook._core.select import resolve
from torchhook.errors import NeverRanError, NeverRanWarning, SelectorError


class Branches(nn.Module):
    """Layers that are called, bypassed, or held by a part that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(4, 4)
        self.bypassed = nn.Sequential(nn.Linear(4, 4))
        self.other = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.called(x))
        return F.linear(y, self.bypassed[0].weight)


X = torch.ones(2, 4)


def silence(model: nn.Module, *selectors: Any, run: Callable[[nn.Module], Any] | None = None, **options: Any) -> str:
    """Run a session in which the first site stays silent; the cause, checked to be the same in all three places."""
    with warned() as caught:
        with th.capture(model, *selectors, **options) as rec:
            (run or (lambda m: m(X)))(model)
    ours = [w for w in caught if w.category is NeverRanWarning]
    assert len(ours) == 1
    assert ours[0].filename == __file__
    address = next(iter(rec.missing))
    cause = rec.missing[address]
    assert f"{address or '(model)'!r}: {cause}" in str(ours[0].message)
    with pytest.raises(NeverRanError) as raised:
        rec[address]
    assert str(raised.value) == f"{address!r} was selected and never ran: {cause}"
    assert address not in rec
    assert address not in list(rec)
    assert cause in str(rec)
    return cause


# -- the causes -------------------------------------------------------------------------------


def test_nothing_ran() -> None:
    cause = "the model was not called while the session was open: call it (not model.forward) inside the block."
    assert silence(Branches(), "called", run=lambda m: None) == cause


def test_only_the_models_forward_was_called() -> None:
    assert "not model.forward" in silence(nn.Linear(4, 4), "", run=lambda m: m.forward(X))


def test_it_ran_in_another_thread() -> None:
    def times(n: int) -> Callable[[nn.Module], None]:
        def run(model: nn.Module) -> None:
            for _ in range(n):
                in_threads(lambda: model(X))

        return run

    cause = "it ran once in another thread or task than the session's; threads='all' records those too."
    assert silence(Branches(), "called", run=times(1)) == cause
    assert "it ran 3 times in another thread" in silence(Branches(), "called:input", run=times(3))


def test_there_was_no_such_call() -> None:
    model = Branches()
    with warned() as caught, th.capture(model, "called#2") as rec:
        model(X)
    assert rec.missing == {"called#2": "it ran 1 time, so there was no call 2."}
    assert "'called#2': it ran 1 time" in str(caught[0].message)
    with warned(), th.capture(model, "called#2") as rec:
        model(X)
        model(X)
    assert rec.missing == {"called#2": "it ran 2 times, so there was no call 2."}


def test_reading_a_call_that_there_was_not_gives_the_cause() -> None:
    assert silence(Branches(), "called#2") == "it ran 1 time, so there was no call 2."


def test_the_forward_pass_was_stopped_before_it() -> None:
    class Swallows(Branches):
        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(BaseException):
                self.called(x)
            return x

    model = Swallows()
    session = th.capture(model, "called", stop=True)
    session.look(resolve(model, "other.0")[0], lambda value, call: None)
    with warned() as caught, session as rec:
        model(X)
    assert rec.missing == {"other.0": "stop=True ended the forward pass at 'called', before it."}
    assert "'called', before it" in str(caught[0].message)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)


@pytest.mark.shows("Fused layers: out_proj of nn.MultiheadAttention", error="NeverRanError")
def test_attention_uses_the_weights_of_its_projection_without_calling_it() -> None:
    cause = silence(Attends(), "attention.out_proj")
    assert cause.startswith("nn.MultiheadAttention reads the weights of 'out_proj' without calling it (pytorch#78109)")
    assert cause.endswith("capture 'attention' instead.")


@pytest.mark.shows("Fused layers: children of nn.TransformerEncoderLayer")
def test_pytorchs_own_encoder_layer_runs_its_children_where_hooks_are_attached() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)).eval()
    with torch.inference_mode(), th.capture(model, "0.linear1") as rec:
        model(X[None])
    assert rec["0.linear1"].shape == (1, 2, 8)


class Skipped(nn.Module):
    """An encoder layer in a branch that is not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.layer = nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x)


def test_an_encoder_layer_that_did_not_run_is_not_said_to_have_taken_its_fused_path() -> None:
    assert "fused" not in silence(Skipped(), "layer.linear1", "layer")


@pytest.mark.shows("TorchScript: sites inside a scripted module", error="NeverRanError")
def test_hooks_never_fire_inside_a_scripted_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), models.scripted(nn.Sequential(nn.Linear(4, 4))))
    cause = "it is TorchScript, which takes no hooks: use the module it was made from."
    for selector in ("1.0", "1", "1:input", "1.0.weight", "**"):
        assert silence(model, selector) == cause
    assert silence(model[1], "") == cause


def test_the_part_that_holds_it_did_not_run_either() -> None:
    cause = silence(Branches(), "other.0", "other")
    assert cause == "'other', which holds it, did not run either: a branch that was not taken?"


def test_it_was_bypassed() -> None:
    bypassed = "a branch that was not taken, or code that uses its weights or its .forward directly."
    assert silence(Branches(), "bypassed.0") == f"the model ran without calling it in 'bypassed': {bypassed}"
    assert silence(Branches(), "bypassed") == f"the model ran without calling it: {bypassed}"


def test_the_model_ran_no_such_operation() -> None:
    cause = silence(Branches(), "/gelu")
    assert cause.startswith("the model itself ran no 'gelu'. ")
    assert "relu" in cause
    assert "'called' ran no 'relu'. " in silence(Branches(), "called/relu")


def test_a_part_that_was_called_by_itself_is_no_call_of_the_model() -> None:
    cause = "the model was not called while the session was open: call it (not model.forward) inside the block."
    assert silence(Branches(), "other.0", run=lambda m: m.called(X)) == cause


def test_its_module_did_not_run() -> None:
    cause = silence(Branches(), "other.0:grad", run=lambda m: m(X).sum().backward())
    assert cause == "it did not run in the forward pass while the session was open."


def test_its_value_needs_no_gradient() -> None:
    def without(model: nn.Module) -> None:
        with torch.no_grad():
            model(X)

    assert silence(Branches(), "called:grad", run=without).startswith("its value needs no gradient")
    assert silence(Branches(), "called:grad_input").startswith("its value needs no gradient")


def test_no_backward_pass_reached_it() -> None:
    cause = "no gradient reached it: call backward inside the block, on something that depends on it."
    assert silence(Branches(), "called:grad") == cause

    def elsewhere(model: Branches) -> None:
        model(X)
        model.other(X).sum().backward()

    assert silence(Branches(), "called:grad", run=elsewhere) == cause


def test_gradients_arrived_for_other_calls() -> None:
    def second_only(model: Branches) -> None:
        model.called(X)
        model.called(X).sum().backward()

    cause = "gradients arrived for other calls, but not for call 0."
    assert silence(Branches(), "called#0:grad", run=second_only) == cause


def test_a_parameter_is_frozen() -> None:
    model = Branches()
    model.called.requires_grad_(False)
    cause = silence(model, "called.weight:grad", run=lambda m: m(X).sum().backward())
    assert cause == "it does not require a gradient."


def test_no_gradient_of_a_parameter_was_computed() -> None:
    cause = "no gradient reached it: call backward inside the block, on something that depends on it."
    assert silence(Branches(), "called.weight:grad") == cause
    assert "other.0.weight" in silence_addresses(Branches(), "other.0.weight:grad", "called")


def silence_addresses(model: nn.Module, *selectors: Any) -> str:
    with warned(), th.capture(model, *selectors) as rec:
        model(X).sum().backward()
    return " ".join(rec.missing)


def test_a_parameter_whose_module_did_not_run_is_reported() -> None:
    assert "'bypassed.0', which holds it, did not run" in silence(Branches(), "bypassed.0.weight")


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["ValueError", "KeyboardInterrupt"])
def test_an_exception_is_the_cause_and_there_is_no_warning(error: BaseException) -> None:
    model = Branches()
    session = th.capture(model, "called")
    with pytest.raises(type(error)), session:
        raise error
    assert session.recording.missing == {"called": f"the block ended early with {type(error).__name__}."}


def test_the_stop_of_another_session_is_named_as_what_it_is() -> None:
    model = Branches()
    with th.capture(model, "called", stop=True):
        with th.capture(model, "other") as rec:
            model(X)
    assert "stop=True" in rec.missing["other"]
    assert "with Stop" not in rec.missing["other"]


# -- the report -------------------------------------------------------------------------------


def test_the_warning_points_to_the_end_of_the_users_block() -> None:
    model = Branches()
    with warned() as caught:
        here = inspect.currentframe().f_lineno
        with th.capture(model, "other"):
            model(X)
    assert (caught[0].filename, caught[0].lineno) == (__file__, here + 1)


def test_the_warning_points_to_where_the_user_closes_the_session() -> None:
    model = Branches()
    for close in ("close", "remove"):
        session = th.capture(model, "other").open()
        model(X)
        with warned() as caught:
            getattr(session, close)()
        assert caught[0].filename == __file__


def test_the_warning_points_to_the_users_call_of_run() -> None:
    with warned() as caught:
        th.run(Branches(), X, capture="other")
    assert caught[0].filename == __file__


def test_one_warning_names_every_silent_site() -> None:
    model = Branches()
    with warned() as caught, th.capture(model, "**") as rec:
        model(X)
    assert len(caught) == 1
    assert str(caught[0].message).splitlines()[0] == "5 selected sites never ran:"
    assert list(rec.missing) == ["bypassed", "bypassed.0", "other", "other.0", "other.1"]


def test_a_long_warning_is_cut_and_says_where_the_rest_is() -> None:
    model = nn.Sequential(*[nn.Identity() for _ in range(14)])
    with warned() as caught, th.capture(model) as rec:
        pass
    lines = str(caught[0].message).splitlines()
    assert lines[0] == "15 selected sites never ran:"  # the model itself is one
    assert len(lines) == 12
    assert lines[-1] == "  … and 5 more: see rec.missing"
    assert len(rec.missing) == 15


def test_where_nothing_was_named_the_warning_says_so_and_passes_over_empty_places() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.drop_path, self.other = nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc(x)

    model, x = Block(), torch.ones(1, 3)
    with warned() as caught, th.capture(model) as rec:
        model(x)
    assert [str(one.message).splitlines()[0] for one in caught] == ["1 module of all, since none was named, never ran:"]
    assert "'other'" in str(caught[0].message)
    assert list(rec.missing) == ["drop_path", "other"]
    del model.other
    with warned() as caught, th.capture(model) as rec:
        model(x)
    assert caught == []
    assert list(rec.missing) == ["drop_path"]
    with warned() as caught, th.capture(model, "drop_path", "fc"):
        model(x)
    assert str(caught[0].message).splitlines()[0] == "1 selected site never ran:"


def test_the_model_itself_has_a_name_in_the_report() -> None:
    model = Branches()
    with warned() as caught, th.capture(model, "", "called") as rec:
        model.called(X)
    assert "'(model)': " in str(caught[0].message)
    assert list(rec.missing) == [""]
    assert "never ran: (model)" in str(rec)


def test_nothing_is_reported_where_everything_ran() -> None:
    model = Branches()
    with warned() as caught, th.capture(model, "called", ":input", "called#0") as rec:
        model(X)
    assert caught == []
    assert rec.missing == {}


def test_a_site_that_runs_later_is_not_missing_yet() -> None:
    model = Branches()
    with th.capture(model, "called") as rec:
        with pytest.raises(NeverRanError, match="has not run yet"):
            rec["called"]
        model(X)
        assert "called" in rec


# -- replaced while the session is open -----------------------------------------------------------------------------


def test_a_module_that_is_replaced_after_a_call_is_reported() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    with pytest.warns(NeverRanWarning, match=r"replaced while.*\n  '0': '0' is another Identity now"):
        with th.capture(model, "0", "1.1") as rec:
            model(torch.ones(1, 2))
            model[0] = nn.Identity()
            model(torch.ones(1, 2))
    assert len(rec.all("0")) == 1
    assert list(rec.replaced) == ["0"]
    assert "replaced: 0" in str(rec)


def test_what_a_replaced_module_held_is_reported_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    with pytest.warns(NeverRanWarning, match=r"'1\.1' is another Linear now"), th.capture(model, "1.1") as rec:
        model(torch.ones(1, 2))
        model[1] = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
        model(torch.ones(1, 2))
    assert len(rec.all("1.1")) == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_parameter_that_is_replaced_is_the_cause_that_is_given(first: bool) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    with pytest.warns(NeverRanWarning, match=r"'0\.weight' is another tensor now"):
        with th.capture(model, "0.weight:grad") as rec:
            if first:
                model(x).sum().backward()
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
            model(x).sum().backward()
    assert len(rec.replaced) == 1
    assert ("0.weight:grad" in rec.missing) is not first


def test_a_model_without_layers_says_what_it_is_called() -> None:
    with pytest.raises(SelectorError, match=r"holds no layers.*'\(model\)'"):
        th.capture(nn.Linear(2, 2), "**")
    with th.capture(model := nn.Linear(2, 2), "(model)") as rec:
        output = model(torch.ones(1, 2))
    assert torch.equal(rec["(model)"], output)

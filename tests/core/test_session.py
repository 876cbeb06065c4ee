"""The promises of a session, tried hard: true, never silent, no residue, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import io
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchhook as th
from tests.oracle import hooks_on, in_threads, stance, warned
from torchhook._core.scope import Stop, active
from torchhook.errors import NeverOpenedWarning, NeverRanError, NeverRanWarning, SelectorError, SessionError
from torchhook.types import Stopped


class Model(nn.Module):
    """Three layers by name, and a place for each test to do something in the middle."""

    def __init__(self, middle: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.middle is not None:
            self.middle(y)
        return self.c(self.b(y))

    def expected(self, x: Tensor) -> Tensor:
        """What layer a makes of x, by hand."""
        return F.linear(x, self.a.weight, self.a.bias).detach()


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4)


def flags_on(model: nn.Module) -> list[Any]:
    """The other dicts in which PyTorch notes something about a hook."""
    return [
        value for m in model.modules() for key, d in vars(m).items() if "hooks" in key and d for value in d.values()
    ]


@pytest.fixture(autouse=True)
def no_session_stays_active() -> Iterator[None]:
    before = active.get()
    yield
    assert active.get() <= before


def raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


# -- exceptions -------------------------------------------------------------------------------

ERRORS = [ValueError("mine"), RuntimeError(), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), StopIteration()]
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)


@each_error
def test_an_exception_in_the_block_passes_unchanged(model: Model, x: Tensor, error: BaseException) -> None:
    session = th.capture(model)

    def block() -> None:
        with session:
            model(x)
            raise error

    with pytest.raises(type(error)) as caught:
        block()
    assert caught.value is error
    assert error.__cause__ is None
    assert error.__context__ is None
    assert hooks_on(model) == flags_on(model) == []
    assert torch.equal(session.recording["a"], model.expected(x))


@each_error
def test_an_exception_in_the_model_passes_unchanged_and_keeps_what_ran(x: Tensor, error: BaseException) -> None:
    model = Model(raiser(error))
    with pytest.raises(type(error)) as caught:
        with th.capture(model) as rec:
            model(x)
    assert caught.value is error
    assert error.__cause__ is None
    assert error.__context__ is None
    assert hooks_on(model) == flags_on(model) == []
    assert torch.equal(rec["a"], model.expected(x))
    assert rec.keys() == ["a"]
    assert set(rec.missing) == {"", "b", "c"}
    with pytest.raises(NeverRanError, match=type(error).__name__):
        rec["c"]


@each_error
def test_an_exception_in_a_transform_passes_unchanged(model: Model, x: Tensor, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        with th.capture(model, "b", transform=raiser(error)):
            model(x)
    assert caught.value is error
    assert error.__cause__ is None
    assert hooks_on(model) == flags_on(model) == []


def test_an_exception_in_an_edit_passes_unchanged(model: Model, x: Tensor) -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        with th.edit(model, {"b": raiser(error)}):
            model(x)
    assert caught.value is error
    assert hooks_on(model) == []


def test_an_exception_that_the_model_catches_ends_nothing(x: Tensor) -> None:
    picky = Model()

    def middle(y: Tensor) -> None:
        with contextlib.suppress(RuntimeError):
            picky.a(torch.ones(1, 3))

    model = Model(middle)
    model.picky = picky
    with th.capture(model, "a", "c") as rec:
        model(x)
    assert torch.equal(rec["a"], model.expected(x))
    assert "c" in rec


def test_the_block_ends_with_the_users_error_and_without_a_warning(model: Model) -> None:
    with pytest.raises(ZeroDivisionError):
        with th.capture(model) as rec:
            1 / 0
    assert set(rec.missing.values()) == {"the block ended early with ZeroDivisionError."}


def test_an_interrupt_while_hooks_are_attached_takes_them_all_away() -> None:
    class Interrupting(nn.Linear):
        def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(4, 4), Interrupting(4, 4))
    session = th.capture(model)
    with pytest.raises(KeyboardInterrupt):
        session.open()
    assert hooks_on(model) == flags_on(model) == []


# -- early stop -------------------------------------------------------------------------------


def test_stop_leaves_the_block_at_the_last_site(model: Model, x: Tensor) -> None:
    reached = []
    with th.capture(model, "a", stop=True) as rec:
        model(x)
        reached.append("after")
    assert reached == []
    assert torch.equal(rec["a"], model.expected(x))
    assert hooks_on(model) == []


def test_stop_waits_for_every_site_in_whatever_order_they_run(model: Model, x: Tensor) -> None:
    with th.capture(model, "b", "a:input", "a", stop=True) as rec:
        model(x)
    assert rec.keys() == ["a:input", "a", "b"]


def test_stop_waits_for_the_call_that_was_asked_for(x: Tensor) -> None:
    model = Model()
    model.c = model.a
    ran = []
    model.b.register_forward_hook(lambda *_: ran.append(1))
    with th.capture(model, "a#1", stop=True) as rec:
        model(x)
    assert rec.keys() == ["a"]
    assert ran == [1]
    assert torch.equal(rec["a", 1], model.expected(F.relu(model.expected(x))))


def test_stop_survives_a_model_that_catches_exceptions(x: Tensor) -> None:
    class Catching(Model):
        def forward(self, x: Tensor) -> Any:
            try:
                return super().forward(x)
            except Exception:
                return "caught"

    model = Catching()
    output, rec = th.run(model, x, capture="a", stop=True)
    assert isinstance(output, Stopped)
    assert output.at == "a"
    assert torch.equal(rec["a"], model.expected(x))


def test_a_model_that_catches_everything_has_no_output_where_it_was_stopped_and_the_value_is_true(x: Tensor) -> None:
    class CatchingAll(Model):
        def forward(self, x: Tensor) -> Any:
            try:
                return super().forward(x)
            except:  # noqa: E722
                return "caught"

    model = CatchingAll()
    session = th.capture(model, "a", stop=True)
    for _ in range(2):
        output, rec = session.run(x)
        assert repr(output) == "<no output: the forward pass stopped at 'a'>"
        assert torch.equal(rec["a"], model.expected(x))
    assert hooks_on(model) == []


def test_a_stopped_output_says_so_when_it_is_used(model: Model, x: Tensor) -> None:
    output, _ = th.run(model, x, capture="a", stop=True)
    assert repr(output) == "<no output: the forward pass stopped at 'a'>"
    with pytest.raises(AttributeError, match="stopped at 'a'"):
        output.shape


def test_stop_restores_the_gradient_mode(x: Tensor) -> None:
    class Quiet(Model):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    model = Quiet()
    with th.capture(model, "a", stop=True) as rec:
        model(x)
    assert rec["a"].dtype == torch.bfloat16
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_stop_runs_the_finally_blocks_of_the_model(x: Tensor) -> None:
    closed = []

    class Careful(Model):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            finally:
                closed.append(True)

    th.run(Careful(), x, capture="a", stop=True)
    assert closed == [True]


def test_an_inner_session_stops_and_the_outer_block_goes_on(model: Model, x: Tensor) -> None:
    reached = []
    with th.capture(model, "a", "c") as outer:
        with th.capture(model, "a", stop=True) as inner:
            model(x)
            reached.append("inner")
        reached.append("outer")
        model(x)
    assert reached == ["outer"]
    assert torch.equal(inner["a"], model.expected(x))
    assert len(outer.all("a")) == 2
    assert len(outer.all("c")) == 1


def test_an_outer_session_stops_through_an_inner_block(model: Model, x: Tensor) -> None:
    reached = []
    with th.capture(model, "b", stop=True) as outer:
        with th.capture(model, "a", "c") as inner:
            model(x)
            reached.append("inner")
        reached.append("outer")
    assert reached == []
    assert "b" in outer
    assert torch.equal(inner["a"], model.expected(x))
    assert set(inner.missing) == {"c"}
    assert hooks_on(model) == []


def test_run_does_not_swallow_the_stop_of_another_session(model: Model, x: Tensor) -> None:
    reached = []
    with th.capture(model, "a", stop=True):
        th.run(model, x, capture="c")
        reached.append(1)
    assert reached == []
    assert hooks_on(model) == []


def test_two_sessions_that_stop_at_one_site_leave_one_block_each(model: Model, x: Tensor) -> None:
    reached = []
    with th.capture(model, "a", stop=True) as outer:
        with th.capture(model, "c", stop=True):
            model(x)
            reached.append("inner")
        reached.append("outer")
    assert reached == []
    assert torch.equal(outer["a"], model.expected(x))


def test_a_block_that_ends_before_the_stop_reports_what_did_not_run(model: Model, x: Tensor) -> None:
    with pytest.warns(NeverRanWarning, match="'c'"):
        with th.capture(model, "a", "c", stop=True) as rec:
            model.a(x)
    assert rec.keys() == ["a"]


def test_stop_needs_the_forward_pass(model: Model) -> None:
    with pytest.raises(SessionError, match="backward"):
        th.capture(model, "a:grad", stop=True)
    assert hooks_on(model) == []


def test_a_stop_never_escapes_a_session_that_was_opened_by_hand(model: Model, x: Tensor) -> None:
    session = th.capture(model, "a", stop=True)
    try:
        session.open()
        model(x)
    except SessionError:
        pass
    except Stop:
        pytest.fail("the stop escaped")
    finally:
        session.close()


@pytest.mark.shows("Threads: an early stop of all of them", error="SessionError")
def test_a_stop_in_all_threads_is_refused(model: Model) -> None:
    with pytest.raises(SessionError, match="leave out threads='all'"):
        th.capture(model, "a", stop=True, threads="all")


# -- garbage, generators ----------------------------------------------------------------------


def test_an_open_session_that_is_dropped_takes_its_hooks_with_it(model: Model, x: Tensor) -> None:
    gc.disable()
    try:
        session = th.capture(model, "a", "b:input", "c:grad", "a.weight", "/relu").open()
        rec = session.recording
        model(x)
        assert hooks_on(model)
        del session
        assert hooks_on(model) == flags_on(model) == []
    finally:
        gc.enable()
    model(x)
    assert len(rec.all("a")) == 1


def test_a_dropped_session_is_no_longer_active(model: Model) -> None:
    before = active.get()
    session = th.capture(model, "a").open()
    assert active.get() == before | {session.scope}
    del session
    assert active.get() == before


def test_an_abandoned_generator_takes_its_hooks_with_it(model: Model, x: Tensor) -> None:
    def features() -> Iterator[Tensor]:
        with th.capture(model, "a") as rec:
            while True:
                model(x)
                yield rec["a", -1]

    generator = features()
    assert torch.equal(next(generator), model.expected(x))
    assert hooks_on(model)
    del generator
    gc.collect()
    assert hooks_on(model) == []


def test_the_model_does_not_hold_on_to_what_was_recorded(model: Model, x: Tensor) -> None:
    with th.capture(model, "a", "c") as rec:
        output = model(x)
    gone = weakref.ref(rec["a"]), weakref.ref(rec)
    gc.disable()
    try:
        del rec
        assert gone[0]() is None
        assert gone[1]() is None
    finally:
        gc.enable()
    assert output.grad_fn is not None


def test_a_session_that_never_opened_leaves_nothing(model: Model) -> None:
    session = th.capture(model)
    assert hooks_on(model) == []
    session.close()
    with pytest.warns(NeverOpenedWarning, match="dropped without ever being opened") as caught:
        del session
    assert caught[0].filename == __file__
    assert hooks_on(model) == []


@pytest.mark.parametrize("make", [lambda m: th.capture(m, "a"), lambda m: th.edit(m, {"a": th.edits.zero()})])
def test_what_is_made_and_never_opened_says_so(make: Any, model: Model, x: Tensor) -> None:
    with pytest.warns(NeverOpenedWarning, match="with block"):
        make(model)  # as one writes it who believes that it is on from here
    model(x)


@pytest.mark.parametrize("read", [lambda s: s["a"], lambda s: s.keys(), lambda s: s.all("a"), lambda s: s.table()])
def test_a_session_that_is_read_like_a_recording_says_how_to_open_it(read: Any, model: Model, x: Tensor) -> None:
    session = th.capture(model, "a")
    model(x)
    with pytest.raises(SessionError, match=r"never opened.*with th\.capture"):
        read(session)
    session.open()
    model(x)
    with pytest.raises(SessionError, match=r"session\.recording"):
        read(session)
    session.close()
    assert not hasattr(session, "no_such_thing")


def test_a_capture_that_cannot_be_made_was_not_forgotten(model: Model) -> None:
    with pytest.raises(SelectorError):
        th.capture(model, "nowhere")


# -- opening and closing ----------------------------------------------------------------------


def test_an_open_session_does_not_open_again(model: Model, x: Tensor) -> None:
    session = th.capture(model, "a")
    with session:
        model(x)
        with pytest.raises(SessionError, match="open already"):
            session.open()
        with pytest.raises(SessionError, match="open already"), session:
            pass
        assert hooks_on(model)
    assert hooks_on(model) == []


def test_closing_twice_does_nothing_and_remove_is_another_name_for_it(model: Model, x: Tensor) -> None:
    session = th.capture(model, "a").open()
    model(x)
    session.remove()
    session.close()
    assert hooks_on(model) == []
    assert torch.equal(session.recording["a"], model.expected(x))


def test_closing_inside_the_block_ends_the_recording_there(model: Model, x: Tensor) -> None:
    session = th.capture(model, "a")
    with session as rec:
        model(x)
        session.close()
        model(x)
    assert len(rec.all("a")) == 1


@pytest.mark.parametrize(
    "selector", ["nope", "a.nope", "*.nope", nn.Conv2d, [], "a:nope", ["a", "nope"], nn.Linear(1, 1), 3, None]
)
def test_a_wrong_selector_raises_before_anything_is_attached(model: Model, selector: Any) -> None:
    with pytest.raises((SelectorError, TypeError)):
        th.capture(model, selector)
    assert hooks_on(model) == []


@pytest.mark.parametrize(
    "wrong",
    [{"keep": "kept"}, {"max_records": 0}, {"threads": "some"}, {"transform": 3.5}, {"port": "out"}, {"dtype": "half"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_option_raises_before_anything_is_attached(model: Model, wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        th.capture(model, "a", **wrong)
    assert hooks_on(model) == []


def test_a_failure_to_attach_takes_the_other_hooks_away() -> None:
    class Refusing(nn.Linear):
        def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no hooks here")

    model = nn.Sequential(nn.Linear(4, 4), Refusing(4, 4))
    with pytest.raises(RuntimeError, match="no hooks here"):
        th.capture(model).open()
    assert hooks_on(model) == flags_on(model) == []


# -- several sessions on one model ------------------------------------------------------------


def test_nested_sessions_each_keep_their_own(model: Model, x: Tensor) -> None:
    with th.capture(model, "a") as outer:
        model(x)
        with th.capture(model, "a", "c", transform=torch.sum) as inner:
            model(x + 1)
        model(x + 2)
    assert [torch.equal(v, model.expected(x + i)) for i, v in enumerate(outer.all("a"))] == [True] * 3
    assert torch.equal(inner["a"], model.expected(x + 1).sum())
    assert hooks_on(model) == []


def test_overlapping_sessions_close_in_any_order(model: Model, x: Tensor) -> None:
    first, second, third = (th.capture(model, "a") for _ in range(3))
    first.open()
    model(x)
    second.open()
    model(x)
    first.close()
    third.open()
    model(x)
    second.close()
    model(x)
    third.close()
    model(x)
    assert [len(s.recording.all("a")) for s in (first, second, third)] == [2, 2, 2]
    assert hooks_on(model) == flags_on(model) == []


def test_the_outer_sessions_edits_come_first(model: Model, x: Tensor) -> None:
    with th.edit(model, {"a": lambda v: v * 0 + 3}):
        with th.capture(model, "a") as rec, th.edit(model, {"a": lambda v: v + 1}):
            with th.capture(model, "a") as last:
                model(x)
    assert rec["a"].unique().tolist() == [3.0]
    assert last["a"].unique().tolist() == [4.0]


def test_a_session_opens_inside_a_hook_of_the_user(model: Model, x: Tensor) -> None:
    inner = []

    def hook(module: nn.Module, args: Any) -> None:
        with th.capture(model.a, "") as rec:
            model.a(args[0] * 0)
        inner.append(rec[""])

    handle = model.c.register_forward_pre_hook(hook)
    with th.capture(model, "a") as rec:
        model(x)
    handle.remove()
    assert torch.equal(inner[0], model.expected(x * 0))
    assert [torch.equal(v, e) for v, e in zip(rec.all("a"), [model.expected(x), inner[0]], strict=True)] == [True, True]
    assert hooks_on(model) == []


def test_a_session_opens_and_another_closes_while_the_model_runs(x: Tensor) -> None:
    first, second = [], []

    def middle(y: Tensor) -> None:
        first[0].close()
        second.append(th.capture(model, "b", "c").open())

    model = Model(middle)
    first.append(th.capture(model, "a").open())
    output = model(x)
    second[0].close()
    assert torch.equal(first[0].recording["a"], model.expected(x))
    assert torch.equal(second[0].recording["c"], output)
    assert hooks_on(model) == []


def test_a_session_on_a_submodule_has_its_own_names(x: Tensor) -> None:
    whole = nn.Sequential(Model(), nn.Tanh())
    with th.capture(whole, "0.a") as outer:
        with th.capture(whole[0], "a") as inner:
            whole(x)
    assert torch.equal(outer["0.a"], inner["a"])
    assert hooks_on(whole) == []


def test_two_models_that_share_a_layer_are_told_apart_by_their_sessions(x: Tensor) -> None:
    shared = nn.Linear(4, 4)
    one, two = nn.Sequential(shared), nn.Sequential(nn.ReLU(), shared)
    with th.capture(one, "0") as rec_one, th.capture(two, "1") as rec_two:
        one(x)
        two(x)
    assert len(rec_one.all("0")) == len(rec_two.all("1")) == 2  # the layer ran twice, whoever called it


# -- the user's own hooks ---------------------------------------------------------------------


def test_the_users_hooks_survive_in_their_order_and_act_as_before(model: Model, x: Tensor) -> None:
    order: list[str] = []

    def user(name: str) -> Callable[..., None]:
        return lambda *_: order.append(name)

    model.a.register_forward_hook(user("first"))
    model.a.register_forward_hook(user("with_kwargs"), with_kwargs=True)
    model.a.register_forward_hook(user("always"), always_call=True)
    model.a.register_forward_hook(user("prepended"), prepend=True)
    model.a.register_forward_pre_hook(user("before"))
    model.c.register_full_backward_hook(user("backward"))
    model.a.register_state_dict_pre_hook(user("state"))
    model(x).sum().backward()
    alone, held = list(order), held_by(model)
    order.clear()
    with th.capture(model):
        model(x).sum().backward()
    assert order == alone
    assert held_by(model) == held


def held_by(model: nn.Module) -> list[Any]:
    return [list(d.items()) for m in model.modules() for key, d in vars(m).items() if "hooks" in key and d]


def test_a_users_hook_that_changes_the_output_comes_before_ours(model: Model, x: Tensor) -> None:
    model.a.register_forward_hook(lambda m, a, o: o * 0 + 5)
    model.a.register_forward_pre_hook(lambda m, a: (a[0] * 0,))
    with th.capture(model, "a", "a:input") as rec:
        model(x)
    assert rec["a"].unique().tolist() == [5.0]
    assert rec["a:input"].unique().tolist() == [0.0]


def test_hooks_that_come_and_go_inside_the_block_stay_as_the_user_left_them(model: Model, x: Tensor) -> None:
    ran: list[str] = []
    early = model.a.register_forward_hook(lambda *_: ran.append("early"))
    with th.capture(model, "a") as rec:
        late = model.a.register_forward_hook(lambda *_: ran.append("late"))
        early.remove()
        model(x)
    model(x)
    assert ran == ["late", "late"]
    assert list(model.a._forward_hooks) == [late.id]
    assert torch.equal(rec["a"], model.expected(x))


def test_clearing_the_hooks_by_force_inside_the_block_is_no_error_on_exit(model: Model, x: Tensor) -> None:
    def clear() -> None:
        for module in model.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()

    with pytest.warns(NeverRanWarning, match="the model was not called"), th.capture(model, "a"):
        clear()
    assert hooks_on(model) == []


# -- copies -----------------------------------------------------------------------------------


@pytest.mark.shows("Copies: deep copies of a hooked model")
def test_a_deep_copy_of_a_hooked_model_works_and_records_nothing(model: Model, x: Tensor) -> None:
    with th.capture(model, "a", "", "c:input", "b:grad", "a/linear") as rec:
        twin = copy.deepcopy(model)
        output = model(x)
        assert torch.equal(twin(x + 0), output)
        output.sum().backward()
        assert {len(rec.all(key)) for key in rec} == {1}
    assert torch.equal(twin(x), output)
    assert all(type(hook) is type(contextlib.nullcontext().__exit__) for hook in hooks_on(twin))


def test_a_copy_of_a_hooked_model_can_be_captured_by_itself(model: Model, x: Tensor) -> None:
    with th.capture(model, "a") as rec:
        twin = copy.deepcopy(model)
        with th.capture(twin, "a") as other:
            twin(x)
        model(x)
    assert torch.equal(rec["a"], other["a"])
    assert len(rec.all("a")) == 1


def test_a_shallow_copy_of_a_hooked_model_works(model: Model, x: Tensor) -> None:
    with th.capture(model, "a") as rec:
        twin = copy.copy(model)
        output = twin(x)
    assert torch.equal(output, model(x))
    assert len(rec.all("a")) == 1  # it holds the very same layers, so this is a call of the model's own layer
    assert hooks_on(twin) == []


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickle_of_a_hooked_model_works_and_records_nothing(model: Model, x: Tensor, how: str) -> None:
    with th.capture(model, "a", "b:input", "a/linear") as rec:
        file = io.BytesIO()
        (pickle.dump if how == "pickle" else torch.save)(model, file)
        file.seek(0)
        twin = pickle.load(file) if how == "pickle" else torch.load(file, weights_only=False)
        assert torch.equal(twin(x), model(x))
        assert len(rec.all("a")) == 1
    assert hooks_on(model) == []


@pytest.mark.shows("Copies: pickles load where TorchHook is not installed")
@pytest.mark.slow
def test_a_pickle_of_a_hooked_model_loads_where_torchhook_is_not_installed(tmp_path: Path, x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with th.capture(model, "0", "1:input", "0/linear"):
        output = model(x)
        torch.save([model, x, output], tmp_path / "saved.torch")
        (tmp_path / "saved.pickle").write_bytes(pickle.dumps([model, x, output]))
    script = """
        import sys
        sys.modules["torchhook"] = None
        import pickle, torch
        for loaded in (pickle.load(open(sys.argv[1], "rb")), torch.load(sys.argv[2], weights_only=False)):
            model, x, output = loaded
            assert torch.equal(model(x), output)
            model(x).sum().backward()
        assert not [name for name in sys.modules if name.startswith("torchhook.")]
        print("fine")
    """
    files = [tmp_path / "saved.pickle", tmp_path / "saved.torch"]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), *files], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.shows("Copies: state dicts of a hooked model")
def test_a_hooked_models_state_dict_is_the_models_own(model: Model, x: Tensor) -> None:
    keys = list(model.state_dict())
    with th.capture(model):
        model(x)
        assert list(model.state_dict()) == keys
        torch.save(model.state_dict(), io.BytesIO())


# -- threads and tasks ------------------------------------------------------------------------


@pytest.mark.shows("Threads: sessions of their own")
def test_two_threads_with_their_own_sessions_do_not_mix(x: Tensor) -> None:
    meet = threading.Barrier(2)
    model = Model(lambda y: meet.wait(30))  # both are between layers a and c at the same time, every time

    def job(offset: float) -> Callable[[], list[bool]]:
        def work() -> list[bool]:
            with th.capture(model, "a", "a:input", "c") as rec:
                outputs = [model(x + offset + i) for i in range(10)]
            assert rec.elsewhere.keys() <= {"a", "a:input", "c"}
            wanted = [model.expected(x + offset + i) for i in range(10)]
            true = [torch.equal(v, w) for v, w in zip(rec.all("a"), wanted, strict=True)]
            true += [torch.equal(v, o) for v, o in zip(rec.all("c"), outputs, strict=True)]
            return true + [torch.equal(v, x + offset + i) for i, v in enumerate(rec.all("a:input"))]

        return work

    for true in in_threads(job(0.0), job(100.0)):
        assert true == [True] * 30
    assert hooks_on(model) == []


def test_calls_from_elsewhere_are_counted_and_named(model: Model, x: Tensor) -> None:
    with th.capture(model, "a", "c:input") as rec:
        model(x)
        in_threads(lambda: (model(x), model(x)))
    assert len(rec.all("a")) == 1
    assert rec.elsewhere == {"a": 2, "c:input": 2}
    assert "in other threads: a (2 times)" in str(rec)


@pytest.mark.shows("Threads: one session for all")
def test_every_thread_is_recorded_on_request(model: Model, x: Tensor) -> None:
    with th.capture(model, "a", threads="all") as rec:
        model(x)
        in_threads(lambda: model(x + 1), lambda: model(x + 2))
    assert rec.elsewhere == {}
    sums = sorted(v.sum().item() for v in rec.all("a"))
    assert sums == sorted(model.expected(x + i).sum().item() for i in range(3))
    assert [r.call for r in rec.records("a")] == [0, 1, 2]


@pytest.mark.shows("Threads: one session for all")
def test_many_threads_lose_no_record(model: Model, x: Tensor) -> None:
    with th.capture(model, "a", "c", threads="all") as rec:
        in_threads(*[lambda: [model(x) for _ in range(50)]] * 8)
    assert len(rec.all("a")) == len(rec.all("c")) == 400
    assert [r.call for r in rec.records("a")] == list(range(400))


def test_a_session_may_close_in_another_thread_than_it_opened_in(model: Model, x: Tensor) -> None:
    session = th.capture(model, "a").open()
    model(x)
    in_threads(session.close)
    assert hooks_on(model) == []
    model(x)
    assert len(session.recording.all("a")) == 1
    session.scope.leave()


@pytest.mark.shows("Threads: asyncio tasks")
def test_asyncio_tasks_do_not_mix(model: Model, x: Tensor) -> None:
    async def task(offset: float) -> list[bool]:
        with th.capture(model, "a") as rec:
            for i in range(5):
                model(x + offset + i)
                await asyncio.sleep(0)
        return [torch.equal(v, model.expected(x + offset + i)) for i, v in enumerate(rec.all("a"))]

    async def both() -> list[list[bool]]:
        return await asyncio.gather(task(0.0), task(50.0), task(100.0))

    assert asyncio.run(both()) == [[True] * 5] * 3
    assert hooks_on(model) == []


def test_tasks_and_threads_started_by_asyncio_belong_to_the_session_that_started_them(model: Model, x: Tensor) -> None:
    async def child() -> None:
        await asyncio.sleep(0)
        model(x)

    async def main() -> Any:
        with th.capture(model, "a") as rec:
            await asyncio.create_task(child())
            await asyncio.to_thread(model, x)
        return rec

    rec = asyncio.run(main())
    assert len(rec.all("a")) == 2
    assert rec.elsewhere == {}


def test_a_stop_in_a_child_task_leaves_the_block_that_awaits_it(model: Model, x: Tensor) -> None:
    reached = []

    async def child() -> None:
        model(x)

    async def main() -> Any:
        with th.capture(model, "a", stop=True) as rec:
            await asyncio.create_task(child())
            reached.append(1)
        return rec

    assert torch.equal(asyncio.run(main())["a"], model.expected(x))
    assert reached == []


def test_gradients_computed_on_another_thread_belong_to_the_session(model: Model, x: Tensor) -> None:
    with th.capture(model, "a:grad") as rec:
        loss = model(x).sum()
        in_threads(loss.backward)
    alone = Model()
    alone.load_state_dict(model.state_dict())
    y = alone.a(x)
    y.retain_grad()
    alone.c(F.relu(y)).sum().backward()
    assert torch.equal(rec["a:grad"], y.grad)


# -- compiled models --------------------------------------------------------------------------


@pytest.fixture
def compiled(model: Model, x: Tensor) -> Any:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph(*args)

        return run

    with warned():
        made = torch.compile(model, backend=backend)
        with torch.no_grad():
            made(x)
    return made, calls


@pytest.mark.shows("Compiled: captures of a model that was compiled before")
def test_hooks_fire_although_the_model_was_compiled_before(compiled: Any, model: Model, x: Tensor) -> None:
    made, calls = compiled
    for whole in (made, model):
        with torch.no_grad(), th.capture(whole, "a", "c:input") as rec:
            assert stance() == "force_eager"
            made(x)
        assert torch.equal(rec["a"], model.expected(x))
        assert stance() == "default"
    assert hooks_on(model) == []
    before = len(calls)
    with torch.no_grad():
        made(x)
    assert len(calls) == before + 1  # compiled code runs again
    assert len(rec.all("a")) == 1


def test_overlapping_sessions_restore_the_stance_once_the_last_one_is_gone(compiled: Any, x: Tensor) -> None:
    made, _ = compiled
    first, second = th.capture(made, "a").open(), th.capture(made, "a").open()
    with torch.no_grad():
        made(x)
        first.close()
        assert stance() == "force_eager"
        made(x)
    second.close()
    assert stance() == "default"
    assert len(second.recording.all("a")) == 2


@pytest.mark.shows("Compiled: compiled code runs again after a session")
def test_the_stance_that_the_user_set_comes_back(compiled: Any, x: Tensor) -> None:
    made, _ = compiled
    with torch.compiler.set_stance("eager_on_recompile"):
        with th.capture(made, "a"), torch.no_grad():
            made(x)
        assert stance() == "eager_on_recompile"
        with pytest.raises(ValueError, match="mine"), th.capture(made, "a"):
            raise ValueError("mine")
        assert stance() == "eager_on_recompile"
        with torch.no_grad(), th.capture(made, "a", stop=True):
            made(x)
        assert stance() == "eager_on_recompile"
    assert stance() == "default"


def test_a_dropped_session_restores_the_stance(compiled: Any) -> None:
    made, _ = compiled
    session = th.capture(made, "a").open()
    assert stance() == "force_eager"
    del session
    assert stance() == "default"


@pytest.mark.shows("Compiled: a model compiled inside a session")
@pytest.mark.slow
def test_a_model_compiled_inside_the_block_is_captured_and_runs_free_of_hooks_afterwards() -> None:
    script = """
        import sys, warnings
        import torch, torchhook as th
        assert "torch._dynamo" not in sys.modules
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True))
        x = torch.randn(2, 4)
        wanted = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
        with torch.no_grad(), th.capture(model, "0") as rec:
            assert "torch._dynamo" not in sys.modules
            made = torch.compile(model, backend="eager")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made(x)
            assert torch.equal(rec["0"], wanted)
        made(x)
        assert len(rec.all("0")) == 1
        print("fine")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


# -- the rest of the process ------------------------------------------------------------------


def test_the_process_is_as_it_was(model: Model, x: Tensor) -> None:
    def process() -> Any:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.overrides._get_current_function_mode_stack(),
            torch.get_rng_state().tolist(),
            torch.get_default_dtype(),
            nn.Module.__call__,
            nn.modules.module._global_forward_hooks,
            nn.modules.module._global_forward_pre_hooks,
            len(torch.autograd.graph._get_tid_and_saved_tensors_hooks())
            if hasattr(torch.autograd.graph, "_get_tid_and_saved_tensors_hooks")
            else None,
            warnings.filters[:],
            sys.excepthook,
            threading.active_count(),
        )

    before = process()
    for selector in ("a", "a:grad", "a/linear", "a.weight", "**:input", "c:grad_input"):
        with th.capture(model, selector):
            model(x).sum().backward()
        assert process() == before
        with pytest.raises(ZeroDivisionError), th.capture(model, selector):
            model(x).sum() / (1 / 0)
        assert process() == before
    for selector in ("a", "a/linear", "b:input"):
        with th.capture(model, selector, stop=True):
            model(x)
        assert process() == before


def test_an_interrupt_inside_an_operation_leaves_no_mode_behind(x: Tensor) -> None:
    model = Model(raiser(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), th.capture(model, "/linear", "a/linear"):
        model(x)
    assert torch.overrides._get_current_function_mode_stack() == []
    assert hooks_on(model) == []


def test_the_training_flags_and_gradients_are_the_models_own(model: Model, x: Tensor) -> None:
    model.b.eval()
    model(x).sum().backward()
    grads, flags = [p.grad for p in model.parameters()], [m.training for m in model.modules()]
    values = [g.clone() for g in grads]
    with th.capture(model), torch.no_grad():
        model(x)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(g, v) for g, v in zip(grads, values, strict=True))
    assert [m.training for m in model.modules()] == flags


def test_a_session_says_whether_it_is_open_as_guards_and_watches_do(model: Model, x: Tensor) -> None:
    session = th.capture(model, "a")
    seen = [session.is_open]
    with session:
        seen.append(session.is_open)
        model(x)
    seen.append(session.is_open)
    session.open()
    seen.append(session.is_open)
    model(x)
    session.close()
    seen.append(session.is_open)
    assert seen == [False, True, False, True, False]
    assert not hasattr(th.types.Recording, "is_open")  # it is no life that a recording has

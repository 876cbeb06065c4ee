"""A prepared session opens again and again, each time as if it were new, without looking for anything."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchhook as th
from tests.oracle import hooks_on
from torchhook import edits
from torchhook._core import choices
from torchhook._core.index import Index
from torchhook._core.scope import Scope
from torchhook._core.session import Session
from torchhook.errors import NeverRanWarning, SelectorError, SessionError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(self.act(x.clone()))))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randn(2, 3, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def by_hand(net: Net, x: Tensor, name: str) -> list[Tensor]:
    seen: list[Tensor] = []
    handle = net.get_submodule(name).register_forward_hook(lambda m, args, out: seen.append(out.detach().clone()))
    net(x)
    handle.remove()
    return seen


def test_each_opening_has_a_recording_of_its_own(net: Net) -> None:
    session = th.capture(net, "a", "act#1", "b:input")
    recordings = []
    for x in batches():
        with session as rec:
            net(x)
        assert rec is session.recording
        recordings.append(rec)
    for x, rec in zip(batches(), recordings, strict=True):
        assert torch.equal(rec["a"], by_hand(net, x, "a")[0])
        assert torch.equal(rec["act#1"], by_hand(net, x, "act")[1])
        assert torch.equal(rec["b:input"], rec["act#1"])
        assert [record.call for record in rec.records("a")] == [0]
    assert hooks_on(net) == []


def test_nothing_is_looked_for_again(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    session = th.capture(net, "a", "*", edit={"act": edits.scale(2)})
    x = batches()[0]
    for name in ("find", "find_tensor", "matching"):
        monkeypatch.setattr(Index, name, lambda *args, name=name: pytest.fail(name))
    monkeypatch.setattr(Index, "modules", property(lambda self: pytest.fail("modules")))
    for _ in range(2):
        with session as rec:
            net(x)
        assert rec.keys() == ["act", "a", "b"]


def test_gradients_belong_to_the_opening_whose_forward_pass_they_come_from(net: Net) -> None:
    session = th.capture(net, "a:grad", "a.weight:grad")
    for x in batches():
        net.zero_grad()
        with session as rec:
            net(x).sum().backward()
        assert torch.equal(rec["a.weight:grad"], net.a.weight.grad)
        assert rec["a:grad"].shape == (2, 3)
    with pytest.warns(NeverRanWarning, match="no gradient reached it"), session as late:
        loss = net(batches()[0]).sum()
    with pytest.warns(NeverRanWarning, match="did not run"), session as later:
        loss.backward()  # the graph of the opening before
    assert "a:grad" not in late
    assert "a:grad" not in later


def test_edits_are_made_anew_and_end_with_each_opening(net: Net) -> None:
    x = batches()[0]
    plain = net(x)
    session = th.edit(net, {"act#1": edits.zero(), "b": edits.add(torch.ones(2))})
    for _ in range(3):
        with session:
            assert torch.allclose(net(x), net.b.bias + 1)
        assert torch.equal(net(x), plain)


def test_a_stopped_pass_stops_again(net: Net) -> None:
    session = th.capture(net, "a", stop=True)
    for x in batches():
        with session as rec:
            net(x)
            pytest.fail("it should have stopped")
        assert torch.equal(rec["a"], by_hand(net, x, "a")[0])


def test_a_ring_buffer_is_as_large_each_time(net: Net) -> None:
    session = th.capture(net, "a", max_records=2)
    for _ in range(2):
        with session as rec:
            for x in batches():
                net(x)
        assert [record.call for record in rec.records("a")] == [1, 2]


def test_what_never_ran_is_said_of_the_opening_in_which_it_did_not(net: Net) -> None:
    session = th.capture(net, "a")
    with session:
        net(batches()[0])
    with pytest.warns(NeverRanWarning, match="was not called"), session as rec:
        pass
    assert list(rec.missing) == ["a"]
    with session as rec:
        net(batches()[0])
    assert rec.missing == {}


# -- selectors mean what is there when it opens ------------------------------------------------------


@pytest.mark.parametrize("opened_before", [0, 1, 2])
@pytest.mark.parametrize("selector", ["a", "*", re.compile("a"), nn.Linear, lambda name, module: name == "a"])
def test_a_module_that_took_the_place_of_another_is_seen_from_then_on(
    net: Net, opened_before: int, selector: Any
) -> None:
    session, x = th.capture(net, selector), batches()[0]
    for _ in range(opened_before):
        with session:
            net(x)
    net.a = nn.Linear(3, 3)
    for _ in range(2):
        with session as rec:
            net(x)
        assert torch.equal(rec["a"], by_hand(net, x, "a")[0])
        assert rec.missing == {}
    assert hooks_on(net) == []


class Around(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 1


@pytest.mark.parametrize("options", [{}, {"stop": True}, {"transform": torch.neg}, {"edit": {"b": edits.scale(2)}}])
def test_a_layer_that_is_wrapped_meanwhile_is_what_its_name_says(net: Net, options: Any) -> None:
    session, x = th.capture(net, "a", **options), batches()[0]
    session.run(x)
    net.a = Around(net.a)  # type: ignore[assignment]
    _, rec = session.run(x)
    expected = by_hand(net, x, "a")[0]
    assert torch.equal(rec["a"], -expected if "transform" in options else expected)
    net.a = net.a.base  # type: ignore[assignment]
    rec = session.run(x)[1]
    assert torch.equal(rec["a"].abs(), by_hand(net, x, "a")[0].abs())


def test_what_a_wrapper_holds_now_is_seen() -> None:
    wrapper, x = torch.optim.swa_utils.AveragedModel(nn.Sequential(nn.Linear(3, 3))), batches()[0]
    sessions = [th.capture(wrapper, selector) for selector in ("0", "*", "**")]
    for session in sessions:
        session.run(x)
    wrapper.module = nn.Sequential(nn.Linear(3, 3))
    for session in sessions:
        assert torch.equal(session.run(x)[1]["0"], wrapper.module[0](x))


def test_many_selectors_that_are_asked_each_time_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looks = nn.Sequential(*[nn.Linear(3, 3) for _ in range(60)]), list[int]()
    holds = choices._Searched.hold_the_same
    monkeypatch.setattr(choices._Searched, "hold_the_same", lambda self: looks.append(1) or holds(self))
    for session in (
        th.edit(model, {module: edits.scale(1) for module in model}),
        th.capture(model, lambda name, module: True, edit={str(number): edits.scale(1) for number in range(60)}),
        th.edit(model, {f"{number}*": edits.scale(1) for number in range(6)}),
    ):
        looks.clear()
        with session:
            model(batches()[0])
        assert len(looks) <= 4


def test_edits_go_to_the_module_that_is_there(net: Net) -> None:
    session, x = th.edit(net, {"a": edits.zero()}), batches()[0]
    with session:
        net(x)
    net.a = nn.Linear(3, 3)
    plain = net(x)
    with session:
        assert torch.equal(net(x), net.b.bias.expand(2, 2))
    assert torch.equal(net(x), plain)


def test_layers_that_came_are_found_by_a_glob(net: Net) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    session, x = th.capture(model, "*"), batches()[0]
    session.run(x)
    model.append(nn.ReLU())
    assert session.run(x)[1].keys() == ["0", "1", "2"]
    del model[0]
    assert session.run(x)[1].keys() == ["0", "1"]


ASKED_EACH_TIME: dict[str, dict[str, Any]] = {
    "none": {"selectors": ()},
    "function": {"selectors": (lambda name, module: bool(name),)},
    "exclude": {"selectors": ("**",), "exclude": lambda name, module: name == "1"},
    "type": {"selectors": (nn.Module,)},
    "port": {"selectors": ("*",), "port": "input"},
    "list": {"selectors": (["0", "*"],)},
}


@pytest.mark.parametrize("name", ASKED_EACH_TIME)
def test_layers_that_came_are_chosen_as_a_new_session_would(name: str) -> None:
    how = dict(ASKED_EACH_TIME[name])
    selectors, x = how.pop("selectors"), batches()[0]
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    session = th.capture(model, *selectors, **how)
    session.run(x)
    model.append(nn.Tanh())
    assert session.run(x)[1].keys() == th.capture(model, *selectors, **how).run(x)[1].keys()
    assert any("2" in site for site in session.recording.keys())  # noqa: SIM118
    container = nn.ModuleList([nn.Tanh()])
    model.append(container)
    container.forward = lambda x: container[0](x)  # type: ignore[method-assign]
    assert session.run(x)[1].keys() == th.capture(model, *selectors, **how).run(x)[1].keys()


def test_a_container_that_can_be_called_now_is_chosen() -> None:
    container = nn.ModuleList([nn.Tanh()])
    model, x = nn.Sequential(nn.Linear(3, 3)), batches()[0]
    model.parts = container  # type: ignore[assignment]
    session = th.capture(model, "**")
    container.forward = lambda x: container[0](x)  # type: ignore[method-assign]
    assert "parts" in session.run(x)[1].keys()  # noqa: SIM118


def test_a_glob_that_meant_parameters_means_the_layers_that_came() -> None:
    model = nn.Sequential()
    model.m1 = nn.Linear(3, 3)  # type: ignore[assignment]
    session, x = th.capture(model, "m*.*", port="grad"), batches()[0]
    with session as rec:
        model(x).sum().backward()
    assert set(rec.keys()) == {"m1.weight:grad", "m1.bias:grad"}
    model.m2 = nn.Sequential(nn.Linear(3, 3))  # type: ignore[assignment]
    with session as rec:
        model(x).sum().backward()
    assert rec.keys() == ["m2.0:grad"]


def test_a_layer_that_is_gone_is_named_and_the_session_opens_when_it_is_back(net: Net) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    session, x, last = th.capture(model, "1"), batches()[0], model[1]
    session.run(x)
    del model[1]
    for _ in range(2):
        with pytest.raises(SelectorError, match="'1'"):
            session.run(x)
    assert hooks_on(model) == []
    assert not session.is_open
    model.append(last)
    assert torch.equal(session.run(x)[1]["1"], model(x))


def test_attention_maps_are_those_of_the_module_that_is_there() -> None:
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(), torch.randn(1, 5, 8)
    session = th.attention(layer)
    with torch.no_grad():
        session.run(x)
        layer.self_attn = nn.MultiheadAttention(8, 4, batch_first=True).eval()
        _, maps = session.run(x)
        expected = layer.self_attn(x, x, x, average_attn_weights=False)[1]
    assert maps["self_attn"].shape == (1, 4, 5, 5)
    assert torch.allclose(maps["self_attn"], expected, atol=1e-6)


# -- one context at a time ---------------------------------------------------------------------------


class Meets(nn.Module):
    """Its forward pass is under way in two threads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if threading.current_thread().name == "first":
            self.inside.set()
            self.go_on.wait(10)
        return y


@pytest.mark.parametrize("way", ["run", "block"])
def test_a_session_that_is_open_in_one_thread_is_refused_in_another(way: str) -> None:
    model, found = Meets(), dict[str, Any]()
    session = th.capture(model, "layer")

    def first() -> None:
        found["first"] = session.run(torch.ones(1, 2))[1]["layer"]

    def second() -> None:
        model.inside.wait(10)
        try:
            if way == "run":
                session.run(torch.zeros(1, 2))
            else:
                with session:
                    pass
        except SessionError as error:
            found["second"] = str(error)
        finally:
            model.go_on.set()

    threads = [threading.Thread(target=first, name="first"), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found["first"], model.layer(torch.ones(1, 2)))
    expected = "in another thread or task" if way == "run" else "is open already"
    assert expected in found["second"]
    assert "ake " in found["second"]  # what to do
    assert torch.equal(session.run(torch.zeros(1, 2))[1]["layer"], model.layer(torch.zeros(1, 2)))
    assert hooks_on(model) == []


@pytest.mark.parametrize("held_at", ["_open", "_make_ready", "_attach", "_tell"])
def test_whoever_is_refused_takes_nothing_from_the_one_who_has_it_open(
    net: Net, held_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first thread is held in the middle of its opening or closing, where a switch of threads may come.
    session, found = th.capture(net, "b", edit={"a": edits.scale(1)}), dict[str, Any]()
    expected = {x.sum().item(): net(x).detach() for x in batches(4)}
    reached, go_on = threading.Event(), threading.Event()
    held = getattr(Session, held_at)

    def hold(session: Session, *args: Any) -> Any:
        if threading.current_thread().name == "first" and not reached.is_set():
            reached.set()
            go_on.wait(10)
        return held(session, *args)

    monkeypatch.setattr(Session, held_at, hold)

    def run(name: str, x: Tensor) -> None:
        try:
            found[name] = session.run(x)[1]["b"], expected[x.sum().item()]
        except SessionError as error:
            found[name] = error

    first = threading.Thread(target=run, args=("first", batches(4)[0]), name="first")
    first.start()
    assert reached.wait(10)
    for name, x in zip("abc", batches(4)[1:], strict=True):
        run(name, x)
    go_on.set()
    first.join()
    values = [pair for pair in found.values() if not isinstance(pair, SessionError)]
    assert all(torch.equal(*pair) for pair in values)
    assert len(values) >= 1  # before it has begun to open, others may
    if held_at != "_open":
        assert [type(found[name]) for name in ("first", *"abc")] == [tuple, *[SessionError] * 3]
    assert hooks_on(net) == []
    assert torch.equal(session.run(batches()[0])[1]["b"], net(batches()[0]))


def test_of_threads_that_share_a_session_each_gets_its_own_values_or_an_error(net: Net) -> None:
    session, wrong, refused = th.capture(net, "b"), list[int](), list[str]()
    barrier, interval = threading.Barrier(4), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(number: int) -> None:
        x = torch.full((1, 3), float(number))
        expected = net(x).detach()
        barrier.wait()
        for _ in range(500):
            try:
                if not torch.equal(session.run(x)[1]["b"], expected):
                    wrong.append(number)
            except SessionError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert wrong == []
    assert all("this session is open" in message for message in refused)
    assert hooks_on(net) == []


def test_run_in_another_thread_adds_to_a_session_of_all_threads(net: Net) -> None:
    session, x = th.capture(net, "b", threads="all"), batches()[0]
    with session as rec:
        thread = threading.Thread(target=session.run, args=(x,))
        thread.start()
        thread.join()
    assert torch.equal(rec["b"], net(x))


def test_a_session_whose_opening_failed_is_built_anew(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    session, x = th.capture(net, "a", edit={"b": edits.scale(2)}), batches()[0]
    session.run(x)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "record", lambda *args: pytest.fail("no"))
        with pytest.raises(pytest.fail.Exception):
            session.open()
    output, rec = session.run(x)
    assert torch.equal(rec["a"], by_hand(net, x, "a")[0])
    assert torch.equal(output, 2 * net(x))


def test_after_an_error_inside_the_block_it_opens_again(net: Net) -> None:
    session = th.capture(net, "a")
    with pytest.raises(ValueError, match="mine"), session:
        raise ValueError("mine")
    with session as rec:
        net(batches()[0])
    assert "a" in rec


def test_an_opening_that_failed_leaves_it_closed(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    session = th.capture(net, "a")
    with monkeypatch.context() as patch:
        patch.setattr(Scope, "enter", lambda scope: pytest.fail("no"))
        with pytest.raises(pytest.fail.Exception):
            session.open()
    assert hooks_on(net) == []
    with session as rec:
        net(batches()[0])
    assert "a" in rec


def test_a_checkpointed_part_is_recomputed_in_its_own_opening() -> None:
    torch.manual_seed(0)
    inner = Net()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    model, x = Outer(), batches()[0].requires_grad_()
    session = th.capture(model, "inner.a", edit={"inner.a": edits.scale(3)})
    for _ in range(2):
        with session as rec:
            model(x).sum().backward()
        assert rec.recomputed == {"inner.a": 1}
        assert torch.allclose(rec["inner.a"], 3 * inner.a(torch.relu(x)))


def test_one_that_was_built_by_hand_opens_once(net: Net) -> None:
    session = Session(net)
    session.open()
    session.close()
    with pytest.raises(SessionError, match="opens once"):
        session.open()


# -- run: a pass that is ended alone -----------------------------------------------------------------


def test_run_ends_each_pass_alone_and_records_it_by_itself(net: Net) -> None:
    session, ran = th.capture(net, "a", stop=True), 0
    net.b.register_forward_hook(lambda *_: pytest.fail("the pass should have stopped before"))
    for x in batches():
        output, rec = session.run(x)
        ran += 1
        assert repr(output) == "<no output: the forward pass stopped at 'a'>"
        seen = net.act(net.a(net.act(x.clone())))
        assert torch.equal(net.act(rec["a"]), seen)
    assert ran == 3


def test_run_inside_the_block_of_its_session_adds_every_pass_to_one_recording(net: Net) -> None:
    session = th.capture(net, "a", "act", stop=True)
    with session as rec:
        for x in batches():
            session.run(x)
        ended = True
    assert ended
    # The pass ends at the first call of the last site that is seen.
    assert torch.equal(rec.cat("a"), torch.cat([by_hand(net, x, "a")[0] for x in batches()]))
    assert "stop=True ended each forward pass at 'a'" in str(rec)
    assert hooks_on(net) == []


def test_a_pass_that_misses_a_site_does_not_shorten_the_next() -> None:
    class Sometimes(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() < 0 else self.b(self.a(x))

    net, x = Sometimes(), torch.ones(2, 3)
    session = th.capture(net, "a", "b", stop=True)
    with session as rec:
        session.run(-x)
        session.run(x)
    assert len(rec.all("a")) == 2
    assert torch.equal(rec["b"], by_hand(net, x, "b")[0])


def test_run_without_stop_gives_the_output_and_lets_errors_through(net: Net) -> None:
    x = batches()[0]
    session = th.capture(net, "a")
    output, rec = session.run(x)
    assert torch.equal(output, net(x))
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        session.run(x, mask=None)
    assert hooks_on(net) == []
    assert torch.equal(session.run(x)[1]["a"], rec["a"])


def test_a_pass_inside_of_a_pass_may_end_alone() -> None:
    class Twice(Net):
        session: Any = None

        def forward(self, x: Tensor, inner: bool = False) -> Tensor:
            if not inner:
                assert "no output" in repr(self.session.run(-x, inner=True)[0])
                return self.act(x.clone())  # not by way of 'a'
            return self.b(self.a(x))

    model, x = Twice(), batches()[0]
    model.session = session = th.capture(model, "a", stop=True)
    output, rec = session.run(x)
    assert torch.equal(output, x.relu())
    assert len(rec.all("a")) == 1


def test_operations_are_seen_in_every_pass_of_a_block_that_ends_early() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.add(x, 1)) * 0

    model = Adds()
    session = th.capture(model, "(model)/add", stop=True)
    with session as rec:
        for x in batches():
            session.run(x)
            torch.add(x, 2)  # outside of the model: none of the session's business
    assert torch.equal(rec.cat("/add"), torch.cat(batches()) + 1)


def test_the_stop_of_an_outer_session_is_not_swallowed(net: Net) -> None:
    x = batches()[0]
    with th.capture(net, "a", stop=True) as outer:
        th.capture(net, "b", stop=True).run(x)
        pytest.fail("it should have stopped")
    assert torch.equal(outer["a"], by_hand(net, x, "a")[0])


def test_a_block_that_was_left_says_what_it_left_out(net: Net, tmp_path: Path) -> None:
    with th.capture(net, "a", stop=True) as rec:
        for x in batches():
            net(x)
    said = "stop=True left the block at 'a': calls of the model after this one did not run. session.run(x) ends each"
    assert said in str(rec)
    assert said in str(th.load(rec.save(tmp_path / "run.safetensors")))
    assert th.capture(net, "b", stop=True).run(batches()[0])[1].stopped == "stop=True ended each forward pass at 'b'"
    with th.capture(net, "b") as whole:
        net(batches()[0])
    assert whole.stopped == ""


# -- the short way, of those that only record ----------------------------------------------------------


def test_a_third_opening_is_like_the_first(net: Net) -> None:
    net.twin = net.a  # type: ignore[assignment]
    session = th.capture(net, "a", "act", "(model)", threads="all")
    recordings = []
    for x in batches(5):
        with session as rec:
            net(x)
        recordings.append(rec)
    assert session._recorders is not None
    for x, rec in zip(batches(5), recordings, strict=True):
        assert torch.equal(rec["a"], by_hand(net, x, "a")[0])
        assert torch.equal(rec["twin"], rec["a"])  # the other name of a shared module
        assert torch.equal(rec["(model)"], net(x))
        assert [torch.equal(*pair) for pair in zip(rec.all("act"), by_hand(net, x, "act"), strict=True)] == [True, True]
        assert [record.order for record in rec.records()] == [0, 1, 2, 3]
        assert rec.missing == rec.elsewhere == rec.recomputed == {}
    assert hooks_on(net) == []


@pytest.mark.parametrize(
    ("site", "options"),
    [
        *((site, {}) for site in ("a:grad", "a:input", "act#1", "a/linear", "a.weight")),
        *(("a", option) for option in ({"edit": {"b": edits.scale(2)}}, {"transform": torch.abs})),
    ],
)
def test_who_does_more_than_record_is_built_by_its_recipe(net: Net, site: str, options: Any) -> None:
    session, found = th.capture(net, site, **options), []
    for _ in range(4):
        with session as rec:
            net(batches()[0]).sum().backward()
        found.append([record.value for record in rec.records()])
    assert session._recorders is None
    assert found[0]
    for values in found:
        assert all(torch.equal(one, other) for one, other in zip(values, found[0], strict=True))


def test_a_call_that_began_in_one_opening_is_none_of_the_next(net: Net) -> None:
    session = th.capture(net, "b", "act")
    recordings: list[Any] = []
    for x in batches(2):
        with session:
            net(x)
    session.open()

    def turn_over(module: nn.Module, args: Any, output: Tensor) -> None:
        # Hooks that are taken away are still called in the call that they were there for.
        session.close()
        recordings.append(session.open().recording)

    net.b.register_forward_hook(turn_over)
    net.b._forward_hooks.move_to_end(next(reversed(net.b._forward_hooks)), last=False)
    before = session.recording
    with pytest.warns(NeverRanWarning, match="'b'"):
        net(batches()[0])
    assert "b" not in before
    assert "b" not in recordings[0]
    with pytest.warns(NeverRanWarning, match="'b'"):
        session.close()
    assert hooks_on(net) == [turn_over]


def test_an_opening_in_which_nothing_ran_says_so_and_why(net: Net) -> None:
    session = th.capture(net, "a", "b")
    for _ in range(4):
        with pytest.warns(NeverRanWarning, match="2 selected sites never ran") as seen, session as rec:
            pass
        assert [warning.filename for warning in seen] == [__file__]
        assert rec.missing == dict.fromkeys("ab", rec.missing["a"])
        assert "was not called" in rec.missing["a"]
        rec.missing.clear()
    with pytest.warns(NeverRanWarning, match="'b'"), session as rec:
        net.a(batches()[0])
    assert list(rec.missing) == ["b"]
    with pytest.raises(ValueError, match="mine"), session as rec:
        raise ValueError("mine")
    assert rec.missing["a"] == "the block ended early with ValueError."
    with pytest.raises(SessionError, match="is open already"), session:
        session.open()


def test_calls_in_other_threads_are_counted_as_elsewhere(net: Net) -> None:
    session = th.capture(net, "a")
    for _ in range(4):
        with pytest.warns(NeverRanWarning, match="in another thread"), session as rec:
            thread = threading.Thread(target=net, args=(batches()[0],))
            thread.start()
            thread.join()
        assert rec.elsewhere == {"a": 1}


def test_inputs_and_parameters_are_cloned_each_time(net: Net) -> None:
    model = nn.Sequential(nn.Identity(), nn.Flatten())
    session = th.capture(model, "0", "1")
    for _ in range(4):
        x = torch.ones(2, 3)
        with session as rec:
            model(x)
        x.numpy()[:] = 7.0  # memory that a raw pointer knows
        assert rec["0"].tolist() == rec["1"].tolist() == [[1.0] * 3] * 2
    assert session._keeps[0]._inputs == ()  # and not held any longer

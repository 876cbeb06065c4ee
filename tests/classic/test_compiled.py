"""Compiled models: one sentence where hooks cannot be followed, and compiled code that other threads keep."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.classic.toys import TORCH
from tests.oracle import hooks_on, in_threads, stance, warned
from torchhook._core.hooks import eager_stance
from torchhook.errors import CompiledWarning, NeverRanError, SessionError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


@pytest.fixture
def net() -> Net:
    torch._dynamo.reset()
    return Net().requires_grad_(False)


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))


def captured(net: nn.Module, x: Tensor) -> Tensor:
    with th.capture(net, "a") as rec:
        net(x)
    return rec["a"]


def captured_later(net: nn.Module) -> Callable[[Tensor], Any]:
    session = th.capture(net, "a")

    def call(x: Tensor) -> Tensor:
        with session as rec:
            net(x)
        return rec["a"]

    return call


INSIDE: dict[str, Callable[[Net], Callable[[Tensor], Any]]] = {
    "FeatureLayers": lambda net: th.FeatureLayers(net, ["a"]),
    "FeatureLayer": lambda net: th.FeatureLayer(net, "a"),
    "FeatureExtractor": lambda net: th.FeatureExtractor(net, ["a"], stop=True),
    "VerboseExecution": lambda net: th.VerboseExecution(net, print=lambda line: None),
    "capture": lambda net: lambda x: captured(net, x),
    "capture made before": captured_later,
    "run": lambda net: lambda x: th.run(net, x, capture="a")[1]["a"],
}


@pytest.mark.shows("Compiled: a session inside a compiled function", error="SessionError")
@pytest.mark.parametrize("what", INSIDE)
def test_a_session_inside_compiled_code_is_refused_in_one_sentence(net: Net, what: str) -> None:
    call = torch.compile(INSIDE[what](net), backend="eager")  # type: ignore[call-overload]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of copy-on-write, above all
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
        warnings.filterwarnings("ignore", category=th.errors.NeverOpenedWarning)
        with pytest.raises(SessionError, match="attach=True") as caught:
            call(X)
    assert len(str(caught.value)) < 300
    assert "stance" not in str(caught.value)
    assert hooks_on(net) == []
    assert stance() == "default"


@pytest.mark.parametrize("what", INSIDE)
@pytest.mark.filterwarnings("ignore")
def test_a_whole_graph_is_refused_with_the_same_sentence_inside(net: Net, what: str) -> None:
    if what == "capture made before" or (what == "VerboseExecution" and TORCH < (2, 7)):
        pytest.skip("torch stops at another line of the session before it comes to that one")
    with pytest.raises(Exception, match="attach=True"):
        torch.compile(INSIDE[what](net), backend="eager", fullgraph=True)(X)  # type: ignore[call-overload]


def test_a_wrapper_without_attached_hooks_does_not_compile_itself(net: Net) -> None:
    with pytest.raises(SessionError, match="attach=True"):
        th.FeatureLayers(net, ["a"]).compile(backend="eager")


def test_what_the_compiler_leaves_out_may_have_sessions(net: Net) -> None:
    @torch.compiler.disable
    def look(x: Tensor) -> Tensor:
        return captured(net, x)

    made = torch.compile(lambda x: look(x) * 2, backend="eager")
    with warned():
        assert torch.equal(made(X), net.a(X) * 2)


@pytest.mark.shows("Compiled: attach=True on a model that was compiled and called", error="NeverRanError")
@pytest.mark.parametrize("make", [lambda n: torch.compile(n, backend="eager"), lambda n: nn.Sequential(n)])
def test_attached_hooks_on_a_model_that_was_compiled_and_called_say_that(net: Net, make: Any) -> None:
    model = make(net)
    prefix = ""
    if isinstance(model, nn.Sequential):
        model[0], prefix = torch.compile(net, backend="eager"), "0."
    with warned():
        model(X)
        with pytest.raises(NeverRanError) as caught:
            th.FeatureLayers(model, [f"{prefix}a"], attach=True)(X)
    assert "the model was compiled and called before the hooks were there" in str(caught.value)
    assert "Wrap the model first, then compile" in str(caught.value)


def test_attached_hooks_on_a_model_that_was_only_compiled_are_followed(net: Net) -> None:
    with warned():
        hooked = th.FeatureLayers(torch.compile(net, backend="eager"), ["a"], attach=True)
        for x in (X, X + 1):
            assert torch.equal(hooked(x)[0]["a"], net.a(x))


# -- which way was taken -----------------------------------------------------------------------------------------


@pytest.fixture
def unsaid() -> Iterator[None]:
    eager_stance.said = False
    yield
    eager_stance.said = True


@pytest.mark.shows("Compiled: captures of a model that was compiled before")
@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize("how", ["function", "method", "part"])
def test_a_compiled_model_in_a_session_says_once_that_it_runs_eagerly(net: Net, how: str) -> None:
    model: nn.Module = net
    if how == "function":
        model = torch.compile(net, backend="eager")  # type: ignore[assignment]
    elif how == "method":
        net.compile(backend="eager")
    else:
        net.act.compile(backend="eager")
    with pytest.warns(CompiledWarning, match="runs eagerly while a session is open") as caught:
        assert torch.equal(captured(model, X), nn.functional.linear(X, net.a.weight, net.a.bias))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    captured(model, X)


@pytest.mark.usefixtures("unsaid")
def test_other_models_say_nothing(net: Net) -> None:
    torch.compile(net, backend="eager")
    captured(net, X)


# -- threads -------------------------------------------------------------------------------------------------------


class Counting:
    """A backend that counts how often compiled code runs, and in which thread."""

    def __init__(self) -> None:
        self.compiled = 0
        self.runs: list[str] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.runs.append(threading.current_thread().name)
            return graph(*args)

        return run


@pytest.mark.shows("Compiled: other threads keep their compiled code")
@pytest.mark.parametrize("threads", ["own", "all"])
def test_other_threads_keep_their_compiled_code_while_a_session_is_open(net: Net, threads: Any) -> None:
    backend = Counting()
    with warned():
        made = torch.compile(net, backend=backend, dynamic=False)
        expected, small = made(X), net(X[:1])
        before = len(backend.runs)
        with th.capture(net, "a", threads=threads) as rec:
            assert torch.equal(in_threads(lambda: made(X))[0], expected)
            elsewhere = len(backend.runs) - before
            assert torch.equal(made(X), expected)
            assert len(backend.runs) - before == elsewhere  # here it is eager
            # What was never compiled is not compiled now: the hooks of the session would be in it for good.
            assert torch.equal(in_threads(lambda: made(X[:1]))[0], small)
            assert backend.compiled == 1
        assert elsewhere == (1 if threads == "own" else 0)
        assert torch.equal(rec.all("a")[0 if threads == "own" else 1], net.a(X))
        made(X[:1])
    assert backend.compiled == 2
    assert stance() == "default"


def test_a_whole_graph_in_another_thread_is_not_refused_for_the_sake_of_a_session(net: Net) -> None:
    with warned():
        made = torch.compile(net, backend="eager", fullgraph=True)
        with th.capture(net, "a"):
            assert torch.equal(in_threads(lambda: made(X))[0], net(X))


def test_a_session_of_another_thread_does_not_make_this_one_eager(net: Net) -> None:
    backend, opened, done = Counting(), threading.Event(), threading.Event()

    def holds() -> Tensor:
        with th.capture(net, "a") as rec:
            opened.set()
            done.wait(30)
            net(X)
        return rec["a"]

    def works() -> int:
        opened.wait(30)
        try:
            before = len(backend.runs)
            made(X)
            return len(backend.runs) - before
        finally:
            done.set()

    with warned():
        made = torch.compile(net, backend=backend)
        made(X)
        kept, runs = in_threads(holds, works)
    assert runs == 1
    assert torch.equal(kept, net.a(X))


def test_a_stance_that_the_user_sets_inside_a_session_outlives_it(net: Net) -> None:
    import torch._dynamo

    session = th.capture(net, "a").open()
    with torch.compiler.set_stance("fail_on_recompile"):
        net(X)
        session.close()
        assert stance() == "fail_on_recompile"
    assert stance() == "default"


# -- losses on features ----------------------------------------------------------------------------------------------


def trained_on(net: Net, keep: str) -> None:
    with th.capture(net, "a", keep=keep) as rec:
        net(X)
        rec["a"].sum().backward()


def test_a_loss_on_a_value_without_a_graph_says_how_to_keep_it() -> None:
    net = Net()
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        trained_on(net, keep="copy")
    notes = getattr(caught.value, "__notes__", ["keep='live'"])  # Python 3.11
    assert any("keep='live'" in text for text in notes)
    trained_on(net, keep="live")
    assert net.a.bias.grad is not None
    with pytest.raises(RuntimeError, match="does not require grad") as caught, th.capture(net, "a", keep="live"):
        torch.zeros(1).backward()
    assert not getattr(caught.value, "__notes__", [])

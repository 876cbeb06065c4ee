"""Compiled code in threads: sessions of one leave the others what they have compiled, whenever they come and go."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.oracle import in_threads, stance, warned
from torchhook._core.hooks import eager_stance

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.act(self.a(x)))
        return result


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


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


def test_a_session_that_closes_while_another_thread_decides_does_not_change_the_decision(net: Net) -> None:
    """Torch reads its stance several times for one decision: 'invalid stance', if it changes in between."""
    with warned():
        made = torch.compile(net, backend="eager")
        made(X)
        for turn in range(6):
            asked: list[str | None] = []
            session = th.capture(net, "a")
            in_threads(session.open)
            real = eager_stance._here

            def here(turn: int = turn, asked: Any = asked, session: Any = session, real: Any = real) -> str | None:
                asked.append(real())
                if len(asked) == turn + 1:
                    in_threads(session.close)
                return asked[-1]

            frames: Any = sys.modules["torch._dynamo.eval_frame"]
            frames._stance.here = here
            assert torch.equal(made(X), net(X))
            assert asked[0] == "eager_on_recompile"
            session.close()
            assert stance() == "default"
            with th.capture(net, "b"):  # what was left standing is taken over
                pass
            assert type(frames._stance).__name__ == "DynamoStance"


def test_a_session_that_closes_while_another_thread_runs_a_whole_graph_does_not_refuse_it(net: Net) -> None:
    """Torch reads its stance again when the call returns, and a call that ran eagerly has no compiled code to show."""
    session, closed = th.capture(net, "a"), []

    def works() -> None:
        if not torch.compiler.is_compiling() and not closed:
            closed.append(in_threads(session.close))

    with warned():
        made = torch.compile(lambda x: net(x) + 1, backend="eager", fullgraph=True, dynamic=False)
        made(X)
        in_threads(session.open)
        # Never compiled for this shape, so that it runs eagerly.
        handle = net.b.register_forward_hook(lambda *_: works())
        try:
            assert torch.equal(made(X[:1]), net(X[:1]) + 1)
        finally:
            handle.remove()
            session.close()
    assert closed
    assert stance() == "default"


def test_a_stance_that_the_user_sets_inside_a_session_outlives_it(net: Net) -> None:
    import torch._dynamo

    session = th.capture(net, "a").open()
    with torch.compiler.set_stance("fail_on_recompile"):
        net(X)
        session.close()
        assert stance() == "fail_on_recompile"
    assert stance() == "default"

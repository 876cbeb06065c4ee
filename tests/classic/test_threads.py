"""Threads on one model: a value belongs to the call that made it, through one wrapper and through sessions."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchhook as th
from tests.classic.toys import clean
from tests.oracle import in_threads
from torchhook import edits

WORKERS, CALLS = 4, 3_000


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


@pytest.fixture
def net() -> Iterator[Net]:
    """A model, with threads that take turns far more often than they do by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield Net().requires_grad_(False)
    sys.setswitchinterval(before)


def counted(net: Net, call: Callable[[Tensor], tuple[Tensor, Tensor]], calls: int = CALLS) -> Counter[str]:
    """How many calls of all workers were right, by hand, and what became of the others."""

    def work(seed: int) -> Counter[str]:
        found: Counter[str] = Counter()
        generator = torch.Generator().manual_seed(seed)
        for _ in range(calls):
            x = torch.randn(1, 8, generator=generator)
            try:
                a, b = call(x)
            except Exception as error:
                found[f"{type(error).__name__}: {error}"] += 1
                continue
            first = F.linear(x, net.a.weight, net.a.bias)
            right = torch.equal(a, first) and torch.equal(b, F.linear(first.relu(), net.b.weight, net.b.bias))
            found["right" if right else "wrong"] += 1
        return found

    return sum(in_threads(*[lambda seed=seed: work(seed) for seed in range(WORKERS)]), Counter())


@pytest.mark.shows("Threads: one attached extractor")
def test_one_attached_extractor_serves_many_threads(net: Net) -> None:
    extractor = th.FeatureExtractor(net, ["a", "b"], attach=True)

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        features = extractor(x)
        return features["a"], features["b"]

    assert counted(net, call) == {"right": WORKERS * CALLS}


@pytest.mark.shows("Threads: sessions of their own")
@pytest.mark.slow
def test_own_sessions_serve_many_threads(net: Net) -> None:
    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        with th.capture(net, "a", "b") as rec:
            net(x)
        return rec["a"], rec["b"]

    assert counted(net, call) == {"right": WORKERS * CALLS}
    assert clean(net)


@pytest.mark.shows("Threads: one compiled extractor")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
@pytest.mark.parametrize("broken", [False, True])
def test_a_compiled_extractor_serves_many_threads(net: Net, broken: bool) -> None:
    torch._dynamo.reset()
    if broken:  # into two graphs: then hooks run between them

        class Breaks(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                torch._dynamo.graph_break()
                return x.relu_()

        net.act = Breaks()  # type: ignore[assignment]
    made = torch.compile(th.FeatureExtractor(net, ["a", "b"], attach=True), backend="eager", fullgraph=not broken)
    made(torch.zeros(1, 8))

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        features = made(x)
        return features["a"], features["b"]

    assert counted(net, call, 300) == {"right": WORKERS * 300}


def test_a_call_of_the_model_alone_beside_one_of_the_wrapper_gives_it_nothing(net: Net) -> None:
    """And edits of the wrapper change only what runs in it."""
    hooked = th.FeatureLayers(net, ["a"], attach=True, edit={"b": edits.zero()})
    x = torch.ones(1, 8)
    expected, wrong = net(x), []
    done = threading.Event()

    def alone() -> None:
        while not done.is_set():
            wrong.extend([1] * (not torch.equal(net(x), expected)))

    def wrapped() -> Any:
        try:
            return [(len(hooked(x)[0]), hooked(x)[1].abs().max().item()) for _ in range(500)]
        finally:
            done.set()

    assert in_threads(alone, wrapped)[1] == [(1, 0.0)] * 500
    assert not wrong


def test_one_wrapper_around_another_and_around_itself_keep_their_own(net: Net) -> None:
    inner = th.FeatureLayers(net, ["a"], attach=True)
    outer = th.FeatureLayers(inner, ["model.b"], attach=True)
    x = torch.ones(1, 8)
    features, (inside, output) = outer(x)
    assert torch.equal(inside["a"], F.linear(x, net.a.weight, net.a.bias))
    assert torch.equal(features["model.b"], output)


def test_a_session_waits_for_what_another_thread_compiles() -> None:
    # Hooks that come and go in the middle of that are an error in the other thread, deep in the compiler.
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(2, 3)
    compiling, opened = threading.Event(), threading.Event()
    early: list[bool] = []

    def backend(graph: Any, _: Any) -> Any:
        compiling.set()
        early.append(opened.wait(0.5))
        return graph.forward

    compiled = torch.compile(th.FeatureLayers(model, ["0"], attach=True), fullgraph=True, backend=backend)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(compiled, x)
        assert compiling.wait(60)
        with th.capture(model, "0") as rec:
            opened.set()
            model(x)
        assert torch.equal(other.result()[0]["0"], model[0](x))
    assert early == [False]
    assert torch.equal(rec["0"], model[0](x))

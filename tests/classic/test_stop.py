"""``FeatureExtractor(..., stop=True)``: nothing runs after the last feature, and all before it is as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.oracle import in_threads
from torchhook.errors import ArgumentError, NeverRanError

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """Layers that note that they ran, the second twice; and a place where exceptions are caught."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.unused = (nn.Linear(4, 4) for _ in range(4))
        self.act = nn.ReLU(inplace=True)
        self.ran: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.note("a", self.act(self.a(x)))
            x = self.note("b", self.b(x))
            x = self.note("b", self.b(x))
        except Exception:
            self.ran.append("caught")
        return self.note("c", self.c(x))

    def note(self, name: str, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.ran.append(name)
        return x


@pytest.fixture
def net() -> Net:
    return Net()


attached = pytest.mark.parametrize("attach", [False, True])


@attached
@pytest.mark.parametrize(
    ("names", "ran"),
    [(["a"], []), (["act"], []), (["b"], ["a"]), (["b#1"], ["a", "b"]), (["a", "c"], ["a", "b", "b"])],
)
def test_the_forward_pass_ends_at_the_last_feature(net: Net, names: list[str], ran: list[str], attach: bool) -> None:
    first = net.a(X)
    second = net.b(first.relu())
    third = net.b(second)
    by_hand = {"a": first, "act": first.relu(), "b": second, "b#1": third, "c": net.c(third)}
    features = th.FeatureExtractor(net, names, attach=attach, stop=True)(X)
    assert net.ran == ran
    assert list(features) == names
    assert all(torch.equal(features[name], by_hand[name]) for name in names)


@attached
def test_a_perceptual_loss_trains_what_lies_before_and_leaves_the_rest(net: Net, attach: bool) -> None:
    teacher, student = th.FeatureExtractor(copy.deepcopy(net), ["a"], attach=attach, stop=True), net
    x = X.clone().requires_grad_()
    features = th.FeatureExtractor(student, ["a", "act"], attach=attach, stop=True)(x)
    with torch.no_grad():
        target = teacher(X)["a"]
    loss = (features["a"] - target - 1).square().sum() + features["act"].sum()
    loss.backward()
    twin = copy.deepcopy(student).requires_grad_(True)
    twin.zero_grad()
    other = X.clone().requires_grad_()
    ((twin.a(other) - target - 1).square().sum() + twin.a(other).relu().sum()).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(student.a.weight.grad, twin.a.weight.grad)
    assert student.b.weight.grad is None


@attached
@pytest.mark.filterwarnings("ignore::torchhook.errors.NeverRanWarning")
def test_a_layer_that_never_runs_lets_the_model_run_to_its_end_and_is_said(net: Net, attach: bool) -> None:
    with pytest.raises(NeverRanError, match="'unused' was selected and never ran"):
        th.FeatureExtractor(net, ["a", "unused"], attach=attach, stop=True)(X)
    assert net.ran[-1] == "c"


@attached
def test_no_layers_to_stop_at_are_refused(net: Net, attach: bool) -> None:
    with pytest.raises(ArgumentError, match="stop=True ends the forward pass at the last layer: name at least one"):
        th.FeatureExtractor(net, [], attach=attach, stop=True)


@attached
def test_errors_of_the_model_pass_and_the_next_call_is_right(net: Net, attach: bool) -> None:
    extractor = th.FeatureExtractor(net, ["a"], attach=attach, stop=True)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        extractor(X[:, :2])
    assert torch.equal(extractor(X)["a"], net.a(X))


def test_sessions_around_a_stopped_call_see_what_ran(net: Net) -> None:
    extractor = th.FeatureExtractor(net, ["b#0"], attach=True, stop=True)
    with pytest.warns(th.errors.NeverRanWarning, match="'c'"), th.capture(net, "a/linear", "act", "c") as rec:
        extractor(X)
        net.a(X)  # the model is left: this is no call inside of it
    assert rec.all("act")[0].shape == (2, 4)
    assert len(rec.all("a/linear")) == 2
    assert net.ran == ["a"]


def test_attached_extractors_stop_in_threads_of_their_own(net: Net) -> None:
    extractor = th.FeatureExtractor(net, ["b#0"], attach=True, stop=True)

    def work(number: int) -> bool:
        xs = [torch.full((1, 4), float(number + i)) for i in range(200)]
        return all(torch.equal(extractor(x)["b#0"], net.b(net.a(x).relu())) for x in xs)

    assert in_threads(*[lambda number=number: work(number) for number in range(4)]) == [True] * 4
    assert set(net.ran) == {"a"}


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
def test_compiled_and_exported_code_has_nothing_after_the_last_feature() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 9), nn.Sigmoid())
    extractor = th.FeatureExtractor(net, ["0"], attach=True, stop=True)
    operations: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        operations.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    with torch.no_grad():
        made = torch.compile(extractor, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
        assert torch.allclose(made(X)["0"], net[0](X))
        program = torch.export.export(extractor, (X,)).run_decompositions()
    assert not [name for name in operations if "sigmoid" in name]
    assert not [node for node in program.graph.nodes if "sigmoid" in str(node.target)]

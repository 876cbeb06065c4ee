"""Compiled models: one sentence where hooks cannot be followed, and compiled code that other threads keep."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.utils.checkpoint import checkpoint

import torchhook as th
from tests.classic.toys import TORCH
from tests.oracle import hooks_on, stance, warned
from torchhook._core.hooks import eager_stance
from torchhook.errors import AmbiguousCallError, CompiledWarning, EditError, NeverRanError, SessionError

SIDE_EFFECTS = "skip_fwd_side_effects_in_bwd_under_checkpoint"


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


# Of one that was made before, torch stops at another line of the session before it comes to that one.
@pytest.mark.parametrize("what", [what for what in INSIDE if what != "capture made before"])
@pytest.mark.filterwarnings("ignore")
def test_a_whole_graph_is_refused_with_the_same_sentence_inside(net: Net, what: str) -> None:
    if what == "VerboseExecution" and TORCH < (2, 7):
        pytest.skip("this version's compiler stops at another line of the session before it comes to that one")
    with pytest.raises(SessionError, match="attach=True") as caught:
        torch.compile(INSIDE[what](net), backend="eager", fullgraph=True)(X)  # type: ignore[call-overload]
    assert "attach=True" in str(caught.value).splitlines()[0]  # and not behind what the compiler says


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.act(self.a(x))))


REFUSED: dict[str, tuple[list[str], dict[str, Any], type[Exception], str]] = {
    "ambiguous": (["act"], {}, AmbiguousCallError, "'act' ran 2 times. Say which call: 'act#0' is the first."),
    "never ran": (["act#5"], {}, NeverRanError, "'act#5' was selected and never ran"),
    "edit": (["a"], {"edit": {"a": lambda a: a[:1]}}, EditError, "a: the edit changes the shape: expected"),
}


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused_while_the_compiler_follows_is_said_first(what: str, fullgraph: bool) -> None:
    if what == "edit" and TORCH < (2, 7):
        pytest.skip("this version's compiler stops before, at the name of the site")
    torch._dynamo.reset()
    paths, options, kind, sentence = REFUSED[what]
    hooked = th.FeatureLayers(Twice(), paths, attach=True, **options)
    with pytest.raises(kind) as caught:
        torch.compile(hooked, backend="eager", fullgraph=fullgraph)(X)
    assert str(caught.value).startswith(sentence)


class Broken(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


@pytest.mark.skipif(TORCH < (2, 7), reason="this version's compiler has code of its own for each model")
def test_code_that_was_compiled_for_another_model_of_the_class_is_named_with_the_way_out() -> None:
    torch._dynamo.reset()
    with warned():
        torch.compile(Broken(), backend="eager")(X)
        with pytest.raises(NeverRanError, match="compiled for another model of its class") as caught:
            torch.compile(th.FeatureLayers(Broken(), ["a"], attach=True), backend="eager")(X)
        assert "skip_nnmodule_hook_guards = False" in str(caught.value)
        torch._dynamo.reset()
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            torch.compile(Broken(), backend="eager")(X)
            model = Broken()
            (value,), _ = torch.compile(th.FeatureLayers(model, ["a"], attach=True), backend="eager")(X)
    torch._dynamo.reset()
    assert torch.equal(value, model.a(X))


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


@pytest.mark.skipif(TORCH < (2, 7), reason="this version's compiler follows no lists with names")
@pytest.mark.parametrize("itself", [False, True])
def test_features_of_compiled_code_are_read_by_position_and_by_path(net: Net, itself: bool) -> None:
    hooked = th.FeatureLayers(net, ["a", "b"], attach=True)
    made: Any = hooked if itself else torch.compile(hooked, backend="eager", fullgraph=True)
    if itself:
        hooked.compile(backend="eager", fullgraph=True)
    for _ in range(2):
        features, output = made(X)
        assert torch.equal(features[0], net.a(X))
        assert features["a"] is features[0]
        assert features.keys() == ["a", "b"]
        assert torch.equal(features[1], output)


def test_the_second_call_runs_what_the_first_compiled(net: Net) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    made = torch.compile(th.FeatureLayers(net, ["a"], attach=True), backend=backend, fullgraph=True)
    made(X)
    made(X)
    assert len(graphs) == 1


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


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(lambda x: self.act(self.a(x)), x, use_reentrant=False)  # type: ignore[no-untyped-call]
        return self.b(hidden)


@pytest.mark.shows("Compiled: sites in checkpointed segments with attach=True")
@pytest.mark.skipif(not hasattr(dynamo_config, SIDE_EFFECTS), reason="this torch has no such option")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_site_in_a_checkpointed_segment_has_its_value_and_gradients(fullgraph: bool) -> None:
    model, bare = Checkpointed(), Net()
    bare.load_state_dict(model.state_dict())
    hooked = th.FeatureLayers(model, ["a"], attach=True)
    with warned(), torch._dynamo.config.patch(**{SIDE_EFFECTS: fullgraph}):
        made = torch.compile(hooked, fullgraph=fullgraph, backend="aot_eager")
        (value,), output = made(X)
        (output.sum() + value.pow(2).sum()).backward()
    a = bare.a(X)
    (bare.b(torch.relu(a)).sum() + a.pow(2).sum()).backward()
    torch.testing.assert_close(value, a)
    for mine, other in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


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

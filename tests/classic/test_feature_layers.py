"""Models that return features: true, on the graph, in the order of the paths; and what compilers make of them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.classic.toys import Net, clean, saved
from torchhook.errors import AmbiguousCallError, NeverRanError, NeverRanWarning, SelectorError


def test_feature_layers_give_a_list_in_the_order_of_the_paths(net: Net, x: Tensor) -> None:
    hooked = th.FeatureLayers(net, ["head.0", "fc1"])
    features, output = hooked(x)
    assert isinstance(features, list)
    assert len(features) == 2
    assert [f.shape for f in features] == [(2, 3), (2, 40)]
    assert torch.equal(output, net(x))
    assert hooked.feature_layer_paths == ["head.0", "fc1"]
    assert hooked.model is net


def test_features_are_read_by_name_too(net: Net, x: Tensor) -> None:
    features, _ = th.FeatureLayers(net, ["head.0", "fc1"])(x)
    assert features["fc1"] is features[1]
    assert features[-1] is features["fc1"]
    assert features[:1][0] is features["head.0"]
    assert features.keys() == ["head.0", "fc1"]
    assert [key for key, _ in features.items()] == ["head.0", "fc1"]
    assert all(a is b for a, (_, b) in zip(features, features.items(), strict=True))
    first, second = features
    assert second is features["fc1"]
    assert first is features["head.0"]
    with pytest.raises(SelectorError, match=r"^no feature 'fc2' here\. Closest: 'fc1'\.$"):
        features["fc2"]
    with pytest.raises(IndexError):
        features[2]


def test_features_are_asked_for_names_and_compared_as_a_dict_would_be(net: Net, x: Tensor) -> None:
    features, _ = th.FeatureLayers(net, ["head.0", "fc1"])(x)
    assert "fc1" in features
    assert "fc2" not in features
    assert list(features.values()) == list(features)
    assert features == {"head.0": features[0], "fc1": features[1]}
    assert features != {"head.0": features[0]}
    assert features == list(features)
    assert features != [features[0]]


def test_no_paths_give_no_features_whatever_they_are_compared_with(net: Net, x: Tensor) -> None:
    features, output = th.FeatureLayers(net, [])(x)
    assert features == {}
    assert features == []
    assert torch.equal(output, net(x))


def test_a_feature_layer_gives_one_feature_and_the_output(net: Net, x: Tensor) -> None:
    hooked = th.FeatureLayer(net, "fc1")
    feature, output = hooked(x)
    assert torch.equal(feature, net.fc1(x))
    assert torch.equal(output, net(x))
    assert hooked.feature_layer_path == "fc1"


def test_features_are_true_before_an_in_place_layer_and_on_the_graph(net: Net, x: Tensor) -> None:
    for wrapped in (th.FeatureLayer(net, "fc1"), th.FeatureLayers(net, ["fc1"]), th.FeatureExtractor(net, ["fc1"])):
        result = wrapped(x)
        if isinstance(wrapped, th.FeatureExtractor):
            feature = result["fc1"]
        else:
            feature = result[0][0] if isinstance(wrapped, th.FeatureLayers) else result[0]
        assert (feature < 0).any()
        assert torch.equal(feature, net.fc1(x))
        (grad,) = torch.autograd.grad(feature.sum(), net.fc1.bias)
        assert grad.tolist() == [2.0] * 40


def test_gradients_flow_through_the_output_as_without_the_wrapper(net: Net, x: Tensor) -> None:
    net(x)[0, 0].backward()
    expected = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    features, output = th.FeatureLayers(net, ["fc1", "relu"])(x)
    output[0, 0].backward()
    assert {name for name, p in net.named_parameters() if p.grad is not None} == set(expected)
    for name, p in net.named_parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, expected[name])
    assert len(features) == 2


def test_a_feature_extractor_gives_a_dict_by_name(net: Net, x: Tensor) -> None:
    extractor = th.FeatureExtractor(net, layer_names=["relu", "head.1"])
    features = extractor(x)
    assert type(features) is dict
    assert list(features) == ["relu", "head.1"]
    assert torch.equal(features["head.1"], net(x))
    assert extractor.layer_names == ["relu", "head.1"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: th.FeatureLayer(m, "fc1"),
        lambda m: th.FeatureLayers(m, ["fc1"]),
        lambda m: th.FeatureExtractor(m, ["fc1"]),
        lambda m: th.VerboseExecution(m, print=lambda line: None),
    ],
)
def test_wrappers_are_modules_and_hooks_are_there_only_while_they_run(net: Net, x: Tensor, wrap: Any) -> None:
    wrapped = wrap(net)
    assert isinstance(wrapped, nn.Module)
    assert clean(net)
    wrapped(x)
    assert clean(net)
    assert [n for n, _ in wrapped.named_parameters()] == [f"model.{n}" for n, _ in net.named_parameters()]
    wrapped.eval()
    assert not net.training
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        wrapped(torch.rand(1, 7))
    assert clean(net)
    assert pickle.loads(pickle.dumps(net)) is not None


@pytest.mark.parametrize("make", [th.FeatureLayers, th.FeatureExtractor, lambda m, p: th.FeatureLayer(m, p[0])])
def test_a_wrong_path_is_said_when_the_wrapper_is_made(net: Net, make: Any) -> None:
    for kind in (ValueError, AttributeError):
        with pytest.raises(kind, match=r"^no layer 'fc2' in the model\. Closest: 'fc1'\.$"):
            make(net, ["fc2"])


def test_one_path_is_a_list_of_one_and_any_iterable_will_do(net: Net, x: Tensor) -> None:
    assert len(th.FeatureLayers(net, "fc1")(x)[0]) == 1
    assert list(th.FeatureExtractor(net, iter(["fc1", "relu"]))(x)) == ["fc1", "relu"]


def test_a_glob_among_the_paths_gives_each_layer_under_its_own_name(net: Net, x: Tensor) -> None:
    features, _ = th.FeatureLayers(net, ["head.*", "fc1:input"])(x)
    assert features.keys() == ["head.0", "head.1", "fc1:input"]
    assert torch.equal(features["fc1:input"], x)


class Skips(nn.Module):
    """Layers that do not run, for one reason or another."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.ReLU()
        self.branch = nn.Sequential(nn.ReLU())
        self.attention = nn.MultiheadAttention(4, 1)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.listed = nn.ModuleList([nn.ReLU()])

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.attention(*[self.used(x)] * 3)
        for block in self.blocks:
            x = block(x)
        return x


CAUSES = {
    "unused": "the model ran without calling it: a branch that was not taken",
    "branch.0": "the model ran without calling it in 'branch': a branch that was not taken",
    "attention.out_proj": "nn.MultiheadAttention reads the weights of 'out_proj' without calling it",
    "blocks": "Or the model calls what it holds one by one: choose 'blocks.0' or 'blocks.1'.",
}


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("path", CAUSES)
@pytest.mark.filterwarnings("ignore::torchhook.errors.NeverRanWarning")
def test_a_layer_that_never_ran_is_an_error_with_the_cause_and_not_a_none(path: str, attach: bool) -> None:
    hooked = th.FeatureLayers(Skips(), ["used", path], attach=attach)
    for _ in range(2):
        with pytest.raises(NeverRanError) as caught:
            hooked(torch.ones(2, 4))
        assert str(caught.value).startswith(f"{path!r} was selected and never ran: ")
        assert CAUSES[path] in str(caught.value)


@pytest.mark.parametrize("attach", [False, True])
def test_a_container_that_cannot_run_is_refused_when_the_wrapper_is_made(attach: bool) -> None:
    with pytest.raises(SelectorError, match="'listed' is a ModuleList: a container that is never called"):
        th.FeatureLayers(Skips(), ["listed"], attach=attach)


def test_a_layer_that_never_ran_is_reported_as_well() -> None:
    with pytest.warns(NeverRanWarning, match="'unused'"), pytest.raises(NeverRanError, match="'unused' was selected"):
        th.FeatureLayers(Skips(), ["unused"])(torch.ones(2, 4))


@pytest.mark.parametrize("attach", [False, True])
def test_a_layer_that_ran_twice_is_an_error_that_says_how_to_choose(attach: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x))

    model, x = Twice(), torch.ones(1, 4)
    with pytest.raises(AmbiguousCallError, match=r"'fc' ran 2 times.*'fc#0' is the first"):
        th.FeatureLayer(model, "fc", attach=attach)(x)
    assert torch.equal(th.FeatureLayer(model, "fc#0")(x)[0], model.fc(x))  # as it says


def bare(net: nn.Module, path: str, x: Tensor) -> Tensor:
    """What a layer produced, by a hook written by hand."""
    seen: list[Tensor] = []
    handle = net.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    net(x)
    handle.remove()
    return seen[0]


MAKERS = [th.FeatureLayers, th.FeatureExtractor, lambda m, p, **kw: th.FeatureLayer(m, p[0], **kw)]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("path", ["fc1:grad", "fc1:grad_input", "fc1.weight", "head.*:grad_total"])
def test_attached_hooks_refuse_what_no_forward_hook_sees(net: Net, make: Any, path: str) -> None:
    with pytest.raises(SelectorError, match=r"attach=True takes what layers and operations take and return"):
        make(net, [path], attach=True)
    assert clean(net)


def test_attached_hooks_take_layers_and_globs_and_go_with_their_wrapper(net: Net, x: Tensor) -> None:
    paths = ["fc1", "head.*", "relu:output", "fc1"]
    hooked = th.FeatureLayers(net, paths, attach=True)
    features, output = hooked(x)
    assert torch.equal(output, net(x))
    expected = [bare(net, path, x) for path in ("fc1", "head.0", "head.1", "relu", "fc1")]
    assert len(features) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(features, expected, strict=True))
    del hooked
    gc.collect()
    assert clean(net)


def test_plain_calls_of_an_attached_model_keep_nothing(net: Net, x: Tensor) -> None:
    hooked = th.FeatureLayer(net, "fc1", attach=True)
    wanted = bare(net, "fc1", x)
    given = x.clone()
    reference = weakref.ref(given)  # it is saved for the gradient of the weight, as long as the output is there
    net(given)
    del given
    gc.collect()
    assert reference() is None
    assert torch.equal(hooked(x)[0], wanted)
    with pytest.raises(RuntimeError):
        hooked(x[:, :-1])
    net(x)
    assert torch.equal(hooked(x)[0], wanted)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f)), saved])
def test_a_copy_of_an_attached_wrapper_has_hooks_of_its_own(net: Net, x: Tensor, duplicate: Any) -> None:
    hooked = th.FeatureExtractor(net, ["fc1", "relu"], attach=True)
    wanted = {path: bare(net, path, x) for path in ("fc1", "relu")}
    again = duplicate(hooked)
    again_twice = duplicate(again)
    for wrapper in (again, hooked, again_twice):
        for path, value in wrapper(x).items():
            assert torch.equal(value, wanted[path])
    # What stands for the hooks of the original does nothing, and is not left in the copy beside its own.
    if duplicate is not copy.copy:
        for wrapper in (hooked, again, again_twice):
            assert [len(module._forward_hooks) for module in (wrapper.model.fc1, wrapper.model.relu)] == [1, 1]
    del hooked
    gc.collect()
    assert torch.equal(again(x)["fc1"], wanted["fc1"])


@pytest.mark.shows("Compiled: FeatureLayers(attach=True) under torch.compile(fullgraph=True) and torch.export")
@pytest.mark.parametrize("duplicate", [lambda f: f, copy.deepcopy])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
def test_an_attached_wrapper_is_compiled_and_exported_whole(net: Net, x: Tensor, make: Any, duplicate: Any) -> None:
    hooked = duplicate(make(net, ["fc1"], attach=True))
    wanted = bare(net, "fc1", x)

    def feature(result: Any) -> Tensor:
        first = result["fc1"] if isinstance(result, dict) else result[0]
        return first["fc1"] if isinstance(first, (list, dict)) else first

    torch._dynamo.reset()
    compiled = torch.compile(hooked, fullgraph=True, backend="eager")
    for _ in range(2):
        assert torch.equal(feature(compiled(x)), wanted)
    for strict in (False, True):
        exported = torch.export.export(hooked, (x,), strict=strict)
        assert torch.equal(feature(exported.module()(x)), wanted)
    assert torch.equal(feature(hooked(x)), wanted)


def test_other_arguments_reach_the_model() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x: Tensor, y: Tensor, *, times: int) -> Tensor:
            return self.layer(x + y) * times

    feature, output = th.FeatureLayer(Adds(), "layer")(torch.ones(1), torch.ones(1), times=5)
    assert (feature.item(), output.item()) == (2, 10)


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(1, ["fc1", "relu", "head"]), (2, ["fc1", "relu", "head", "head.0", "head.1"]), (0, [])],
)
def test_layer_candidates_down_to_a_depth(net: Net, depth: int, expected: list[str]) -> None:
    assert list(th.get_layer_candidates(net, max_depth=depth)) == expected
    assert list(th.get_layer_candidates(net)) == ["fc1", "relu", "head"]
    assert iter(found := th.get_layer_candidates(net)) is found


@pytest.mark.parametrize("depth", [-1, 1.5])
def test_a_depth_that_makes_no_sense_is_refused_at_once(net: Net, depth: Any) -> None:
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match=rf"^max_depth must be a non-negative integer, found {depth}\.$"):
            th.get_layer_candidates(net, max_depth=depth)
    with pytest.raises(AssertionError, match=r"^model must be a torch\.nn\.Module, found str\.$"):
        th.get_layer_candidates("resnet18")  # type: ignore[arg-type]

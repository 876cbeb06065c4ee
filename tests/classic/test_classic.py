"""The seeds' names: the whole interface of each, and that values are true and hooks leave no residue."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import re
import weakref
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from torchhook.errors import NeverRanError, NeverRanWarning, SelectorError

RULE = "-" * 80


class Net(nn.Module):
    """The value of ``fc1`` is overwritten by the layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(30, 40)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Sequential(nn.Linear(40, 3), nn.Softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.fc1(x)))


PARAMETERS = 30 * 40 + 40 + 40 * 3 + 3


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.rand(2, 30, generator=torch.Generator().manual_seed(1))


def clean(model: nn.Module) -> bool:
    return not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def printed(function: Any, *args: Any) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        function(*args)
    return out.getvalue()


# -- HookManager -----------------------------------------------------------------------------------


def test_a_manager_has_the_whole_interface_of_its_ancestor(net: Net) -> None:
    assert list(inspect.signature(th.HookManager).parameters) == ["model", "max_size"]
    expected = ["self", "layer_name", "layer", "custom_hook", "output_transform"]
    for name in ("add", "register_forward_hook"):
        assert list(inspect.signature(getattr(th.HookManager, name)).parameters)[:5] == expected
    manager = th.HookManager(net)
    for name in ["get_features", "get", "get_all", "get_keys", "remove", "clear_features", "clear_hooks", "summary"]:
        assert callable(getattr(manager, name))
    assert manager.max_size == -1
    assert manager.model is net


def test_features_are_safe_detached_copies_on_the_cpu(net: Net, x: Tensor) -> None:
    expected = net.fc1(x).detach().clone()
    assert (expected < 0).any()
    manager = th.HookManager(net)
    manager.add("fc1")
    net(x)
    (feature,) = manager.get("fc1")
    assert torch.equal(feature, expected)
    assert not feature.requires_grad
    assert feature.device.type == "cpu"


def test_features_come_oldest_first_and_max_size_keeps_the_newest(net: Net) -> None:
    everything, newest = th.HookManager(net), th.HookManager(net, max_size=2)
    for manager in (everything, newest):
        manager.register_forward_hook(layer_name="fc1")
    inputs = [torch.full((1, 30), float(n)) for n in range(4)]
    expected = [net.fc1(value).detach() for value in inputs]
    everything.clear_features()
    newest.clear_features()
    for value in inputs:
        net(value)
    assert all(torch.equal(a, b) for a, b in zip(everything.get("fc1"), expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(newest.get_features("fc1"), expected[2:], strict=True))


def test_a_layer_is_hooked_by_name_by_object_and_under_a_name_of_ones_own(net: Net, x: Tensor) -> None:
    manager = th.HookManager(net)
    manager.add("fc1")
    manager.add(layer=net.relu)
    manager.add(layer_name="probabilities", layer=net.head[1])
    manager.add(None, net.head[0])
    assert manager.get_keys() == ["fc1", "ReLU_0", "probabilities", "Linear_0"]
    output = net(x)
    assert torch.equal(manager.get("probabilities")[0], output)
    assert torch.equal(manager.get("ReLU_0")[0], net.fc1(x).relu())
    assert list(manager.get_all()) == manager.get_keys()


def test_a_layer_object_need_not_be_part_of_the_model(net: Net) -> None:
    other = nn.Linear(1, 1)
    manager = th.HookManager(net)
    manager.add("elsewhere", other)
    other(torch.ones(1, 1))
    assert len(manager.get("elsewhere")) == 1
    manager.clear_hooks()
    assert clean(other)


def test_selectors_choose_many_layers_at_once(net: Net, x: Tensor) -> None:
    manager = th.HookManager(net)
    handles = manager.add(nn.Linear)
    assert isinstance(handles, list)
    assert manager.get_keys() == ["fc1", "head.0"]
    net(x)
    assert [len(v) for v in manager.get_all().values()] == [1, 1]
    handles[0].remove()
    net(x)
    assert [len(v) for v in manager.get_all().values()] == [1, 2]


def test_a_custom_hook_decides_what_is_kept(net: Net, x: Tensor) -> None:
    seen: list[tuple[Any, ...]] = []

    def only_the_first(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        seen.append((module, args, output))
        return output.sum() if len(seen) == 1 else None

    manager = th.HookManager(net)
    manager.add("head.0", custom_hook=only_the_first)
    first = net(x)
    net(x)
    assert len(seen) == 2
    module, args, output = seen[0]
    assert module is net.head[0]
    assert isinstance(args, tuple)
    assert len(manager.get("head.0")) == 1
    assert torch.equal(manager.get("head.0")[0], output.sum())
    manager.clear_hooks()
    assert torch.equal(net(x), first)  # what a custom hook returns never goes into the model


def test_a_custom_hook_may_keep_anything_and_stay_on_the_graph(net: Net, x: Tensor) -> None:
    manager = th.HookManager(net)
    manager.add("fc1", custom_hook=lambda m, i, o: {"in": i[0], "mean": o.mean()})
    net(x)
    (kept,) = manager.get("fc1")
    assert torch.equal(kept["in"], x)
    assert kept["mean"].requires_grad


def test_an_output_transform_changes_what_is_kept(net: Net, x: Tensor) -> None:
    manager = th.HookManager(net)
    manager.add("head.0", output_transform=lambda t: torch.softmax(t, -1).detach())
    output = net(x)
    assert torch.equal(manager.get("head.0")[0], output)
    assert not manager.get("head.0")[0].requires_grad


def test_structured_outputs_are_kept_whole() -> None:
    model = nn.Sequential(nn.LSTM(3, 4))
    manager = th.HookManager(model)
    manager.add("0")
    output, (h, c) = model(torch.rand(5, 3))
    (kept,) = manager.get("0")
    assert torch.equal(kept[0], output)
    assert torch.equal(kept[1][0], h)
    assert torch.equal(kept[1][1], c)
    assert str(manager).splitlines()[6].split("   ")[-1].strip() == "((5, 4), ((1, 4), (1, 4)))"


def test_inputs_and_gradients_come_under_keys_of_their_own(net: Net, x: Tensor) -> None:
    manager = th.HookManager(net)
    manager.add("head.0", inputs=True, grad=True)
    assert manager.get_keys() == ["head.0", "head.0:input", "head.0:grad"]
    net(x)[0, 0].backward()
    inside = net.fc1(x).relu()
    assert torch.equal(manager.get("head.0:input")[0], inside)
    logits = net.head[0](inside).detach().requires_grad_()
    (expected,) = torch.autograd.grad(logits.softmax(-1)[0, 0], logits)
    assert torch.allclose(manager.get("head.0:grad")[0], expected)


def test_an_edit_changes_the_model_until_the_hooks_go(net: Net, x: Tensor) -> None:
    before = net(x)
    manager = th.HookManager(net)
    manager.edit("head.0", lambda t: torch.zeros_like(t))
    assert torch.allclose(net(x), torch.full((2, 3), 1 / 3))
    manager.clear_hooks()
    assert torch.equal(net(x), before)
    assert clean(net)


def test_a_handle_removes_its_hook_and_the_features_stay(net: Net, x: Tensor) -> None:
    manager = th.HookManager(net)
    handle = manager.add("fc1")
    net(x)
    handle.remove()
    handle.remove()
    net(x)
    assert len(manager.get("fc1")) == 1
    assert clean(net)


def test_remove_takes_one_hook_and_its_features(net: Net, x: Tensor) -> None:
    manager = th.HookManager(net)
    manager.add("fc1")
    manager.add("relu")
    net(x)
    manager.remove("fc1")
    assert manager.get_keys() == ["relu"]
    with pytest.raises(ValueError, match=r"^no hook with key 'fc1'\. There are: 'relu'\.$"):
        manager.get("fc1")
    net(x)
    assert len(manager.get("relu")) == 2
    manager.add("fc1")
    assert manager.get("fc1") == []


def test_clear_features_keeps_the_hooks_and_clear_hooks_keeps_nothing(net: Net, x: Tensor) -> None:
    manager = th.HookManager(net)
    manager.add("fc1")
    net(x)
    manager.clear_features()
    assert manager.get_all() == {"fc1": []}
    net(x)
    assert len(manager.get("fc1")) == 1
    manager.clear_hooks()
    assert manager.get_keys() == []
    assert manager.get_all() == {}
    assert clean(net)


@pytest.mark.parametrize("fails", [False, True])
def test_at_the_end_of_a_with_block_the_hooks_go_and_the_features_stay(net: Net, x: Tensor, fails: bool) -> None:
    def use(manager: th.HookManager) -> None:
        manager.add("fc1")
        manager.edit("relu", lambda t: t)
        net(x)
        if fails:
            raise KeyError("mine")

    manager = th.HookManager(net)
    if fails:
        with pytest.raises(KeyError, match="mine"), manager as entered:
            use(entered)
    else:
        with manager as entered:
            assert entered is manager
            use(manager)
    assert clean(net)
    net(x)
    assert len(manager.get("fc1")) == 1


def test_the_hooks_go_when_the_manager_does(net: Net, x: Tensor) -> None:
    manager = th.HookManager(net)
    manager.add("fc1")
    manager.add("relu", custom_hook=lambda m, i, o: o)
    manager.add("head.0", output_transform=lambda t: t, inputs=True)
    manager.edit("head.1", lambda t: t)
    net(x)
    assert not clean(net)
    del manager
    gc.collect()
    assert clean(net)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_hooked_model_can_be_copied_and_the_copy_records_nothing(net: Net, x: Tensor, duplicate: Any) -> None:
    manager = th.HookManager(net)
    manager.add("fc1")
    manager.add("relu", inputs=True)
    twin = duplicate(net)
    assert torch.equal(twin(x), Net.forward(twin, x))
    assert manager.get_all() == {"fc1": [], "relu": [], "relu:input": []}


def test_two_managers_on_one_model_do_not_meet(net: Net, x: Tensor) -> None:
    first, second = th.HookManager(net), th.HookManager(net)
    first.add("fc1")
    second.add("fc1", output_transform=lambda t: t.sum())
    net(x)
    first.clear_hooks()
    net(x)
    assert len(second.get("fc1")) == 2
    assert first.get_keys() == []


def test_an_error_inside_a_custom_hook_passes_through(net: Net, x: Tensor) -> None:
    def fail(module: nn.Module, args: Any, output: Any) -> None:
        raise ZeroDivisionError("mine")

    with th.HookManager(net) as manager:
        manager.add("fc1", custom_hook=fail)
        with pytest.raises(ZeroDivisionError, match="mine"):
            net(x)
    assert clean(net)


def test_calls_of_other_threads_are_captured_too(net: Net, x: Tensor) -> None:
    from threading import Thread

    manager = th.HookManager(net)
    manager.add("fc1")
    thread = Thread(target=net, args=(x,))
    thread.start()
    thread.join()
    assert len(manager.get("fc1")) == 1


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda m: th.HookManager("model"), TypeError, "'model' must be a torch.nn.Module, found str."),
        (lambda m: th.HookManager(m.model, max_size=1.5), TypeError, "'max_size' must be an integer, found 1.5."),
        (lambda m: th.HookManager(m.model, max_size=True), TypeError, "'max_size' must be an integer, found True."),
        (
            lambda m: th.HookManager(m.model, max_size=-2),
            ValueError,
            "'max_size' must be -1 (keep everything) or more, found -2.",
        ),
        (lambda m: m.add(), ValueError, "give 'layer_name' or 'layer': there is nothing to hook."),
        (lambda m: m.add(layer="fc1"), TypeError, "'layer' must be a torch.nn.Module, found str."),
        (
            lambda m: m.add(nn.Linear, m.model.fc1),
            TypeError,
            "'layer_name' must be a string beside 'layer', found type.",
        ),
        (lambda m: m.add("fc1", custom_hook=3), TypeError, "'custom_hook' must be callable, found int."),
        (lambda m: m.add("fc1", output_transform=3), TypeError, "'output_transform' must be callable, found int."),
        (
            lambda m: (m.add("fc1"), m.add("fc1")),
            ValueError,
            "there is a hook with key 'fc1' already; remove it first, or choose another name.",
        ),
        (lambda m: m.get(3), TypeError, "'key' must be a string, found int."),
        (lambda m: m.get("fc1"), SelectorError, "no hook with key 'fc1'."),
        (lambda m: m.remove("fc1"), SelectorError, "no hook with key 'fc1'."),
        (lambda m: (m.add("fc1"), m.get("fc2")), SelectorError, "no hook with key 'fc2'. Closest: 'fc1'."),
    ],
)
def test_wrong_use_says_what_was_expected(net: Net, use: Any, error: type[Exception], message: str) -> None:
    manager = th.HookManager(net)
    with pytest.raises(error) as caught:
        use(manager)
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", [ValueError, AttributeError])
def test_a_wrong_layer_name_is_a_value_error_and_an_attribute_error(net: Net, kind: type[Exception]) -> None:
    manager = th.HookManager(net)
    with pytest.raises(kind, match=r"^no layer 'fc2' in the model\. Closest: 'fc1'\.$"):
        manager.add("fc2")
    with pytest.raises(kind, match="no layer 'layer4'"):
        manager.add(layer_name="layer4")
    assert manager.get_keys() == []
    assert clean(net)


HEAD = "Model: Net | Total Parameters: 1.36 K"


def test_the_summary_of_a_manager_without_hooks(net: Net) -> None:
    assert f"{PARAMETERS / 1000:.2f} K" in HEAD
    assert str(th.HookManager(net)) == f"{HEAD}\nNo hooks have been registered."


def test_the_summary_before_anything_ran(net: Net) -> None:
    manager = th.HookManager(net)
    manager.add("fc1")
    assert str(manager) == f"{HEAD}\n1 hook registered (fc1), but no features have been captured yet."
    manager.add("relu")
    assert str(manager) == f"{HEAD}\n2 hooks registered (fc1, relu), but no features have been captured yet."


@pytest.mark.parametrize(("max_size", "shown"), [(-1, "unlimited"), (1, "1"), (7, "7")])
def test_the_summary_of_what_was_captured_and_what_is_waiting(net: Net, x: Tensor, max_size: int, shown: str) -> None:
    manager = th.HookManager(net, max_size=max_size)
    manager.add("fc1")
    manager.add("aside", nn.Linear(1, 1))
    manager.add("head.0", output_transform=lambda t: t.mean())
    net(x)
    net(x)
    calls = 1 if max_size == 1 else 2
    expected = "\n".join(
        [
            HEAD,
            f"Registered Hooks: 3 (max_size={shown})",
            RULE,
            "Captured Features Summary:",
            "Layer Key                     Feature Count       Feature Shape",
            RULE,
            f"fc1                           {calls}                   (2, 40)",
            f"head.0                        {calls}                   ()",
            RULE,
            "Hooks Registered but Not Triggered Yet:",
            "- aside",
            RULE,
        ]
    )
    assert str(manager) == repr(manager) == expected
    assert printed(manager.summary) == expected + "\n"


# -- FeatureLayer, FeatureLayers, FeatureExtractor -------------------------------------------------


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


def test_a_layer_that_never_ran_is_an_error_and_not_a_none() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.ReLU(), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with pytest.warns(NeverRanWarning, match="'unused'"), pytest.raises(NeverRanError, match="'unused' was selected"):
        th.FeatureLayers(Skips(), ["unused"])(torch.ones(1))


def bare(net: nn.Module, path: str, x: Tensor) -> Tensor:
    """What a layer produced, by a hook written by hand."""
    seen: list[Tensor] = []
    handle = net.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    net(x)
    handle.remove()
    return seen[0]


MAKERS = [th.FeatureLayers, th.FeatureExtractor, lambda m, p, **kw: th.FeatureLayer(m, p[0], **kw)]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("path", ["relu:input", "fc1:grad", "fc1.weight", "relu/relu_", "fc1#5", "head.*:input"])
def test_attached_hooks_refuse_what_is_no_output_of_a_layer(net: Net, make: Any, path: str) -> None:
    with pytest.raises(SelectorError, match=r"attach=True takes the outputs of layers, by plain paths"):
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
    del hooked
    gc.collect()
    assert torch.equal(again(x)["fc1"], wanted["fc1"])


@pytest.mark.parametrize("duplicate", [lambda f: f, copy.deepcopy])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
def test_an_attached_wrapper_is_compiled_and_exported_whole(net: Net, x: Tensor, make: Any, duplicate: Any) -> None:
    hooked = duplicate(make(net, ["fc1"], attach=True))
    wanted = bare(net, "fc1", x)

    def feature(result: Any) -> Tensor:
        first = result["fc1"] if isinstance(result, dict) else result[0]
        return first["fc1"] if isinstance(first, list) else first

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


# -- VerboseExecution ------------------------------------------------------------------------------


def test_verbose_execution_prints_one_line_for_each_direct_child(net: Net, x: Tensor, capsys) -> None:
    output = th.VerboseExecution(net)(x)
    assert capsys.readouterr().out == (
        "fc1: torch.Size([2, 40])\nrelu: torch.Size([2, 40])\nhead: torch.Size([2, 3])\n"
    )
    assert torch.equal(output, net(x))
    assert capsys.readouterr().out == ""


def test_verbose_execution_goes_deeper_and_says_more_on_request(net: Net, x: Tensor) -> None:
    lines: list[str] = []
    th.VerboseExecution(net, depth=2, dtype=True, time=True, print=lines.append)(x)
    assert [re.sub(r"\d+\.\d\d ms$", "T ms", line) for line in lines] == [
        "fc1: torch.Size([2, 40]) torch.float32 T ms",
        "relu: torch.Size([2, 40]) torch.float32 T ms",
        "head.0: torch.Size([2, 3]) torch.float32 T ms",
        "head.1: torch.Size([2, 3]) torch.float32 T ms",
        "head: torch.Size([2, 3]) torch.float32 T ms",
    ]


def test_verbose_execution_shows_structured_outputs_and_lines_before_an_error(capsys) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.fails = nn.LSTM(3, 4), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Any:
            return self.fails(self.lstm(x))

    with pytest.raises(TypeError):
        th.VerboseExecution(Odd())(torch.rand(5, 3))
    assert capsys.readouterr().out == "lstm: ((5, 4), ((1, 4), (1, 4)))\n"


# -- gradient_clipper ------------------------------------------------------------------------------


def test_every_gradient_is_clamped_as_it_is_computed(net: Net, x: Tensor) -> None:
    (net(x).log().sum() * 100).backward()
    expected = {name: p.grad.clamp(-0.5, 0.5) for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    assert th.gradient_clipper(net, 0.5) is net
    (net(x).log().sum() * 100).backward()
    assert any((g.abs() == 0.5).any() for g in expected.values())
    for name, p in net.named_parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, expected[name])


def test_frozen_and_tied_parameters_are_no_obstacle_to_clipping() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    th.gradient_clipper(model, 0.1)
    (model(torch.ones(1, 2)).sum() * 100).backward()
    assert model[0].weight.grad.abs().max().item() == pytest.approx(0.1)
    assert model[0].bias.grad is None


# -- Hook ------------------------------------------------------------------------------------------


def test_a_hook_keeps_what_goes_in_and_what_comes_out(net: Net, x: Tensor) -> None:
    hook = th.Hook()
    handle = net.fc1.register_forward_hook(hook)
    for scale in (1, 2):
        net(x * scale)
    handle.remove()
    net(x)
    assert hook.module_name == [nn.Linear, nn.Linear]
    assert len(hook.features_in_hook) == len(hook.features_out_hook) == 2
    for scale, inputs, output in zip((1, 2), hook.features_in_hook, hook.features_out_hook, strict=True):
        assert type(inputs) is tuple
        assert torch.equal(inputs[0], x * scale)
        assert torch.equal(output, net.fc1(x * scale))  # not what the in-place layer made of it
        assert output.requires_grad


def test_a_hook_changes_nothing_that_the_model_computes(net: Net, x: Tensor) -> None:
    before = net(x)
    hook = th.Hook()
    assert hook(net.fc1, (x,), net.fc1(x)) is None
    for module in net.modules():
        module.register_forward_hook(hook)
    assert torch.equal(net(x), before)
    assert set(hook.module_name[1:]) == {type(m) for m in net.modules()}


# -- counting --------------------------------------------------------------------------------------


def test_parameters_are_counted_once_even_when_tied(net: Net) -> None:
    assert th.count_parameters(net) == PARAMETERS == sum(p.numel() for p in net.parameters())
    net.fc1.bias.requires_grad_(False)
    assert th.count_parameters(net, trainable_only=True) == PARAMETERS - 40
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = tied[0].weight
    assert th.count_parameters(tied) == 15
    with pytest.raises(TypeError, match=r"^'model' must be a torch\.nn\.Module, found str\.$"):
        th.count_parameters("resnet18")  # type: ignore[arg-type]


def test_a_model_summary_lists_every_layer_and_a_tied_weight_where_it_comes_first(capsys) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 20)
            self.block = nn.Sequential(nn.Linear(20, 20), nn.ReLU())
            self.head = nn.Linear(20, 100, bias=False)
            self.head.weight = self.embed.weight
            self.block[0].bias.requires_grad_(False)

    th.model_summary(Tied())
    wide = "=" * 80
    expected = [
        wide,
        "Model Summary: Tied",
        RULE,
        "Total Parameters: 2.42 K",
        "Trainable Parameters: 2.40 K",
        "Non-trainable Parameters: 20.00",
        RULE,
        "Layer Name                               Total Params         Trainable Params",
        wide,
        "embed                                    2.00 K               2.00 K",
        "block                                    0.00                 0.00",
        "  block.0                                420.00               400.00",
        "  block.1                                0.00                 0.00",
        "head                                     0.00                 0.00",
        wide,
    ]
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == expected


def test_a_model_summary_can_be_cut_at_a_depth_and_leave_out_layers_without_parameters(net: Net) -> None:
    def names(*args: Any) -> list[str]:
        lines = printed(th.model_summary, net, *args).splitlines()[9:-1]
        return [line.split()[0] for line in lines]

    assert names() == ["fc1", "relu", "head", "head.0", "head.1"]
    assert names(0) == ["fc1", "relu", "head"]
    assert names(-1, False) == ["fc1", "head.0"]

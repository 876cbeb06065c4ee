"""``HookManager``: the whole interface of its ancestor, true values, and no residue."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.classic.toys import PARAMETERS, RULE, Net, clean, printed
from torchhook.errors import SelectorError


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


def test_an_output_transform_may_be_given_for_each_layer_by_selectors(net: Net, x: Tensor) -> None:
    expected, manager = net.fc1(x).detach().clone(), th.HookManager(net)
    manager.add(["fc1", "head.0"], output_transform={nn.Linear: lambda t: t[:, :1].detach(), "fc1": None}, inputs=True)
    net(x)
    assert torch.equal(manager.get("fc1")[0], expected)
    assert torch.equal(manager.get("head.0")[0], net.head[0](torch.relu(expected))[:, :1])
    assert torch.equal(manager.get("head.0:input")[0], torch.relu(expected))
    with pytest.raises(SelectorError, match=r"'output_transform'\['fc2'\]: no such site is kept. Closest: 'fc1'"):
        th.HookManager(net).add("fc1", output_transform={"fc2": torch.abs})


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
            "there is a hook with key 'fc1' already: remove it, or choose another name.",
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

"""Selectors to sites: every kind by example, globs against a slow reference, and what wrong ones say."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchhook._core.index import Index, is_callable
from torchhook._core.select import resolve
from torchhook._core.targets import Target, live_tensor
from torchhook._recording.address import Site
from torchhook.errors import SelectorError

patient = settings(deadline=None)  # the machine may be busy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 1, 1)
        self.relu = nn.ReLU(inplace=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 1, 1)
        self.layer1 = nn.Sequential(Block(), Block())
        self.layer2 = nn.Sequential(Block())
        self.heads = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.fc = nn.Linear(1, 1)
        self.register_buffer("scale", torch.ones(1))
        self.extra = nn.ParameterList([torch.ones(1)])


NET = Net()
EVERY = [name for name, _ in NET.named_modules()]
RELUS = ["layer1.0.relu", "layer1.1.relu", "layer2.0.relu"]
SOME_NAMES = (
    "There are: 'conv1', 'layer1', 'layer1.0', 'layer1.0.conv1', 'layer1.0.relu', 'layer1.1' "
    f"and {len(EVERY) - 1 - 6} more."
)


def chosen(selector: Any, model: nn.Module = NET, **options: Any) -> list[str]:
    targets = resolve(model, selector, **options)
    index = Index(model)
    for target in targets:
        if target.tensor is None:
            assert target.module is index.modules[target.site.path]
    return [str(target.site) for target in targets]


def complaint(selector: Any, model: nn.Module = NET, **options: Any) -> str:
    with pytest.raises(SelectorError) as caught:
        resolve(model, selector, **options)
    return str(caught.value)


# -- every kind of selector ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "sites"),
    [
        ("fc", ["fc"]),
        ("layer1.0.relu", ["layer1.0.relu"]),
        ("", [""]),
        ("layer*", ["layer1", "layer2"]),
        ("layer*.*", ["layer1.0", "layer1.1", "layer2.0"]),
        ("**.relu", RELUS),
        ("layer1.**", [n for n in EVERY if n.startswith("layer1")]),
        ("**.conv?", ["conv1", "layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1"]),
        ("layer[12]", ["layer1", "layer2"]),
        ("layer[1-2].0", ["layer1.0", "layer2.0"]),
        ("layer[!1]", ["layer2"]),
        (re.compile(r"relu$"), RELUS),
        (re.compile(r"^layer2"), ["layer2", "layer2.0", "layer2.0.conv1", "layer2.0.relu"]),
        (nn.Conv2d, ["conv1", "layer1.0.conv1", "layer1.1.conv1", "layer2.0.conv1"]),
        (Block, ["layer1.0", "layer1.1", "layer2.0"]),
        (NET.fc, ["fc"]),
        (NET, [""]),
        (NET.layer1[1], ["layer1.1"]),
        (lambda name, module: name.endswith("relu"), RELUS),
        (lambda name, module: isinstance(module, nn.Linear), ["heads.0", "heads.1", "fc"]),
        (Site("fc", port="input"), ["fc:input"]),
        (["fc", nn.ReLU], ["fc", *RELUS]),
        (("fc", ["conv1", ["layer1"]]), ["fc", "conv1", "layer1"]),
        (frozenset({"fc"}), ["fc"]),
    ],
)
def test_every_kind_of_selector_chooses_its_sites_in_the_order_of_the_model(selector: Any, sites: list[str]) -> None:
    assert chosen(selector) == sites


def test_two_stars_choose_every_module_that_can_run_except_the_model_itself() -> None:
    assert chosen("**") == [n for n in EVERY if n not in ("", "heads", "extra")]
    assert chosen(nn.Module)[0] == ""


def test_a_list_keeps_the_order_written_and_chooses_nothing_twice() -> None:
    assert chosen(["layer1.1.relu", "**.relu", "layer1.1.relu"]) == ["layer1.1.relu", "layer1.0.relu", "layer2.0.relu"]
    assert chosen(["fc", "fc:input", "fc"]) == ["fc", "fc:input"]


@pytest.mark.parametrize(
    ("selector", "port", "sites"),
    [
        ("fc:input", "output", ["fc:input"]),
        ("fc", "input", ["fc:input"]),
        ("fc:output", "input", ["fc"]),
        ("fc:grad", "input", ["fc:grad"]),
        ("layer*:grad", "output", ["layer1:grad", "layer2:grad"]),
        ("layer*", "grad_input", ["layer1:grad_input", "layer2:grad_input"]),
        (NET.fc, "input", ["fc:input"]),
        (nn.Linear, "input", ["heads.0:input", "heads.1:input", "fc:input"]),
        (re.compile("^fc"), "grad", ["fc:grad"]),
        (lambda n, m: n == "fc", "grad", ["fc:grad"]),
        (Site("fc"), "input", ["fc"]),
        ("fc#2:input", "output", ["fc#2:input"]),
        ("**.relu#1", "output", [f"{n}#1" for n in RELUS]),
        ("layer*/add_", "output", ["layer1/add_", "layer2/add_"]),
        (":input", "output", [":input"]),
    ],
)
def test_ports_calls_and_operations_are_carried_to_every_site(selector: Any, port: str, sites: list[str]) -> None:
    assert chosen(selector, port=port) == sites


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ("**.conv1", RELUS),
        (nn.Conv2d, RELUS),
        (re.compile("conv"), RELUS),
        (["layer1.**", "layer2.*.conv1"], ["layer2.0.relu"]),
        (lambda n, m: "layer1" in n or "conv" in n, ["layer2.0.relu"]),
        (NET.layer1[0].relu, ["layer1.0.conv1", "layer1.1.conv1", "layer1.1.relu", "layer2.0.conv1", "layer2.0.relu"]),
    ],
)
def test_exclude_takes_any_selector_and_leaves_the_rest(exclude: Any, left: list[str]) -> None:
    assert chosen("layer*.*.*", exclude=exclude) == left


def test_exclude_reaches_a_shared_module_under_its_other_name() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(1, 1))
    model.append(model[0])
    assert chosen("*", model, exclude="2") == ["1"]


# -- globs against a slow reference ----------------------------------------------------------------


def component_matches(pattern: str, text: str) -> bool:
    """One component, character by character, with every choice of what ``*`` stands for tried out."""
    if not pattern:
        return not text
    if pattern[0] == "*":
        return any(component_matches(pattern[1:], text[i:]) for i in range(len(text) + 1))
    if not text:
        return False
    if pattern[0] == "[" and "]" in pattern[2:]:
        end = pattern.index("]", 2)
        inside, negated = pattern[1:end], pattern[1] == "!"
        allowed = set()
        items = list(inside[1:] if negated else inside)
        while items:
            if len(items) >= 3 and items[1] == "-":
                allowed.update(map(chr, range(ord(items[0]), ord(items[2]) + 1)))
                del items[:3]
            else:
                allowed.add(items.pop(0))
        return (text[0] in allowed) != negated and component_matches(pattern[end + 1 :], text[1:])
    return pattern[0] in ("?", text[0]) and component_matches(pattern[1:], text[1:])


def glob_matches(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(glob_matches(pattern[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and component_matches(pattern[0], path[0]) and glob_matches(pattern[1:], path[1:])


NAMES = st.text(alphabet="ab1+$(\\|", min_size=1, max_size=3)
PIECES = st.sampled_from(["a", "b", "1", "+", "$", "(", "\\", "|", "*", "?", "[ab]", "[!a]", "[a-b1]", "[!+1]", "[$(]"])
PATTERNS = st.lists(
    st.just("**") | st.lists(PIECES, min_size=1, max_size=3).map("".join), min_size=1, max_size=4
).filter(lambda parts: any(mark in part for part in parts for mark in "*?["))


def grown(paths: list[list[str]]) -> nn.Module:
    """A model that has these paths."""
    model = nn.Module()
    for path in paths:
        at = model
        for name in path:
            if name not in at._modules:
                at.add_module(name, nn.Module())
            at = at._modules[name]  # type: ignore[assignment]
    return model


@patient
@given(st.lists(st.lists(NAMES, min_size=1, max_size=4), min_size=1, max_size=5), PATTERNS)
def test_a_glob_chooses_what_the_slow_reference_chooses(paths: list[list[str]], pattern: list[str]) -> None:
    model = grown(paths)
    expected = [name for name, _ in model.named_modules() if name and glob_matches(pattern, name.split("."))]
    try:
        found = [target.site.path for target in resolve(model, ".".join(pattern))]
    except SelectorError:
        found = []
    assert found == expected


@patient
@given(st.lists(st.lists(NAMES, min_size=1, max_size=3), min_size=1, max_size=4), st.data())
def test_every_module_is_chosen_by_its_own_name(paths: list[list[str]], data: st.DataObject) -> None:
    model = grown(paths)
    name = data.draw(st.sampled_from([n for n, _ in model.named_modules()]))
    assert [target.site.path for target in resolve(model, name)] == [name]


def test_a_name_with_glob_marks_in_it_means_itself_first() -> None:
    model = nn.Module()
    model.add_module("a*", nn.ReLU())
    model.add_module("ab", nn.ReLU())
    assert chosen("a*", model) == ["a*"]


def test_names_that_hold_the_marks_of_the_grammar_can_be_chosen() -> None:
    model = nn.Module()
    for name in ("a/b", "a#1", "a:input", "a"):
        model.add_module(name, nn.ReLU())
    assert chosen("a/b", model) == ["a/b"]
    assert chosen("a/b:input", model) == ["a/b:input"]
    assert resolve(model, "a/b:input")[0].site == Site("a/b", port="input")
    assert resolve(model, "a#1")[0].site == Site("a#1")
    assert resolve(model, "a#2")[0].site == Site("a", call=2)
    assert resolve(model, "a:input")[0].site == Site("a:input")


# -- wrong selectors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("Fc", "no layer 'Fc' in the model. Closest: 'fc'."),
        ("layer3", "no layer 'layer3' in the model. Closest: 'layer2', 'layer1', 'layer2.0'."),
        ("layer1.2", "no layer 'layer1.2' in the model. Closest: 'layer1.1', 'layer1.0', 'layer2'."),
        ("xyz", f"no layer 'xyz' in the model. {SOME_NAMES}"),
        (
            "relu",
            "no layer 'relu' in the model. '**.relu' would choose 3: "
            "'layer1.0.relu', 'layer1.1.relu', 'layer2.0.relu', …",
        ),
        ("layer1[0].relu", "'layer1[0].relu' matches nothing. Did you mean 'layer1.0.relu'?"),
        (
            "conv2.weight",
            "no layer 'conv2.weight' in the model. Closest: 'conv1.weight', 'fc.weight', 'layer2.0.conv1.weight'.",
        ),
        ("*.xyz", f"'*.xyz' matches nothing. {SOME_NAMES}"),
        ("layer3*", "'layer3*' matches nothing. Closest: 'layer2', 'layer1', 'layer2.0'."),
        (
            "relu*",
            "'relu*' matches nothing. '*' stands for one level; '**.relu*' would choose 3: "
            "'layer1.0.relu', 'layer1.1.relu', 'layer2.0.relu'.",
        ),
        (re.compile("nope"), f"regular expression 'nope' matches no module. {SOME_NAMES}"),
        (nn.Conv1d, "no module of the model is a Conv1d. Closest: 'Conv2d'."),
        (int, "int is a type, but not a torch.nn.Module type."),
        (Site("nope"), f"no layer 'nope' in the model. {SOME_NAMES}"),
        ([], "an empty list selects nothing. Name at least one site, or '**' for every module."),
        ([[]], "an empty list selects nothing. Name at least one site, or '**' for every module."),
        (["fc", "Fc"], "no layer 'Fc' in the model. Closest: 'fc'."),
        (
            nn.Linear(1, 1),
            "this Linear is not part of the model: a copy, a wrapper or another model's layer. "
            "Pass the model's own module, or its name.",
        ),
        (
            3,
            "3 (int) is not a selector. Use an address or glob, a compiled regular expression, a module type, "
            "a module of the model, a predicate (name, module) -> bool, or a list of these.",
        ),
        (
            "heads",
            "'heads' is a ModuleList: a container that is never called, so nothing passes there. "
            "Select its members: 'heads.*'.",
        ),
        (
            "heads:input",
            "'heads' is a ModuleList: a container that is never called, so nothing passes there. "
            "Select its members: 'heads.*'.",
        ),
        ("hea*", "'hea*' matches only containers that are never called: 'heads'."),
        (nn.ModuleList, "ModuleList matches only containers that are never called: 'heads'."),
    ],
    ids=str,
)
def test_a_wrong_selector_says_what_was_meant(selector: Any, message: str) -> None:
    assert complaint(selector) == message


def test_a_predicate_that_accepts_nothing_is_named() -> None:
    def is_pooling(name: str, module: nn.Module) -> bool:
        return False

    assert complaint(is_pooling).startswith("predicate is_pooling matches no module.")


def test_a_wrong_name_is_a_value_error_and_an_attribute_error() -> None:
    for kind in (ValueError, AttributeError):
        with pytest.raises(kind, match="no layer 'nope'"):
            resolve(NET, "nope")


def test_a_wrong_exclude_is_an_error_too_and_so_is_one_that_leaves_nothing() -> None:
    assert complaint("**", exclude="nope") == f"no layer 'nope' in the model. {SOME_NAMES}"
    assert complaint("fc", exclude="**") == ("exclude= leaves no site: everything that was selected is excluded too.")


def test_a_wrong_port_lists_the_ports() -> None:
    assert complaint("fc", port="out") == (
        "port='out' is not a port; ports are 'output', 'input', 'grad', 'grad_input', 'grad_total'."
    )


def test_what_is_not_a_module_is_refused_by_type() -> None:
    with pytest.raises(TypeError, match=r"^the model comes first: expected a torch\.nn\.Module, found function$"):
        resolve(lambda x: x, "fc")  # type: ignore[arg-type]


def test_an_error_inside_a_predicate_passes_through_unchanged() -> None:
    error = ZeroDivisionError("mine")

    def predicate(name: str, module: nn.Module) -> bool:
        raise error

    with pytest.raises(ZeroDivisionError) as caught:
        resolve(NET, predicate)
    assert caught.value is error


# -- containers, parameters, shared modules, wrappers ----------------------------------------------


def test_containers_are_passed_over_by_patterns() -> None:
    assert "heads" not in chosen("*")
    assert chosen("heads.**") == ["heads.0", "heads.1"]


def test_a_container_with_a_forward_of_its_own_can_be_chosen() -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: Any) -> Any:
            return x

    model = nn.Module()
    model.chain, model.plain = Chain(), nn.ModuleList()
    assert is_callable(model.chain)
    assert not is_callable(model.plain)
    assert chosen("*", model) == ["chain"]


@pytest.mark.parametrize(
    ("selector", "sites"),
    [
        ("conv1.weight", ["conv1.weight"]),
        ("layer1.0.conv1.bias:grad", ["layer1.0.conv1.bias:grad"]),
        ("scale", ["scale"]),
        ("extra.0", ["extra.0"]),
        ("*.weight", ["conv1.weight", "fc.weight"]),
        ("heads.0.*", ["heads.0.weight", "heads.0.bias"]),
    ],
)
def test_parameters_and_buffers_have_addresses(selector: str, sites: list[str]) -> None:
    assert chosen(selector) == sites
    named = {**dict(NET.named_parameters()), **dict(NET.named_buffers())}
    for target in resolve(NET, selector):
        assert live_tensor(target) is named[target.site.path]


def test_a_tensor_target_follows_the_parameter_that_the_module_holds_now() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    (target,) = resolve(model, "0.weight")
    model[0].weight = nn.Parameter(torch.ones(1, 1))
    assert live_tensor(target) is model[0].weight


def test_a_glob_that_finds_modules_does_not_mean_parameters_too() -> None:
    assert chosen("layer1.0.*") == ["layer1.0.conv1", "layer1.0.relu"]


def test_a_shared_module_is_chosen_once_under_the_first_name_asked_for() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(1, 1))
    model.append(model[0])
    assert chosen("*", model) == ["0", "1"]
    assert chosen(["2", "*"], model) == ["2", "1"]
    assert chosen(model[0], model) == ["0"]
    assert chosen(["0", "2:input"], model) == ["0", "2:input"]
    assert Index(model).names(model[0]) == ["0", "2"]
    assert Index(model).names(nn.ReLU()) == []


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def checkpointed(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    return checkpoint_wrapper(model)


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, checkpointed])
def test_wrapped_models_are_selected_by_the_original_names(wrap: Any) -> None:
    model = Net()
    expected = resolve(model, ["**", "conv1.weight"])
    model.layer1 = wrap(model.layer1)
    model.fc = wrap(model.fc)
    assert resolve(wrap(model), ["**", "conv1.weight"]) == expected
    assert resolve(wrap(model), [model.conv1, "fc"])[0] == Target(Site("conv1"), model.conv1)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "_checkpoint_wrapped_module."])
def test_a_name_copied_with_its_wrapper_prefix_is_told_the_original(prefix: str) -> None:
    assert complaint(f"{prefix}fc").endswith("Closest: 'fc'.")
    assert complaint(f"{prefix}layer1.0.conv1", nn.DataParallel(Net())).startswith(
        f"no layer '{prefix}layer1.0.conv1' in the model. Closest: 'layer1.0.conv1'"
    )


def test_a_users_own_attribute_called_module_keeps_its_name() -> None:
    model = nn.Module()
    model.module = nn.Sequential(nn.ReLU())
    assert chosen("**", model) == ["module", "module.0"]
    assert chosen("module.0", nn.DataParallel(model)) == ["module.0"]


@pytest.mark.parametrize("calls", ["x", "1-2", "", "1:2:3", "1.5", " 1", "all"])
def test_calls_that_cannot_be_read_are_told_how_they_are_written(calls: str) -> None:
    how = f"{'#' + calls!r} names no call of {{}}: write '#1' for one, '#1:' for those from there on"
    for port in ("", ":input"):
        assert how.format("'fc'") in complaint(f"fc#{calls}{port}")
    assert how.format("'layer1.*'") in complaint(f"layer1.*#{calls}")
    assert how.format("'add_'") in complaint(f"layer1.0/add_#{calls}")
    assert how.format("'fc.weight'") in complaint(f"fc.weight#{calls}")
    assert complaint(f"fcc#{calls}").startswith(f"no layer 'fcc#{calls}' in the model. ")

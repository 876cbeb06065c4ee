"""What selectors chose is found again without a search, and never when the model has changed meanwhile."""

from __future__ import annotations

import abc
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.models import scripted
from torchhook._core import choices, generators
from torchhook._core.index import Index
from torchhook._core.select import resolve


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.act = nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU()
        self.spare: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.act(self.mlp(self.norm(x)))
        return x if self.spare is None else self.spare(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    choices._of_models.clear()
    yield
    choices._of_models.clear()


def chosen(net: nn.Module, selectors: Any, exclude: Any = None, port: str = "output") -> list[tuple[str, int]]:
    return [(str(t.site), id(t.module)) for t in resolve(Index(net), selectors, exclude=exclude, port=port)]


def by_search(net: nn.Module, selectors: Any, exclude: Any = None, port: str = "output") -> list[tuple[str, int]]:
    known = dict(choices._of_models)
    choices._of_models.clear()
    try:
        return chosen(net, selectors, exclude, port)
    finally:
        choices._of_models.clear()
        choices._of_models.update(known)


def was_recalled(net: nn.Module, selectors: Any, exclude: Any = None) -> bool:
    index = Index(net)
    resolve(index, selectors, exclude=exclude)
    return bool(index.recalled)


SELECTORS: list[tuple[Any, Any]] = [
    ("head", None),
    (["h.0.mlp", "h.2", "head"], None),
    ("**", None),
    ("**", "**.norm"),
    ("h.*", None),
    ("h.*.mlp", None),
    ("**.act", ["h.1.act"]),
    (("h.*.norm", nn.Linear), None),
    (re.compile(r"mlp$"), None),
    (nn.LayerNorm, re.compile("h.0")),
    ("h.*.mlp/linear", None),
    ("h.0:input", None),
    ("h.1.act#0", None),
]


@pytest.mark.parametrize(("selectors", "exclude"), SELECTORS)
def test_the_same_is_chosen_again_without_a_search(selectors: Any, exclude: Any) -> None:
    net = Net()
    first = chosen(net, selectors, exclude)
    assert was_recalled(net, selectors, exclude)
    assert chosen(net, selectors, exclude) == first == by_search(net, selectors, exclude)


def renamed(net: Net) -> None:
    net.h[1]._modules["fc"] = net.h[1]._modules.pop("mlp")


def exchanged(net: Net) -> None:
    net.h[0], net.h[1] = net.h[1], net.h[0]


def callable_list(net: Net) -> None:
    net.h.forward = lambda x: x  # type: ignore[method-assign]


class Other(nn.Linear):
    pass


def other_kind(net: Net) -> None:
    net.head.__class__ = Other


def wrapped_inside(net: Net) -> None:
    """What a wrapper holds becomes another, and the wrapper stays."""
    for held in [net, net.h, *net.h]:
        for child in held.children():
            if type(child) is nn.DataParallel:
                child.module = nn.Sequential(child.module)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "replaced": lambda net: setattr(net.h[0], "mlp", nn.Linear(4, 4)),
    "replaced by another type": lambda net: setattr(net.h[0], "act", nn.GELU()),
    "a block replaced": lambda net: net.h.__setitem__(0, Block()),
    "the head replaced": lambda net: setattr(net, "head", nn.Sequential(nn.Linear(4, 2))),
    "added at the end": lambda net: net.h.append(Block()),
    "added inside": lambda net: setattr(net.h[2], "spare", nn.ReLU()),
    "added below a layer": lambda net: net.head.add_module("act", nn.ReLU()),
    "taken away": lambda net: net.h.pop(1),
    "taken away inside": lambda net: delattr(net.h[0], "norm"),
    "nothing in its place": lambda net: setattr(net.h[0], "norm", None),
    "exchanged": exchanged,
    "renamed": renamed,
    "another class": other_kind,
    "wrapped": lambda net: setattr(net.h[0], "mlp", torch.compile(net.h[0].mlp)),
    "a list that can be called": callable_list,
    "a parameter of that name": lambda net: net.h[0].norm.register_parameter("mlp", nn.Parameter(torch.ones(1))),
    "a parameter of a block": lambda net: net.h[0].mlp.register_parameter("act", nn.Parameter(torch.ones(1))),
    "a buffer of that name": lambda net: net.h[0].mlp.register_buffer("norm", torch.ones(1)),
}


def with_wrappers(net: Net) -> Net:
    net.h[0].mlp = nn.DataParallel(net.h[0].mlp)
    net.h[2] = nn.DataParallel(net.h[2])
    net.head = nn.DataParallel(net.head)
    return net


@pytest.mark.parametrize(("selectors", "exclude"), SELECTORS)
def test_what_a_wrapper_holds_may_become_another(selectors: Any, exclude: Any) -> None:
    net = with_wrappers(Net())
    chosen(net, selectors, exclude)
    assert was_recalled(net, selectors, exclude)
    wrapped_inside(net)
    assert outcome(chosen, net, selectors, exclude) == outcome(by_search, net, selectors, exclude)


def outcome(choose: Callable[..., Any], *args: Any) -> Any:
    try:
        return choose(*args)
    except th.errors.SelectorError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # when the compiler is first imported
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize(("selectors", "exclude"), SELECTORS)
def test_what_is_chosen_of_a_changed_model_is_what_a_search_finds(
    selectors: Any, exclude: Any, change: Callable[[Net], Any]
) -> None:
    net = Net()
    chosen(net, selectors, exclude)
    change(net)
    assert outcome(chosen, net, selectors, exclude) == outcome(by_search, net, selectors, exclude)
    # And once more, by what that left behind.
    assert outcome(chosen, net, selectors, exclude) == outcome(by_search, net, selectors, exclude)


@pytest.mark.filterwarnings("ignore:replaced:torchhook.errors.NeverRanWarning")
@pytest.mark.parametrize("change", [name for name in CHANGES if "replaced" in name or name == "exchanged"])
def test_a_session_says_what_was_replaced_whether_it_was_looked_for_or_not(change: str) -> None:
    found = []
    for is_known in (False, True):
        net = Net()
        if is_known:
            chosen(net, ("**",))
        with th.capture(net, "**") as rec:
            net(torch.ones(1, 4))
            CHANGES[change](net)
        found.append((rec.replaced, rec.missing))
    assert found[0] == found[1]
    assert found[0][0]


def test_nothing_of_a_model_is_held() -> None:
    class Child(nn.Linear):
        def __init__(self, parent: list[nn.Module]) -> None:
            super().__init__(4, 4)
            self.parent = parent  # so that a child would be enough to hold all of it

    net = Net()
    net.head = Child([])
    for selectors, exclude in SELECTORS:
        chosen(net, selectors, exclude)
    gone = [weakref.ref(module) for module in net.modules()]
    gc.disable()
    try:
        del net
        assert [ref() for ref in gone] == [None] * len(gone)
        assert choices._of_models == {}
    finally:
        gc.enable()


def test_a_model_whose_layers_know_it_can_go() -> None:
    net = Net()
    net.head.parent = [net]  # type: ignore[assignment]
    chosen(net, "**")
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    assert choices._of_models == {}


def test_another_model_in_the_place_of_an_old_one_is_not_taken_for_it() -> None:
    old, new = Net(), Net()
    chosen(old, "head")
    choices._of_models[id(new)] = choices._of_models[id(old)]
    assert not was_recalled(new, "head")


@pytest.mark.parametrize(
    "selectors", [lambda name, module: True, "@resid_post.*", [nn.Linear, lambda name, module: True], {"head"}]
)
def test_what_a_function_or_a_proof_chooses_is_not_remembered(selectors: Any) -> None:
    assert choices.key_of(selectors, None, "output") is None
    assert choices.key_of("head", selectors, "output") is None


def test_modules_and_parameters_are_not_remembered() -> None:
    net = Net()
    for selectors in (net.head, ["head", net.h[0]], "head.weight", "**.weight"):
        resolve(Index(net), selectors, port="output")
        assert not was_recalled(net, selectors)


def test_few_choices_are_remembered_of_one_model_and_the_newest_are() -> None:
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(40)])
    for number in range(40):
        chosen(net, str(number))
    assert was_recalled(net, "39")
    assert not was_recalled(net, "0")
    assert len(choices._of_models[id(net)][1]) <= choices._MOST


def test_a_port_is_part_of_what_was_asked_for() -> None:
    net = Net()
    assert chosen(net, "head")[0][0] == "head"
    assert chosen(net, "head", port="grad")[0][0] == "head:grad"
    assert chosen(net, "head")[0][0] == "head"


class Writer(Net):
    def generate(self, x: Tensor) -> Tensor:
        return self(x)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


@pytest.mark.parametrize("selectors", ["model.h.*", "model.head", "**"])
def test_the_modules_that_generate_are_recalled_with_what_was_chosen(selectors: str) -> None:
    net = Wrapper(Writer())
    expected = [net.model]
    for _ in range(2):
        index = Index(net)
        resolve(index, selectors)
        assert generators.generators(index) == expected
    net.model = Writer()
    index = Index(net)
    resolve(index, selectors)
    assert generators.generators(index) == [net.model]


def test_a_model_that_comes_to_generate_is_found_although_what_was_chosen_is_elsewhere() -> None:
    net = nn.Sequential(Net(), nn.Linear(2, 2))
    resolve(Index(net), "1")
    net[0] = Writer()
    index = Index(net)
    resolve(index, "1")
    assert generators.generators(index) == [net[0]]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_searched_each_time() -> None:
    net = scripted(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    first = [str(target.site) for target in resolve(Index(net), "*")]
    assert [str(target.site) for target in resolve(Index(net), "*")] == first == ["0", "1"]
    assert not was_recalled(net, "*")


def test_a_class_that_knows_its_model_does_not_keep_it() -> None:
    def made() -> nn.Module:
        model = Net()

        class Probe(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * len(list(model.parameters()))

        model.head = Probe(4, 2)
        for selectors in ("**", "head", Probe, ["h.*", Probe]):
            chosen(model, selectors)
            generators.generators(Index(model))
        return model

    gone = weakref.ref(made())
    gc.collect()
    assert gone() is None


def test_a_wrapper_with_layers_of_its_own_has_choices_of_its_own() -> None:
    class Wrapping(nn.DataParallel):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.extra = nn.Linear(2, 2)

    net = Net()
    plain = chosen(net, "**")
    wrapped = chosen(Wrapping(net), "**")
    assert [site for site, _ in wrapped if site not in dict(plain)] == ["extra"]
    assert chosen(net, "**") == plain


def test_a_model_may_become_of_another_class() -> None:
    net = Net()
    index = Index(net)
    resolve(index, "head")
    assert generators.generators(index) == []
    net.__class__ = Writer
    index = Index(net)
    resolve(index, "head")
    assert generators.generators(index) == [net]
    chosen(net, Writer)
    net.__class__ = Net
    with pytest.raises(th.errors.SelectorError, match="no module of the model is a Writer"):
        chosen(net, Writer)


def test_what_generates_does_not_depend_on_what_was_asked_for_before() -> None:
    class Holder(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.head = inner, nn.Linear(2, 2)

    net = Holder(Holder(Holder(Holder(Writer()))))
    for _ in range(2):
        index = Index(net)
        resolve(index, "inner.inner.inner.inner.head")
        resolve(index, "head")
    index = Index(net)
    resolve(index, "head")
    found = generators.generators(index)
    choices._of_models.clear()
    index = Index(net)
    resolve(index, "head")
    assert found == generators.generators(index) == []


def test_a_model_that_came_to_hold_few_is_looked_at_for_what_generates() -> None:
    net = nn.Sequential(Writer(), *[nn.Linear(2, 2) for _ in range(8)])
    index = Index(net)
    resolve(index, "1")
    assert generators.generators(index) == []
    del net[8]
    index = Index(net)
    resolve(index, "1")
    assert generators.generators(index) == [net[0]]


def test_a_list_that_is_called_no_more_is_no_site() -> None:
    net = Net()
    net.h.forward = lambda x: x  # type: ignore[method-assign]
    for selector in ("h", "*", "**"):
        assert ("h", id(net.h)) in chosen(net, selector)
    del net.h.forward
    for selector in ("h", "*", "**"):
        assert outcome(chosen, net, selector) == outcome(by_search, net, selector)


@pytest.mark.parametrize("exclude", ["head.weight", "head.*", ["h.0", "head.bias"]])
def test_what_is_left_out_of_parameters_is_looked_for_each_time(exclude: Any) -> None:
    net = Net()
    chosen(net, "**", exclude)
    assert not was_recalled(net, "**", exclude)
    del net.head.weight, net.head.bias
    assert outcome(chosen, net, "**", exclude) == outcome(by_search, net, "**", exclude)
    assert "no " in outcome(chosen, net, "**", exclude) or "nothing" in outcome(chosen, net, "**", exclude)


def test_kinds_that_say_by_themselves_what_is_of_them_are_asked_each_time() -> None:
    class Kind(abc.ABCMeta):
        pass

    class Abstract(nn.Module, metaclass=Kind):
        pass

    assert choices.key_of(Abstract, None, "output") is None
    assert choices.key_of(nn.Linear, None, "output") is not None

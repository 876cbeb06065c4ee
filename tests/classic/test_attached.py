"""Hooks that stay: what they see and change is what a session sees and changes, eagerly, compiled and exported."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchhook as th
from tests.classic.toys import TORCH
from torchhook import edits, transforms
from torchhook.errors import AmbiguousCallError, EditError, NeverRanError, SelectorError, SessionError

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own making


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x[:, :2] + 1, {"rest": x[:, 2:] * 2}


class Block(nn.Module):
    """In-place layers and operators, a function, a keyword argument, a nested value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.halves = Halves()

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        y = self.act(self.fc(x))
        y += x
        y = F.gelu(y) - 1
        one, two = self.halves(y)
        return torch.cat([one, two["rest"]], 1) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x, scale=torch.full((1,), 2.0)))


@pytest.fixture
def model() -> Model:
    return Model().eval()


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))


def compiled(wrapper: nn.Module, x: Tensor) -> Any:
    if TORCH < (2, 7) and any(name in str(vars(wrapper)) for name in ("block:input", "compose(")):
        pytest.skip("this version's compiler follows no named tuples and context managers")
    torch._dynamo.reset()
    return torch.compile(wrapper, backend="eager", fullgraph=True)(x)


def exported(wrapper: nn.Module, x: Tensor) -> Any:
    return torch.export.export(wrapper, (x,), strict=False).module()(x)


WAYS: list[Callable[[nn.Module, Tensor], Any]] = [lambda wrapper, x: wrapper(x), compiled, exported]
ways = pytest.mark.parametrize("way", WAYS, ids=["eager", "compiled", "exported"])
# A second for each that is compiled.
patient_ways = pytest.mark.parametrize(
    "way",
    [WAYS[0], pytest.param(compiled, marks=pytest.mark.slow), exported],
    ids=["eager", "compiled", "exported"],
)


class Bare:
    """Everything that passes, by hooks and a mode written by hand, and changed where a function is given."""

    def __init__(self, model: Model, change: Callable[[str, Any], Any] = lambda where, value: value) -> None:
        self.seen: dict[str, Any] = {}
        block, seen = model.block, self.seen

        def note(where: str, value: Any) -> Any:
            value = change(where, value)
            seen[where] = torch.utils._pytree.tree_map(torch.clone, value)
            return value

        class Mode(torch.overrides.TorchFunctionMode):
            inside = False

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                name = func.__name__
                if name == "gelu" and len(args) == 1:
                    args = (note("block/gelu:input", args[0]),)
                out = func(*args, **(kwargs or {}))
                return note(f"block/{name}", out) if name in ("gelu", "add_", "sub") else out

        hooks = [
            block.fc.register_forward_hook(lambda m, a, out: note("block.fc", out)),
            block.act.register_forward_pre_hook(lambda m, a: (note("block.act:input", a[0]),)),
            block.halves.register_forward_hook(lambda m, a, out: note("block.halves", out)),
            block.register_forward_pre_hook(
                lambda m, a, k: note("block:input", {"args": a, "kwargs": k}) and None, with_kwargs=True
            ),
        ]
        with Mode():
            self.output = model(X)
        for hook in hooks:
            hook.remove()


def same(one: Any, other: Any) -> bool:
    a, b = (torch.utils._pytree.tree_leaves(v if not hasattr(v, "kwargs") else tuple(v)) for v in (one, other))
    return len(a) == len(b) and all(torch.allclose(p, q) for p, q in zip(a, b, strict=True))


SITES = ["block.fc", "block.act:input", "block.halves", "block:input", "block/gelu", "block/gelu:input", "block/add_"]


@pytest.mark.shows("Compiled: outputs, inputs and operations with attach=True, also exported")
@ways
@pytest.mark.parametrize("site", [*SITES, "block/sub"])
def test_an_attached_site_is_what_bare_hooks_see(model: Model, site: str, way: Any) -> None:
    bare = Bare(model)
    features, output = way(th.FeatureLayers(model, [site], attach=True), X)
    assert same(features[site], bare.seen[site])
    assert torch.allclose(output, bare.output)


EDITS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "scale": (edits.scale(2), lambda t: t * 2),
    "add a number": (edits.add(0.5), lambda t: t + 0.5),
    "add a vector": (edits.add(torch.arange(4.0)), lambda t: t + torch.arange(4.0)),
    "zero": (edits.zero(), torch.zeros_like),
    "mean": (edits.mean(), lambda t: t.mean(0, keepdim=True).expand_as(t).clone()),
    "clamp": (edits.clamp(-0.1, 0.1), lambda t: t.clamp(-0.1, 0.1)),
    "replace": (edits.replace(torch.ones(4)), torch.ones_like),
    "several": ([edits.scale(2), edits.add(1.0)], lambda t: t * 2 + 1),
    "function": (lambda value: value.sin(), torch.sin),
    "function of value and site": (lambda value, site: value.cos() if site.path == "block.fc" else value, torch.cos),
}


@pytest.mark.shows("Compiled: edits with attach=True, also exported")
@patient_ways
@pytest.mark.parametrize("name", EDITS)
def test_an_attached_edit_changes_what_the_model_computes(model: Model, name: str, way: Any) -> None:
    edit, change = EDITS[name]
    bare = Bare(model, lambda where, value: change(value) if where == "block.fc" else value)
    hooked = th.FeatureLayers(model, ["block.fc", "block.halves"], attach=True, edit={"block.fc": edit})
    features, output = way(hooked, X)
    assert same(features["block.fc"], bare.seen["block.fc"])
    assert same(features["block.halves"], bare.seen["block.halves"])
    assert torch.allclose(output, bare.output)
    assert not torch.allclose(output, model(X))  # calls of the model alone are not changed


@ways
@pytest.mark.parametrize("site", ["block.act:input", "block/gelu", "block/gelu:input", "block/add_", "block/sub"])
def test_inputs_and_operations_are_edited_too(model: Model, site: str, way: Any) -> None:
    bare = Bare(model, lambda where, value: value * 3 if where == site else value)
    plain = Bare(model).output
    features, output = way(th.FeatureLayers(model, [site], attach=True, edit={site: edits.scale(3)}), X)
    assert torch.allclose(output, bare.output)
    assert same(features[site], bare.seen[site])
    assert not torch.allclose(output, plain)


def test_strict_export_hears_no_operators_and_says_so(model: Model) -> None:
    hooked = th.FeatureLayers(model, [], attach=True, edit={"block/sub": edits.scale(3)})
    with pytest.raises(Exception, match="'block/sub' was selected and never ran"):
        torch.export.export(hooked, (X,), strict=True)


@pytest.mark.shows("Compiled: transforms with attach=True, also exported")
@patient_ways
@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (transforms.pool("mean", dims=(0,)), lambda t: t.mean(0)),
        (transforms.cast(torch.float64), Tensor.double),
        (transforms.topk(2), lambda t: dict(zip(("values", "indices"), t.topk(2), strict=True))),
        (transforms.compose(transforms.narrow(0, 2), lambda t: t + 1), lambda t: t[:, :2] + 1),
    ],
)
def test_a_transform_changes_what_is_returned(model: Model, transform: Any, expected: Any, way: Any) -> None:
    wanted = expected(Bare(model).seen["block.fc"])
    features, output = way(th.FeatureLayers(model, ["block.fc"], attach=True, transform=transform), X)
    assert same(features["block.fc"], wanted)
    assert torch.allclose(output, model(X))


@pytest.mark.parametrize("attach", [False, True])
def test_both_ways_of_hooking_take_the_same_arguments(model: Model, attach: bool) -> None:
    made = th.FeatureExtractor(
        model, ["block.fc"], attach=attach, transform=transforms.cast(torch.float64), edit={"block.fc": edits.scale(2)}
    )
    assert same(made(X)["block.fc"], 2 * Bare(model).seen["block.fc"].double())
    with pytest.raises(EditError, match="the edit changes the shape"):
        th.FeatureLayers(model, [], attach=attach, edit={"block.fc": lambda value: value[:1]})(X)
    with pytest.raises(EditError, match="is not an edit"):
        th.FeatureLayers(model, [], attach=attach, edit={"block.fc": 3})
    with pytest.raises(TypeError, match="edit must be a dict of selectors and edits, found list"):
        th.FeatureLayers(model, [], attach=attach, edit=[edits.zero()])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="transform must be callable, found int"):
        th.FeatureLayers(model, [], attach=attach, transform=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("attach", [False, True])
def test_a_transform_may_be_given_for_each_layer_by_selectors(model: Model, attach: bool) -> None:
    bare = Bare(model).seen
    double = transforms.cast(torch.float64)
    made = th.FeatureExtractor(model, ["block.fc", "block.halves"], attach=attach, transform={nn.Linear: double})
    found = made(X)
    assert same(found["block.fc"], bare["block.fc"].double())
    assert same(found["block.halves"], bare["block.halves"])
    with pytest.raises(SelectorError, match=r"transform\['block.fx'\]: no such site is kept. Closest: 'block.fc'"):
        th.FeatureLayers(model, ["block.fc"], attach=attach, transform={"block.fx": double})


def test_attached_hooks_have_one_transform_for_all_calls_of_a_layer(model: Model) -> None:
    with pytest.raises(SelectorError, match=r"'block.fc#1': with attach=True all calls of a site have one transform"):
        th.FeatureLayers(model, ["block.fc#0", "block.fc#1"], attach=True, transform={"block.fc#1": torch.abs})


@pytest.mark.parametrize("site", ["block/relu", "block.fc/dropout"])
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.filterwarnings("ignore::torchhook.errors.NeverRanWarning")
def test_an_edit_whose_site_never_ran_is_an_error(model: Model, site: str, attach: bool) -> None:
    with pytest.raises(NeverRanError, match=f"'{site}' was selected and never ran"):
        th.FeatureLayers(model, ["block.fc"], attach=attach, edit={site: edits.zero()})(X)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x).relu())


@ways
def test_single_calls_are_chosen_by_their_number(way: Any) -> None:
    model = Twice()
    first = model.fc(X)
    hooked = th.FeatureLayers(model, ["fc#0", "fc#1"], attach=True)
    features, _ = way(hooked, X)
    assert same([features["fc#0"], features["fc#1"]], [first, model.fc(first.relu())])


def test_calls_that_do_not_fit_are_errors() -> None:
    model = Twice()
    with pytest.raises(AmbiguousCallError, match="'fc' ran 2 times"):
        th.FeatureLayers(model, ["fc"], attach=True)(X)
    with pytest.raises(NeverRanError, match="'fc#2' was selected and never ran: it ran 2 times"):
        th.FeatureLayers(model, ["fc#2"], attach=True)(X)
    with pytest.raises(SelectorError, match="with attach=True every call is edited"):
        th.FeatureLayers(model, [], attach=True, edit={"fc#1": edits.zero()})


def test_what_hooks_do_themselves_is_no_operation_of_the_model(model: Model) -> None:
    """The clone of a feature and the product of an edit happen while the block runs."""
    hooked = th.FeatureLayers(model, ["block/clone"], attach=True, edit={"block.fc": edits.scale(2)})
    with pytest.raises(NeverRanError, match="'block/clone'"):
        hooked(X)


def test_features_of_an_attached_wrapper_stay_on_the_graph_when_compiled(model: Model) -> None:
    torch._dynamo.reset()
    made = torch.compile(th.FeatureExtractor(model, ["block.fc"], attach=True), backend="aot_eager", fullgraph=True)
    made(X)["block.fc"].sum().backward()
    assert model.block.fc.bias.grad is not None
    assert model.block.fc.bias.grad.tolist() == [2.0] * 4


def test_a_wrapper_is_compiled_in_place_and_its_copy_is_not(model: Model) -> None:
    torch._dynamo.reset()
    hooked = th.FeatureLayers(model, ["block.fc"], attach=True)
    hooked.compile(backend="eager", fullgraph=True)
    for wrapper in (hooked, copy.deepcopy(hooked), pickle.loads(pickle.dumps(hooked))):
        features, output = wrapper(X)
        assert same(features["block.fc"], Bare(model).seen["block.fc"])
        assert torch.allclose(output, model(X))


# -- activation checkpointing ---------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, nested: bool) -> None:
        super().__init__()
        self.first, self.fc, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant, self.nested, self.on = reentrant, nested, True

    def again(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant) if self.on else function(x)

    def segment(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc(x).sin()).square()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        inner = (lambda x: self.again(self.segment, x).cos()) if self.nested else self.segment
        return self.last(self.again(inner, x))


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model.zero_grad()
    call(X).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpointed_layer_is_edited_when_it_is_recomputed(reentrant: bool, nested: bool) -> None:
    model = Checkpointed(reentrant, nested)
    hooked = th.FeatureLayers(model, [], attach=True, edit={"fc": edits.scale(3)})
    plain = gradients(model, model)
    found = gradients(model, lambda x: hooked(x)[1])
    again = gradients(model, model)
    model.on = False
    handle = model.fc.register_forward_hook(lambda module, args, output: output * 3)
    expected = gradients(model, model)
    handle.remove()
    assert same(found, expected)
    assert same(again, plain)  # recomputations of the model's own calls are not edited
    assert not same(found, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_edits_that_could_not_be_repeated_are_refused(reentrant: bool) -> None:
    model = Checkpointed(reentrant, nested=False)
    with pytest.raises(SessionError, match="'fc' is edited in a checkpointed part of the model"):
        th.FeatureLayers(model, [], edit={"fc": edits.scale(3)})(X)
    with pytest.raises(SessionError, match=r"gelu' is edited in a checkpointed part of the model"):
        th.FeatureLayers(model, [], attach=True, edit={"(model)/gelu": edits.scale(3)})(X)
    with torch.no_grad():
        th.FeatureLayers(model, [], edit={"fc": edits.scale(3)})(X)
        th.FeatureLayers(model, [], attach=True, edit={"(model)/gelu": edits.scale(3)})(X)

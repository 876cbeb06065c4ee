"""Checkpoints count what a segment computes and saves: what a session does itself is no part of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torchhook as th
from torchhook import edits

aten = torch.ops.aten
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
P = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
SAVED: dict[str, Callable[[Any], bool]] = {
    "products": lambda op: op in (aten.mm.default, aten.addmm.default),
    "clones": lambda op: op is aten.clone.default,
    "means": lambda op: op in (aten.mean.dim, aten.sum.default, aten.pow.Tensor_Scalar, aten.aminmax.default),
    "views": lambda op: op in (aten.view.default, aten.alias.default, aten.t.default, aten.detach.default),
    "all": lambda op: True,
    "none": lambda op: False,
}
policies = pytest.mark.parametrize("saved", SAVED)


class Block(nn.Module):
    """Has operations of every kind that a session might use too, behind those that it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).sin().view(4, 8)
        h = self.b(h).clone().sin()
        low, high = torch.aminmax(h.detach())
        h = self.relu(h + h.sum() + h.pow(2) + low * high)
        m = h.mean(-1, keepdim=True)
        h = self.c(h * h - m).view(2, 2, 8).sin().view(4, 8)
        return h * (h @ self.a.weight).clone().sin() + h.double().float().mean(-1, keepdim=True)


class Net(nn.Module):
    def __init__(self, saved: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.saved = nn.ModuleList([Block(), Block()]), saved

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.saved is None:
                x = block(x)
                continue
            is_saved = SAVED[self.saved]

            def policy(context: Any, op: Any, *args: Any, is_saved: Any = is_saved, **kwargs: Any) -> CheckpointPolicy:
                return CheckpointPolicy.MUST_SAVE if is_saved(op) else CheckpointPolicy.PREFER_RECOMPUTE

            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


def gradients(net: nn.Module, also: Callable[[], Any] = lambda: 0) -> list[Tensor]:
    x = X.clone().requires_grad_()
    (net(x).pow(2).sum() + also()).backward()
    return [x.grad, *(parameter.grad for parameter in net.parameters())]


def bare(net: nn.Module, sites: list[str], keep: Callable[[Tensor], Tensor]) -> tuple[dict[str, Tensor], list[Any]]:
    """What bare hooks see, and put there themselves."""
    seen: dict[str, Tensor] = {}

    def put(site: str, value: Tensor) -> None:
        seen.setdefault(site, keep(value))

    handles: list[Any] = []
    for site in sites:
        path, _, port = site.partition(":")
        module = net.get_submodule(path)
        if port:
            handles.append(module.register_forward_pre_hook(lambda m, args, site=site: put(site, args[0])))
        else:
            handles.append(module.register_forward_hook(lambda m, args, out, site=site: put(site, out)))
    return seen, handles


@pytest.fixture(scope="module")
def right() -> list[Tensor]:
    return gradients(Net(None))


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


SITES = ["blocks.0.a", "blocks.0.a:input", "blocks.1.b", "blocks.1.c:input", "blocks.1.relu"]
KEPT: dict[str, dict[str, Any]] = {
    "copy": {},
    "clone": {"keep": "clone"},
    "reference": {"keep": "reference"},
    "double": {"dtype": torch.float64},
    "cpu": {"device": "cpu"},
    "projection": {"transform": lambda v: v @ P},
    "mean": {"transform": lambda v: v.mean(-1, keepdim=True)},
    "power": {"transform": lambda v: v.pow(2).clone()},
}


@policies
@pytest.mark.parametrize("how", KEPT)
def test_what_is_kept_leaves_the_gradients_of_the_model_alone(saved: str, how: str, right: list[Tensor]) -> None:
    options = KEPT[how]
    plain = Net(None)
    seen, _ = bare(plain, SITES, lambda value: options.get("transform", lambda v: v)(value.detach().clone()))
    plain(X)
    net = Net(saved)
    with th.capture(net, *SITES, **options) as rec:
        assert_same(gradients(net), right)
    for site in SITES if how != "reference" else ():  # which the model may overwrite
        torch.testing.assert_close(rec[site], seen[site], check_dtype=False)


@policies
@pytest.mark.parametrize(
    "transform", [None, lambda v: v @ P, lambda v: v.pow(2).tanh()], ids=["as is", "product", "tanh"]
)
def test_values_on_the_graph_have_their_gradients(saved: str, transform: Callable[[Tensor], Tensor] | None) -> None:
    sites, change = ["blocks.0.b", "blocks.1.a:input", "blocks.1.c"], transform or (lambda v: v)
    plain, net = Net(None), Net(saved)
    seen, _ = bare(plain, sites, lambda value: change(value.clone()))
    expected = gradients(plain, lambda: sum(value.sum() for value in seen.values()))
    with th.capture(net, *sites, keep="live", transform=transform) as rec:
        found = gradients(net, lambda: sum(rec[site].sum() for site in sites))
    assert_same(found, expected)


TOOLS: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "operations": lambda net: th.capture(net, "blocks.*/sin", "blocks.*/clone:input"),
    "gradients": lambda net: th.capture(net, "blocks.*.b:grad", "blocks.*.a:grad_input", "blocks.*.relu:grad_total"),
    "gradient of a passed value": lambda net: th.capture(net, "blocks.*:grad", "blocks.*:grad_input"),
    "operations' gradients": lambda net: th.capture(net, "blocks.*/sin:grad"),
    "before edits": lambda net: th.capture(net, "blocks.*.b", keep="clone", before_edits=True),
    "watch": lambda net: th.watch(net, every=1, log=None),
    "histograms": lambda net: th.watch(net, "**", every=1, log=None, statistics=["histogram"]),
    "guard": lambda net: th.guard(net),
    "thorough guard": lambda net: th.guard(net, thorough=True),
    "edit": lambda net: th.edit(net, {"blocks.*.b": lambda v: v * 1.0}),
    "edit of an input": lambda net: th.edit(net, {"blocks.*.c:input": lambda v: v.clone()}),
    "edit of an operation": lambda net: th.edit(net, {"blocks.*/sin": lambda v: v.clone()}),
    "noise": lambda net: th.edit(net, {"blocks.*.b": edits.noise(0.0)}),
    "clipping": lambda net: th.clip_gradients(net, norm=1e9),
}


@policies
@pytest.mark.parametrize("tool", TOOLS)
def test_tools_leave_the_gradients_of_the_model_alone(saved: str, tool: str, right: list[Tensor]) -> None:
    net = Net(saved)
    with TOOLS[tool](net):
        assert_same(gradients(net), right)


@policies
def test_an_edit_is_made_again_as_without_a_checkpoint(saved: str) -> None:
    plain, net = Net(None), Net(saved)
    for block in plain.blocks:
        block.b.register_forward_hook(lambda m, args, out: out.clone() * 2 + out.mean(-1, keepdim=True))
    with (
        th.edit(net, {"blocks.*.b": lambda v: v.clone() * 2 + v.mean(-1, keepdim=True)}),
        th.capture(net, "blocks.*.b", "blocks.*.b:input", keep="clone"),
    ):
        found = gradients(net)
    assert_same(found, gradients(plain))


@policies
@pytest.mark.parametrize("attach", [False, True], ids=["session", "attached"])
def test_features_leave_the_gradients_of_the_model_alone(saved: str, attach: bool) -> None:
    sites = ["blocks.0.a", "blocks.1.b", "blocks.1.c:input"]
    plain, net = Net(None), Net(saved)
    seen, _ = bare(plain, sites, lambda value: (value.clone() @ P).tanh())
    expected = gradients(plain, lambda: sum(value.sum() for value in seen.values()))
    hooked = th.FeatureLayers(net, sites, attach=attach, transform=lambda v: (v @ P).tanh())
    x = X.clone().requires_grad_()
    features, output = hooked(x)
    (output.pow(2).sum() + sum(feature.sum() for feature in features)).backward()
    assert_same([x.grad, *(parameter.grad for parameter in net.parameters())], expected)


def test_a_session_that_opens_between_the_passes_leaves_the_gradients_alone(right: list[Tensor]) -> None:
    net, x = Net("all"), X.clone().requires_grad_()
    output = net(x)
    with th.capture(net, "blocks.*.a", "blocks.*.b:input", keep="clone"):
        output.pow(2).sum().backward()
    assert_same([x.grad, *(parameter.grad for parameter in net.parameters())], right)


def test_a_mode_that_is_no_checkpoints_hears_all() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        heard = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.heard += func is aten.mm.default
            return func(*args, **(kwargs or {}))

    layer = nn.Linear(8, 8)
    with Counts() as counts, th.capture(layer, "", transform=lambda v: v @ P):
        layer(X)
    assert counts.heard == 1


def test_fake_tensors_stay_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        net = Net("all")
        with th.capture(net, "blocks.*.a", transform=lambda v: v @ v.mT) as rec:
            net(torch.ones(4, 8, requires_grad=True)).sum()
    assert all(isinstance(rec[site], FakeTensor) for site in rec)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="this version's compiler follows no such checkpoints")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")  # the compiler's own
@pytest.mark.parametrize("saved", ["clones", "all"])
def test_compiled_features_leave_the_gradients_of_the_model_alone(saved: str) -> None:
    net = Net(saved)
    compiled = torch.compile(th.FeatureLayers(net, ["blocks.0.a", "blocks.1.b"], attach=True), backend="aot_eager")
    x = X.clone().requires_grad_()
    _, output = compiled(x)
    output.pow(2).sum().backward()
    assert_same([x.grad, *(parameter.grad for parameter in net.parameters())], gradients(Net(None)))


class Spoils(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, -1.0).sqrt()


class Whole(nn.Module):
    """Checkpointed as a whole by its user; spoils a value in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.spoils = Block(), Spoils()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * self.spoils(x).nan_to_num(1.0).clone()


@pytest.mark.parametrize("saved", ["all", "means", "none"])
def test_a_run_that_the_guard_repeats_is_no_part_of_the_checkpoint(saved: str) -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if SAVED[saved](op) else CheckpointPolicy.PREFER_RECOMPUTE

    plain, model = Whole(), Whole()
    plain(X).sum().backward()
    with pytest.warns(th.errors.GuardWarning), th.guard(model, action="warn"):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        checkpoint(model, X, use_reentrant=False, context_fn=contexts).sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_hooks_in_the_style_of_tutorials_leave_the_gradients_alone(right: list[Tensor]) -> None:
    net, hook = Net("all"), th.Hook()
    handle = net.blocks[0].b.register_forward_hook(hook)
    x = X.clone().requires_grad_()
    output = net(x).pow(2).sum()
    handle.remove()
    output.backward()
    assert_same([x.grad, *(parameter.grad for parameter in net.parameters())], right)


# -- what autograd saves for a kept value ---------------------------------------------------------------------------


class Plain(nn.Module):
    """Checkpointed as a whole, or not at all; an in-place layer follows the first, where asked for."""

    def __init__(self, checkpointed: bool, inplace: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 8), nn.Tanh())
        self.head, self.checkpointed = nn.Linear(8, 8), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x))


SAVES = {"power": lambda v: v.pow(2), "exp": torch.exp, "product": lambda v: v @ P, "mean": lambda v: v.mean(0) ** 2}


@pytest.mark.parametrize("transform", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("how", ["capture", "session", "attached"])
@pytest.mark.parametrize("used", [True, False], ids=["with a loss on it", "with none"])
def test_a_transform_on_the_graph_may_save_what_it_needs(transform: Any, how: str, used: bool) -> None:
    sites = ["body.0", "body.2", "body.2:input"]
    plain, model = Plain(False), Plain(True)
    seen, _ = bare(plain, sites, lambda value: transform(value.clone()))
    expected = gradients(plain, lambda: sum(value.sum() for value in seen.values()) if used else 0)
    if how == "capture":
        with th.capture(model, *sites, keep="live", transform=transform) as rec:
            found = gradients(model, lambda: sum(rec[site].sum() for site in sites) if used else 0)
    else:
        x = X.clone().requires_grad_()
        features, output = th.FeatureLayers(model, sites, transform=transform, attach=how == "attached")(x)
        (output.pow(2).sum() + (sum(feature.sum() for feature in features) if used else 0)).backward()
        found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert_same(found, expected)


def test_what_was_saved_and_then_written_to_is_an_error_and_no_wrong_gradient() -> None:
    model = Plain(True, inplace=True)
    with th.capture(model, "body.0", keep="live", transform=lambda v: v.pow(2)) as rec:
        output = model(X)
    with pytest.raises(th.errors.SessionError, match=r"shape \(4, 8\) that was written to since.*value.clone\(\)"):
        (output.sum() + rec["body.0"].sum()).backward()
    model = Plain(True, inplace=True)
    with th.capture(model, "body.0", keep="live", transform=lambda v: v.clone().pow(2)) as rec:
        (model(X).sum() + rec["body.0"].sum()).backward()
    plain = Plain(False)
    seen, _ = bare(plain, ["body.0"], lambda value: value.clone().pow(2))
    (plain(X).sum() + seen["body.0"].sum()).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


# -- reentrant ones, which run without gradients first ------------------------------------------------------------


class Reentrant(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=True))


LIVE: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "capture": lambda model, x: th.run(model, x, capture="body.0", keep="live"),
    "layers": lambda model, x: th.FeatureLayers(model, ["body.0"])(x),
    "attached": lambda model, x: th.FeatureLayers(model, ["body.0"], attach=True)(x),
    "extractor": lambda model, x: th.FeatureExtractor(model, ["body.0"], stop=True)(x),
    "operation": lambda model, x: th.run(model, x, capture="body.3/tanh", keep="live"),
}


@pytest.mark.parametrize("how", LIVE)
def test_a_value_that_would_be_off_the_graph_is_refused(how: str) -> None:
    with pytest.raises(th.errors.SessionError, match=r"^'body.* runs in a reentrant checkpoint.* use_reentrant=False"):
        LIVE[how](Reentrant(True), X.clone().requires_grad_())


@pytest.mark.parametrize("how", LIVE)
@pytest.mark.parametrize("why", ["no gradients", "nothing that needs one"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_a_value_that_would_have_no_gradient_anyway_is_kept(how: str, why: str) -> None:
    with torch.set_grad_enabled(why != "no gradients"):
        LIVE[how](Reentrant(True), X)


@pytest.mark.parametrize("keep", ["copy", "clone", "reference"])
def test_detached_values_are_kept_in_a_reentrant_checkpoint(keep: str) -> None:
    model, x = Reentrant(True), X.clone().requires_grad_()
    with th.capture(model, "body.0", keep=keep) as rec:
        model(x).sum().backward()
    torch.testing.assert_close(rec["body.0"], model.body[0](X).detach(), check_device=False)

"""Gradients through the same door as values, against ``torch.autograd.grad`` with respect to clones."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import torchhook as th
from tests.language_models import small_gpt2
from tests.models import Apply, tensors_in
from tests.oracle import assert_same, hooks_on, in_threads, snapshot
from torchhook import edits
from torchhook.errors import AmbiguousCallError, NeverRanError, NeverRanWarning, SelectorError, SessionError
from torchhook.types import Recording

# -- the oracle ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def out_of_place(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The model as its own twin without in-place layers, ``F.relu`` among them."""
    was = {module: module.inplace for module in model.modules() if hasattr(module, "inplace")}
    with monkeypatch.context() as patch:
        patch.setattr(F, "relu", lambda x, inplace=False: torch.relu(x))
        for module in was:
            patch.setattr(module, "inplace", False)
        yield


class Cloned(NamedTuple):
    """For every module, call by call, clones of the tensors of its output that the model went on with."""

    outputs: dict[str, list[list[Tensor]]]
    inputs: dict[str, list[list[Tensor]]]


def _cloned(value: Any, held: list[Tensor]) -> Any:
    """A copy of a nested value in which every tensor with a gradient is a clone of a clone: the first is held."""
    if isinstance(value, Tensor):
        if not value.requires_grad:
            return value
        held.append(value.clone())
        return held[-1].clone()  # a layer that works in place then spoils this one only
    if isinstance(value, PackedSequence):
        return value._replace(data=_cloned(value.data, held))
    if isinstance(value, (tuple, list)):
        return type(value)([_cloned(part, held) for part in value])
    if isinstance(value, dict):
        parts = {name: _cloned(part, held) for name, part in value.items()}
        return type(value)(**parts) if type(value) is not dict else parts
    return value


@contextlib.contextmanager
def cloning(model: nn.Module, inputs: bool = False) -> Iterator[Cloned]:
    """Bare hooks that put clones in the place of every output, or of every input."""
    seen = Cloned({}, {})

    def after(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            held: list[Tensor] = []
            seen.outputs.setdefault(name, []).append(held)
            return _cloned(output, held)

        return hook

    def before(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            held: list[Tensor] = []
            seen.inputs.setdefault(name, []).append(held)
            return _cloned(args, held), _cloned(kwargs, held)

        return hook

    handles = []
    for name, module in model.named_modules():
        if inputs:
            handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(after(name)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def parts(value: Any) -> list[Tensor]:
    """The tensors of a nested value, each once: a ``ModelOutput`` holds its own as items and as attributes."""
    return list({id(tensor): tensor for tensor in tensors_in(value)}.values())


Gradients = dict[str, list[list[Tensor]]]


def gradients_of(score: Tensor, held: dict[str, list[list[Tensor]]], **options: Any) -> Gradients:
    """The gradients of the score by site and call, those that there are."""
    every = [tensor for calls in held.values() for call in calls for tensor in call]
    grads = iter(torch.autograd.grad(score, every, allow_unused=True, **options))
    return {
        name: [[grad for grad in (next(grads) for _ in call) if grad is not None] for call in calls]
        for name, calls in held.items()
    }


def assert_gradients(rec: Recording, expected: Gradients, port: str, error: float = 1e-6) -> int:
    """Every gradient is there call by call, and no other; returns the number compared."""
    compared, wrong = 0, []
    for name, calls in expected.items():
        address = f"{name}:{port}"
        if not any(calls):
            assert address not in rec, address
            continue
        found = {record.call: parts(record.value) for record in rec.records(address)}
        assert sorted(found) == [k for k, call in enumerate(calls) if call], address
        for k, call in enumerate(calls):
            assert len(found.get(k, [])) == len(call), f"{address}#{k}"
            for one, two in zip(call, found.get(k, []), strict=True):
                assert one.shape == two.shape, address
                compared += 1
                if not (one - two).abs().max() <= error:
                    wrong.append((address, k, (one - two).abs().max().item()))
    assert not wrong
    return compared


# -- real models --------------------------------------------------------------------------------------------------


def image(size: int) -> Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def vgg11() -> tuple[nn.Module, dict[str, Any]]:
    from torchvision.models.vgg import VGG, cfgs, make_layers

    with torch.device("meta"):  # the real classifier has 120 million weights and nothing to show here
        model = VGG(nn.Identity(), init_weights=False)
    model.features, model.avgpool = make_layers(cfgs["A"]), nn.AdaptiveAvgPool2d(2)
    model.classifier = nn.Sequential(nn.Linear(2048, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 10))
    return model, {"x": image(32)}


def resnet18() -> tuple[nn.Module, dict[str, Any]]:
    import torchvision

    return torchvision.models.resnet18(weights=None, num_classes=10), {"x": image(48)}


def densenet121() -> tuple[nn.Module, dict[str, Any]]:
    import torchvision

    return torchvision.models.densenet121(weights=None, num_classes=10), {"x": image(64)}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10)
    nn.init.normal_(model.heads.head.weight)  # zeros otherwise, and all gradients with it
    return model, {"x": image(32)}


MODELS = [vgg11, resnet18, pytest.param(densenet121, marks=pytest.mark.slow), vit, small_gpt2]


def score_of(output: Any) -> Tensor:
    return (output if isinstance(output, Tensor) else output.logits)[..., 3].sum()


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("build", MODELS)
@pytest.mark.filterwarnings("ignore::torchhook.errors.NeverRanWarning")
def test_every_output_gradient_is_that_of_a_clone_in_an_out_of_place_twin(
    build: Any, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, kwargs = build()
    model.train(training)
    call = (lambda: model(*kwargs.values())) if "x" in kwargs else (lambda: model(**kwargs))
    torch.manual_seed(1)
    with out_of_place(model, monkeypatch), cloning(model) as held:
        expected = gradients_of(score_of(call()), held.outputs)
    torch.manual_seed(1)
    with th.capture(model, port="grad") as rec:
        score_of(call()).backward()
    compared = assert_gradients(rec, expected, "grad")
    assert compared >= 0.9 * len(held.outputs) > 20


@pytest.mark.parametrize("build", [resnet18, small_gpt2])
@pytest.mark.filterwarnings("ignore::torchhook.errors.NeverRanWarning")
def test_every_input_gradient_is_that_of_a_clone_of_the_input(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, kwargs = build()
    model.eval()
    call = (lambda: model(*kwargs.values())) if "x" in kwargs else (lambda: model(**kwargs))
    with out_of_place(model, monkeypatch), cloning(model, inputs=True) as held:
        expected = gradients_of(score_of(call()), held.inputs)
    with th.capture(model, port="grad_input") as rec:
        score_of(call()).backward()
    assert assert_gradients(rec, expected, "grad_input") >= 0.9 * (len(held.inputs) - 2)


@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenetv3_small_050", pytest.param("efficientnet_b0", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("ports", [("grad",), ("grad_input",), ("grad", "grad_input")], ids="+".join)
@pytest.mark.filterwarnings("ignore::torchhook.errors.NeverRanWarning")
def test_models_full_of_pass_through_and_in_place_layers(
    name: str, ports: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import timm

    torch.manual_seed(0)
    model, x = timm.create_model(name, num_classes=10).eval(), image(64)
    with out_of_place(model, monkeypatch), cloning(model) as outputs:
        expected = {"grad": gradients_of(score_of(model(x)), outputs.outputs)}
    with out_of_place(model, monkeypatch), cloning(model, inputs=True) as inputs:
        expected["grad_input"] = gradients_of(score_of(model(x)), inputs.inputs)
    with th.capture(model, *(f"**:{port}" for port in ports)) as rec:
        score_of(model(x)).backward()
    for port in ports:
        inner = {name: calls for name, calls in expected[port].items() if name}
        assert assert_gradients(rec, inner, port, 1e-5) > 80


def test_grad_cam_weights_before_an_in_place_relu_are_exact() -> None:
    torch.manual_seed(0)
    model, kwargs = vgg11()
    model.eval()
    x = kwargs["x"]
    first = model.features[0](x)
    rest = first
    for layer in model.features[1:]:
        rest = F.relu(rest) if isinstance(layer, nn.ReLU) else layer(rest)
    logits = model.classifier(model.avgpool(rest).flatten(1))
    weights = torch.autograd.grad(logits[:, 5].sum(), first)[0].mean((2, 3))

    with th.capture(model, "features.0:grad", "features.0") as rec:
        model(x)[:, 5].sum().backward()
    assert torch.equal(rec["features.0:grad"].mean((2, 3)), weights)
    assert torch.equal(rec["features.0"], first)


# -- ways to go backward ------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block with in-place layers: what backward hooks of modules cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.b(self.relu(self.a(x)))
        out += x
        return self.relu(out)


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(1))


def test_several_backward_passes_are_recorded_one_by_one(block: Block, x: Tensor) -> None:
    with cloning(block) as held:
        y = block(x)
    one = gradients_of(y.sum(), held.outputs, retain_graph=True)["a"][0][0]
    two = gradients_of((y**2).sum(), held.outputs)["a"][0][0]
    with th.capture(block, "a:grad") as rec:
        y = block(x)
        y.sum().backward(retain_graph=True)
        (y**2).sum().backward()
    torch.testing.assert_close(rec.all("a:grad"), [one, two])


def test_accumulated_steps_are_calls(block: Block, x: Tensor) -> None:
    expected = []
    for scale in (1.0, 2.0, 3.0):
        with cloning(block) as held:
            y = block(x * scale)
        expected.append(gradients_of(y.sum(), held.outputs)["b"][0][0])
    with th.capture(block, "b:grad", "a.weight:grad") as rec:
        for scale in (1.0, 2.0, 3.0):
            block(x * scale).sum().backward()
    torch.testing.assert_close(rec.all("b:grad"), expected)
    assert [record.call for record in rec.records("b:grad")] == [0, 1, 2]
    torch.testing.assert_close(sum(rec.all("a.weight:grad")), block.a.weight.grad)
    with pytest.raises(AmbiguousCallError, match="ran more than once"):
        rec["b:grad"]


def test_one_call_with_two_backward_passes_is_ambiguous_to_pick(block: Block, x: Tensor) -> None:
    with th.capture(block, "a:grad") as rec:
        y = block(x)
        y.sum().backward(retain_graph=True)
        (2 * y).sum().backward()
    one, two = rec.all("a:grad")
    torch.testing.assert_close(two, 2 * one)
    with pytest.raises(AmbiguousCallError):
        rec["a:grad", 0]


def test_autograd_grad_is_seen_and_leaves_no_grad_behind(block: Block, x: Tensor) -> None:
    with cloning(block) as held:
        y = block(x)
    expected = gradients_of(y.sum(), held.outputs)["a"][0][0]
    with th.capture(block, "a:grad") as rec:
        torch.autograd.grad(block(x).sum(), list(block.parameters()))
    torch.testing.assert_close(rec["a:grad"], expected)
    assert all(parameter.grad is None for parameter in block.parameters())


def test_gradients_of_gradients(x: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    leaf = x.clone().requires_grad_()

    def penalty() -> Tensor:
        (slope,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
        return slope.square().sum()

    penalty().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with cloning(model) as held:
        y = model(leaf)
    first = gradients_of(y.sum(), held.outputs)["0"][0][0]
    with th.capture(model, "0:grad", "0.weight:grad") as rec:
        penalty().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(rec.all("0:grad")[0], first)
    assert not rec.all("0:grad")[0].requires_grad


def test_a_live_gradient_can_be_differentiated(x: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    leaf = x.clone().requires_grad_()
    with cloning(model) as held:
        y = model(leaf)
    (grad,) = torch.autograd.grad(y.sum(), held.outputs["0"][0], create_graph=True)
    (expected,) = torch.autograd.grad(grad.square().sum(), leaf)
    with th.capture(model, "0:grad", keep="live") as rec:
        torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
    (found,) = torch.autograd.grad(rec["0:grad"].square().sum(), leaf)
    torch.testing.assert_close(found, expected)


@pytest.mark.shows("Threads: gradients")
def test_backward_in_another_thread_is_recorded(block: Block, x: Tensor) -> None:
    with cloning(block) as held:
        y = block(x)
    expected = gradients_of(y.sum(), held.outputs)["a"][0][0]
    with th.capture(block, "a:grad") as rec:
        in_threads(block(x).sum().backward)
    torch.testing.assert_close(rec["a:grad"], expected)


@pytest.mark.shows("Threads: gradients")
def test_gradients_of_two_threads_do_not_mix() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    found: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        with th.capture(model, "1:grad") as rec:
            for _ in range(20):
                torch.autograd.grad((model(torch.ones(1, 3)) * number).sum(), list(model.parameters()))
        found[number] = rec.all("1:grad")

    in_threads(*[functools.partial(work, number) for number in (1, 2, 3)])
    for number, grads in found.items():
        assert len(grads) == 20
        assert all(torch.equal(grad, torch.full((1, 3), float(number))) for grad in grads)
    assert len(found) == 3


# -- what needs no gradient ---------------------------------------------------------------------------------------


def test_frozen_parameters_do_not_stop_the_gradient_of_what_comes_after(x: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    with pytest.warns(NeverRanWarning, match=r"'0:grad': its value needs no gradient"):
        with th.capture(model, "0:grad", "2:grad") as rec:
            model(x).sum().backward()
    assert torch.equal(rec["2:grad"], torch.ones(2, 2))
    with pytest.raises(NeverRanError, match="needs no gradient"):
        rec["0:grad"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_output_without_gradient_is_reported_with_the_cause(block: Block, x: Tensor, mode: Any) -> None:
    with pytest.warns(NeverRanWarning, match=r"'a:grad': its value needs no gradient.*no_grad"):
        with th.capture(block, "a:grad") as rec, mode():
            block(x)
    assert "a:grad" in rec.missing


def test_integer_outputs_need_no_gradient(x: Tensor) -> None:
    class Rank(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argsort(-1)

    model = nn.Sequential(nn.Linear(3, 3), Rank())
    with pytest.warns(NeverRanWarning, match=r"'1:grad': its value needs no gradient"):
        with th.capture(model, "1:grad"):
            model(x)


def test_a_gradient_that_never_came_is_reported(block: Block, x: Tensor) -> None:
    with pytest.warns(NeverRanWarning, match=r"'a:grad': no gradient reached it: call backward inside the block"):
        with th.capture(block, "a:grad"):
            block(x)


def test_a_gradient_of_a_module_that_did_not_run_is_reported(block: Block, x: Tensor) -> None:
    block.spare = nn.Linear(3, 3)
    with pytest.warns(NeverRanWarning, match=r"'spare:grad': it did not run in the forward pass"):
        with th.capture(block, "spare:grad", "a"):
            block(x).sum().backward()


def test_stop_and_gradients_exclude_each_other(block: Block) -> None:
    with pytest.raises(SessionError, match=r"'a:grad' needs the backward pass"):
        th.capture(block, "a:grad", stop=True)


# -- shapes of outputs --------------------------------------------------------------------------------------------


def test_a_module_that_runs_several_times_has_one_gradient_per_call(x: Tensor) -> None:
    torch.manual_seed(0)
    lin = nn.Linear(3, 3)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.act = lin, nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.act(self.lin(x))
            return x

    model = Loop()
    with cloning(model) as held:
        y = model(x)
    expected = gradients_of(y.sum(), held.outputs)
    with th.capture(model, "lin:grad", "act:grad") as rec:
        model(x).sum().backward()
    assert assert_gradients(rec, {name: expected[name] for name in ("lin", "act")}, "grad") == 6
    assert torch.equal(rec["lin:grad", 0], rec["lin#0:grad"])


def test_a_call_whose_predecessors_got_no_gradient_is_not_reported(x: Tensor) -> None:
    class LastOfThree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return [self.lin(x) for _ in range(3)][2]

    model = LastOfThree()
    with th.capture(model, "lin#2:grad") as rec:
        model(x).sum().backward()
    assert torch.equal(rec["lin#2:grad"], torch.ones(2, 3))
    assert rec.missing == {}


def test_the_gradient_of_a_module_that_returns_its_input_is_what_flows_through_it_alone(x: Tensor) -> None:
    class Shortcut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.short = nn.Linear(3, 3), nn.Sequential()

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x)
            return self.short(y) * 2 + y * 3

    model = Shortcut()
    with th.capture(model, "short:grad", "lin:grad") as rec:
        model(x).sum().backward()
    assert torch.equal(rec["short:grad"], torch.full((2, 3), 2.0))
    assert torch.equal(rec["lin:grad"], torch.full((2, 3), 5.0))


@pytest.mark.parametrize("passing", [nn.Identity, nn.Dropout, lambda: nn.Flatten(0), lambda: nn.Unflatten(1, (1, 3))])
@pytest.mark.parametrize(
    "sites", [("1:grad",), ("1:grad_input",), ("1:grad", "1:grad_input", "0:grad", "2:grad_input")]
)
def test_a_layer_after_the_next_one_may_work_in_place(passing: Any, sites: tuple[str, ...], x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 3), passing(), nn.ReLU(inplace=True)).eval()
    start = model[0](x).detach().requires_grad_()
    (expected,) = torch.autograd.grad((start.relu() ** 2).sum(), start)
    with th.capture(model, *sites) as rec, th.capture(model, *sites) as other:
        (model(x) ** 2).sum().backward()
    for site in sites:
        for found in (rec[site], other[site]):
            torch.testing.assert_close(found.reshape(-1), expected.reshape(-1))


def test_an_edit_of_a_gradient_goes_through_a_view_that_is_overwritten(x: Tensor) -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, 1:]

    model = nn.Sequential(nn.Linear(3, 3), Half(), nn.ReLU(inplace=True))
    (model(x) ** 2).sum().backward()
    before = model[0].weight.grad.clone()
    model.zero_grad()
    with th.edit(model, {"1:grad": edits.scale(0.5)}), th.capture(model, "1:grad") as rec:
        (model(x) ** 2).sum().backward()
    assert before[1:].any()
    assert rec["1:grad"].shape == (len(x), 2)
    torch.testing.assert_close(model[0].weight.grad, before / 2)


def test_an_unused_alias_has_no_gradient_though_its_memory_is_overwritten(x: Tensor) -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> float:
            return x.detach().mean().item()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.looks, self.relu = nn.Linear(3, 3), Looks(), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            self.looks(h)
            return self.relu(h)

    model = Net()
    with pytest.warns(NeverRanWarning), th.capture(model, "looks:grad_input") as rec:
        model(x).sum().backward()
    assert "looks:grad_input" in rec.missing


def test_what_a_module_wrote_in_place_has_the_gradient_of_all_who_read_it(x: Tensor) -> None:
    class PreActivation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.relu, self.b = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(self.relu(h)) + h  # which the ReLU has overwritten

    model = PreActivation()
    start = model.a(x).detach().relu().requires_grad_()
    (expected,) = torch.autograd.grad(((model.b(start) + start) ** 2).sum(), start)
    with th.capture(model, "relu:grad") as rec:
        (model(x) ** 2).sum().backward()
    torch.testing.assert_close(rec["relu:grad"], expected)


@pytest.mark.parametrize("site", ["same:grad", "same:grad_input"])
def test_a_module_that_runs_without_gradients_does_not_cut_the_graph_of_its_input(site: str, x: Tensor) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.same = nn.Linear(3, 3), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            with torch.no_grad():
                h = self.same(h)
            return h * 2

    model = Net()
    with th.capture(model, site) as rec:
        model(x).sum().backward()
    assert torch.equal(model.layer.bias.grad, torch.full((3,), 2.0 * len(x)))
    assert torch.equal(rec[site], torch.full_like(x, 2.0))


def test_a_tensor_that_is_returned_twice_has_a_gradient_for_each(x: Tensor) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.layer(x).tanh()
            return h, h

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Cell()

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.cell(x)
            return 2 * a + 3 * b

    model = Net()
    model(x).sum().backward()
    before = model.cell.layer.weight.grad.clone()
    model.zero_grad()
    with th.capture(model, "cell:grad", edit={"cell:grad": edits.scale(0.5)}) as rec:
        model(x).sum().backward()
    torch.testing.assert_close(model.cell.layer.weight.grad, before / 2)
    assert [grad.unique().tolist() for grad in rec["cell:grad"]] == [[1.0], [1.5]]  # half of 2 and of 3


def test_a_module_that_returns_its_parameter_has_one_gradient_per_call() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.factor

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale()

    model = Scaled()
    with th.capture(model, "scale:grad") as rec:
        for k in range(4):
            model(torch.full((3,), float(k))).sum().backward()
    found = [(record.call, record.value.tolist()) for record in rec.records("scale:grad")]
    assert found == [(k, [float(k)] * 3) for k in range(4)]
    assert not model.scale.factor._backward_hooks


class Many(nn.Module):
    """Returns tensors in every kind of container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.lin, self.kind = nn.Linear(3, 4), kind

    def forward(self, x: Tensor) -> Any:
        a, b = self.lin(x).chunk(2, -1)
        a, b = a * 1, b * 1
        if self.kind == "dict":
            return {"first": a, "none": None, "more": [b, 7]}
        if self.kind == "output":
            from transformers.modeling_outputs import BaseModelOutput

            return BaseModelOutput(last_hidden_state=a, hidden_states=(b,))
        return a, None, (b, "text")


class Holder(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.many = Many(kind)

    def forward(self, x: Tensor) -> Any:
        a, b = parts(self.many(x))
        return (a * 2).sum() + (b * 3).sum()


@pytest.mark.parametrize("kind", ["tuple", "dict", "output"])
def test_structured_outputs_give_structured_gradients(kind: str, x: Tensor) -> None:
    model = Holder(kind)
    with th.capture(model, "many:grad", "many") as rec:
        model(x).backward()
    grad, value = rec["many:grad"], rec["many"]
    assert type(grad) is type(value)
    a, b = parts(grad)
    assert torch.equal(a, torch.full((2, 2), 2.0))
    assert torch.equal(b, torch.full((2, 2), 3.0))


def test_the_part_of_an_output_that_nobody_used_has_no_gradient(x: Tensor) -> None:
    model = Many("tuple")
    with th.capture(model, ":grad") as rec:
        model(x)[0].sum().backward()
    a, _, (b, _) = rec[":grad"]
    assert torch.equal(a, torch.ones(2, 2))
    assert b is None


def test_the_states_of_an_lstm_have_gradients_of_their_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(3, 4, num_layers=2))
    x = torch.randn(5, 2, 3)
    with cloning(model) as held:
        out, (hidden, cell) = model(x)
    expected = gradients_of(out.sum() + hidden[0].exp().sum() + cell.sin().sum(), held.outputs)["0"][0]
    with th.capture(model, "0:grad") as rec:
        out, (hidden, cell) = model(x)
        (out.sum() + hidden[0].exp().sum() + cell.sin().sum()).backward()
    torch.testing.assert_close(parts(rec["0:grad"]), expected)


def test_packed_sequences_have_gradients() -> None:
    torch.manual_seed(0)

    class Packer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lower, self.upper = nn.GRU(3, 4), nn.GRU(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, torch.tensor([3, 5]), enforce_sorted=False)
            out, _ = self.upper(self.lower(packed)[0])
            return pad_packed_sequence(out)[0]

    model, x = Packer(), torch.randn(5, 2, 3)
    with cloning(model) as held:
        y = model(x)
    expected = gradients_of(y.square().sum(), held.outputs)["lower"][0]
    with th.capture(model, "lower:grad", "upper:grad_input") as rec:
        model(x).square().sum().backward()
    packed = rec["lower:grad"][0]
    assert isinstance(packed, PackedSequence)
    torch.testing.assert_close(packed.data, expected[0])
    torch.testing.assert_close(rec["upper:grad_input"].data, expected[0])


def test_several_backward_passes_through_a_structured_output(x: Tensor) -> None:
    model = Many("tuple")
    with th.capture(model, ":grad") as rec:
        a, _, (b, _) = model(x)
        (2 * a).sum().backward(retain_graph=True)
        (3 * b).sum().backward(retain_graph=True)
        (4 * a + 5 * b).sum().backward()
    one, two, three = rec.all(":grad")
    assert torch.equal(one[0], torch.full((2, 2), 2.0))
    assert one[2][0] is None
    assert two[0] is None
    assert torch.equal(two[2][0], torch.full((2, 2), 3.0))
    assert torch.equal(three[0] + three[2][0], torch.full((2, 2), 9.0))


# -- grad_input ---------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3), inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.inner(y) * 2 + y * 100


def test_grad_input_is_what_flows_through_this_module_alone(x: Tensor) -> None:
    model = Residual(nn.Linear(3, 3))
    with th.capture(model, "inner:grad_input", "first:grad") as rec:
        model(x).sum().backward()
    through = torch.full((2, 3), 2.0) @ model.inner.weight.detach()
    torch.testing.assert_close(rec["inner:grad_input"], through)
    torch.testing.assert_close(rec["first:grad"], through + 100)


def test_grad_input_of_a_module_that_works_in_place(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    mask = (model[0](x) > 0).float()
    with th.capture(model, "1:grad_input", "1:grad") as rec:
        y = model(x)
        y.sum().backward()
    after = torch.ones(2, 2) @ model[2].weight.detach()
    torch.testing.assert_close(rec["1:grad"], after)
    torch.testing.assert_close(rec["1:grad_input"], after * mask)


def test_grad_input_of_a_module_that_works_in_place_on_a_keyword_argument(x: Tensor) -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.relu = nn.Linear(3, 3), Apply(lambda x, other: x.relu_())

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(x=self.lin(x), other=x) * 2

    model = Keyword()
    mask = (model.lin(x) > 0).float()
    with th.capture(model, "relu:grad_input") as rec:
        model(x).sum().backward()
    torch.testing.assert_close(rec["relu:grad_input"].kwargs["x"], 2 * mask)


def test_grad_input_of_a_module_that_works_in_place_after_a_call_that_raised(x: Tensor) -> None:
    class Retries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.relu = nn.Linear(3, 3), Apply(self.in_place)
            self.errors = [ValueError()]

        def in_place(self, x: Tensor) -> Tensor:
            if self.errors:
                raise self.errors.pop()
            return x.relu_()

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(ValueError):
                self.relu(self.lin(x))
            return self.relu(self.lin(x))

    model = Retries()
    mask = (model.lin(x) > 0).float()
    with th.capture(model, "relu:grad_input") as rec:
        model(x).sum().backward()
    torch.testing.assert_close(rec["relu:grad_input"], mask)


def test_grad_input_of_a_module_that_works_in_place_on_what_others_have_read(x: Tensor) -> None:
    class ReadBefore(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.relu = nn.Linear(3, 3), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x)
            read = y * 5
            return self.relu(y) * 2 + read

    model = ReadBefore()
    mask = (model.lin(x) > 0).float()
    with th.capture(model, "relu:grad_input") as rec:
        model(x).sum().backward()
    torch.testing.assert_close(rec["relu:grad_input"], 2 * mask)


def test_grad_input_of_the_model_is_the_gradient_of_its_input(block: Block, x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    with th.capture(block, ":grad_input") as rec:
        block(leaf).sum().backward()
    assert torch.equal(rec[":grad_input"], leaf.grad)


class Mixer(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor, extra: dict[str, Any]) -> Tensor:
        return x * scale + extra["bias"][0] * 3


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mix = nn.Linear(3, 3), nn.Linear(3, 3), Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.a(x), scale=torch.tensor(5.0), extra={"bias": [self.b(x)], "name": "n"})


def test_grad_input_of_keyword_and_nested_arguments(x: Tensor) -> None:
    model = Mixed()
    with th.capture(model, "mix:grad_input") as rec:
        model(x).sum().backward()
    grad = rec["mix:grad_input"]
    assert torch.equal(grad.args[0], torch.full((2, 3), 5.0))
    assert grad.kwargs["scale"] is None
    assert torch.equal(grad.kwargs["extra"]["bias"][0], torch.full((2, 3), 3.0))
    assert grad.kwargs["extra"]["name"] == "n"


def test_grad_input_changes_nothing_that_the_model_computes(block: Block, x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    plain = block(leaf)
    plain.sum().backward()
    grads = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    block.zero_grad()
    with th.capture(block, port="grad_input") as rec:
        y = block(leaf)
        y.sum().backward()
    assert torch.equal(y, plain)
    assert len(rec) == 4
    assert all(torch.equal(g, p.grad) for g, p in zip(grads, block.parameters(), strict=True) if p.grad is not None)


# -- activation checkpointing -------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(3, 3)) for _ in range(3)
        )
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.shows("Checkpointing: captures and gradients")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointed_calls_are_counted_once_and_their_gradients_are_right(reentrant: bool, x: Tensor) -> None:
    model, plain, leaf = Checkpointed(reentrant), Checkpointed(None), x.clone().requires_grad_()
    torch.manual_seed(3)
    with cloning(plain) as held:
        y = plain(leaf)
    expected = gradients_of(y.square().sum(), held.outputs)
    torch.manual_seed(3)
    with th.capture(model, "**", "**:grad") as rec:
        model(leaf).square().sum().backward()
    assert_gradients(rec, {name: grads for name, grads in expected.items() if name}, "grad")
    for name in expected:
        if name:
            assert torch.equal(rec[name], held.outputs[name][0][0].detach()), name
    assert rec.recomputed["blocks.0.0"] == 1
    assert all(times == 1 for times in rec.recomputed.values())
    assert "blocks.0.0 (once)" in str(rec)


@pytest.mark.shows("Checkpointing: captures and gradients")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointed_grad_input_is_right(reentrant: bool, x: Tensor) -> None:
    model, plain, leaf = Checkpointed(reentrant).eval(), Checkpointed(None).eval(), x.clone().requires_grad_()
    with cloning(plain, inputs=True) as held:
        y = plain(leaf)
    expected = gradients_of(y.square().sum(), held.inputs)["blocks.1.3"]
    with th.capture(model, "blocks.1.3:grad_input") as rec:
        model(leaf).square().sum().backward()
    assert_gradients(rec, {"blocks.1.3": expected}, "grad_input")


def test_accumulated_checkpointed_steps_keep_their_call_index(x: Tensor) -> None:
    model, plain = Checkpointed(True).eval(), Checkpointed(None).eval()
    with th.capture(plain, "blocks.0.0:grad") as right:
        for scale in (1, 2, 3):
            plain(x * scale).sum().backward()
    with th.capture(model, "blocks.0.0:grad") as rec:
        for scale in (1, 2, 3):
            model((x * scale).requires_grad_()).sum().backward()
    assert [record.call for record in rec.records("blocks.0.0:grad")] == [0, 1, 2]
    torch.testing.assert_close(rec.all("blocks.0.0:grad"), right.all("blocks.0.0:grad"))


# -- parameters and buffers ---------------------------------------------------------------------------------------


def test_parameters_and_their_gradients_are_addresses(block: Block, x: Tensor) -> None:
    with th.capture(block, "a.weight", "a.weight:grad", "b.bias:grad") as rec:
        block(x).sum().backward()
    assert torch.equal(rec["a.weight"], block.a.weight.detach())
    assert torch.equal(rec["a.weight:grad"], block.a.weight.grad)
    assert torch.equal(rec["b.bias:grad"], block.b.bias.grad)


def test_a_captured_parameter_is_the_one_before_the_step(block: Block, x: Tensor) -> None:
    was = block.a.weight.detach().clone()
    optimizer = torch.optim.SGD(block.parameters(), lr=1.0)
    with th.capture(block, "a.weight") as rec:
        block(x).sum().backward()
        optimizer.step()
    assert torch.equal(rec["a.weight"], was)
    assert not torch.equal(block.a.weight.detach(), was)


def test_a_glob_takes_the_gradients_of_all_weights(block: Block, x: Tensor) -> None:
    with th.capture(block, "**.weight:grad") as rec:
        block(x).sum().backward()
    assert sorted(rec.keys()) == ["a.weight:grad", "b.weight:grad"]
    assert torch.equal(rec["b.weight:grad"], block.b.weight.grad)


def test_a_glob_leaves_out_biases_that_are_none(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    with th.capture(model, "**.bias:grad") as rec:
        model(x).sum().backward()
    assert rec.keys() == ["1.bias:grad"]
    assert torch.equal(rec["1.bias:grad"], torch.full((3,), 2.0))


def test_a_glob_over_weights_reports_those_that_are_frozen(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    with pytest.warns(NeverRanWarning, match=r"'0.weight:grad': it does not require a gradient"):
        with th.capture(model, "**.weight:grad") as rec:
            model(x).sum().backward()
    assert rec.keys() == ["1.weight:grad"]
    assert torch.equal(rec["1.weight:grad"], model[1].weight.grad)


def test_a_glob_over_weights_goes_together_with_parametrized_ones(x: Tensor) -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3))
    with th.capture(model, "**.weight:grad") as rec:
        model(x).sum().backward()
    assert torch.equal(rec["1.weight:grad"], model[1].weight.grad)
    # The parametrization is a module, and what it returns is the weight.
    through = torch.ones(2, 3) @ model[1].weight.detach()
    torch.testing.assert_close(rec["0.parametrizations.weight:grad"], through.T @ x)


def test_a_parameter_gradient_is_the_new_one_not_the_accumulated_one(block: Block, x: Tensor) -> None:
    block(x).sum().backward()
    first = block.a.weight.grad.clone()
    with th.capture(block, "a.weight:grad") as rec:
        block(x).sum().backward()
    torch.testing.assert_close(rec["a.weight:grad"], first)
    torch.testing.assert_close(block.a.weight.grad, 2 * first)


def test_tied_weights_have_one_gradient_under_both_names() -> None:
    torch.manual_seed(0)
    model, kwargs = small_gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    with th.capture(model, "lm_head.weight:grad", "transformer.wte.weight:grad") as rec:
        score_of(model(**kwargs)).backward()
    assert torch.equal(rec["lm_head.weight:grad"], model.lm_head.weight.grad)
    assert torch.equal(rec["transformer.wte.weight:grad"], model.lm_head.weight.grad)
    assert len(rec) == 1


def test_buffers_are_addresses_and_have_no_gradient(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with th.capture(model, "1.running_mean") as rec:
        model(x)
    assert torch.equal(rec["1.running_mean"], torch.zeros(3))
    assert not torch.equal(model[1].running_mean, torch.zeros(3))
    with pytest.raises(SelectorError, match=r"'1.running_mean' is a buffer, which has no gradient"):
        th.capture(model, "1.running_mean:grad")


def test_a_parameter_has_no_inputs(block: Block) -> None:
    with pytest.raises(SelectorError, match="without inputs"):
        th.capture(block, "a.weight:grad_input")


def test_a_parameter_that_got_no_gradient_is_reported(block: Block, x: Tensor) -> None:
    block.spare = nn.Linear(3, 3)
    with pytest.warns(NeverRanWarning, match=r"'spare.weight:grad': no gradient reached it: call backward"):
        with th.capture(block, "spare.weight:grad"):
            block(x).sum().backward()


# -- nothing is left behind ---------------------------------------------------------------------------------------


def test_nothing_is_recorded_or_edited_after_the_session(block: Block, x: Tensor) -> None:
    block(x).sum().backward()
    expected = {name: p.grad.clone() for name, p in block.named_parameters()}
    block.zero_grad()
    change = {"a:grad": edits.zero(), "a.weight:grad": edits.zero(), "b:grad_input": edits.zero()}
    with pytest.warns(NeverRanWarning):
        with th.capture(block, "a:grad", "b:grad_input", "a.weight:grad", edit=change) as rec:
            y = block(x)
    y.sum().backward()
    assert len(rec) == 0
    assert {name: p.grad for name, p in block.named_parameters()}.keys() == expected.keys()
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_gradient_hooks_go_on_every_way_out(block: Block, x: Tensor, error: Any) -> None:
    leaf = x.clone().requires_grad_()
    before = snapshot(block)
    session = th.capture(block, "**:grad", "**:grad_input", "a.weight:grad", "b.weight")
    with contextlib.suppress(ZeroDivisionError, KeyboardInterrupt), session:
        torch.autograd.grad(block(leaf).sum(), [leaf, *block.parameters()])
        if error is not None:
            raise error
    assert not leaf._backward_hooks
    assert leaf.grad is None
    assert_same(before, snapshot(block), "the model and the process")


def test_a_session_that_is_dropped_takes_its_gradient_hooks_with_it(block: Block, x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    session = th.capture(block, "**:grad", ":grad_input", "a.weight:grad").open()
    y, recording = block(leaf), session.recording
    del session
    assert not leaf._backward_hooks
    assert not block.a.weight._backward_hooks
    assert not hooks_on(block)
    y.sum().backward()
    assert len(recording) == 0


def test_a_users_own_hooks_and_gradients_stay_as_they_are(x: Tensor) -> None:
    block = nn.Sequential(OrderedDict(a=nn.Linear(3, 3), act=nn.Tanh(), b=nn.Linear(3, 3)))
    seen: list[str] = []
    leaf = x.clone().requires_grad_()
    leaf.register_hook(lambda grad: seen.append("tensor"))
    block.b.weight.register_hook(lambda grad: seen.append("parameter"))
    block.b.register_full_backward_hook(lambda *_: seen.append("module"))
    block.a.weight.grad = torch.full((3, 3), 7.0)
    with th.capture(block, "a:grad", "b.weight:grad", ":grad_input"):
        torch.autograd.grad(block(leaf).sum(), [leaf, block.b.weight])
    assert sorted(seen) == ["module", "parameter", "tensor"]
    assert torch.equal(block.a.weight.grad, torch.full((3, 3), 7.0))
    block(leaf).sum().backward()
    assert sorted(seen) == 2 * ["module"] + 2 * ["parameter"] + 2 * ["tensor"]


def live_tensors() -> int:
    return sum(1 for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter))


@pytest.mark.parametrize("keep", ["copy", "live"])
def test_three_hundred_steps_leak_nothing(keep: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), Many("tuple"))
    outputs: list[weakref.ref[Tensor]] = []
    model[0].register_forward_hook(lambda _, args, output: outputs.append(weakref.ref(output)))
    ports = ("**", "**:grad", "**:grad_input", "0.weight:grad")
    gc.collect()
    gc.disable()
    try:
        with th.capture(model, *ports, max_records=1, keep=keep) as rec:
            for step in range(300):
                a, _, (b, _) = model(torch.randn(2, 3, requires_grad=True))
                (a + b).sum().backward()
                model.zero_grad()
                if step == 20:
                    early = live_tensors()
            late = live_tensors()
        assert late <= early
        alive = [k for k, output in enumerate(outputs) if output() is not None]
        assert not [k for k in alive if k < 298], alive
        assert rec.records("0:grad")[0].call == 299
    finally:
        gc.enable()


# -- any small network --------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    activations=st.lists(st.sampled_from(["relu", "late relu", "tanh", "none"]), min_size=6, max_size=6),
    batch=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_the_gradients_of_any_small_network_follow_the_chain_rule(
    widths: list[int], activations: list[str], batch: int, seed: int
) -> None:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for (before, after), activation in zip(itertools.pairwise(widths), activations, strict=False):
        layers.append(nn.Linear(before, after, dtype=torch.float64))
        layers += {
            "relu": [nn.ReLU(inplace=True)],
            "late relu": [nn.Identity(), nn.Flatten(), nn.ReLU(inplace=True)],
            "tanh": [nn.Tanh()],
            "none": [],
        }[activation]
    model = nn.Sequential(*layers)
    x = torch.randn(batch, widths[0], dtype=torch.float64)

    values = [x]
    for layer in layers:
        with torch.no_grad():
            values.append(torch.relu(values[-1]) if isinstance(layer, nn.ReLU) else layer(values[-1]))
    weight = torch.randn_like(values[-1])
    grad, grads = weight, [weight]
    for layer, below, above in reversed(list(zip(layers, values, values[1:], strict=False))):
        if isinstance(layer, nn.Linear):
            grad = grad @ layer.weight.detach()
        elif isinstance(layer, nn.ReLU):
            grad = grad * (below > 0)
        elif isinstance(layer, nn.Tanh):
            grad = grad * (1 - above**2)  # the others pass it on
        grads.insert(0, grad)

    leaf = x.clone().requires_grad_()
    with th.capture(model, "**", [f"{k}:grad_input" for k in range(len(layers))], port="grad") as rec:
        (model(leaf) * weight).sum().backward()
    for k in range(len(layers)):
        torch.testing.assert_close(rec[f"{k}:grad"], grads[k + 1], rtol=0, atol=1e-12)
        torch.testing.assert_close(rec[f"{k}:grad_input"], grads[k], rtol=0, atol=1e-12)


class InPlaceAndOld(nn.Module):
    """Returns one tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2
        return self.act(h), h


class SharedTuple(nn.Module):
    """Returns one tuple twice."""

    def forward(self, x: Tensor) -> Any:
        pair = (x * 2,)
        return pair, pair


class WritesWithoutGradients(nn.Module):
    """A checkpoint whose recomputation writes to its input once more."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.part = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        def quietly(h: Tensor) -> Tensor:
            with torch.no_grad():
                h.sin_()
            return h

        return self.part(checkpoint(quietly, self.lin(x), use_reentrant=True))


@pytest.mark.parametrize("more", ["", "act:grad", "act:grad_input", "act:grad act:grad_input", ":grad_total"])
def test_one_tensor_under_two_names_has_a_gradient_for_each(more: str) -> None:
    net, x = InPlaceAndOld(), torch.randn(3, requires_grad=True)
    with th.capture(net, ":grad", *more.split()) as rec:
        new, old = net(x)
        (new.sum() + 10 * old.sum()).backward()
    assert [grad.tolist() for grad in rec[":grad"]] == [[1.0] * 3, [10.0] * 3]


def test_a_tuple_that_is_returned_twice_has_a_gradient_for_each_place() -> None:
    net, x = SharedTuple(), torch.randn(3, requires_grad=True)
    with th.capture(net, ":grad") as rec:
        (one,), (two,) = net(x)
        (one.sum() + 10 * two.sum()).backward()
    assert [grad.tolist() for (grad,) in rec[":grad"]] == [[1.0] * 3, [10.0] * 3]


def test_a_recomputation_that_writes_again_is_not_a_second_gradient() -> None:
    net = WritesWithoutGradients()
    with th.capture(net, ":grad", "part:grad", "lin:grad") as rec:
        net(torch.randn(2, 3)).sum().backward()
    assert [len(rec.all(site)) for site in rec] == [1, 1, 1]


def test_a_view_from_a_block_without_gradients_does_not_upset_a_checkpoint() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            def segment(h: Tensor) -> Tensor:
                with torch.no_grad():
                    turned = h.t()
                return self.second(turned).sigmoid()

            out: Tensor = checkpoint(segment, self.first(x), use_reentrant=False)
            return out

    net, x = Net(), torch.randn(3, 3)
    net(x).sum().backward()
    bare = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with pytest.warns(NeverRanWarning), th.capture(net, "second:grad_input") as rec:
        net(x).sum().backward()
    assert not list(rec)
    for parameter, grad in zip(net.parameters(), bare, strict=True):
        assert (parameter.grad is None and grad is None) or torch.equal(parameter.grad, grad)


@pytest.mark.parametrize("sites", ["grad", "grad_total", "grad grad_input grad_total"])
def test_a_tensor_that_passes_a_block_without_gradients_in_a_checkpoint_is_heard_once(sites: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.same = nn.Linear(3, 3), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            def segment(h: Tensor) -> Tensor:
                with torch.no_grad():
                    h = self.same(h)
                return h.sin()

            out: Tensor = checkpoint(segment, self.lin(x), use_reentrant=False)
            return out

    net, x = Net(), torch.randn(2, 3)
    with th.capture(net, *(f"same:{port}" for port in sites.split())) as rec:
        net(x).sum().backward()
    for site in rec:
        (grad,) = rec.all(site)
        assert torch.allclose(grad, net.lin(x).cos())

"""Two models on one input: the layer that differs is named first, and nothing is left behind."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import oracle, zoo
from tests.diff.nets import Net, image, net
from tests.language_models import ENDS, made
from tests.models import Restless
from torchhook._capture import capture
from torchhook._diff.api import diff
from torchhook._recording.records import load
from torchhook._values.tree import Inputs
from torchhook.errors import MissingRecordError


def bare_outputs(model: nn.Module, *args: Any, **kwargs: Any) -> list[tuple[str, int, Tensor]]:
    """What bare hooks see: name, call and output of every module, in order, cloned on the spot."""
    seen: list[tuple[str, int, Tensor]] = []
    calls: dict[str, int] = {}

    def hook(name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            calls[name] = calls.get(name, -1) + 1
            seen.append((name, calls[name], output.detach().clone()))

        return look

    handles = [m.register_forward_hook(hook(n)) for n, m in model.named_modules()]
    model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return seen


def test_a_model_is_the_same_as_its_copy_with_one_row_for_each_call() -> None:
    model = net()
    result = diff(model, copy.deepcopy(model), image(), rtol=0, atol=0)
    assert result.ok
    assert result.first is None
    assert [row.site for row in result] == ["conv", "bn", "relu#0", "conv2", "relu#1", "drop", "fc", ""]


def test_the_errors_are_those_between_what_bare_hooks_see() -> None:
    model, other = net(), net()
    with torch.no_grad():
        other.conv2.weight += 0.1  # type: ignore[operator]
    result = diff(model, other, image())
    rows = zip(result, bare_outputs(model, image()), bare_outputs(other, image()), strict=True)
    for row, (_, _, a), (_, _, b) in rows:
        assert row.max_abs == pytest.approx((a - b).abs().max().item(), rel=1e-6)
        assert row.relative == pytest.approx(((a - b).norm() / a.norm()).item(), rel=1e-4, abs=1e-9)
        assert row.cosine == pytest.approx(F.cosine_similarity(a.flatten(), b.flatten(), dim=0).item(), abs=1e-5)


@pytest.mark.parametrize("layer", ["conv", "bn", "conv2", "fc"])
def test_the_one_changed_layer_of_a_port_is_named_first(layer: str) -> None:
    model, port = net(), net()
    with torch.no_grad():
        port.get_submodule(layer).bias += 0.5  # type: ignore[operator]
    first = diff(model, port, image()).first
    assert first is not None
    assert first.site == layer


def test_a_difference_that_no_child_has_is_named_at_the_module_that_makes_it() -> None:
    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.bn(self.conv(x)))
            y = self.relu(self.conv2(x) - x)
            return self.fc(self.drop(y.mean((2, 3))))

    model, other = net(), Other().eval()
    other.load_state_dict(model.state_dict())
    first = diff(model, other, image()).first
    assert first is not None
    assert first.site == "relu#1"
    result = diff(model, other, image(), sites="conv2")
    assert result.ok
    assert [row.site for row in result] == ["conv2"]


@pytest.mark.parametrize("layer", ["layer1.0.conv1", "layer2.0.downsample.0", "layer2.1.bn2", "layer4.1.conv2", "fc"])
def test_the_changed_layer_of_a_resnet_is_named_before_its_parents_and_what_overwrites_it(layer: str) -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(weights=None, num_classes=10).eval()
    port = copy.deepcopy(model)
    with torch.no_grad():
        parameter = next(port.get_submodule(layer).parameters())
        parameter *= 1.2
    result = diff(model, port, torch.randn(1, 3, 64, 64))
    assert result.first is not None
    assert result.first.site == layer
    assert not result[""].ok


def frozen_outputs(model: nn.Module, case: zoo.Case) -> dict[tuple[str, int], Any]:
    """What bare hooks see of each call, frozen, in the order in which calls end; a shared module by its first name."""
    seen: dict[tuple[str, int], Any] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, output: seen.__setitem__(
            (name, sum(n == name for n, _ in seen)), oracle.freeze(output)
        )

    handles = [m.register_forward_hook(hook(n)) for n, m in model.named_modules()]
    torch.manual_seed(5)
    model(*case.args, **case.kwargs)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "torchvision_vit",
        "timm_convnext_atto",
        "timm_hrnet_w18_small",
        "transformers_gpt2",
        "transformers_mixtral",
        "transformers_t5",
        "transformers_albert",
    ],
)
@pytest.mark.parametrize("which", [0.2, 0.5, 0.9])
def test_the_first_divergence_of_a_real_model_is_the_one_that_bare_hooks_see(name: str, which: float) -> None:
    case, port, *spare = (zoo.ZOO[name]() for _ in range(4))
    inputs = Inputs(case.args, case.kwargs)
    torch.manual_seed(5)
    assert diff(case.model, port.model, inputs, rtol=0, atol=0).ok
    for model in (port.model, spare[1].model):
        parameters = list(model.parameters())
        with torch.no_grad():
            parameters[int(which * len(parameters))] += 0.3
    torch.manual_seed(5)
    first = diff(case.model, port.model, inputs, rtol=0, atol=0).first
    a, b = frozen_outputs(spare[0].model, case), frozen_outputs(spare[1].model, case)
    expected = next((key for key in a if key not in b or oracle.differences(a[key], b[key])), None)
    if expected is None:
        assert first is None
    else:
        assert first is not None
        assert first.site in (expected[0], f"{expected[0]}#{expected[1]}")


def test_the_wrong_block_of_a_gpt2_port_with_other_names_is_found_through_a_map() -> None:
    model = made("gpt2", n_layer=2, **ENDS)

    class Port(nn.Module):
        def __init__(self, original: Any) -> None:
            super().__init__()
            self.body, self.head = original.transformer, original.lm_head

        def forward(self, tokens: Tensor) -> Any:
            return self.head(self.body(tokens).last_hidden_state)

    port = Port(copy.deepcopy(model))
    tokens = torch.arange(6)[None]
    result = diff(model, port, {"input_ids": tokens}, inputs_b=tokens, names=_renamed)
    assert [row.site for row in result if not row.ok] == [""]
    assert result[""].status == "structure"
    with torch.no_grad():
        port.body.h[1].mlp.c_fc.bias += 0.1
    result = diff(model, port, {"input_ids": tokens}, inputs_b=tokens, names={"transformer": "body", "lm_head": "head"})
    assert result.first is not None
    assert (result.first.site, result.first.other) == ("transformer.h.1.mlp.c_fc", "body.h.1.mlp.c_fc")


def _renamed(path: str) -> str:
    return path.replace("transformer", "body").replace("lm_head", "head")


def test_bfloat16_is_within_its_tolerance_and_flagged_when_asked_strictly() -> None:
    model = net()
    half = copy.deepcopy(model).bfloat16()
    result = diff(model, half, image())
    assert result.ok, result
    assert result["conv"].dtype == "float32 / bfloat16"
    strict = diff(model, half, image(), rtol=1e-4)
    assert strict.first is not None
    assert strict.first.site == "conv"


def test_a_changed_layer_shows_through_bfloat16() -> None:
    model = net()
    half = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        half.conv2.bias += 1  # type: ignore[operator]
    first = diff(model, half, image()).first
    assert first is not None
    assert first.site == "conv2"


@pytest.mark.shows("Kinds of tensors: diff with a dynamically quantized model")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dynamic_quantization_is_named_at_its_first_layer_and_within_a_wider_tolerance() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    x = torch.randn(8, 16)
    result = diff(model, quantized, x)
    assert [row.site for row in result] == ["0", "1", "2", "3", ""]
    assert result.first is not None
    assert result.first.site == "1"
    assert diff(model, quantized, x, rtol=0.1).ok


@pytest.mark.parametrize(("layers", "first"), [(("bn", "drop"), "bn"), (("drop",), "drop")])
def test_train_against_eval_parts_at_the_first_layer_that_minds(layers: tuple[str, ...], first: str) -> None:
    model, training = net(), net()
    for layer in layers:
        training.get_submodule(layer).train()
    result = diff(model, training, image())
    assert result.first is not None
    assert result.first.site == first
    assert f"in training mode in B only: '{layers[0]}'" in str(result)


def test_everything_is_left_as_it_was() -> None:
    model, training = net(), net().train()
    training.conv.eval()
    x = image()
    kept, before = x.clone(), [oracle.freeze(dict(m.state_dict())) for m in (model, training)]
    modes = [[m.training for m in one.modules()] for one in (model, training)]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    diff(model, training, x)
    for was, one in zip(before, (model, training), strict=True):
        assert not oracle.differences(was, oracle.freeze(dict(one.state_dict())))
    assert modes == [[m.training for m in one.modules()] for one in (model, training)]
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in [*model.modules(), *training.modules()])
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1], states[2]) == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(x, kept)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_everything_is_left_as_it_was_whatever_the_models_do(training: bool, fails: bool) -> None:
    model, x = Restless(fails=False).train(training), torch.randn(3, 4, 8)
    other = copy.deepcopy(model)
    other.fails = fails
    kept, before = x.clone(), [oracle.snapshot(m, versions=False) for m in (model, other)]
    with pytest.raises(KeyError, match="mine") if fails else contextlib.nullcontext():
        assert diff(model, other, Inputs((x,), {"scale": 2.0}), rtol=0, atol=0).ok
    for was, one in zip(before, (model, other), strict=True):
        oracle.assert_same(was, oracle.snapshot(one, versions=False), "the models and the process")
    assert torch.equal(x, kept)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "both"])
def test_inputs_mean_the_same_as_everywhere(kind: str) -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
            return x * factor

    x = torch.ones(2)
    inputs = {"tensor": x, "tuple": (x, 3.0), "dict": {"factor": 3.0, "x": x}, "both": Inputs((x,), {"factor": 3.0})}
    other = nn.Sequential(Scales())
    result = diff(Scales(), other, inputs[kind], inputs_b=x, names={"(model)": "(model)"})
    assert result["(model)"] is result[""]
    assert result["(model)"].max_abs == (0.0 if kind == "tensor" else 1.0)


def test_the_model_itself_is_chosen_and_named_as_it_is_printed() -> None:
    model, wrapped = net(), nn.Sequential(net())
    for name in ("(model)", ""):
        result = diff(model, wrapped, image(), sites=name, names={name: "0"})
        assert [(row.site, row.other, row.status) for row in result] == [("", "0", "same")]
    result = diff(wrapped, model, image(), sites=["0", "(model):input"], names=lambda path: "(model)")
    assert [(row.site, row.other) for row in result] == [(":input", ":input"), ("0", "")]
    assert "(model):input" in str(result)
    assert result["(model):input"] is result[0]


def test_sites_that_b_does_not_have_are_named_with_the_way_out() -> None:
    with pytest.raises(MissingRecordError, match=r"B has none of the sites that were chosen in A: 'fc'.* names="):
        diff(net(), nn.Sequential(net()), image(), sites="fc")


def test_both_runs_draw_the_same_random_numbers() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x) * random.random() + float(np.random.rand())

    assert diff(Noisy().train(), Noisy().train(), torch.ones(4, 64), rtol=0, atol=0).ok


def test_an_in_place_first_layer_does_not_spoil_the_input_of_the_second_model() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Hardtanh(-0.5, 0.5, inplace=True))

    x = torch.tensor([[-3.0, 3.0]])
    assert diff(model(), model(), x, rtol=0, atol=0).ok
    assert x.tolist() == [[-3.0, 3.0]]
    assert diff(model(), nn.Sequential(nn.Identity(), nn.Identity()), x)["0"].max_abs == 3.0


def test_an_error_of_a_model_passes_and_leaves_nothing_behind() -> None:
    class Wrong(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.bn(self.conv(x))
            raise KeyError("mine")

    model, wrong = net().train(), Wrong()
    before = oracle.freeze(dict(model.state_dict())), oracle.freeze(dict(wrong.state_dict()))
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        diff(model, wrong, image())
    assert not oracle.differences(before[0], oracle.freeze(dict(model.state_dict())))
    assert not oracle.differences(before[1], oracle.freeze(dict(wrong.state_dict())))
    assert torch.equal(state, torch.get_rng_state())
    assert all(not m._forward_hooks for m in wrong.modules())


def test_models_of_another_layout_are_compared_where_they_meet() -> None:
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    b = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    result = diff(a, b, torch.ones(1, 4))
    assert [(row.site, row.status) for row in result] == [
        ("0", "differs"),
        ("1", "differs"),
        ("2", "shape"),
        ("3", "only in B"),
        ("", "differs"),
    ]


def test_sites_choose_inputs_and_operations_too() -> None:
    model, other = net(), net()
    with torch.no_grad():
        other.conv2.bias += 1  # type: ignore[operator]
    result = diff(model, other, image(), sites=["fc:input", "/mean", "conv"])
    assert [(row.site, row.ok) for row in result] == [("conv", True), ("/mean", False), ("fc:input", False)]
    result = diff(model, other, image(), exclude=["conv2", "relu"])
    assert [row.site for row in result] == ["conv", "bn", "drop", "fc"]


def test_saved_recordings_of_two_models_name_the_changed_layer(tmp_path: Path) -> None:
    model, port = net(), net()
    with torch.no_grad():
        port.conv2.bias += 1  # type: ignore[operator]
    paths = []
    for name, one in (("a", model), ("b", port)):
        with capture(one) as rec:
            one(image())
        paths.append(rec.save(tmp_path / f"{name}.safetensors"))
    first = diff(*map(load, paths)).first
    assert first is not None
    assert first.site == "conv2"


def test_gradients_are_compared_through_recordings() -> None:
    grads = []
    for factor in (1.0, 2.0):
        model = net()
        with capture(model, "conv2:grad", "fc:grad") as rec:
            (model(image()) * factor).sum().backward()
        grads.append(rec)
    result = diff(*grads)
    assert [row.site for row in result] == ["fc:grad", "conv2:grad"]
    assert result["conv2:grad"].relative == pytest.approx(1.0)


def test_wrong_arguments_are_refused() -> None:
    model = net()
    with capture(model, "fc") as rec:
        model(image())
    with pytest.raises(TypeError, match="needs inputs"):
        diff(model, model)
    with pytest.raises(TypeError, match=r"A is a list: diff compares models, exported programs"):
        diff([rec], model, image())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"B is a int"):
        diff(model, 3, image())  # type: ignore[arg-type]
    for sides in ((rec, model), (model, rec)):
        with pytest.raises(TypeError, match="needs inputs"):
            diff(*sides)
        with pytest.raises(TypeError, match=r"local=True .* needs two models"):
            diff(*sides, image(), local=True)
    with pytest.raises(TypeError, match="inputs_b is for a model B"):
        diff(model, rec, image(), inputs_b=image())
    with pytest.raises(TypeError, match="A holds values only"):
        diff(rec, model, image(), sites="fc")
    with pytest.raises(TypeError, match="nothing runs"):
        diff(rec, rec, image())

"""``local=True``: each row shows what one module alone adds. The oracle runs B's modules by hand on A's inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.diff.nets import image, net
from tests.language_models import ENDS, made
from torchhook._diff.api import diff


def chain(*factors: float) -> nn.Sequential:
    """Each layer multiplies by a number."""
    layers = [nn.Linear(1, 1, bias=False) for _ in factors]
    with torch.no_grad():
        for layer, factor in zip(layers, factors, strict=True):
            layer.weight.fill_(factor)
    return nn.Sequential(*layers)


def test_errors_do_not_add_up() -> None:
    a, b = chain(2.0, 2.0, 2.0), chain(2.1, 2.0, 2.2)
    x = torch.ones(1, 1)
    whole = diff(a, b, x)
    # 2.1 - 2; then 2 * that; then 2.1 * 2 * 2.2 - 8.
    assert [whole[name].max_abs for name in "012"] == pytest.approx([0.1, 0.2, 1.24], abs=1e-5)
    local = diff(a, b, x, local=True)
    # 2.1 - 2; nothing, from the same input 2; 4 * 2.2 - 8.
    assert [local[name].max_abs for name in "012"] == pytest.approx([0.1, 0.0, 0.8], abs=1e-5)
    assert [local[name].status for name in "012"] == ["differs", "same", "differs"]
    assert str(local).splitlines()[-2].startswith("local: each module of B ran on the inputs")


def inputs_seen(model: nn.Module, *args: Any) -> dict[str, list[Tensor]]:
    """What bare hooks see of each leaf's input."""
    seen: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_pre_hook(lambda m, args, n=name: seen.setdefault(n, []).append(args[0].clone()))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    model(*args)
    for handle in handles:
        handle.remove()
    return seen


def test_each_row_is_the_module_of_b_on_the_input_that_bare_hooks_see_in_a() -> None:
    a, b = net(), net()
    with torch.no_grad():
        for parameter in b.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    result = diff(a, b, image(), local=True, rtol=0, atol=0)
    for name, calls in inputs_seen(a, image()).items():
        for call, x in enumerate(calls):
            expected = (a.get_submodule(name)(x.clone()) - b.get_submodule(name)(x.clone())).abs().max().item()
            row = result[name if len(calls) == 1 else f"{name}#{call}"]
            assert row.max_abs == pytest.approx(expected, rel=1e-5, abs=1e-7)
    for name in ("relu#0", "relu#1", "drop"):
        assert result[name].max_abs == 0


def test_lower_precision_shows_its_own_error_only() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(8)]
    a = nn.Sequential(*layers).eval()
    b = copy.deepcopy(a).bfloat16()
    x = torch.randn(4, 16)
    whole, local = diff(a, b, x), diff(a, b, x, local=True)
    # The input of each layer rounded once, its weights, and the result.
    for name, inputs in inputs_seen(a, x).items():
        expected = a.get_submodule(name)(inputs[0]) - b.get_submodule(name)(inputs[0].bfloat16()).float()
        assert local[name].max_abs == pytest.approx(expected.abs().max().item(), rel=1e-5)
    assert local["7"].sqnr > whole["7"].sqnr


def test_names_and_calls_lead_to_the_counterpart() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.PReLU(init=0.5)
            self.fc = nn.Linear(1, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.fc(self.act(x)))

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act1, self.act2 = nn.PReLU(init=0.25), nn.PReLU(init=0.75)
            self.head = nn.Linear(1, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.act2(self.head(self.act1(x)))

    a, b = One(), Other()
    with torch.no_grad():
        a.fc.weight.fill_(3.0)
        b.head.weight.fill_(3.0)
    names = {"act#0": "act1", "act#1": "act2", "fc": "head"}
    result = diff(a, b, torch.tensor([[-4.0]]), names=names, local=True)
    # In A: -4 * 0.5 = -2, times 3 is -6, times 0.5 is -3. In B, from the same inputs: -1, -6, -4.5; the code
    # around them adds nothing.
    assert [(row.site, row.max_abs) for row in result] == [("act#0", 1.0), ("fc", 0.0), ("act#1", 1.5), ("", 0.0)]
    # By itself, B makes -1, -3, -2.25.
    assert result[""].note == "B by itself: max error 7.50e-01"


def test_an_input_of_another_shape_stays_bs_own_and_is_said() -> None:
    class Wider(nn.Sequential):
        pass

    a = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    b = Wider(nn.Linear(2, 4), nn.Linear(4, 2))
    result = diff(a, b, torch.ones(1, 2), local=True)
    assert "on its own input: (1, 3) in A, (1, 4) in B" in result["1"].note
    assert result["0"].note == "(1, 3) in A, (1, 4) in B"


def test_what_comes_in_is_compared_before_it_is_replaced() -> None:
    class Shifted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x) + 1.0)

    a, b = chain(2.0, 2.0), Shifted(*chain(3.0, 2.0))
    result = diff(a, b, torch.ones(1, 1), sites=["1:input", "1"], local=True)
    # What the code around it makes of 2, which the first layer gave back in A.
    assert [(row.site, row.max_abs) for row in result] == [("1:input", 1.0), ("1", 0.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_modules_get_quantized_inputs() -> None:
    """Static quantization: the inputs of A are floats, those of B integers with a scale."""
    torch.manual_seed(0)

    class Quantizable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
            self.fc, self.relu = nn.Linear(8, 8), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.relu(self.fc(self.quant(x))))

    model: Any = Quantizable().eval()
    prepared = copy.deepcopy(model)
    prepared.qconfig = torch.ao.quantization.get_default_qconfig("onednn")
    torch.ao.quantization.prepare(prepared, inplace=True)
    x = torch.randn(16, 8)
    prepared(x)
    quantized = torch.ao.quantization.convert(prepared)
    result = diff(model, quantized, x, local=True)
    inner = result["fc"]
    assert inner.dtype == "float32 / quint8"
    y = quantized.quant(x)
    expected = (model.fc(x) - quantized.fc(y).dequantize()).abs().max().item()
    assert inner.max_abs == pytest.approx(expected, rel=1e-4)
    # The linear layer is A's exactly, so what the ReLU adds is the rounding of its input alone.
    scale = quantized.fc.scale
    assert result["relu"].max_abs <= scale / 2 + 1e-6


def test_a_program_is_fed_too() -> None:
    a, b = chain(2.0, 2.0, 2.0), chain(2.5, 2.0, 2.0)
    program = torch.export.export(b, (torch.ones(1, 1),), strict=False)
    result = diff(a, program, torch.ones(1, 1), local=True)
    assert [result[name].max_abs for name in "012"] == [0.5, 0.0, 0.0]


def test_one_layer_of_a_language_model_is_all_that_differs() -> None:
    """With caches and keyword arguments: all other layers, and the blocks around it, return what those of A do."""
    model = made("gpt2", **ENDS)
    port = copy.deepcopy(model)
    with torch.no_grad():
        port.transformer.h[1].mlp.c_fc.bias += 0.25
    inputs = {"input_ids": torch.arange(6)[None]}
    assert sum(not row.ok for row in diff(model, port, inputs)) > 20
    local = diff(model, port, inputs, local=True, rtol=0, atol=1e-6)
    assert [row.site for row in local if not row.ok] == ["transformer.h.1.mlp.c_fc"]
    assert local["transformer.h.1.mlp.c_fc"].max_abs == pytest.approx(0.25, abs=1e-6)


def test_the_models_are_left_as_they_were() -> None:
    a, b = net(), net().train()
    before = copy.deepcopy(b.state_dict())
    diff(a, b, image(), local=True)
    assert all(torch.equal(value, before[name]) for name, value in b.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for one in (a, b) for m in one.modules())


@pytest.mark.filterwarnings("ignore")  # torch says that it will change these
def test_nested_tensors_without_a_shape_are_fed() -> None:
    a = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[0].bias += 1
    found = diff(a, b, torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(5, 4)]), local=True)
    assert [row.site for row in found if not row.ok] == ["0"]

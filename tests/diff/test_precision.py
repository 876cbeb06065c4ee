"""What 16-bit floats may make of a model: sound copies pass, and a layer with a wrong scale does not.

The oracle of the tolerance is what bare PyTorch makes of one layer in that dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.language_models import ENDS, made
from torchhook._diff.api import diff
from torchhook._recording.differences import Diff

HALVES = [torch.bfloat16, torch.float16]


def _vision(name: str, **options: Any) -> tuple[nn.Module, Any]:
    import torchvision

    return getattr(torchvision.models, name)(weights=None, **options), torch.randn(2, 3, 64, 64)


def _vit() -> tuple[nn.Module, Any]:
    from torchvision.models import VisionTransformer

    return VisionTransformer(64, 16, 3, 4, 64, 128), torch.randn(2, 3, 64, 64)


def _language(family: str) -> tuple[nn.Module, Any]:
    return made(family, **ENDS), {"input_ids": torch.arange(12).reshape(2, 6)}


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], str]] = {
    "resnet18": (lambda: _vision("resnet18"), "layer2.1.conv1"),
    "squeezenet": (lambda: _vision("squeezenet1_1"), "features.6.squeeze"),
    "mobilenet": (lambda: _vision("mobilenet_v2"), "features.2.conv.0.0"),
    "vit": (_vit, "encoder.layers.encoder_layer_1.mlp.0"),
    "gpt2": (lambda: _language("gpt2"), "transformer.h.1.mlp.c_fc"),
    "llama": (lambda: _language("llama"), "model.layers.1.mlp.up_proj"),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Any, str]:
    torch.manual_seed(0)
    make, layer = MODELS[request.param]
    model, inputs = make()
    return model.eval(), inputs, layer


def scaled(model: nn.Module, layer: str, factor: float) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule(layer).weight *= factor  # type: ignore[operator]
    return other


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_sound_copy_passes(case: tuple[nn.Module, Any, str], dtype: torch.dtype, local: bool) -> None:
    model, inputs, _ = case
    found = diff(model, copy.deepcopy(model).to(dtype), inputs, local=local)
    assert found.ok, found


@pytest.mark.parametrize("factor", [1.15, 1.03])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_wrong_scale_is_the_one_layer_that_differs_alone(
    case: tuple[nn.Module, Any, str], dtype: torch.dtype, factor: float
) -> None:
    model, inputs, layer = case
    found = diff(model, scaled(model, layer, factor).to(dtype), inputs, local=True)
    assert [row.site for row in found if not row.ok] == [layer]


def test_a_wrong_scale_is_found_although_errors_add_up(case: tuple[nn.Module, Any, str]) -> None:
    model, inputs, layer = case
    found = diff(model, scaled(model, layer, 1.15).bfloat16(), inputs)
    assert found.first is not None
    assert found.first.site == layer


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("length", [16, 1024, 16384])
def test_the_error_of_a_layer_does_not_grow_with_the_length_of_its_sums(dtype: torch.dtype, length: int) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(length, 32), torch.randn(64, length)
    right, rounded = layer(x), copy.deepcopy(layer).to(dtype)(x.to(dtype)).float()
    eps = torch.finfo(dtype).eps
    assert (right - rounded).norm() < 0.6 * eps * right.norm()
    found = diff(layer, copy.deepcopy(layer).to(dtype), x, local=True)
    assert found.ok
    assert found[""].rtol == pytest.approx(10 * eps)
    assert found[""].whole == pytest.approx(10 * eps / 3)


def test_a_wrong_scale_of_small_values_is_found_too() -> None:
    """bfloat16 has the range of float32: what is small is as exact as what is large."""
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64, bias=False), 1e-4 * torch.randn(16, 64)
    assert diff(model, copy.deepcopy(model).bfloat16(), x, local=True).ok
    assert not diff(model, scaled(model, "", 1.15).bfloat16(), x, local=True).ok
    assert diff(model, scaled(model, "", 1.15).bfloat16(), x, local=True, atol=1e-4).ok
    # Below what float16 can tell apart, 2**-24, there is nothing to be wrong about.
    assert diff(model, copy.deepcopy(model).half(), 1e-4 * x, local=True).ok


class Functional(nn.Module):
    """Many layers in the code of one module."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.randn(64, 64) / 6) for _ in range(count)]
        for place, weight in enumerate(self.weights):
            self.register_parameter(f"w{place}", weight)

    def forward(self, x: Tensor) -> Tensor:
        for place in range(len(self.weights)):
            x = F.gelu(F.linear(x, getattr(self, f"w{place}")))
        return x


def test_one_module_with_the_matrices_of_many_layers_may_err_as_these_do_together() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Functional(4), Functional(400))
    eps = torch.finfo(torch.bfloat16).eps
    found = diff(model, copy.deepcopy(model).bfloat16(), torch.randn(8, 64), local=True)
    assert [found[name].rtol for name in "01"] == pytest.approx([10 * eps, 20 * eps])
    assert found["2"].rtol == 0.2  # as for whole models
    assert "tolerated at 1: " in str(found)


def test_tolerances_that_were_asked_for_stand_alone() -> None:
    model = nn.Linear(8, 8)
    half = scaled(model, "", 1.15).bfloat16()
    x = torch.randn(4, 8)
    for rtol in (0.5, {torch.bfloat16: 0.5}):
        for local in (False, True):
            row = diff(model, half, x, rtol=rtol, local=local)[""]
            assert (row.ok, row.rtol, row.whole) == (True, 0.5, float("inf"))
    assert diff(model, half, x, rtol={torch.float16: 0.5})[""].rtol == 0.2


def test_the_headline_says_what_was_tolerated_and_where_the_largest_error_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(4, 8)

    def head(found: Diff) -> str:
        return str(found).splitlines()[0]

    found = diff(model, copy.deepcopy(model).bfloat16(), x)
    largest = max(found, key=lambda row: row.relative)
    assert head(found) == (
        "Diff of Sequential and Sequential: 4 sites, all within the tolerance of bfloat16 (0.2), "
        f"the largest error {largest.relative:.2e} at {largest.site}"
    )
    assert "all within the tolerance of bfloat16 (0.078125)" in head(
        diff(model, copy.deepcopy(model).bfloat16(), x, local=True)
    )
    assert head(diff(model, copy.deepcopy(model), x)).endswith("4 sites, all the same")
    nearly = diff(model, scaled(model, "0", 1 + 1e-6), x)
    assert "all within the tolerance of float32 (0.0001), the largest error" in head(nearly)


def test_an_error_that_is_as_large_everywhere_is_no_rounding() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64), torch.randn(16, 64)
    row = diff(model, scaled(model, "", 1.15).bfloat16(), x, rtol=None)[""]
    assert row.status == "differs"
    assert row.mismatches == 0
    assert "as a whole, more than rounding makes" in row.note
    assert row.relative > row.whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_masks_of_a_wider_dtype_are_masks_in_the_narrower_one(kind: str, dtype: torch.dtype) -> None:
    model = made(kind, attn_implementation="eager").eval()
    found = diff(model, copy.deepcopy(model).to(dtype), torch.arange(1, 9)[None], local=True)
    assert found.ok, found

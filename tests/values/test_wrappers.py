"""Tensors that are more than their memory: plain numbers from them, and theirs made again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.bias import causal_upper_left

from tests.values.wrapped import Closed, Halved, Tagged, Wrapped
from torchhook._capture import run
from torchhook._diff.api import diff
from torchhook._guard.api import guard
from torchhook._recording.records import load
from torchhook._report.api import report
from torchhook._values.elements import flatten, measurable, readable
from torchhook._values.loaded import Opaque
from torchhook._values.moments import norm
from torchhook._values.wrappers import is_fake, is_wrapper, like, plain
from torchhook._watch.api import watch

NUMBERS = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


def fake(value: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(value)


def quantized(value: Tensor, scale: float = 0.1, zero: int = 10, dtype: torch.dtype = torch.quint8) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantized tensors will go
        return torch.quantize_per_tensor(value, scale, zero, dtype)


def by_channel(value: Tensor, axis: int = 0) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        size = value.shape[axis]
        scales, zeros = torch.arange(1, size + 1) * 0.05, torch.arange(size)
        return torch.quantize_per_channel(value, scales, zeros, axis, torch.qint8)


# -- to plain numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (NUMBERS, NUMBERS),
        (NUMBERS.as_subclass(Tagged), NUMBERS),  # type: ignore[arg-type]
        (nn.Parameter(NUMBERS), NUMBERS),
        (Wrapped(NUMBERS), NUMBERS),
        (Wrapped(NUMBERS.double()), NUMBERS.double()),
        (Wrapped(NUMBERS.long()), NUMBERS.long()),
        (nn.Parameter(Wrapped(NUMBERS)), NUMBERS),
        (Halved(NUMBERS), NUMBERS * 2),
        (Wrapped(Wrapped(NUMBERS)), NUMBERS),
    ],
    ids=["tensor", "tagged", "parameter", "wrapped", "double", "long", "wrapped parameter", "halved", "twice"],
)
def test_the_numbers_are_those_that_a_tensor_stands_for(tensor: Tensor, expected: Tensor) -> None:
    found = plain(tensor)
    assert type(found) in (Tensor, nn.Parameter)
    assert found is not None
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype
    assert readable(tensor)
    assert measurable(tensor)
    assert flatten(tensor).tolist() == expected.reshape(-1).tolist()
    assert norm(tensor).item() == pytest.approx(expected.double().norm().item())


@pytest.mark.parametrize("tensor", [Closed(NUMBERS), NUMBERS.to("meta"), fake(NUMBERS)], ids=["closed", "meta", "fake"])
def test_what_has_no_numbers_is_not_read(tensor: Tensor) -> None:
    assert plain(tensor) is None
    assert not readable(tensor)
    assert not measurable(tensor)


def test_a_causal_bias_has_no_numbers_but_those_that_it_means(tmp_path: Path) -> None:
    """Its memory is as it was found, and its shape begins with the number of its kind."""

    class Attends(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, attn_mask=causal_upper_left(5, 5))

    bias = causal_upper_left(5, 5)
    assert plain(bias) is None
    assert not readable(bias)
    assert not measurable(bias)
    site = "(model)/scaled_dot_product_attention:input"
    _, rec = run(Attends(), torch.ones(1, 2, 5, 4), capture=site)
    read = load(rec.save(tmp_path / "rec.safetensors"))[site].kwargs["attn_mask"]
    assert type(read) is Tensor
    assert torch.equal(read, torch.ones(5, 5, dtype=torch.bool).tril())


def test_fakes_and_wrappers_are_known() -> None:
    assert [is_fake(t) for t in (NUMBERS, fake(NUMBERS), NUMBERS.to("meta"), Wrapped(NUMBERS))] == [
        False,
        True,
        True,
        False,
    ]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    kinds = (NUMBERS, nn.Parameter(NUMBERS), NUMBERS.as_subclass(Tagged), Wrapped(NUMBERS), nested)  # type: ignore[arg-type]
    assert [is_wrapper(t) for t in kinds] == [False, False, False, True, False]


def test_memory_is_shared_where_a_tensor_has_its_own() -> None:
    tagged = NUMBERS.clone().as_subclass(Tagged)  # type: ignore[arg-type]
    found = plain(tagged)
    assert found is not None
    assert found.data_ptr() == tagged.data_ptr()


# -- and back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32])
def test_numbers_are_quantized_as_torch_does_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    new, old = torch.randn(64, 3) * 9, quantized(torch.zeros(64, 3), 0.07, 3, dtype)
    expected = quantized(new, 0.07, 3, dtype)
    found = like(new, old)
    assert torch.equal(found.int_repr(), expected.int_repr())
    assert (found.q_scale(), found.q_zero_point(), found.dtype) == (0.07, 3, dtype)


@pytest.mark.parametrize("axis", [0, 1])
def test_numbers_are_quantized_channel_by_channel(axis: int) -> None:
    torch.manual_seed(0)
    new = torch.randn(4, 5) * 3
    found = like(new, by_channel(torch.zeros(4, 5), axis))
    assert torch.equal(found.int_repr(), by_channel(new, axis).int_repr())
    assert found.q_per_channel_axis() == axis


def test_a_wrapper_is_filled_where_it_lets_one() -> None:
    old = Wrapped(torch.zeros(2, 2))
    found = like(NUMBERS, old)
    assert isinstance(found, Wrapped)
    assert torch.equal(found.inner, NUMBERS)
    assert old.inner.tolist() == [[0, 0], [0, 0]]
    assert torch.equal(like(NUMBERS, Halved(NUMBERS)), NUMBERS)


def test_what_is_made_is_a_copy() -> None:
    new = NUMBERS.clone()
    found = like(new, torch.zeros(2, 2))
    new.zero_()
    assert torch.equal(found, NUMBERS)


# -- all who read values ---------------------------------------------------------------------------------


def model_of(kind: Any) -> nn.Sequential:
    """Weights of a kind, around numbers that are known."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(kind(NUMBERS.clone()), requires_grad=False)
    return model


@pytest.mark.shows("Kinds of tensors: subclasses that wrap others, captured and saved")
@pytest.mark.parametrize("kind", [Wrapped, Halved, Tagged])
def test_weights_of_a_subclass_are_captured_and_saved(kind: Any, tmp_path: Path) -> None:
    weight = kind(NUMBERS.clone()) if kind is not Tagged else NUMBERS.clone().as_subclass(Tagged)  # type: ignore[arg-type]

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    _, rec = run(Holds(), torch.ones(2), capture="weight")
    found = load(rec.save(tmp_path / "a.safetensors"))["weight"]
    assert type(found) is Tensor
    assert torch.equal(found, NUMBERS * 2 if kind is Halved else NUMBERS)


def test_a_subclass_that_tells_nobody_is_saved_as_what_it_is_called(tmp_path: Path) -> None:
    class Holds(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, Closed(x)

    _, rec = run(Holds(), NUMBERS, capture="(model)")
    found = load(rec.save(tmp_path / "a.safetensors"))[""]
    assert torch.equal(found[0], NUMBERS)
    assert isinstance(found[1], Opaque)
    assert found[1].kind.endswith("wrapped.Closed")


@pytest.mark.shows("Kinds of tensors: subclasses that wrap others, in every tool")
def test_values_of_a_subclass_are_watched_reported_guarded_and_compared(tmp_path: Path) -> None:
    model, x = model_of(Wrapped), Wrapped(torch.tensor([[1.0, 1.0]]))
    # (1 - 2, 3 + 4) = (-1, 7): a mean of 3, and after the ReLU (0, 7) one zero of two.
    with watch(model) as w:
        model(x)
    assert w.last["0"]["mean"] == 3.0
    assert w.last["1"]["zeros"] == 0.5
    assert report(model, x, out=tmp_path / "a.html").exists()
    with guard(model, action="record") as g:
        model(x)
    assert g.findings == []
    ordinary = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    for layer in (ordinary[0], ordinary[2]):
        layer.weight = nn.Parameter(NUMBERS.clone())
    assert diff(ordinary, model, torch.ones(1, 2)).ok


def test_a_nan_in_a_subclass_is_found_by_the_guard() -> None:
    model = model_of(Wrapped)
    with guard(model, action="record") as g:
        model(Wrapped(torch.tensor([[1.0, float("nan")]])))
    assert "input" in str(g.findings[0])


@pytest.mark.shows("Kinds of tensors: fake tensors, in every tool")
def test_fake_tensors_pass_through_everything(tmp_path: Path) -> None:
    mode = FakeTensorMode()
    with mode:
        model, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)), torch.randn(5, 2)
    _, rec = run(model, x, capture=["0", "2"])
    assert load(rec.save(tmp_path / "a.safetensors"))["2"].shape == (5, 4)
    with watch(model) as w:
        model(x).sum().backward()
    assert "mean" not in w.last.get("0", {})
    assert report(model, x, out=tmp_path / "a.html").exists()
    result = diff(model, model, x)
    assert result.ok
    assert result["2"].note == "without numbers: only the shape was compared"
    with guard(model):
        model(x)


# -- torchao ---------------------------------------------------------------------------------------------------


@pytest.mark.shows("Kinds of tensors: weights of torchao")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_weights_of_torchao_are_read_as_what_they_stand_for(config: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()
    before = model[0].weight.detach().clone()
    quantization.quantize_(model, getattr(quantization, config)())
    expected = model[0].weight.dequantize()
    assert type(expected) is Tensor
    assert (expected - before).norm() / before.norm() < 0.02
    x = torch.randn(8, 64)
    _, rec = run(model, x, capture=["0", "0.weight"])
    assert torch.equal(load(rec.save(tmp_path / "a.safetensors"))["0.weight"], expected)
    assert report(model, x, out=tmp_path / "a.html").exists()
    with watch(model, "0.weight") as w:
        model(x)
    assert w.last["0.weight"]["norm"] == pytest.approx(expected.norm().item(), rel=1e-5)

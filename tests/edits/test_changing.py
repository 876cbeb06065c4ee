"""Edits of tensors that are more than their memory: quantized, fake, wrapped. The oracle is torch's own arithmetic."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchhook as th
from tests.values.wrapped import Wrapped
from torchhook import edits
from torchhook._capture import run
from torchhook.errors import EditError

SCALE, ZERO = 0.05, 20
VECTOR = torch.tensor([1.0, -1.0, 0.5])


def quantized(value: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantized tensors will go
        return torch.quantize_per_tensor(value, SCALE, ZERO, torch.quint8)


class Quantized(nn.Module):
    """Returns a quantized tensor, and what it stands for after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = nn.Identity()
        self.after = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.quant(quantized(x)).dequantize())


X = torch.tensor([[0.5, 2.0, -0.7], [1.5, 0.0, 3.0]])

CASES: list[tuple[Any, Any]] = [
    (edits.zero(), lambda x: x * 0),
    (edits.scale(2), lambda x: x * 2),
    (edits.add(VECTOR), lambda x: x + VECTOR),
    (edits.add(0.5), lambda x: x + 0.5),
    (edits.clamp(0, 1), lambda x: x.clamp(0, 1)),
    (edits.mean(), lambda x: x.mean(0, keepdim=True).expand_as(x)),
    (edits.replace(0.25), lambda x: torch.full_like(x, 0.25)),
    (edits.replace(VECTOR), lambda x: VECTOR.expand_as(x)),
]


@pytest.mark.parametrize(("edit", "change"), CASES, ids=[repr(edit) for edit, _ in CASES])
def test_a_quantized_value_is_changed_in_what_it_stands_for(edit: Any, change: Any) -> None:
    found, rec = run(Quantized(), X, capture="quant", edit={"quant": edit})
    expected = quantized(change(quantized(X).dequantize()))
    assert torch.equal(rec["quant"].int_repr(), expected.int_repr())
    assert (rec["quant"].q_scale(), rec["quant"].q_zero_point()) == (SCALE, ZERO)
    assert torch.equal(found, expected.dequantize())


def test_noise_on_a_quantized_value_is_that_on_a_plain_one() -> None:
    found, _ = run(Quantized(), X, edit={"quant": edits.noise(0.5, seed=3)})

    class Plain(Quantized):
        def forward(self, x: Tensor) -> Tensor:
            return self.quant(quantized(x).dequantize())

    expected, _ = run(Plain(), X, edit={"quant": edits.noise(0.5, seed=3)})
    assert torch.equal(found, quantized(expected).dequantize())
    assert not torch.equal(found, quantized(X).dequantize())


def test_recorded_values_are_patched_into_quantized_ones() -> None:
    _, source = run(Quantized(), X + 1, capture=["quant", "after"])
    whole, _ = run(Quantized(), X, edit={"quant": edits.patch(source)})
    assert torch.equal(whole, quantized(X + 1).dequantize())
    some, _ = run(Quantized(), X, edit={"quant": edits.patch(source, positions=[1])})
    expected = quantized(X).dequantize()
    expected[:, 1] = quantized(X + 1).dequantize()[:, 1]
    assert torch.equal(some, expected)
    floats, _ = run(Quantized(), X, edit={"quant": edits.patch(source, source="after")})
    assert torch.equal(floats, whole)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_layer_of_a_statically_quantized_model_is_ablated() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        torch.ao.quantization.QuantStub(), nn.Linear(4, 4), nn.Linear(4, 2), torch.ao.quantization.DeQuantStub()
    ).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig("onednn")
    torch.ao.quantization.prepare(model, inplace=True)
    x = torch.randn(16, 4)
    model(x)
    torch.ao.quantization.convert(model, inplace=True)
    found, _ = run(model, x, edit={"1": edits.zero()})
    middle = model[1](model[0](x))
    nothing = torch.quantize_per_tensor(torch.zeros(16, 4), middle.q_scale(), middle.q_zero_point(), middle.dtype)
    assert torch.equal(found, model[3](model[2](nothing)))


EVERY = [edit for edit, _ in CASES] + [edits.noise(1.0)]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("edit", EVERY, ids=repr)
def test_edits_of_fake_tensors_keep_shapes(edit: Any, inside: bool) -> None:
    mode = FakeTensorMode()
    with mode:
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(5, 3)
        if inside:
            assert run(model, x, edit={"0": edit})[0].shape == (5, 2)
            return
    found, _ = run(model, x, edit={"0": edit})
    assert (found.shape, type(found).__name__) == ((5, 2), "FakeTensor")


def test_fake_tensors_are_patched() -> None:
    with FakeTensorMode():
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(5, 3)
    _, rec = run(model, x, capture="0")
    for edit in (edits.patch(rec), edits.patch(rec, positions=[0, 2]), edits.patch(rec, positions=1)):
        assert run(model, x, edit={"0": edit})[0].shape == (5, 2)


@pytest.mark.parametrize(("edit", "change"), CASES, ids=[repr(edit) for edit, _ in CASES])
def test_a_wrapped_value_is_changed_as_a_plain_one(edit: Any, change: Any) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    found, _ = run(model, Wrapped(X), edit={"0": edit})
    assert isinstance(found, Wrapped)
    assert torch.equal(found.inner, change(X))


@pytest.mark.filterwarnings("ignore")  # torch says that it will change these
@pytest.mark.parametrize(
    ("edit", "by_hand"),
    [
        (edits.add(torch.arange(4.0)), lambda row: row + torch.arange(4.0)),
        (edits.scale(2.0), lambda row: row * 2),
        (edits.zero(), torch.zeros_like),
        (edits.clamp(0, 1), lambda row: row.clamp(0, 1)),
        (edits.replace(0.5), lambda row: torch.full_like(row, 0.5)),
        (lambda value: value * 2, lambda row: row * 2),
    ],
)
def test_the_rows_of_a_nested_tensor_that_has_no_shape_are_edited(edit: Any, by_hand: Any) -> None:
    # nn.TransformerEncoder makes one in eval mode, of a batch and its padding mask.
    rows = [torch.randn(2, 4), torch.randn(5, 4)]
    model = nn.Sequential(nn.Identity())
    with th.edit(model, {"0": edit}):
        found = model(torch.nested.nested_tensor(rows))
    for row, now in zip(rows, found.unbind(), strict=True):
        assert torch.equal(now, by_hand(row))


def jagged(rows: list[Tensor], kind: str) -> Tensor:
    if kind == "with room between":
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        starts, lengths = torch.zeros(len(rows), dtype=torch.int64), torch.tensor([len(row) for row in rows])
        return torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    made = torch.nested.nested_tensor(
        [row.mT for row in rows] if kind == "in the last dim" else rows, layout=torch.jagged
    )
    return made.transpose(1, 2) if kind == "in the last dim" else made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["packed", "with room between", "in the last dim"])
@pytest.mark.parametrize(
    ("edit", "by_hand"),
    [
        (edits.replace(0.5), lambda row: torch.full_like(row, 0.5)),
        (edits.replace(torch.arange(4.0)), lambda row: torch.arange(4.0).expand_as(row)),
        (edits.add(torch.arange(4.0)), lambda row: row + torch.arange(4.0)),
        (edits.zero(), torch.zeros_like),
    ],
)
def test_a_jagged_tensor_is_edited_row_by_row_and_stays_what_it_can_be_added_to(
    edit: Any, by_hand: Any, kind: str
) -> None:
    rows = [torch.randn(2, 4), torch.randn(5, 4)]

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.a(x)

    model = Residual()
    nested = jagged(rows, kind)
    if kind == "in the last dim":  # torch itself adds no vector to such a one
        edit, by_hand = edits.replace(2.0), lambda row: torch.full_like(row, 2.0)
    with th.edit(model, {"a": edit}):
        found = model(nested)
    for row, now in zip(rows, found.unbind(), strict=True):
        torch.testing.assert_close(now, row + by_hand(row))


@pytest.mark.filterwarnings("ignore")
def test_gradients_go_through_noise_on_a_jagged_tensor() -> None:
    rows = [torch.randn(2, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)]
    model = nn.Sequential(nn.Identity())
    noisy = []
    for layout in (torch.jagged, torch.strided):
        with th.edit(model, {"0": edits.noise(0.1, seed=3)}):
            noisy.append(model(torch.nested.as_nested_tensor(rows, layout=layout)))
    for one, two, row in zip(noisy[0].unbind(), noisy[1].unbind(), rows, strict=True):
        assert torch.equal(one, two)
        assert 0.03 < (one - row).std() < 0.3
    (noisy[0] * 3).values().sum().backward()
    assert all(torch.equal(row.grad, torch.full_like(row, 3.0)) for row in rows)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_takes_the_place_of_one_of_the_same_rows(layout: Any) -> None:
    old, new = ([torch.randn(n, 4) for n in (2, 5)] for _ in range(2))
    model = nn.Sequential(nn.Identity())
    with th.edit(model, {"0": edits.replace(torch.nested.nested_tensor(new, layout=layout))}):
        found = model(torch.nested.nested_tensor(old, layout=layout))
        assert all(torch.equal(a, b) for a, b in zip(found.unbind(), new, strict=True))
        with pytest.raises(
            EditError,
            match=r"0#1: the shape of what edits\.replace was given .*: expected \(2, 4\), found \(\(2, 4\), \(5",
        ):
            model(old[0])
        with pytest.raises(EditError, match=r"expected \(\(2, 4\),\), found \(\(2, 4\), \(5"):
            model(torch.nested.nested_tensor(old[:1], layout=layout))


def fewer(value: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([row[:1] for row in value.unbind()])


@pytest.mark.filterwarnings("ignore")
def test_edits_of_nested_tensors_that_make_no_sense_are_refused() -> None:
    nested, model = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(5, 4)]), nn.Sequential(nn.Identity())
    with pytest.raises(EditError, match="mean needs dims that all rows share"), th.edit(model, {"0": edits.mean()}):
        model(nested)
    with pytest.raises(EditError, match="changes the shape"), th.edit(model, {"0": fewer}):
        model(nested)
    _, rec = run(model, nested, capture="0")
    some = edits.patch(rec, positions=[0])
    with pytest.raises(EditError, match=r"patch with positions= or mask= needs dims"), th.edit(model, {"0": some}):
        model(nested)
    with (
        pytest.raises(EditError, match=r"shape of what edits\.add was given does not fit"),
        th.edit(model, {"0": edits.add(nested)}),
    ):
        model(nested)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_what_an_edit_is_given_is_cast_to_the_dtype_of_the_value(dtype: torch.dtype) -> None:
    model, x = nn.Linear(3, 3).half(), torch.ones(2, 3).half()
    direction = torch.tensor([1, 2, -4], dtype=dtype)
    expected = model(x) + torch.tensor([1.0, 2.0, -4.0]).half()
    with th.edit(model, {"": th.edits.add(direction)}):
        output = model(x)
    assert output.dtype == torch.float16
    assert torch.equal(output, expected)


def test_what_an_edit_is_given_and_does_not_fit_is_told_and_nothing_of_returning() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Embedding(3, 2))
    x, ids = torch.ones(2, 4), torch.tensor([0, 1])
    wide = torch.ones(3, 8)
    for edit, said in (
        (edits.add(torch.ones(5)), r"edits\.add was given does not fit .*: expected \(2, 8\), found \(5,\)"),
        (edits.replace(wide), r"edits\.replace was given does not fit .*: expected \(2, 8\), found \(3, 8\)"),
        (edits.only(edits.add(torch.ones(5)), rows=0), r"edits\.add was given .*: expected \(1, 8\), found \(5,\)"),
    ):
        with th.edit(model, {"0": edit}), pytest.raises(EditError, match=said) as caught:
            model[0](x)
        assert str(caught.value).startswith("0#0: the shape of what edits.")
        assert str(caught.value).endswith("Give one that broadcasts to it.")
    with th.edit(model, {"1:input": edits.replace(0.5)}):
        with pytest.raises(
            EditError, match=r"dtype of what edits\.replace .*expected torch\.int64, found torch\.float32"
        ):
            model[1](ids)


def test_a_patch_that_does_not_fit_speaks_of_the_recording() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8)), torch.ones(3, 4)
    _, rec = run(model, x, capture="0")
    for edit in (edits.patch(rec), edits.patch(rec, positions=0, dim=0)):
        with pytest.raises(EditError, match=r"expected \(2, 8\), found \(3, 8\)\. Patch with what was recorded"):
            run(model, x[:2], edit={"0": edit})

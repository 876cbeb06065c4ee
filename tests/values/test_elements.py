"""Reading tensors of every kind, against numpy and numbers that are plain to see."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from torchhook._values.elements import (
    can_cast,
    dense,
    dtype_name,
    flatten,
    floats,
    in_one_dim,
    measurable,
    readable,
    real,
)

FLOAT8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
SINGLE = ["float16", "bfloat16", "float32", *FLOAT8, "bool", "uint8", "int8", "int16", "uint16"]
DOUBLE = ["float64", "int32", "int64", "uint32", "uint64"]
PACKED = ["float4_e2m1fn_x2", "bits8", "int4", "uint3"]


def packed(name: str) -> Tensor:
    """A tensor of a dtype that torch turns into nothing else, where this torch has it."""
    if not hasattr(torch, name):
        pytest.skip(f"no {name} in this version of torch")
    return torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name))


@pytest.fixture
def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        return torch.nested.nested_tensor([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])


@pytest.mark.parametrize("name", SINGLE + DOUBLE)
def test_numbers_of_every_dtype_are_read_in_a_precision_that_holds_them(name: str) -> None:
    flat = flatten(torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to(getattr(torch, name)))
    assert flat.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert flat.dtype == (torch.float64 if name in DOUBLE else torch.float32)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(torch.int64, 2**53 - 1), (torch.uint32, 2**32 - 1), (torch.int32, -(2**31) + 1), (torch.uint16, 2**16 - 1)],
)
def test_large_integers_are_read_exactly(dtype: torch.dtype, number: int) -> None:
    assert flatten(torch.tensor([number], dtype=dtype)).item() == number


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.complex64, torch.float32), (torch.complex128, torch.float64)], ids=str
)
def test_complex_numbers_are_read_by_their_size(dtype: torch.dtype, expected: torch.dtype) -> None:
    flat = flatten(torch.tensor([[3 + 4j], [-5j]], dtype=dtype).conj())
    assert flat.tolist() == [5.0, 5.0]
    assert flat.dtype == expected


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_numbers_in_half_precision_are_computed_with_in_single() -> None:
    assert flatten(torch.tensor([3 + 4j]).to(torch.complex32)).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_numbers_are_what_they_stand_for() -> None:
    tensor = torch.quantize_per_tensor(torch.tensor([[0.5, -1.0]]), 0.25, 3, torch.qint8)
    assert flatten(tensor).tolist() == [0.5, -1.0]
    assert real(tensor).tolist() == dense(tensor).tolist() == [[0.5, -1.0]]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(1, 3),
        lambda x: x[:, ::2],
        lambda x: x[:1, :1].expand(2, 3, 5, 6),
        lambda x: x[0, 0, 0, 0],
        lambda x: x[:0],
    ],
    ids=["channels_last", "transposed", "stepped", "expanded", "one number", "empty"],
)
def test_every_element_is_read_once_whatever_its_place_in_memory(change: Callable[[Tensor], Tensor]) -> None:
    tensor = change(torch.randn(2, 4, 5, 6))
    flat = flatten(tensor)
    assert flat.dim() == 1
    np.testing.assert_array_equal(np.sort(flat.numpy()), np.sort(tensor.numpy(), axis=None))


def test_what_lies_in_one_piece_is_not_copied() -> None:
    x = torch.randn(2, 4, 5, 6)
    for tensor in (x, x.to(memory_format=torch.channels_last)):
        assert in_one_dim(tensor).data_ptr() == tensor.data_ptr()


def test_elements_have_no_graph() -> None:
    x = torch.randn(3, requires_grad=True)
    assert not flatten(x).requires_grad
    assert not dense(x).requires_grad
    found = floats(x)
    assert found is not None
    assert not found.requires_grad


def test_what_can_be_measured_has_elements_in_one_piece_of_memory(nested: Tensor) -> None:
    assert measurable(torch.ones(()))
    assert measurable(torch.nn.Parameter(torch.ones(2, 3)))
    for tensor in (torch.empty(0), torch.empty(3, device="meta"), torch.eye(3).to_sparse(), nested):
        assert not measurable(tensor)


def test_what_lies_elsewhere_is_not_readable() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    assert readable(torch.eye(3).to_sparse())
    assert not readable(torch.empty(3, device="meta"))
    assert not readable(freed)
    assert not measurable(freed)
    assert floats(freed) is None


@pytest.mark.parametrize("name", PACKED)
def test_packed_numbers_are_not_read(name: str) -> None:
    tensor = packed(name)
    assert not readable(tensor)
    assert not measurable(tensor)
    assert floats(tensor) is None


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_what_torch_computes_with_stays_as_it_is(name: str) -> None:
    tensor = torch.ones(2, dtype=getattr(torch, name))
    assert real(tensor) is tensor


@pytest.mark.parametrize("name", [*FLOAT8, "bool", "int64", "uint8"])
def test_what_torch_only_stores_becomes_single_precision(name: str) -> None:
    found = real(torch.tensor([[0.0, 1.0]]).to(getattr(torch, name)))
    assert found.dtype == torch.float32
    assert found.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_tensors_are_filled_up_to_be_drawn_and_checked_by_what_they_hold(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compressed layouts are in beta
        tensor = getattr(torch.tensor([[0.0, 2.0], [3.0, 0.0]]), kind)()
    assert dense(tensor).tolist() == [[0.0, 2.0], [3.0, 0.0]]
    found = floats(tensor)
    assert found is not None
    assert sorted(found.tolist()) == [2.0, 3.0]


def test_nested_tensors_are_padded_to_be_drawn_and_checked_by_what_they_hold(nested: Tensor) -> None:
    np.testing.assert_array_equal(dense(nested).numpy(), [[1.0, 2.0], [3.0, math.nan]])
    found = floats(nested)
    assert found is not None
    assert found.flatten().tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.int64), torch.ones(2) > 0, torch.empty(2, device="meta")])
def test_what_can_be_neither_nan_nor_inf_need_not_be_checked(tensor: Tensor) -> None:
    assert floats(tensor) is None


def test_what_is_behind_the_wrappers_of_a_function_transform_is_read() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(floats(x))
        return x

    torch.func.vmap(function)(torch.arange(3.0))
    assert [value.tolist() for value in seen if value is not None] == [[0.0, 1.0, 2.0]]


def test_dtypes_are_named_as_users_write_them() -> None:
    assert [dtype_name(d) for d in (torch.float32, torch.half, torch.bool)] == ["float32", "float16", "bool"]


def test_the_rule_for_compiled_code_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*SINGLE, *DOUBLE, "complex64", "complex128"]
    dtypes = [getattr(torch, name) for name in names if hasattr(torch, name)]
    monkeypatch.setattr("torchhook._torch.compiler.in_trace", lambda: True)
    assert [(a, b) for a in dtypes for b in dtypes if can_cast(a, b) != torch.can_cast(a, b)] == []

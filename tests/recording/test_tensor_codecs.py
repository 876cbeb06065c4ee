"""Every kind of tensor through a file and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.recording.round_trips import quietly, raw, round_trip
from torchhook._recording import saving
from torchhook._recording.tensor_codecs import parts
from torchhook._values.loaded import Opaque

EYE = torch.eye(4) * torch.arange(1.0, 5.0)


@pytest.mark.shows("Kinds of tensors: sparse ones in files")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_sparse_tensors_keep_layout_dtype_and_values(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    blocks = {"blocksize": (2, 2)} if "bs" in layout else {}
    value = quietly(lambda: EYE.to(dtype).to_sparse(layout=getattr(torch, layout), **blocks))
    found = quietly(lambda: round_trip(value, tmp_path))
    assert (found.layout, found.dtype, found.shape) == (value.layout, dtype, value.shape)
    assert torch.equal(found.to_dense(), value.to_dense())


def test_a_sparse_tensor_without_entries_or_with_dense_dims_keeps_its_shape(tmp_path: Path) -> None:
    nothing = torch.sparse_coo_tensor(torch.zeros(2, 0).long(), torch.zeros(0), (3, 4), check_invariants=True)
    hybrid = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 5), (3, 5), check_invariants=True)
    for value in (nothing, hybrid):
        found = round_trip(value, tmp_path)
        assert found.shape == value.shape
        assert torch.equal(found.to_dense(), value.to_dense())


def test_repeated_sparse_entries_still_add_up(tmp_path: Path) -> None:
    value = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (2,), check_invariants=True)
    found = round_trip(value, tmp_path)
    assert found._nnz() == 2
    assert found.to_dense().tolist() == [3, 0]


@pytest.mark.shows("Kinds of tensors: quantized ones in files")
@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32])
def test_quantized_tensors_keep_their_integers_and_scales(tmp_path: Path, dtype: torch.dtype) -> None:
    one = quietly(lambda: torch.quantize_per_tensor(EYE, 0.1, 3, dtype))
    each = quietly(
        lambda: torch.quantize_per_channel(EYE, torch.rand(4).double() + 0.1, torch.arange(4), 1, torch.qint8)
    )
    found = quietly(lambda: round_trip((one, each), tmp_path))
    for new, old in zip(found, (one, each), strict=True):
        assert new.dtype == old.dtype
        assert torch.equal(new.int_repr(), old.int_repr())
        assert torch.equal(new.dequantize(), old.dequantize())
    assert (found[0].q_scale(), found[0].q_zero_point()) == (0.1, 3)
    assert torch.equal(found[1].q_per_channel_scales(), each.q_per_channel_scales())
    assert torch.equal(found[1].q_per_channel_zero_points(), each.q_per_channel_zero_points())
    assert found[1].q_per_channel_axis() == 1


@pytest.mark.shows("Kinds of tensors: nested ones in files")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_keep_their_parts(tmp_path: Path, layout: torch.layout) -> None:
    parts = [torch.rand(2, 3), torch.rand(1, 3)]
    value = quietly(lambda: torch.nested.nested_tensor(parts, layout=layout))
    found = quietly(lambda: round_trip(value, tmp_path))
    assert found.is_nested
    assert found.layout == layout
    assert all(torch.equal(a, b) for a, b in zip(found.unbind(), parts, strict=True))


@pytest.mark.shows("Kinds of tensors: meta and fake ones in files")
def test_meta_and_fake_tensors_come_back_as_meta(tmp_path: Path) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2, 3, dtype=torch.float16)
    for value in (torch.empty(2, 3, dtype=torch.float16, device="meta"), fake):
        found = round_trip(value, tmp_path)
        assert (found.device.type, found.shape, found.dtype) == ("meta", (2, 3), torch.float16)


@pytest.mark.shows("Kinds of tensors: subclasses in files")
def test_parameters_and_subclasses_come_back_as_plain_tensors(tmp_path: Path) -> None:
    class Marked(Tensor):
        pass

    for value in (nn.Parameter(torch.rand(3)), torch.rand(3).as_subclass(Marked), torch.rand(3).requires_grad_() * 2):
        found = round_trip(value, tmp_path)
        assert type(found) is Tensor
        assert not found.requires_grad
        assert found.tolist() == value.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layout_of_the_machine_comes_back_with_the_same_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    value = EYE.to(dtype).to_mkldnn()
    found = round_trip(value, tmp_path)
    assert found.is_mkldnn
    assert found.dtype == dtype
    assert torch.equal(found.to_dense(), EYE.to(dtype))


def test_a_layout_that_the_reading_machine_lacks_comes_back_dense(tmp_path: Path, monkeypatch: Any) -> None:
    path = saving.save(tmp_path / "a", [EYE.to_mkldnn()], {})
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert torch.equal(saving.load(path)[0][0], EYE)


def test_a_copy_on_write_tensor_is_saved_without_ending_the_sharing(tmp_path: Path) -> None:
    source = torch.rand(1000)
    kept = torch._lazy_clone(source)
    assert torch.equal(round_trip(kept, tmp_path), source)


def test_the_numbers_of_other_layouts_are_listed_by_parts() -> None:
    value = EYE.to_sparse()
    assert [p.shape for p in parts(value)] == [(2, 4), (4,)]


DENSE = {
    "of no dims": torch.tensor(3.5),
    "empty": torch.empty(0, 3, dtype=torch.int16),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "strided": torch.arange(10)[::3],
    "from the middle of its memory": torch.arange(6).as_strided((3,), (2,), 1),
    "expanded": torch.ones(1, 3).expand(4, 3),
    "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negative view": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "with a gradient": torch.ones(2, requires_grad=True) * 2,
}


@pytest.mark.parametrize("value", DENSE.values(), ids=DENSE)
def test_a_dense_tensor_comes_back_with_its_values_however_it_lies_in_memory(tmp_path: Path, value: Tensor) -> None:
    found = round_trip(value, tmp_path)
    assert type(found) is Tensor
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert raw(found) == raw(value)


def test_complex_halves_come_back_to_the_bit(tmp_path: Path) -> None:
    value = quietly(lambda: torch.tensor([1 + 2j, -3.5j], dtype=torch.complex32))
    found = quietly(lambda: round_trip(value, tmp_path))
    assert found.dtype == torch.complex32
    assert torch.view_as_real(found).tolist() == [[1, 2], [0, -3.5]]


@pytest.mark.shows("Kinds of tensors: floats of eight bits in files")
@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"])
def test_floats_of_eight_bits_come_back_to_the_bit(tmp_path: Path, name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip("this torch has no such dtype")
    dtype = getattr(torch, name)
    value = torch.arange(256, dtype=torch.uint8).view(dtype)
    found = round_trip(value, tmp_path)
    assert found.dtype == dtype
    assert raw(found) == bytes(range(256))


def test_a_dtype_that_no_file_holds_leaves_its_name_and_shape(tmp_path: Path) -> None:
    value = torch.zeros(2, 3, dtype=torch.uint8).view(torch.bits8)
    assert round_trip([value], tmp_path) == [Opaque("torch.Tensor", "torch.bits8 of shape (2, 3)")]


def test_a_tensor_that_is_held_twice_is_written_once_and_comes_back_as_one(tmp_path: Path) -> None:
    held = torch.arange(100_000.0)
    found = round_trip((held, {"again": held}, held.clone()), tmp_path)
    assert found[0] is found[1]["again"]
    assert found[2] is not found[0]
    assert torch.equal(found[0], held)
    assert 800_000 < (tmp_path / "value.safetensors").stat().st_size < 900_000

"""Arrays of other programs: every kind of array becomes the tensor with its numbers, under the site that it names."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from tests.oracle import run_with_jax
from torchhook._recording import arrays
from torchhook._recording.records import Recording
from torchhook.errors import MissingRecordError, RecordingFileError


@pytest.mark.parametrize(
    "array",
    [
        np.array([1.5, -2.0], dtype=np.float32),
        np.array([1.5, -2.0], dtype=np.float16),
        np.array([1.5, -2.0], dtype=">f8"),
        np.array([-2.0, 1.5])[::-1],
        np.frombuffer(np.array([1.5, -2.0]).tobytes()),
        torch.tensor([1.5, -2.0]),
    ],
    ids=["float32", "float16", "big-endian", "reversed", "read-only", "tensor"],
)
def test_arrays_keep_their_numbers(array: Any) -> None:
    assert arrays.recording({"fc": array})["fc"].tolist() == [1.5, -2.0]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, np.uint32, np.int64, np.bool_, np.complex64])
def test_arrays_keep_their_dtype(dtype: Any) -> None:
    found = arrays.recording({"fc": np.array([0, 1], dtype=dtype)})["fc"]
    assert str(found.dtype).removeprefix("torch.") == np.dtype(dtype).name


def test_numbers_and_arrays_without_a_dimension_are_arrays_too() -> None:
    found = arrays.recording({"a": np.float32(2.5), "b": np.array(3)})
    assert (found["a"].item(), found["b"].item()) == (2.5, 3)


def test_what_is_kept_is_a_copy() -> None:
    array = np.zeros(2)
    found = arrays.recording({"fc": array})
    array[0] = 7
    assert found["fc"].tolist() == [0, 0]


class OnADevice:
    """As JAX's arrays and others: only the protocol is there."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def __dlpack__(self, **options: Any) -> Any:
        return self.numbers.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.numbers.__dlpack_device__()


class Runtime:
    """As ONNX Runtime's ``OrtValue``."""

    def numpy(self) -> Any:
        return np.array([4.0])


def test_arrays_of_other_libraries_come_by_their_protocols() -> None:
    values = {"a": OnADevice(torch.tensor([1.0, 2.0]).bfloat16()), "b": Runtime()}
    found = arrays.recording(values)
    assert found["a"].dtype == torch.bfloat16
    assert (found["a"].tolist(), found["b"].tolist()) == ([1.0, 2.0], [4.0])


def test_jax_arrays_keep_bfloat16() -> None:
    run_with_jax("""
        import jax, numpy, torch
        from torchhook._recording import arrays
        given = jax.numpy.array([1.0, 2.5], dtype=jax.numpy.bfloat16)
        found = arrays.recording({"x": given})["x"]
        assert (found.dtype, found.tolist()) == (torch.bfloat16, [1.0, 2.5])
        assert arrays.recording({"x": numpy.asarray(given)})["x"].tolist() == [1.0, 2.5]
    """)


def test_nested_values_keep_their_structure() -> None:
    found = arrays.recording({"lstm": (np.zeros(2), [np.ones(1), None])})["lstm"]
    assert [type(found), type(found[1]), found[1][1]] == [tuple, list, None]
    assert isinstance(found[1][0], torch.Tensor)


def test_keys_are_addresses_where_their_path_is_known_and_whole_names_otherwise() -> None:
    one = np.ones(1)
    keys = {"relu#1": one, "fc:input": one, "(model)": one, "/layer1/Conv_output_0": one, "a:input": one}
    found = arrays.recording(keys, known=["relu", "fc", ""])
    assert [site.parts for site in found.sites] == [
        ("relu", None, None, "output"),
        ("fc", None, None, "input"),
        ("", None, None, "output"),
        ("/layer1/Conv_output_0", None, None, "output"),
        ("a:input", None, None, "output"),
    ]
    assert found.records("relu")[0].call == 1


def test_what_is_no_array_is_refused_by_its_name() -> None:
    with pytest.raises(MissingRecordError, match=r"'fc' holds no array: expected .* found str"):
        arrays.recording({"fc": "weights"})
    with pytest.raises(TypeError, match=r"named by addresses, found the key 3"):
        arrays.recording({3: np.zeros(1)})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"'fc': an array of dtype object"):
        arrays.recording({"fc": np.array([None, {}])})
    if sys.platform == "linux":
        with pytest.raises(TypeError, match=r"'fc': an array of dtype float128 .*astype"):
            arrays.recording({"fc": np.zeros(2, dtype=np.longdouble)})


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_of_arrays_are_read(tmp_path: Path, suffix: str) -> None:
    path, values = tmp_path / f"a{suffix}", {"fc": np.array([1.0, 2.0], dtype=np.float32), "relu#1": np.ones(2)}
    if suffix == ".npz":
        np.savez(path, **values)
    else:
        safetensors.numpy.save_file(values, path)
    found = arrays.read(path, known=["fc", "relu"])
    assert found["fc"].tolist() == [1.0, 2.0]
    assert found["relu", 1].tolist() == [1.0, 1.0]


def test_a_recording_of_our_own_is_read_as_what_it_is(tmp_path: Path) -> None:
    made = Recording("Net")
    made.opened(arrays.Site("fc")).append((0, 0, (torch.ones(1), None)))
    found = arrays.read(made.save(tmp_path / "own.safetensors"))
    assert (found.model_name, found["fc"]) == ("Net", (torch.ones(1), None))


def test_files_that_cannot_be_read_are_named_with_the_reason(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", fc=np.array([None]))
    with pytest.raises(RecordingFileError, match=r"objects\.npz: 'fc' cannot be read without pickle"):
        arrays.read(tmp_path / "objects.npz")
    (tmp_path / "broken.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(RecordingFileError, match=r"broken\.safetensors is no safetensors file"):
        arrays.read(tmp_path / "broken.safetensors")
    with pytest.raises(RecordingFileError, match=r"a\.pkl is no file of arrays .* expected \.safetensors or \.npz"):
        arrays.read(tmp_path / "a.pkl")
    for name in ("none.npz", "none.safetensors"):
        with pytest.raises(FileNotFoundError, match="none"):
            arrays.read(tmp_path / name)


def test_what_is_no_archive_of_arrays_says_so(tmp_path: Path) -> None:
    one = io.BytesIO()
    np.save(one, np.ones(2))
    for content in (b"", b"text", b"PK\x03\x04 cut", one.getvalue()):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(RecordingFileError, match=r"a\.npz is no npz file"):
            arrays.read(tmp_path / "a.npz")

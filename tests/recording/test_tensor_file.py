"""Safetensors files: stock readers open them, damage of any kind is an error, and a failed write leaves no trace."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchhook._recording import tensor_file
from torchhook._recording.tensor_file import DTYPES
from torchhook.errors import RecordingFileError

same_folder = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
"""For tests that write to one folder again and again, on machines that may be busy."""


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit, so that NaN is what it was."""
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(np.prod(shape)) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=count, max_size=count)))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    if tensor.dim() >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    return tensor


NAMES = st.text(min_size=1, max_size=6).filter(lambda n: n != "__metadata__" and n.isprintable())
CONTENTS = st.dictionaries(NAMES, tensors(), max_size=5)
METADATA = st.dictionaries(st.text(max_size=5).filter(lambda k: k != "sha256"), st.text(max_size=10), max_size=3)


@same_folder
@given(CONTENTS, METADATA)
def test_what_was_written_is_read_to_the_bit(tmp_path: Path, contents, metadata) -> None:
    path = tensor_file.write(tmp_path / "a.safetensors", contents, metadata)
    found, about = tensor_file.read(path)
    assert about == metadata
    assert found.keys() == contents.keys()
    assert all(same(found[name], contents[name]) for name in contents)
    assert all(t.is_contiguous() for t in found.values())


@same_folder
@given(CONTENTS)
def test_stock_safetensors_reads_the_same(tmp_path: Path, contents: dict[str, Tensor]) -> None:
    path = tensor_file.write(tmp_path / "a.safetensors", contents, {"note": "for others"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["note"] == "for others"
        assert set(file.keys()) == set(contents)
        assert all(same(file.get_tensor(name), contents[name]) for name in contents)
    assert all(same(tensor, contents[name]) for name, tensor in load_file(path).items())


def test_every_tensor_starts_where_its_dtype_may_be_mapped(tmp_path: Path) -> None:
    contents = {str(dtype): torch.zeros(3, dtype=dtype) for dtype in DTYPES}
    data = tensor_file.write(tmp_path / "a", contents, {}).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    assert (8 + length) % 64 == 0
    for name, entry in header.items():
        assert entry["data_offsets"][0] % contents[name].element_size() == 0


def test_what_was_read_can_be_written_to(tmp_path: Path) -> None:
    path = tensor_file.write(tmp_path / "a", {"x": torch.zeros(3), "y": torch.zeros(2)}, {})
    found, _ = tensor_file.read(path)
    found["x"].add_(1)
    assert found["y"].tolist() == [0, 0]
    assert tensor_file.read(path)[0]["x"].tolist() == [0, 0, 0]


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    contents = {
        "weights": torch.arange(6.0).reshape(2, 3),
        "counts": torch.arange(4),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 2),
    }
    return tensor_file.write(tmp_path / "run.safetensors", contents, {"format": "x", "text": "some metadata"}), contents


def test_every_truncation_is_an_error(example: tuple[Path, dict[str, Tensor]]) -> None:
    path, _ = example
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(RecordingFileError, match=r"run\.safetensors cannot be read"):
            tensor_file.read(path)


def survives(path: Path, contents: dict[str, Tensor], metadata: dict[str, str]) -> bool:
    """Whether the file still reads; if so, it must be with the right data."""
    try:
        found, about = tensor_file.read(path)
    except RecordingFileError:
        return False
    assert about == metadata
    assert found.keys() == contents.keys()
    assert all(same(found[name], contents[name]) for name in contents)
    return True


def test_a_change_of_any_single_byte_is_an_error_or_changes_nothing(example: tuple[Path, dict[str, Tensor]]) -> None:
    path, contents = example
    metadata = {"format": "x", "text": "some metadata"}
    data = bytearray(path.read_bytes())
    header_end = 8 + int.from_bytes(data[:8], "little")
    harmless = []
    for place in range(len(data)):
        before = data[place]
        for after in {before ^ 1, 0, 0x20, 0x22, 0x39, 0xFF} - {before}:
            data[place] = after
            path.write_bytes(data)
            if survives(path, contents, metadata):
                harmless.append((place, before))
        data[place] = before
    # Only blanks between the parts of the header may change without harm.
    assert all(place < header_end and before == 0x20 for place, before in harmless)


@same_folder
@given(st.data())
def test_random_damage_is_an_error_or_changes_nothing(example, data: st.DataObject) -> None:
    path, contents = example
    metadata = {"format": "x", "text": "some metadata"}
    good = path.read_bytes()
    start = data.draw(st.integers(0, len(good)))
    end = data.draw(st.integers(start, len(good)))
    patch = data.draw(st.binary(max_size=12))
    path.write_bytes(good[:start] + patch + good[end:])
    try:
        survives(path, contents, metadata)
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes are too few for any safetensors file"),
        (b"1234567", "7 bytes are too few for any safetensors file"),
        (b"\xff" * 16, "the header should end at byte 18446744073709551623, the file at byte 16: truncated or altered"),
        (b"\x02" + bytes(7) + b"[]", "the header is not one that torchhook writes: altered, or another program's file"),
        (b"\x02" + bytes(7) + b"{}", "the header is not one that torchhook writes: altered, or another program's file"),
        (b"\x02" + bytes(7) + b"{\xff", "the header is not one that torchhook writes: altered, or another program's"),
        (b"PK\x03\x04 a zip file, as torch.save writes them", "the header should end at byte"),
    ],
)
def test_what_is_no_such_file_is_told_so(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(data)
    with pytest.raises(RecordingFileError) as caught:
        tensor_file.read(path)
    assert str(caught.value).startswith(f"{path} cannot be read: {why}")
    assert str(caught.value).endswith("Write it again, or take it from a backup.")


def test_a_file_of_the_safetensors_library_itself_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(3)}, tmp_path / "a")
    with pytest.raises(RecordingFileError, match="not one that torchhook writes"):
        tensor_file.read(tmp_path / "a")


def test_a_truncated_file_says_where_it_should_have_ended(example: tuple[Path, dict[str, Tensor]]) -> None:
    path, _ = example
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(RecordingFileError) as caught:
        tensor_file.read(path)
    assert f"should end at byte {len(data)}, the file ends at byte {len(data) - 1}: truncated" in str(caught.value)


def test_changed_data_says_that_the_checksum_does_not_fit(example: tuple[Path, dict[str, Tensor]]) -> None:
    path, _ = example
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RecordingFileError, match="the checksum does not fit the contents: the file was altered"):
        tensor_file.read(path)


def test_a_file_that_is_not_there_is_the_usual_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tensor_file.read(tmp_path / "nothing")


# -- writing whole or not at all -------------------------------------------------------------------


@pytest.mark.parametrize("call", ["fsync", "replace", "fdopen", "chmod"])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_the_old_file_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    path = tensor_file.write(tmp_path / "a", {"x": torch.zeros(2)}, {})
    before = path.read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        tensor_file.write(path, {"x": torch.ones(2)}, {})
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["a"]
    assert path.read_bytes() == before
    assert tensor_file.read(path)[0]["x"].tolist() == [0, 0]


def test_a_failed_first_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        tensor_file.write(tmp_path / "a", {"x": torch.ones(2)}, {})
    assert os.listdir(tmp_path) == []


def test_the_file_is_synced_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("replace"), replace(a, b))[1])
    tensor_file.write(tmp_path / "a", {}, {})
    assert events[:2] == ["fsync", "replace"]


def test_folders_are_made_and_a_plain_string_is_a_path(tmp_path: Path) -> None:
    path = tensor_file.write(str(tmp_path / "new" / "deep" / "a"), {"x": torch.ones(1)}, {})
    assert path == tmp_path / "new" / "deep" / "a"
    assert tensor_file.read(str(path))[0]["x"].tolist() == [1]


def test_a_new_file_has_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = tensor_file.write(tmp_path / "a", {}, {})
    finally:
        assert os.umask(before) == 0o027
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_an_unknown_dtype_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        tensor_file.write(tmp_path / "a", {"x": torch.ones(1, dtype=torch.complex64)}, {})
    assert os.listdir(tmp_path) == []

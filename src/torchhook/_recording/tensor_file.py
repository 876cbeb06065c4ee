"""Safetensors files that are written whole or not at all, and checked when they are read.

The header is written here because a file must be synced before it takes its final name, which the
safetensors library does not do; every stock reader opens the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchhook.errors import RecordingFileError

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}

Checksum = Callable[[bytes, Sequence[memoryview]], str]
"""Takes what a header says, and the tensors' memory."""


def encode(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], name: str, checksum: Checksum, align: int = 64
) -> list[memoryview]:
    """A file as its header, with a checksum of everything under ``name``, and the tensors' own memory.

    The tensors begin at a multiple of ``align``, and each at one of its item size.
    """
    order = sorted(tensors, key=lambda key: _rank(tensors[key]))
    entries: dict[str, Any] = {}
    offset = 0
    for key in order:
        tensor = tensors[key]
        end = offset + tensor.nbytes
        entries[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    chunks = [_raw(tensors[key]) for key in order if tensors[key].nbytes]
    about = {**metadata, name: checksum(signed(entries, metadata), chunks)}
    header = json.dumps({"__metadata__": about, **entries}).encode()
    # The format has blanks at the end of a header for this.
    header += b" " * (-(len(header) + 8) % align)
    return [memoryview(len(header).to_bytes(8, "little") + header), *chunks]


def _rank(tensor: Tensor) -> tuple[bool, int]:
    """Whole words first, the largest of them at the front; then wide items before narrow ones."""
    # safetensors allows no gaps between tensors, so that only their order can align them.
    words = tensor.nbytes % 8 == 0
    return not words, -tensor.nbytes if words else -tensor.element_size()


def signed(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """What the checksum covers of a header."""
    return json.dumps([entries, dict(metadata)], sort_keys=True).encode()


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """Write dense CPU tensors of the dtypes in ``DTYPES``. An old file stays until the new one is complete."""
    path = Path(path)
    chunks = encode(tensors, metadata, "sha256", _sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a file takes another's place at once only within a file system.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            # Else, after a power cut, the final name may stand for an empty file.
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes private files
        os.replace(temporary, path)
    # An interrupt must not leave half a file either.
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file of ``write``, or say what is wrong with it."""
    path = Path(path)
    # Not bytes: the tensors share this memory, and must be writable.
    data = bytearray(path.read_bytes())
    if len(data) < 8:
        raise _broken(path, f"{len(data)} bytes are too few for any safetensors file")
    end = 8 + int.from_bytes(data[:8], "little")
    if end > len(data):
        raise _broken(path, f"the header should end at byte {end}, the file at byte {len(data)}: truncated or altered")
    try:
        entries = json.loads(bytes(data[8:end]))
        metadata = dict(entries.pop("__metadata__"))
        stated = metadata.pop("sha256")
        wanted = end + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise _broken(
            path, "the header is not one that torchhook writes: altered, or another program's file"
        ) from error
    if wanted != len(data):
        raise _broken(path, f"the tensors should end at byte {wanted}, the file ends at byte {len(data)}: truncated")
    if _sha256(signed(entries, metadata), [memoryview(data)[end:]]) != stated:
        raise _broken(path, "the checksum does not fit the contents: the file was altered after it was written")
    try:
        tensors = {name: _view(data, end, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _broken(path, "a tensor entry of the header makes no sense") from error
    return tensors, metadata


def _sha256(header: bytes, chunks: Sequence[memoryview]) -> str:
    digest = hashlib.sha256(header)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _view(data: bytearray, start: int, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape = BY_NAME[entry["dtype"]], entry["shape"]
    first, last = entry["data_offsets"]
    # frombuffer refuses to make a tensor of nothing.
    if first == last:
        return torch.empty(shape, dtype=dtype)
    items = (last - first) // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=items, offset=start + first).reshape(shape)


def _umask() -> int:
    # It cannot be read without being set.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _broken(path: Path, why: str) -> RecordingFileError:
    return RecordingFileError(f"{path} cannot be read: {why}. Write it again, or take it from a backup.")

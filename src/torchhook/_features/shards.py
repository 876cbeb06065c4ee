"""The shard: a safetensors file whose header holds a checksum of everything in it.

The header fills whole blocks of the disk and the largest column comes right after it, so that it can be written from
where it lies; every column of a mapped file is aligned.
Nothing in a shard depends on when, where or by whom it was written: the same rows are the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from torchhook._features import direct_io, formats
from torchhook._recording import tensor_file
from torchhook._recording.tensor_file import BY_NAME
from torchhook.errors import BrokenShardError

FOLDER = "shards"
_GUESS = 4096  # most headers fit into the first read


def name_of(shard: int) -> str:
    return f"{FOLDER}/s{shard:09d}.safetensors"


def number_of(name: str) -> int | None:
    """The shard that a file name stands for, or ``None``: temporary files and strangers are no shards."""
    stem = name.rsplit("/", 1)[-1].removesuffix(".safetensors")
    # There and back: "s7" and digits of other scripts are numbers too, and no names that are written here.
    fits = stem[:1] == "s" and stem[1:].isdecimal() and name_of(int(stem[1:])).endswith(name.rsplit("/", 1)[-1])
    return int(stem[1:]) if fits else None


def encode(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], version: int = formats.VERSION
) -> list[memoryview]:
    """The header and the tensors' own memory, in the order of the file: nothing is copied."""
    # A store that is gone on with keeps its format: whoever read its first shards can read the last ones.
    name = "xxh3" if version >= 3 else "crc32"
    return tensor_file.encode(tensors, metadata, name, CHECKSUMS[name], align=direct_io.BLOCK)


# Two checksums: of the header alone, which every reader can check, and of everything. Against damage, not against
# malice; both let other threads run meanwhile.


def _xxh3(header: bytes, chunks: Iterable[Any]) -> str:
    """Several times as fast as a CRC, whatever zlib Python was built with: a writer's time is the disk's."""
    digest = xxhash.xxh3_64(header)
    front = digest.hexdigest()
    for chunk in chunks:
        digest.update(chunk)
    return f"{front}-{digest.hexdigest()}"


def _crc32(header: bytes, chunks: Iterable[Any]) -> str:
    front = crc = zlib.crc32(header)
    for chunk in chunks:
        crc = zlib.crc32(chunk, crc)
    return f"{front:08x}-{crc:08x}"


CHECKSUMS: dict[str, Callable[[bytes, Iterable[Any]], str]] = {"xxh3": _xxh3, "crc32": _crc32}
"""By the word under which a header has it: that of format 3, and that of the formats before."""


@dataclasses.dataclass(frozen=True)
class Header:
    """What a shard says about itself."""

    where: str
    entries: dict[str, Any]
    metadata: dict[str, str]
    algorithm: str
    checksum: str
    start: int
    """Where the data begins."""
    size: int
    """How long the file must be."""

    def span(self, name: str) -> tuple[torch.dtype, list[int], int, int]:
        """Dtype, shape, first and last byte in the file of one tensor."""
        entry = self.entries.get(name)
        if entry is None:
            raise BrokenShardError(f"{self.where} has no {name!r}: altered, or of another store.")
        first, last = entry["data_offsets"]
        return BY_NAME[entry["dtype"]], entry["shape"], self.start + first, self.start + last


Read = Callable[[int, int], bytes]
"""Bytes ``[start, end)`` of a file."""


def header(where: str, read: Read, size: int | None) -> Header:
    """The header of a shard of ``size`` bytes, where that is known, or what is wrong with it."""
    front = read(0, _GUESS if size is None else min(_GUESS, size))
    if len(front) < 8:
        raise BrokenShardError(f"{where}: {len(front)} bytes are too few for a shard: truncated.")
    start = 8 + int.from_bytes(front[:8], "little")
    if size is not None and start > size:
        raise BrokenShardError(f"{where}: the header should end at byte {start}, the file at {size}: truncated.")
    text = front[8:start] if start <= len(front) else front[8:] + read(len(front), start)
    try:
        entries = json.loads(text)
        metadata = dict(entries.pop("__metadata__"))
        algorithm = next(name for name in CHECKSUMS if name in metadata)
        checksum = str(metadata.pop(algorithm))
        # Shards of the first format have only the checksum of everything, for which all of it must be read.
        first = algorithm == "crc32" and len(checksum) == 8
        if not first and not _fits(checksum, algorithm, tensor_file.signed(entries, metadata)):
            raise ValueError("checksum")
        end = start + _end(entries)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, StopIteration, RecursionError) as error:
        raise BrokenShardError(f"{where}: the header is not one of a shard: altered, or a stranger's file.") from error
    if size is not None and end != size:
        raise BrokenShardError(f"{where}: {end} bytes are expected, {size} found: truncated or altered.")
    return Header(where, entries, metadata, algorithm, checksum, start, end)


def _fits(checksum: str, algorithm: str, signed: bytes) -> bool:
    """Whether what a header says is what it said when it was written."""
    return checksum.split("-")[0] == CHECKSUMS[algorithm](signed, ()).split("-")[0]


def _end(entries: Mapping[str, Any]) -> int:
    """Where the data of all tensors end, if they lie end to end and are as long as they say."""
    at = 0
    for entry in sorted(entries.values(), key=lambda entry: entry["data_offsets"]):
        first, last = entry["data_offsets"]
        sizes = [at, first, last, *entry["shape"]]
        if any(type(size) is not int or size < 0 for size in sizes):
            raise ValueError("sizes")
        if first != at or last - first != math.prod(entry["shape"]) * BY_NAME[entry["dtype"]].itemsize:
            raise ValueError("offsets")
        at = last
    return at


def check(where: str, read: Read, size: int, block: int = 1 << 24) -> Header:
    """The header of a shard whose every byte is as it was written."""
    found = header(where, read, size)
    chunks = (read(at, min(at + block, size)) for at in range(found.start, size, block))
    # The header made anew: its own bytes hold the checksum, which cannot cover itself.
    checksum = CHECKSUMS[found.algorithm](tensor_file.signed(found.entries, found.metadata), chunks)
    # The first format has only the second of the two.
    if found.checksum not in (checksum, checksum.split("-")[1]):
        raise BrokenShardError(f"{where}: the checksum is {checksum}, the header says {found.checksum}: altered.")
    return found

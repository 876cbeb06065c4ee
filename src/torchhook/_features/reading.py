"""Rows out of shards: by memory map, or by reading just the bytes that are asked for."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchhook._features import shards
from torchhook._features.index import REPAIR, Entry
from torchhook._features.storage import Folder, Storage
from torchhook.errors import BrokenShardError

_MOST_MAPS = 4096  # a process may have about 65,000


class MappedShard:
    """A shard in memory, page by page as it is read. Private: writing to a row never reaches the file."""

    def __init__(self, path: Path, header: shards.Header) -> None:
        self.header = header
        # Not Python's mmap, which holds a file descriptor for every shard.
        self._storage: Any = torch.UntypedStorage.from_file(str(path), False, header.size)
        self._tensors: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, none of it read yet."""
        found = self._tensors.get(name)
        if found is None:
            dtype, shape, first, last = self.header.span(name)
            empty = torch.empty(shape, dtype=dtype, device="meta")  # for its strides; it takes no memory
            found = torch.empty(0, dtype=dtype)
            if last > first:
                found.set_(self._storage, first // dtype.itemsize, empty.shape, empty.stride())
            else:
                found = found.reshape(shape)
            self._tensors[name] = found
        return found

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """Rows ``[low, high)`` of a tensor, as they lie in the map."""
        return self.tensor(name)[low:high]


class RangedShard:
    """A shard of which only the bytes asked for are read: from an object store, or from a disk that is not cached."""

    def __init__(self, storage: Storage, name: str, header: shards.Header) -> None:
        self.header, self._storage, self._name = header, storage, name

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """Rows ``[low, high)`` of a tensor, read now."""
        dtype, shape, first, last = self.header.span(name)
        row = (last - first) // shape[0] if shape[0] else 0
        # A bytearray, because a tensor over bytes, which cannot be written to, warns.
        data = bytearray(self._storage.read(self._name, first + low * row, first + high * row)) if high > low else b""
        if not data:
            return torch.empty((max(0, high - low), *shape[1:]), dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(high - low, *shape[1:])


class OpenShards:
    """The open shards of a store, the latest of them kept open."""

    def __init__(self, storage: Storage, sizes: dict[str, int], mapped: bool, entries: Mapping[int, Entry]) -> None:
        self.storage, self.sizes, self.entries = storage, sizes, entries
        self.mapped = mapped and isinstance(storage, Folder)
        self._open: OrderedDict[int, MappedShard | RangedShard] = OrderedDict()

    def __getitem__(self, shard: int) -> MappedShard | RangedShard:
        found = self._open.get(shard)
        if found is None:
            name = shards.name_of(shard)
            # Checked against its size at first: reading a map beyond the end of a file kills the process (SIGBUS).
            header = shards.header(name, lambda a, b: self.storage.read(name, a, b), self.sizes[name])
            self._same(shard, header)
            if self.mapped:
                assert isinstance(self.storage, Folder)
                found = MappedShard(self.storage.root / name, header)
            else:
                found = RangedShard(self.storage, name, header)
            self._open[shard] = found
            if len(self._open) > _MOST_MAPS:
                self._open.popitem(last=False)
        return found

    def _same(self, shard: int, header: shards.Header) -> None:
        """A shard must still be the one that the index knew when the store was opened, which read no shard."""
        known = self.entries.get(shard)
        if known is None or known.crc32 == header.crc32:
            return
        plan = header.metadata.get("plan", "")
        which = "a shard of another run" if plan != known.plan else "another shard than the store was finished with"
        raise BrokenShardError(
            f"{self.storage.url}: {shards.name_of(shard)} is {which} (checksum {header.crc32}, the index has "
            f"{known.crc32}). If it was made again since, open the store again. {REPAIR}"
        )


def fits_in_memory(nbytes: int) -> bool:
    """Whether reading everything by memory map would leave it in the page cache."""
    try:
        # Where it is not cached, a map is slow: 256 random rows took 95 ms, and 13 ms when just their bytes were read.
        return nbytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError, AttributeError):
        return True

"""Rows out of shards: by memory map, or by reading just the bytes that are asked for."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchhook._features import shards
from torchhook._features.index import REPAIR, Entry
from torchhook._features.manifest import ColumnSpec, Manifest
from torchhook._features.storage import Folder, Storage
from torchhook._recording.tensor_file import DTYPES
from torchhook.errors import BrokenShardError, ExtractError, IncompleteStoreError

MOST_MAPS = 4096  # of one store; a process may have about 65,000


class MappedShard:
    """A shard in memory, page by page as it is read. Private: writing to a row never reaches the file."""

    def __init__(self, path: Path, header: shards.Header) -> None:
        self.header = header
        try:
            # Not Python's mmap, which holds a file descriptor for every shard.
            self._storage: Any = torch.UntypedStorage.from_file(str(path), False, header.size)
        except RuntimeError as error:
            if path.stat().st_size < header.size:
                raise BrokenShardError(f"{path}: {header.size} bytes are expected: truncated.") from error
            raise ExtractError(
                f"{path} cannot be mapped into memory: {error}. open_features(path, access='read') does without maps."
            ) from error

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, none of it read yet."""
        dtype, shape, first, last = self.header.span(name)
        empty = torch.empty(shape, dtype=dtype, device="meta")  # for its strides; it takes no memory
        found = torch.empty(0, dtype=dtype)
        if last == first:
            return found.reshape(shape)
        return found.set_(self._storage, first // dtype.itemsize, empty.shape, empty.stride())

    def rows(self, name: str, low: int, high: int, dims: int = 1) -> Tensor:
        """Rows ``[low, high)`` of a tensor, as they lie in the map; its first ``dims`` dims are taken for one."""
        return self.tensor(name).flatten(0, dims - 1)[low:high]


class RangedShard:
    """A shard of which only the bytes asked for are read: from an object store, or from a disk that is not cached."""

    def __init__(self, storage: Storage, name: str, header: shards.Header) -> None:
        self.header: shards.Header
        self.header, self._storage, self._name = header, storage, name

    def rows(self, name: str, low: int, high: int, dims: int = 1) -> Tensor:
        """Rows ``[low, high)`` of a tensor, read now; its first ``dims`` dims are taken for one."""
        dtype, whole, first, last = self.header.span(name)
        shape = (math.prod(whole[:dims]), *whole[dims:])
        row = (last - first) // shape[0] if shape[0] else 0
        wanted = max(0, high - low) * row
        if not wanted:
            return torch.empty((max(0, high - low), *shape[1:]), dtype=dtype)
        # A bytearray, because a tensor over bytes, which cannot be written to, warns.
        data = bytearray(self._storage.read(self._name, first + low * row, first + high * row))
        if len(data) != wanted:
            raise BrokenShardError(
                f"{self._name}: {wanted} bytes of {name!r} are expected, {len(data)} found: truncated."
            )
        return torch.frombuffer(data, dtype=dtype).reshape(high - low, *shape[1:])


class OpenShards:
    """The open shards of a store; of many, those that were used last are kept open.

    ``views`` are the mapped tensors of each column by shard. Columns look into them first, and tell ``used``.
    """

    def __init__(
        self, storage: Storage, sizes: dict[str, int], mapped: bool, whole: Manifest, entries: Mapping[int, Entry]
    ) -> None:
        self.storage: Storage
        self.sizes: dict[str, int]
        self.entries: Mapping[int, Entry]
        self.storage, self.sizes, self._whole, self.entries = storage, sizes, whole, entries
        self.mapped: bool = mapped and isinstance(storage, Folder)
        self._open: OrderedDict[int, MappedShard | RangedShard] = OrderedDict()
        self._locks = {os.getpid(): threading.Lock()}
        self.views: dict[str, dict[int, Tensor]] = {spec.name: {} for spec in whole.columns}
        self.used: Callable[[int], None] = self._open.move_to_end

    @property
    def _lock(self) -> threading.Lock:
        # One of each process: a fork may have happened while a thread, which is not in the child, held it.
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def __getitem__(self, shard: int) -> MappedShard | RangedShard:
        with self._lock:
            found = self._open.get(shard)
            if found is None:
                found = self._open[shard] = self._opened(shard)
                while len(self._open) > MOST_MAPS:
                    self._close(*self._open.popitem(last=False))
            self.used(shard)
        return found

    def view(self, shard: int, name: str) -> Tensor:
        """A whole column of a mapped shard."""
        found = self[shard]
        assert isinstance(found, MappedShard)
        tensor = found.tensor(name)
        with self._lock:
            # Another thread may have closed it since: what is remembered then would keep its map for ever.
            if self._open.get(shard) is found:
                self.views[name][shard] = tensor
        return tensor

    def _close(self, shard: int, found: MappedShard | RangedShard) -> None:
        # A map lives as long as a tensor over it.
        for views in self.views.values():
            views.pop(shard, None)

    def _opened(self, shard: int) -> MappedShard | RangedShard:
        name = shards.name_of(shard)
        try:
            # Checked against its size at first: reading a map beyond the end of a file kills the process (SIGBUS).
            header = shards.header(name, lambda a, b: self.storage.read(name, a, b), self.sizes[name])
        except FileNotFoundError as error:
            raise IncompleteStoreError(
                f"{self.storage.url}: {name} is gone since the store was opened. Run the same extract call again."
            ) from error
        self._same(shard, header)
        first, last = self._whole.span(shard)
        misfit = misfits(header, self._whole.columns, last - first)
        if misfit:
            raise BrokenShardError(f"{self.storage.url}: {misfit[0]} It was altered, or is of another store.")
        if self.mapped:
            assert isinstance(self.storage, Folder)
            return MappedShard(self.storage.root / name, header)
        return RangedShard(self.storage, name, header)

    def _same(self, shard: int, header: shards.Header) -> None:
        """A shard must still be the one that the index knew when the store was opened, which read no shard."""
        known = self.entries.get(shard)
        if known is None or known.checksum == header.checksum:
            return
        plan = header.metadata.get("plan", "")
        which = "a shard of another run" if plan != known.plan else "another shard than the store was finished with"
        raise BrokenShardError(
            f"{self.storage.url}: {shards.name_of(shard)} is {which} (checksum {header.checksum}, the index has "
            f"{known.checksum}). If it was made again since, open the store again. {REPAIR}"
        )


def misfits(header: shards.Header, specs: Iterable[ColumnSpec], rows: int) -> list[str]:
    """Where a shard does not hold what the manifest says of its columns, as sentences."""
    found: list[str | None] = []
    known = set()
    for spec in specs:
        known |= {spec.name, spec.offsets} if spec.ragged else {spec.name}
        if spec.ragged:
            found.append(_misfit(header, spec.offsets, torch.int64, [rows + 1]))
            found.append(_misfit(header, spec.name, spec.dtype, [None, *spec.shape]))
        else:
            found.append(_misfit(header, spec.name, spec.dtype, [rows, *spec.shape]))
    found += [f"{header.where} has {name!r}, which the store does not know." for name in header.entries.keys() - known]
    return [sentence for sentence in found if sentence is not None]


def _misfit(header: shards.Header, name: str, dtype: torch.dtype, shape: Sequence[int | None]) -> str | None:
    entry = header.entries.get(name)
    if entry is None:
        return f"{header.where} has no {name!r}."
    # The items of rows of different lengths may be any number.
    there = [None if wanted is None else size for size, wanted in zip(entry["shape"], shape, strict=False)]
    if entry["dtype"] != DTYPES[dtype] or there != list(shape) or len(entry["shape"]) != len(shape):
        wanted = f"{DTYPES[dtype]} {['any' if size is None else size for size in shape]}"
        return f"{header.where}: {name!r} is {entry['dtype']} {entry['shape']} where {wanted} is expected."
    return None


def fits_in_memory(nbytes: int) -> bool:
    """Whether reading everything by memory map would leave it in the page cache."""
    try:
        # Where it is not cached, a map is slow: 256 random rows took 95 ms, and 13 ms when just their bytes were read.
        return nbytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError, AttributeError):
        return True

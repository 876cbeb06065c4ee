"""A feature store as files: the manifest, the shards and the index. All that extraction writes goes through here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from torchhook._features import index, manifest, shards
from torchhook._features.index import Contents, Entry
from torchhook._features.manifest import Manifest
from torchhook._features.storage import locate
from torchhook.errors import StoreMismatchError


class Commit(NamedTuple):
    """What became of a shard."""

    entry: Entry
    """What the index says of it."""
    ours: bool
    """Whether this writer was the first."""


class Store:
    """The files of one feature store, complete or not. It pickles, and two processes may write to the same one.

    >>> Store("features/").url
    'features/'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.storage = locate(path)

    @property
    def url(self) -> str:
        return self.storage.url

    # -- the manifest ---------------------------------------------------------------------------

    def manifest(self) -> Manifest | None:
        """What the store says it holds, if there is one."""
        try:
            return Manifest.from_json(self.storage.read(manifest.NAME), self.url)
        except FileNotFoundError:
            return None

    def agree(self, mine: Manifest, any_cut: bool = False) -> Manifest:
        """Make ``mine`` the store's own, or find out that it has the same one already; another one is refused.

        With ``any_cut``, the store may cut its rows into other shards than ``mine`` would: the first to write decides.
        """
        # Not looked for first: of ranks that start together, every one would find none.
        if self.storage.create(manifest.NAME, [mine.to_json().encode()]):
            return mine
        there = self.manifest()
        assert there is not None
        if any_cut:
            mine = dataclasses.replace(mine, rows_per_shard=there.rows_per_shard)
        differences = mine.differences(there)
        if differences:
            raise StoreMismatchError(
                f"{self.url} holds the features of another run:\n  "
                + "\n  ".join(differences)
                + "\nExtract to another path, or pass resume=False to begin again there."
            )
        return there

    # -- shards ---------------------------------------------------------------------------------

    def sizes(self) -> dict[int, int]:
        """The shards that are there, and their bytes: every one of them is listed."""
        return index.numbered(self.storage.sizes(shards.FOLDER))

    def contents(self, whole: Manifest, own: Iterable[Entry] = ()) -> Contents:
        """What is there, by the listing and the index; ``own`` are shards that this process has made."""
        return index.contents(self.storage, whole.shards, own)

    def missing(self, whole: Manifest, own: Iterable[Entry] = ()) -> list[int] | None:
        """The shards that are not there; ``None`` while nobody knows how many there will be."""
        return whole.missing(self.contents(whole, own).sizes)

    def commit(self, shard: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Commit:
        """Write a shard, whole or not at all. One that is there already stays as it is."""
        chunks = shards.encode(tensors, metadata)
        name, nbytes = shards.name_of(shard), sum(map(len, chunks))
        ours = self.storage.create(name, chunks)
        # The header is all in the first chunk.
        return Commit(index.of_header(shard, shards.header(name, lambda a, b: bytes(chunks[0][a:b]), nbytes)), ours)

    def header(self, shard: int, size: int) -> shards.Header:
        """What a shard of ``size`` bytes says about itself."""
        name = shards.name_of(shard)
        return shards.header(name, lambda start, end: self.storage.read(name, start, end), size)

    # -- the whole ------------------------------------------------------------------------------

    def free(self) -> int | None:
        """Bytes that still fit, where one can know."""
        return self.storage.free()

    def sweep(self) -> None:
        """Remove what writers that were killed have left."""
        self.storage.sweep(shards.FOLDER)

    def clear(self) -> None:
        """Delete the store, if there is one; other files stay."""
        if self.manifest() is None:
            return
        index.forget(self.storage)  # first: it must not tell of what is gone
        for shard in self.sizes():
            self.storage.remove(shards.name_of(shard))
        # The manifest goes last: while it is there, what is left is a store that lacks shards.
        self.storage.remove(manifest.NAME)

    def discard(self, gone: Iterable[int]) -> None:
        """Delete some shards, for extraction to make them again."""
        gone = list(gone)
        index.forget(self.storage, gone)
        for shard in gone:
            self.storage.remove(shards.name_of(shard))

    def finish(self, whole: Manifest, own: Iterable[Entry] = ()) -> list[int]:
        """Check that the shards have the rows of ``whole``, write the index, and return the shards that are missing.

        ``own`` are shards that this process has made, whose headers need not be read.
        """
        found = self.contents(whole, own)
        entries = found.entries()
        index.check_rows(self.storage, whole, entries)
        there = self.manifest()
        if there is None or there.rows != whole.rows:  # a stream, which has come to its end only now
            self.storage.replace(manifest.NAME, whole.to_json().encode())
        left = whole.missing(found.sizes) or []
        # Before that, the next shard would make it out of date.
        if not left:
            index.write_index(found, entries)
        self.storage.warm(shards.FOLDER)
        return left

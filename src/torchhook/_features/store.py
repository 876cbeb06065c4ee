"""A feature store as files: the manifest, the shards and the index. All that extraction writes goes through here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from torchhook._features import index, manifest, shards
from torchhook._features.manifest import Manifest
from torchhook._features.storage import locate
from torchhook.errors import StoreMismatchError


class Commit(NamedTuple):
    """What became of a shard."""

    nbytes: int
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

    def agree(self, mine: Manifest) -> Manifest:
        """Make ``mine`` the store's own, or find out that it has the same one already; another one is refused."""
        if self.storage.create(manifest.NAME, [mine.to_json().encode()]):
            return mine
        there = self.manifest()
        assert there is not None
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
        """The shards that are there, and their bytes."""
        found = self.storage.sizes(shards.FOLDER)
        return {number: size for name, size in found.items() if (number := shards.number_of(name)) is not None}

    def missing(self, whole: Manifest) -> list[int] | None:
        """The shards that are not there; ``None`` while nobody knows how many there will be."""
        return whole.missing(self.sizes())

    def commit(self, shard: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Commit:
        """Write a shard, whole or not at all. One that is there already stays as it is."""
        chunks = shards.encode(tensors, metadata)
        ours = self.storage.create(shards.name_of(shard), chunks)
        return Commit(sum(map(len, chunks)), ours)

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
        for shard in self.sizes():
            self.storage.remove(shards.name_of(shard))
        self.storage.remove(index.NAME)
        # The manifest goes last: while it is there, what is left is a store that lacks shards.
        self.storage.remove(manifest.NAME)

    def finish(self, whole: Manifest) -> list[int]:
        """Check that the shards have the rows of ``whole``, write the index, and return the shards that are missing."""
        entries = index.read_headers(self.storage)
        index.check_rows(self.storage, whole, entries)
        there = self.manifest()
        if there is None or there.rows != whole.rows:  # a stream, which has come to its end only now
            self.storage.replace(manifest.NAME, whole.to_json().encode())
        left = self.missing(whole) or []
        if not left:
            index.write_index(self.storage, entries)
        self.storage.warm(shards.FOLDER)
        return left

"""A feature store as files: the manifest, the shards and the index. All that extraction writes goes through here."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from torchhook._features import formats, index, manifest, shards
from torchhook._features.manifest import ColumnSpec, Manifest
from torchhook._features.reading import RangedShard
from torchhook._features.storage import locate
from torchhook.errors import BrokenShardError, ExtractError, StoreMismatchError


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
        there = self.manifest()
        if there is None:
            self.check_shards(mine)
            # Created, not written: of ranks that start together, every one has found none.
            if self.storage.create(manifest.NAME, [mine.to_json().encode()]):
                return mine
            there = self.manifest()
            assert there is not None
        differences = _refusal(mine, there)
        if not differences:
            self.check_shards(there)
            return there
        # An attempt that failed before its first shard leaves nothing that could be of another run.
        if not self.sizes():
            self.storage.replace(manifest.NAME, mine.to_json().encode())
            return mine
        raise StoreMismatchError(
            f"{self.url} holds the features of another run:\n  "
            + "\n  ".join(differences)
            + "\nExtract to another path, or pass resume=False to begin again there."
        )

    def check_shards(self, own: Manifest) -> None:
        """Refuse shards of another run: a copied one, or one that two runs at once have left."""
        sizes = self.storage.sizes(shards.FOLDER)
        # Broken ones are refused when all are there: the others may still be made.
        self._refuse_foreign(own, index.read_index(self.storage, sizes, []) if sizes else [])

    def _refuse_foreign(self, own: Manifest, entries: list[index.Entry]) -> None:
        foreign = [entry.shard for entry in entries if not own.is_own(entry.plan)]
        if not foreign:
            return
        why = own.strangeness(self.header(foreign[0], None).metadata) or "of another run"
        listed = ", ".join(map(str, foreign[:8])) + (", …" if len(foreign) > 8 else "")
        raise StoreMismatchError(
            f"{self.url}: {'shard' if len(foreign) == 1 else 'shards'} {listed} "
            f"{'is' if len(foreign) == 1 else 'are'} {why}. Where they were left by mistake, "
            "open_features(path, incomplete=True).verify().discard() deletes them; else extract to another path, or "
            "pass resume=False to begin again there."
        )

    # -- shards ---------------------------------------------------------------------------------

    def sizes(self) -> dict[int, int]:
        """The shards that are there, and their bytes."""
        found = self.storage.sizes(shards.FOLDER)
        return {number: size for name, size in found.items() if (number := shards.number_of(name)) is not None}

    def missing(self, whole: Manifest) -> list[int] | None:
        """The shards that are not there; ``None`` while nobody knows how many there will be."""
        return whole.missing(self.sizes())

    def commit(self, shard: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Commit:
        """Write a shard, whole or not at all. One of the same run that is there already stays as it is."""
        chunks = shards.encode(tensors, metadata)
        ours = self.storage.create(shards.name_of(shard), chunks)
        if not ours:
            self._same_run(shard, metadata)
        return Commit(sum(map(len, chunks)), ours)

    def _same_run(self, shard: int, metadata: Mapping[str, str]) -> None:
        # Gone again, because somebody clears the store, or broken: both show at the end.
        with contextlib.suppress(FileNotFoundError, BrokenShardError):
            if self.header(shard, None).metadata.get("plan") != metadata.get("plan"):
                raise StoreMismatchError(
                    f"{self.url}: shard {shard} was written by another run while this one was at work. What is there "
                    "is not mixed with it: extract to another path, or run one after the other."
                )

    def header(self, shard: int, size: int | None) -> shards.Header:
        """What a shard of ``size`` bytes, where that is known, says about itself."""
        name = shards.name_of(shard)
        return shards.header(name, lambda start, end: self.storage.read(name, start, end), size)

    def rows(self, shard: int, size: int) -> StoredRows:
        """The rows of a shard, read one by one."""
        return StoredRows(RangedShard(self.storage, shards.name_of(shard), self.header(shard, size)))

    # -- the whole ------------------------------------------------------------------------------

    def free(self) -> int | None:
        """Bytes that still fit, where one can know."""
        return self.storage.free()

    def sweep(self) -> None:
        """Remove what writers that were killed have left."""
        self.storage.sweep(shards.FOLDER)

    def prune(self) -> None:
        """Take shards that are gone out of the index: when they are made again, their checksums may be others."""
        index.prune(self.storage, self.sizes())

    def clear(self) -> None:
        """Delete the store, if there is one; other files stay."""
        try:
            known = self.manifest() is not None
        except ExtractError:
            if self._is_strangers():
                raise
            known = True
        for shard in self.sizes():
            # Without a manifest, files are ours if they say so themselves.
            if known or self._is_shard(shard):
                self.storage.remove(shards.name_of(shard))
        self.storage.remove(index.NAME)
        # The manifest goes last: while it is there, what is left is a store that lacks shards.
        self.storage.remove(manifest.NAME)

    def _is_shard(self, shard: int) -> bool:
        try:
            return "rows" in self.header(shard, None).metadata
        except (BrokenShardError, FileNotFoundError):
            return False

    def _is_strangers(self) -> bool:
        """Whether a manifest that cannot be read is a file of some other program, not a damaged one of ours."""
        try:
            found = json.loads(self.storage.read(manifest.NAME))
        except ValueError:
            return False
        return not (isinstance(found, dict) and found.get("format") == formats.FORMAT) and not any(
            map(self._is_shard, self.sizes())
        )

    def finish(self, whole: Manifest) -> list[int]:
        """Check that the shards have the rows of ``whole``, write the index, and return the shards that are missing."""
        entries = index.read_headers(self.storage)
        there = self._still_ours(whole)
        self._refuse_foreign(whole, entries)
        index.check_rows(self.storage, whole, entries)
        if there.rows != whole.rows:  # a stream, which has come to its end only now
            self.storage.replace(manifest.NAME, whole.to_json().encode())
        left = self.missing(whole) or []
        # Before that, the next shard would make it out of date.
        if not left:
            index.write_index(self.storage, entries)
        self.storage.warm(shards.FOLDER)
        return left

    def _still_ours(self, whole: Manifest) -> Manifest:
        """The manifest that is there, which nobody may have replaced since the run began."""
        there = self.manifest()
        if there is None:
            self.storage.create(manifest.NAME, [whole.to_json().encode()])
            there = self.manifest()
        if there is None or there.plan != whole.plan:
            raise StoreMismatchError(
                f"{self.url}: another run has replaced the store while this one was at work. Extract to another path, "
                "or run one after the other."
            )
        return there


class StoredRows:
    """The rows of one shard as they are stored, and which of them were skipped."""

    def __init__(self, shard: RangedShard) -> None:
        self._shard = shard
        self.skipped = {int(row) for row in json.loads(shard.header.metadata.get("skipped", "{}"))}

    def row(self, spec: ColumnSpec, row: int) -> Tensor:
        if not spec.ragged:
            return self._shard.rows(spec.name, row, row + 1)[0]
        first, last = self._shard.rows(spec.offsets, row, row + 2).tolist()
        return self._shard.rows(spec.name, first, last)


def _refusal(mine: Manifest, there: Manifest) -> list[str]:
    """Why a run cannot go on with what is there, as sentences."""
    if there.plan is None:
        return [
            "it is of format 1, whose shards do not say which model and data they are of: it can be read, and not be "
            "gone on with"
        ]
    return mine.differences(there)

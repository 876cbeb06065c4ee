"""A feature store as files: the manifest, the shards and the index. All that extraction writes goes through here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from torchhook._features import formats, index, manifest, shards
from torchhook._features.index import Contents, Entry
from torchhook._features.manifest import ColumnSpec, Manifest
from torchhook._features.reading import RangedShard
from torchhook._features.storage import locate
from torchhook._words import plural
from torchhook.errors import BrokenShardError, ExtractError, StoreMismatchError

_STALE_SECONDS = 600.0
"""A run that has made no shard for so long was killed: most take half a minute for one."""
_LOOK = 16
"""So many headers are read before a run, to see whose shards are there."""


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

    def agree(
        self, mine: Manifest, any_cut: bool = False, found: Contents | None = None, retried: Collection[int] = ()
    ) -> Manifest:
        """Make ``mine`` the store's own, or find out that it has the same one already; another one is refused.

        With ``any_cut``, the store may cut its rows into other shards than ``mine`` would: the first to write decides.
        ``found`` is what is there, if that was listed already; ``retried`` are rows whose data may have been repaired.
        """
        there = self.manifest()
        if there is None:
            self._check_shards(mine, found)
            # Created, not written: of ranks that start together, every one has found none.
            if self.storage.create(manifest.NAME, [mine.to_json().encode()]):
                return mine
            there = self.manifest()
            assert there is not None
        there = self._accepting(there, mine, retried)
        if self.fits(mine, there, any_cut, found):
            self._check_shards(there, found)
            return there
        self.storage.replace(manifest.NAME, mine.to_json().encode())
        return mine

    def fits(self, mine: Manifest, there: Manifest, any_cut: bool, found: Contents | None) -> bool:
        """Whether a run can go on with what is there: ``False`` if it may be replaced, and else it is refused."""
        wanted = dataclasses.replace(mine, rows_per_shard=there.rows_per_shard) if any_cut else mine
        differences = _refusal(wanted, there)
        if not differences:
            return True
        # An attempt that failed before its first shard leaves nothing that could be of another run.
        if not self.sizes() and time.time() - there.about.get("begun", 0) > _STALE_SECONDS:
            return False
        raise StoreMismatchError(
            f"{self.url} holds the features of another run:\n  "
            + "\n  ".join(differences)
            + "\nExtract to another path, or pass resume=False to begin again there."
            + _retry_hint(wanted, there, found)
        )

    def withdraw(self, mine: Manifest) -> None:
        """Take a manifest away again, with which not a single shard was made: the next run may be another one."""
        with contextlib.suppress(Exception):  # there is an error to be told already
            there = self.manifest()
            if there is not None and there.plan == mine.plan and not self.sizes():
                self.storage.remove(manifest.NAME)

    def _accepting(self, there: Manifest, mine: Manifest, rows: Collection[int]) -> Manifest:
        known = there.accepting(mine.data, rows)
        if known is not there and known.plan is not None:
            self.storage.replace(manifest.NAME, known.to_json().encode())
        return known

    def _check_shards(self, own: Manifest, found: Contents | None) -> None:
        """Refuse shards of another run: a copied one, or one that two runs at once have left."""
        found = self.contents(own) if found is None else found
        # Of those that no index knows, only some: all of them are looked at in the end. Broken ones are refused then.
        self._refuse_foreign(own, found.entries([], headers=_LOOK))
        if found.gone:  # when they are made again, their checksums may be others
            index.forget(self.storage, found.gone)

    def _refuse_foreign(self, own: Manifest, entries: list[Entry]) -> None:
        foreign = [entry.shard for entry in entries if not own.is_own(entry.plan)]
        if not foreign:
            return
        why = own.strangeness(self.header(foreign[0], None).metadata) or "of another run"
        listed = ", ".join(map(str, foreign[:8])) + (", …" if len(foreign) > 8 else "")
        raise StoreMismatchError(
            f"{self.url}: {plural(len(foreign), 'shard')} {listed} "
            f"{plural(len(foreign), 'is', 'are')} {why}. Where they were left by mistake, "
            "open_features(path, incomplete=True).verify().discard() deletes them; else extract to another path, or "
            "pass resume=False to begin again there."
        )

    # -- shards ---------------------------------------------------------------------------------

    def sizes(self) -> dict[int, int]:
        """The shards that are there, and their bytes: every one of them is listed."""
        return index.numbered(self.storage.sizes(shards.FOLDER))

    def contents(self, whole: Manifest, own: Iterable[Entry] = ()) -> Contents:
        """What is there, by the listing and the index; ``own`` are shards that this process has made."""
        return index.contents(self.storage, whole.shards, own, whole.plan)

    def missing(self, whole: Manifest, own: Iterable[Entry] = ()) -> list[int] | None:
        """The shards that are not there; ``None`` while nobody knows how many there will be."""
        return whole.missing(self.contents(whole, own).sizes)

    def commit(
        self, shard: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], version: int = formats.VERSION
    ) -> Commit:
        """Write a shard, whole or not at all. One of the same run that is there already stays as it is.

        ``version`` is the format of the store, which may be one that was begun by an earlier TorchHook.
        """
        chunks = shards.encode(tensors, metadata, version)
        name, nbytes = shards.name_of(shard), sum(map(len, chunks))
        ours = self.storage.create(name, chunks)
        if not ours:
            self._same_run(shard, metadata)
        # The header is all in the first chunk.
        return Commit(index.of_header(shard, shards.header(name, lambda a, b: bytes(chunks[0][a:b]), nbytes)), ours)

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

    def rows(self, shard: int, rows: int) -> StoredRows:
        """The first rows of a shard, to be compared with others."""
        return StoredRows(RangedShard(self.storage, shards.name_of(shard), self.header(shard, None)), rows)

    # -- the whole ------------------------------------------------------------------------------

    def free(self) -> int | None:
        """Bytes that still fit, where one can know."""
        return self.storage.free()

    def sweep(self) -> None:
        """Remove what writers that were killed have left."""
        self.storage.sweep(shards.FOLDER)

    def clear(self) -> None:
        """Delete the store, if there is one; other files stay."""
        try:
            known = self.manifest() is not None
        except ExtractError:
            if self._is_strangers():
                raise
            known = True
        index.forget(self.storage)  # first: it must not tell of what is gone
        for shard in self.sizes():
            # Without a manifest, files are ours if they say so themselves.
            if known or self._is_shard(shard):
                self.storage.remove(shards.name_of(shard))
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
        there = self._still_ours(whole)
        self._refuse_foreign(whole, entries)
        index.check_rows(self.storage, whole, entries)
        if there.rows != whole.rows:  # a stream, which has come to its end only now
            self.storage.replace(manifest.NAME, whole.to_json().encode())
        left = whole.missing(found.sizes) or []
        # Before that, the next shard would make it out of date.
        if not left:
            index.write_index(found, entries)
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
    """The first rows of one shard as they are stored, and which of them were skipped."""

    def __init__(self, shard: RangedShard, rows: int) -> None:
        self._shard, self._rows = shard, rows
        self._blocks: dict[str, Tensor] = {}
        self.skipped = {int(row) for row in json.loads(shard.header.metadata.get("skipped", "{}"))}

    def row(self, spec: ColumnSpec, row: int) -> Tensor:
        if not spec.ragged:
            return self._block(spec.name, self._rows)[row]
        ends = self._block(spec.offsets, self._rows + 1)
        return self._block(spec.name, int(ends[-1]))[int(ends[row]) : int(ends[row + 1])]

    def _block(self, name: str, rows: int) -> Tensor:
        # All at once: one request for each column, wherever the store is.
        if name not in self._blocks:
            self._blocks[name] = self._shard.rows(name, 0, rows)
        return self._blocks[name]


def _retry_hint(mine: Manifest, there: Manifest, found: Contents | None) -> str:
    """What to do where rows that were skipped are all that differs: they may have been repaired."""
    # Only what the index knows: this is no reason to read every header.
    known = found.known.values() if found is not None else ()
    skipped = [there.span(entry.shard)[0] + int(row) for entry in known for row in entry.skipped]
    if not skipped or _refusal(mine, there.accepting(mine.data, skipped)):
        return ""
    which = (
        "1 row was skipped: where only this one was"
        if len(skipped) == 1
        else f"{len(skipped):,} rows were skipped: where only these were"
    )
    return f" {which} repaired, retry_skipped=True."


def _refusal(mine: Manifest, there: Manifest) -> list[str]:
    """Why a run cannot go on with what is there, as sentences."""
    if there.plan is None:
        return [
            "it is of format 1, whose shards do not say which model and data they are of: it can be read, and not be "
            "gone on with"
        ]
    return mine.differences(there)

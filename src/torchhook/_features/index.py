"""``index.json``: what the headers of all shards say, in one file. A cache, which can always be made again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from typing import NamedTuple

from torchhook._features import shards
from torchhook._features.manifest import Manifest
from torchhook._features.storage import Storage
from torchhook.errors import BrokenShardError, ExtractError

NAME = "index.json"
REPAIR = "To repair: open_features(path, incomplete=True).verify().discard(), then the same extract call again."


class Entry(NamedTuple):
    """One shard."""

    shard: int
    rows: int
    size: int
    crc32: str
    skipped: dict[str, str]
    plan: str | None = None
    """The digest of the run that it belongs to; shards of the first format have none."""


def read_headers(storage: Storage, sizes: dict[str, int] | None = None, broken: list[str] | None = None) -> list[Entry]:
    """The index, from the shards themselves. What is wrong with broken ones goes to ``broken``, or is raised."""
    entries = []
    for name, nbytes in sorted((storage.sizes(shards.FOLDER) if sizes is None else sizes).items()):
        number = shards.number_of(name)
        if number is None:
            continue
        try:
            entries.append(_entry(storage, number, nbytes))
        except BrokenShardError as error:
            if broken is None:
                raise BrokenShardError(f"{storage.url}: {error} {REPAIR}") from error
            broken.append(str(error))
    return entries


def _entry(storage: Storage, shard: int, nbytes: int) -> Entry:
    name = shards.name_of(shard)
    header = shards.header(name, lambda a, b: storage.read(name, a, b), nbytes)
    about = header.metadata
    skipped = json.loads(about.get("skipped", "{}"))
    return Entry(shard, int(about["rows"]), nbytes, header.crc32, skipped, about.get("plan"))


def read_file(storage: Storage) -> list[Entry]:
    """What the file says, whatever shards are there; nothing if it is absent or not what it should be."""
    try:
        return [Entry(*entry) for entry in json.loads(storage.read(NAME))]
    except (FileNotFoundError, ValueError, TypeError):
        return []  # a cache is never an error


def read_index(storage: Storage, sizes: dict[str, int], broken: list[str] | None = None) -> list[Entry]:
    """The index from its file, if that fits the shards that are there, else from the shards."""
    entries = read_file(storage)
    # Names and sizes come with one listing; anything more would mean to open every shard, which this file saves.
    if {shards.name_of(e.shard): e.size for e in entries} == {
        name: size for name, size in sizes.items() if shards.number_of(name) is not None
    }:
        return entries
    return read_headers(storage, sizes, broken)


def write_index(storage: Storage, entries: list[Entry]) -> None:
    """Write the index, if it is not there already: a complete store may be one that cannot be written to."""
    data = json.dumps(entries).encode()
    with contextlib.suppress(FileNotFoundError):
        if storage.read(NAME) == data:
            return
    storage.replace(NAME, data)


def own(manifest: Manifest, entries: list[Entry], broken: list[str]) -> list[Entry]:
    """The shards that belong to the run of a manifest; what there is of other runs goes to ``broken``."""
    broken += [
        f"{shards.name_of(e.shard)} is of another run: foreign." for e in entries if not manifest.is_own(e.plan)
    ]
    return [entry for entry in entries if manifest.is_own(entry.plan)]


def prune(storage: Storage, there: Collection[int]) -> None:
    """Forget shards that are gone: when they are made again, their checksums may be others."""
    entries = read_file(storage)
    left = [entry for entry in entries if entry.shard in there]
    if len(left) < len(entries):
        storage.replace(NAME, json.dumps(left).encode())


def check_rows(storage: Storage, manifest: Manifest, entries: list[Entry]) -> None:
    """Every shard must have the rows that the manifest gives it: a stream may have ended elsewhere the last time."""
    for entry in entries:
        first, last = manifest.span(entry.shard)
        expected = max(0, last - first)
        if entry.rows != expected:
            raise ExtractError(
                f"{storage.url}: {shards.name_of(entry.shard)} holds {entry.rows} rows where {expected} are expected "
                f"of {manifest.rows} in all: the stream was not the same before. Begin again with resume=False."
            )

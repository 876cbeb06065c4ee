"""``index.json``: what the headers of all shards say, in one file. A cache, which can always be made again.

While shards are made, each process keeps what it has committed in a page of its own (``index.<some name>.json``); when
the store is complete, the pages become the index. So neither to open a store nor to go on with one means to ask every
shard for its header, which takes 50 minutes for 100,000 of them on an object store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from torchhook._features import formats, shards
from torchhook._features.manifest import Manifest
from torchhook._features.storage import Storage
from torchhook.errors import BrokenShardError, ExtractError

NAME = "index.json"
REPAIR = "To repair: open_features(path, incomplete=True).verify().discard(), then the same extract call again."
LISTED = 20_000
"""Up to so many shards a listing of all of them is cheap (20 requests), and is believed before any index."""
_MOST_LISTS = 64  # so many requests at most look for shards that no index knows: one not found is only made again
_FLUSH_SECONDS = 30.0


class Entry(NamedTuple):
    """One shard."""

    shard: int
    rows: int
    size: int
    checksum: str
    skipped: dict[str, str]
    plan: str = ""
    """The digest of the run that it belongs to, where its header has one."""


def of_header(shard: int, header: shards.Header) -> Entry:
    """What the index says of a shard with this header."""
    about = header.metadata
    try:
        skipped = dict(json.loads(about.get("skipped", "{}")))
        return Entry(shard, int(about["rows"]), header.size, header.checksum, skipped, about.get("plan", ""))
    except (KeyError, ValueError, TypeError) as error:
        raise BrokenShardError(f"{shards.name_of(shard)}: the header does not tell its rows: altered.") from error


# -- what is there ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Contents:
    """The shards of a store by their listing and its index; headers are read only where these do not tell."""

    storage: Storage
    sizes: dict[int, int]
    """The shards that are there, and their bytes."""
    known: dict[int, Entry]
    """Those of them that an index knows."""
    pages: tuple[str, ...]
    """The files of the index that are no more than a part of it."""
    whole: list[Entry]
    """What ``index.json`` itself says."""
    gone: frozenset[int]
    """Shards that an index knows, and that are not there."""

    def entries(self, broken: list[str] | None = None, headers: int | None = None) -> list[Entry]:
        """One for each shard. What is wrong with broken ones goes to ``broken``, or is raised.

        Of shards that the index does not know, no more than ``headers`` are read, if that is said.
        """
        found = []
        left = len(self.sizes) if headers is None else headers
        for shard, nbytes in sorted(self.sizes.items()):
            entry = self.known.get(shard)
            if entry is None and left > 0:
                entry, left = self._read(shard, nbytes, broken), left - 1
            if entry is not None:
                found.append(entry)
        return found

    def _read(self, shard: int, nbytes: int, broken: list[str] | None) -> Entry | None:
        name = shards.name_of(shard)
        try:
            return of_header(shard, shards.header(name, lambda a, b: self.storage.read(name, a, b), nbytes))
        except BrokenShardError as error:
            if broken is None:
                raise BrokenShardError(f"{self.storage.url}: {error} {REPAIR}") from error
            broken.append(str(error))
        return None


def contents(storage: Storage, count: int | None, own: Iterable[Entry] = (), plan: str | None = None) -> Contents:
    """What a store of ``count`` shards holds, if one knows how many; ``own`` are those that this process has made.

    What the index tells of shards of another ``plan`` is not believed: another run may have written it here, too.
    """
    whole, parts, pages = _cached(storage)
    told = [*whole, *parts, *own]
    known = {entry.shard: entry for entry in told if plan is None or entry.plan == plan}
    if count is None or count <= LISTED or not storage.lists_parts:
        sizes = numbered(storage.sizes(shards.FOLDER))
    else:
        sizes = {shard: entry.size for shard, entry in known.items()}
        missing = [shard for shard in range(count) if shard not in known]
        for prefix in _prefixes(missing, known)[:_MOST_LISTS]:
            sizes |= numbered(storage.sizes(shards.FOLDER, prefix))
    # Names and sizes are all that a listing tells: a shard of another size is not the one that the index knows.
    known = {shard: entry for shard, entry in known.items() if sizes.get(shard) == entry.size}
    gone = frozenset(entry.shard for entry in told if entry.shard not in sizes)
    return Contents(storage, sizes, known, pages, whole, gone)


def numbered(sizes: dict[str, int]) -> dict[int, int]:
    """Shards and their bytes, of files by name."""
    return {number: size for name, size in sizes.items() if (number := shards.number_of(name)) is not None}


def _prefixes(missing: Iterable[int], known: Iterable[int]) -> list[str]:
    """The beginnings of names to look for: those of ten thousand shards, or of the thousands with gaps, by the cost."""
    there = Counter(shard // 10_000 for shard in known)
    found = []
    thousands = sorted({shard // 1000 for shard in missing})
    for block in sorted({thousand // 10 for thousand in thousands}):
        gaps = [thousand for thousand in thousands if thousand // 10 == block]
        if there[block] <= 1000 * len(gaps):
            found.append(_beginning(block * 10_000, 4))
        else:
            found += [_beginning(thousand * 1000, 3) for thousand in gaps]
    return found


def _beginning(shard: int, free: int) -> str:
    name = shards.name_of(shard).removeprefix(f"{shards.FOLDER}/").removesuffix(".safetensors")
    return name[: len(name) - free]


# -- its files -----------------------------------------------------------------------------------


def is_file(name: str) -> bool:
    """Whether a file of a store is the index, or a page of it."""
    return name == NAME or _is_page(name)


def _is_page(name: str) -> bool:
    return name.startswith("index.") and name.endswith(".json") and name != NAME


def _cached(storage: Storage) -> tuple[list[Entry], list[Entry], tuple[str, ...]]:
    """The index, the other entries that pages have, and the names of the pages."""
    for _ in range(3):
        files = storage.sizes("")
        pages = tuple(sorted(filter(_is_page, files)))
        read = {name: _read(storage, name) for name in (NAME, *pages) if name in files}
        # Gone since: another process has made them into the index, which is then there.
        if None not in read.values():
            break
    parts = [entry for name in pages for entry in read[name] or ()]
    return read.get(NAME) or [], parts, pages


def _read(storage: Storage, name: str) -> list[Entry] | None:
    """The entries of a file; ``None`` if it is gone, and none of one that is not what it should be: it is a cache."""
    try:
        found = [Entry(*entry) for entry in formats.unpacked(storage.read(name))]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return []
    right = all(type(e.shard) is type(e.rows) is type(e.size) is int and isinstance(e.skipped, dict) for e in found)
    return found if right else []


def write_index(found: Contents, entries: list[Entry]) -> None:
    """Write the index of a complete store, if it is not there already: such a store may be one that is not writable."""
    if found.pages or found.whole != entries:
        found.storage.replace(NAME, formats.packed(entries))
        for page in found.pages:
            found.storage.remove(page)


def forget(storage: Storage, gone: Iterable[int] | None = None) -> None:
    """Take some shards out of the index, or all."""
    left = set(gone or ())
    for name in filter(is_file, storage.sizes("")):
        entries = _read(storage, name) or []
        kept = [entry for entry in entries if gone is not None and entry.shard not in left]
        if not kept:
            storage.remove(name)
        elif len(kept) < len(entries):
            storage.replace(name, formats.packed(kept))


class Page:
    """The shards that this process has committed, written down now and then: else only their headers would tell."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self._lock = storage, threading.Lock()
        self._name = f"index.{secrets.token_hex(8)}.json"
        self.entries: list[Entry] = []
        self._written, self._due = 0, time.monotonic() + _FLUSH_SECONDS

    def add(self, entry: Entry) -> None:
        """Called by the threads that write."""
        with self._lock:
            self.entries.append(entry)
            if time.monotonic() >= self._due:
                self._flush()

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        if self._written == len(self.entries):
            return
        start = time.monotonic()
        packed = formats.packed(self.entries)
        with contextlib.suppress(Exception):  # a cache; what is wrong with the disk, the next shard tells
            self._storage.replace(self._name, packed)
            self._written = len(self.entries)
        # All of it each time, so that there is one file for each process, but never more than a tenth of the time.
        took = time.monotonic() - start
        self._due = time.monotonic() + max(_FLUSH_SECONDS, 10 * took)


def own(manifest: Manifest, entries: list[Entry], broken: list[str]) -> list[Entry]:
    """The shards that belong to the run of a manifest; what there is of other runs goes to ``broken``."""
    foreign = [entry.shard for entry in entries if not manifest.is_own(entry.plan)]
    broken += [f"{shards.name_of(shard)} is of another run: foreign." for shard in foreign]
    return [entry for entry in entries if manifest.is_own(entry.plan)]


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

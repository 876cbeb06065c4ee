"""``verify``: every byte of a store read and checked, and for each problem the way to repair it."""

from __future__ import annotations

import dataclasses
import os
from typing import NamedTuple

from torchhook._features import index, manifest, shards
from torchhook._features.index import Entry
from torchhook._features.manifest import Manifest
from torchhook._features.store import Store
from torchhook._recording.tables import Table, size
from torchhook._recording.tensor_file import DTYPES
from torchhook._words import counted, plural
from torchhook.errors import BrokenShardError


class Problem(NamedTuple):
    """One shard that is not as it should be."""

    shard: int
    kind: str
    """``missing``, ``truncated``, ``altered`` or ``foreign`` (a good shard of some other store, run or place)."""
    detail: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``verify`` found. True when all is well."""

    path: str
    shards: int
    nbytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def discard(self) -> list[int]:
        """Delete the broken shards, so that the same extract call does them again; returns their numbers."""
        # Of a missing one there is no file to delete.
        broken = [problem.shard for problem in self.problems if problem.kind != "missing"]
        Store(self.path).discard(broken)
        return broken

    def __str__(self) -> str:
        if self.ok:
            return f"{self.path}: {counted(self.shards, 'shard')}, {size(self.nbytes)}, every byte as it was written."
        wrong = plural(len(self.problems), "is not as it should be", "are not as they should be")
        lines = [f"{self.path}: {len(self.problems)} of {counted(self.shards, 'shard')} {wrong}:"]
        lines += [f"  shard {problem.shard}: {problem.kind}. {problem.detail}" for problem in self.problems[:20]]
        if len(self.problems) > 20:
            lines.append(f"  … and {len(self.problems) - 20} more")
        broken = any(problem.kind != "missing" for problem in self.problems)
        first = "delete the broken files (report.discard() does), then run" if broken else "run"
        lines.append(f"To repair: {first} the same extract call again; it does only what is missing.")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        title, *notes = str(self).splitlines()
        return Table(title, [], [], notes)._repr_html_()


def verify(path: str | os.PathLike[str]) -> Report:
    """Check a store, complete or not."""
    store = Store(path)
    found = store.manifest()
    if found is None:
        raise FileNotFoundError(f"{os.fspath(path)} is no feature store: it has no {manifest.NAME}.")
    there = store.sizes()
    # A stream that has not ended promises no number of shards: only gaps between them can be seen.
    expected = found.shards if found.shards is not None else max(there, default=-1) + 1
    known = store.contents(found).known
    problems = []
    for shard in sorted({*range(expected), *there}):
        problem = _problem(store, found, shard, there.get(shard), expected, known.get(shard))
        if problem is not None:
            problems.append(problem)
    return Report(os.fspath(path), expected, sum(there.values()), tuple(problems))


def _problem(
    store: Store, found: Manifest, shard: int, nbytes: int | None, expected: int, known: Entry | None
) -> Problem | None:
    name = shards.name_of(shard)
    if nbytes is None:
        return Problem(shard, "missing", f"{name} is not there.")
    try:
        header = shards.check(name, lambda a, b: store.storage.read(name, a, b), nbytes)
    except BrokenShardError as error:
        text = str(error)
        return Problem(shard, "truncated" if "truncated" in text else "altered", text)
    # Killed after its last shard and before the manifest learned of the end, a stream leaves a short one.
    partial = found.rows is None and shard == expected - 1
    why = _strange(found, shard, header, shard >= expected, partial)
    if why is None and known is not None and known.checksum != header.checksum:
        why = f"has the checksum {header.checksum}, and {index.NAME} has {known.checksum}."
    return None if why is None else Problem(shard, "foreign", f"{name} {why}")


# A checksum only says that a shard is whole; a whole one may have been copied here from another store.
def _strange(found: Manifest, shard: int, header: shards.Header, beyond: bool, partial: bool) -> str | None:
    """Why a shard does not belong where it is, if it does not."""
    other_run = found.strangeness(header.metadata)
    if other_run is not None:
        return f"is {other_run}."
    first, last = found.span(shard)
    told = (header.metadata.get("shard"), header.metadata.get("rows"))
    if beyond or told[0] != str(shard) or (told[1] != str(last - first) and not partial):
        return f"says that it is shard {told[0]} with {told[1]} rows."
    for spec in found.columns:
        entry = header.entries.get(spec.name)
        if entry is None or tuple(entry["shape"][1:]) != spec.shape or entry["dtype"] != DTYPES[spec.dtype]:
            return f"does not hold {spec}."
    return None

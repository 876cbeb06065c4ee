"""``open_features``: a feature store, read by row."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchhook._features import export, index, manifest, shards
from torchhook._features.columns import Column
from torchhook._features.dataset import FeatureDataset
from torchhook._features.index import Entry
from torchhook._features.manifest import IDS, LABELS, Manifest, shown, stored
from torchhook._features.reading import OpenShards, fits_in_memory
from torchhook._features.statistics import Statistics, statistics
from torchhook._features.store import Store
from torchhook._features.tokens import Tokens
from torchhook._features.verify import Report, verify
from torchhook._recording.tables import Table, size
from torchhook._words import counted
from torchhook.errors import BrokenShardError, IncompleteStoreError, MissingRecordError, suggestion


def open_features(path: str | os.PathLike[str], *, incomplete: bool = False, access: str = "auto") -> Features:
    """Open a feature store; the model is not needed.

    Args:
        path: The folder, or the URL of an object store, that ``extract`` wrote to.
        incomplete: Open a store that lacks shards, too: their rows raise when they are read, and ``verify`` says what
            is wrong. By default such a store raises here.
        access: ``"mmap"``, ``"read"`` (for random rows of a store much larger than the memory), or ``"auto"``.
    """
    return Features(path, incomplete=incomplete, access=access)


class Features:
    """The features of a data set, by site: ``fs["layer4"][i]``, slices, lists of rows; ``fs.ids``, ``fs.labels``."""

    def __init__(self, path: str | os.PathLike[str], *, incomplete: bool = False, access: str = "auto") -> None:
        if access not in ("auto", "mmap", "read"):
            raise ValueError(f"access={access!r}: use 'auto', 'mmap' or 'read'.")
        self.path: str
        self.path, self._incomplete, self._access = os.fspath(path), incomplete, access
        store = Store(path)
        found = store.manifest()
        if found is None:
            raise FileNotFoundError(f"{self.path} is no feature store: it has no {manifest.NAME}.")
        # Listed once: the index and the shards are judged by the same state, while others may still be writing.
        there = store.contents(found)
        broken: list[str] = []  # not raised yet: with incomplete=True, the other shards can be read
        entries = index.own(found, there.entries(broken), broken)
        self.manifest: Manifest = found if found.rows is not None else _so_far(found, entries)
        """What was run, on what, and how rows are cut into shards."""
        entries = _fitting(self.manifest, entries, broken)
        self.missing: list[int] = self.manifest.missing({entry.shard for entry in entries}) or []
        """Shards that are not there, or cannot be read."""
        if not incomplete:
            _require_complete(self.path, found, broken, self.missing)
        self.skipped: dict[int, str] = {
            entry.shard * found.rows_per_shard + int(row): why
            for entry in entries
            for row, why in entry.skipped.items()
        }
        """Rows without features, and why."""
        self.nbytes: int = sum(entry.size for entry in entries)
        mapped = access == "mmap" or (access == "auto" and fits_in_memory(self.nbytes))
        sizes = {shards.name_of(shard): nbytes for shard, nbytes in there.sizes.items()}
        known = {entry.shard: entry for entry in entries}
        self._shards = OpenShards(store.storage, sizes, mapped, self.manifest, known)
        self._columns: dict[str, Column] = {}

    def __reduce__(self) -> Any:
        return _reopen, (self.path, self._incomplete, self._access)  # a worker maps the files itself

    # -- reading ------------------------------------------------------------------------------

    def __len__(self) -> int:
        assert self.manifest.rows is not None
        return self.manifest.rows

    def keys(self) -> list[str]:
        """The sites, as they can be read; one with several tensors has a column for each, ``site[leaf]``."""
        return [spec.name for spec in self.manifest.columns if spec.name not in (IDS, LABELS)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, site: object) -> bool:
        return isinstance(site, str) and self._name(site) is not None

    def __getitem__(self, site: str) -> Column:
        name = self._name(site)
        if name is None:
            raise MissingRecordError(f"no site {site!r} in {self.path}. {suggestion(site, map(shown, self.keys()))}")
        return self._column(name)

    def _name(self, site: str) -> str | None:
        names = self.keys()
        return next((name for name in (site, stored(site)) if name in names), None)

    def _column(self, name: str) -> Column:
        if name not in self._columns:
            # One object for each column: it knows its open shards, and a loop may ask for it row by row.
            self._columns[name] = Column(self, name, self._shards)
        return self._columns[name]

    @property
    def ids(self) -> Column | range:
        """The ids of the rows; their numbers, if they were given none."""
        return self._column(IDS) if self._has(IDS) else range(len(self))

    @property
    def labels(self) -> Column | None:
        """The labels of the rows, if there are any."""
        return self._column(LABELS) if self._has(LABELS) else None

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes that the labels number, where the data set had such, as folders of images do."""
        return self.manifest.about.get("classes") if self._has(LABELS) else None

    def _has(self, name: str) -> bool:
        return any(spec.name == name for spec in self.manifest.columns)

    def valid(self) -> Tensor:
        """The numbers of the rows that have features: those that were neither skipped nor are missing."""
        good = torch.ones(len(self), dtype=torch.bool)
        for shard in self.missing:
            first, last = self.manifest.span(shard)
            good[first:last] = False
        good[list(self.skipped)] = False
        return good.nonzero().squeeze(1)

    # -- other shapes ---------------------------------------------------------------------------

    def dataset(
        self,
        sites: str | Sequence[str] | None = None,
        *,
        labels: bool | None = None,
        ids: bool = False,
        rows: Any = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> FeatureDataset:
        """A ``torch.utils.data.Dataset`` of rows, of all sites or some; the options are those of ``FeatureDataset``."""
        return FeatureDataset(self, sites, labels=labels, ids=ids, rows=rows, transform=transform)

    def tokens(self, *sites: str) -> Tokens:
        """The tokens of all rows, one after the other: of one site as tensors, of several as dicts of the same tokens.

        ``features.tokens("h.3").loader(4096, shuffle=True)`` gives them in batches.
        """
        return Tokens(self, sites)

    def to_hf(self, sites: str | Sequence[str] | None = None) -> Any:
        """A Hugging Face ``datasets.Dataset`` over the same memory, of all sites or some."""
        return export.to_hf(self, sites)

    def export(self, folder: str | os.PathLike[str], sites: str | Sequence[str] | None = None) -> list[str]:
        """Write ``.npy`` files, one per column of all sites or some, and return their paths."""
        return export.to_npy(self, folder, sites)

    def statistics(self, site: str, **options: Any) -> Statistics:
        """Mean, covariance, quantiles and top rows of a site in one pass: see ``statistics.statistics``."""
        if "per" in options:
            raise TypeError(
                "store.statistics has no per=: they are those of each channel. th.statistics(model, data, sites, "
                "per=…) takes others, from the model."
            )
        return statistics(self, site, **options)

    def verify(self) -> Report:
        """Read every byte and say what is missing, truncated or altered, and how to repair it."""
        return verify(self.path)

    # -- showing ---------------------------------------------------------------------------------

    def table(self) -> Table:
        """The columns, what a row of each is, and how the store was made."""
        about = self.manifest
        notes = [
            f"{counted(len(self), 'row')}, {size(self.nbytes)} in {counted(about.shards or 0, 'shard')} of "
            f"{counted(about.rows_per_shard, 'row')}",
            f"model: {about.model}",
            f"transform: {about.transform}",
        ]
        if "preparation" in about.about:
            notes.append(f"images: {about.about['preparation']}")
        if self.classes:
            notes.append(f"classes: {_some(self.classes)}")
        if self.skipped:
            count = counted(len(self.skipped), "row")
            notes.append(f"skipped: {count}, see .skipped; extract(..., retry_skipped=True) tries again")
        if self.missing:
            notes.append(f"incomplete: {counted(len(self.missing), 'shard is', 'shards are')} missing")
        rows = [[shown(spec.name), spec.row] for spec in about.columns]
        return Table(f"Features {self.path}", ["column", "row"], rows, notes)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _some(names: Sequence[str]) -> str:
    more = f", … ({len(names)} in all)" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


def _reopen(path: str, incomplete: bool, access: str) -> Features:
    return Features(path, incomplete=incomplete, access=access)


def _so_far(found: Manifest, entries: list[Entry]) -> Manifest:
    """The manifest of a stream that has not come to its end, with the rows that are there."""
    ends = [entry.shard * found.rows_per_shard + entry.rows for entry in entries]
    return dataclasses.replace(found, rows=max(ends, default=0))


def _fitting(whole: Manifest, entries: list[Entry], broken: list[str]) -> list[Entry]:
    """The shards with the rows that the manifest gives them; what is wrong with others goes to ``broken``."""
    found = []
    for entry in entries:
        first, last = whole.span(entry.shard)
        if entry.rows == last - first:
            found.append(entry)
        else:
            wanted, name = max(0, last - first), shards.name_of(entry.shard)
            held = counted(entry.rows, "row")
            broken.append(f"{name} holds {held} where {wanted} are expected of {whole.rows} in all: foreign.")
    return found


def _require_complete(path: str, found: Manifest, broken: list[str], missing: list[int]) -> None:
    if broken:
        raise BrokenShardError(f"{path}: {broken[0]} {index.REPAIR}")
    if found.rows is None:
        raise IncompleteStoreError(
            f"{path}: the data has not come to its end yet. Run the same extract call again, or open what "
            "is there with incomplete=True."
        )
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        raise IncompleteStoreError(
            f"{path} lacks {len(missing)} of {counted(found.shards or 0, 'shard')} ({listed}). Run the same extract "
            "call again: it does only those. incomplete=True opens what is there."
        )

"""``open_features``: a feature store, read by row. Nothing here runs a model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchhook._features import export, index, manifest, shards
from torchhook._features.columns import Values
from torchhook._features.dataset import FeatureDataset
from torchhook._features.manifest import IDS, LABELS, Plan
from torchhook._features.reading import Shelf, fits_in_memory
from torchhook._features.statistics import Statistics, statistics
from torchhook._features.storage import place
from torchhook._features.verify import Report, verify
from torchhook._recording.tables import Table, size
from torchhook.errors import BrokenShardError, IncompleteStoreError, MissingRecordError, suggestion


def open_features(path: str | os.PathLike[str], *, incomplete: bool = False, access: str = "auto") -> Features:
    """Open a feature store.

    A store that lacks shards raises, unless ``incomplete=True``: then their rows raise when they are read, and
    ``verify`` says what is wrong. ``access``
    is ``"mmap"``, ``"read"`` (for random rows of a store much larger than the memory), or ``"auto"``.
    """
    return Features(path, incomplete=incomplete, access=access)


class Features:
    """The features of a data set: ``fs["layer4"][i]``, slices, lists of rows; ``fs.ids``, ``fs.labels``."""

    def __init__(self, path: str | os.PathLike[str], *, incomplete: bool = False, access: str = "auto") -> None:
        if access not in ("auto", "mmap", "read"):
            raise ValueError(f"access={access!r}: use 'auto', 'mmap' or 'read'.")
        self.path, self._incomplete, self._access = os.fspath(path), incomplete, access
        self.place = place(path)
        found = manifest.load(self.place)
        if found is None:
            raise FileNotFoundError(f"{self.path} is no feature store: it has no {manifest.NAME}.")
        sizes = self.place.sizes(shards.FOLDER)
        broken: list[str] = []
        entries = index.read_index(self.place, sizes, broken)
        if broken and not incomplete:
            raise BrokenShardError(f"{self.path}: {broken[0]} {index.REPAIR}")
        if found.rows is None:
            if not incomplete:
                raise IncompleteStoreError(
                    f"{self.path}: the data has not come to its end yet. Run the same extract call again, or open what "
                    "is there with incomplete=True."
                )
            ends = [entry.shard * found.rows_per_shard + entry.rows for entry in entries]
            found = _with_rows(found, max(ends, default=0))
        self.plan: Plan = found
        there = {entry.shard for entry in entries}
        self.missing = [shard for shard in range(found.shards or 0) if shard not in there]
        """Shards that are not there, or cannot be read."""
        if self.missing and not incomplete:
            listed = ", ".join(map(str, self.missing[:8])) + (", …" if len(self.missing) > 8 else "")
            raise IncompleteStoreError(
                f"{self.path} lacks {len(self.missing)} of {found.shards} shards ({listed}). Run the same extract call "
                "again: it does only those. incomplete=True opens what is there."
            )
        self.skipped = {
            e.shard * found.rows_per_shard + int(row): why for e in entries for row, why in e.skipped.items()
        }
        """Rows without features, and why."""
        self.nbytes = sum(entry.size for entry in entries)
        self._shelf = Shelf(self.place, sizes, access == "mmap" or (access == "auto" and fits_in_memory(self.nbytes)))
        self._values: dict[str, Values] = {}

    def __reduce__(self) -> Any:
        return _reopen, (self.path, self._incomplete, self._access)  # a worker maps the files itself

    # -- reading ------------------------------------------------------------------------------

    def __len__(self) -> int:
        assert self.plan.rows is not None
        return self.plan.rows

    def keys(self) -> list[str]:
        """The layers, as they can be read."""
        return [column.name for column in self.plan.columns if column.name not in (IDS, LABELS)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __getitem__(self, name: str) -> Values:
        if name not in self.keys():
            raise MissingRecordError(f"no layer {name!r} in {self.path}. {suggestion(name, self.keys())}")
        return self._column(name)

    def _column(self, name: str) -> Values:
        if name not in self._values:
            missing = frozenset(self.missing)
            self._values[name] = Values(self.plan[name], len(self), self.plan.rows_per_shard, self._shelf, missing)
        return self._values[name]

    @property
    def ids(self) -> Values | range:
        """The ids of the rows; their numbers, if they were given none."""
        return self._column(IDS) if self._has(IDS) else range(len(self))

    @property
    def labels(self) -> Values | None:
        """The labels of the rows, if there are any."""
        return self._column(LABELS) if self._has(LABELS) else None

    def _has(self, name: str) -> bool:
        return any(column.name == name for column in self.plan.columns)

    def valid(self) -> Tensor:
        """The numbers of the rows that have features: those that were neither skipped nor are missing."""
        good = torch.ones(len(self), dtype=torch.bool)
        for shard in self.missing:
            first, last = self.plan.span(shard)
            good[first:last] = False
        good[list(self.skipped)] = False
        return good.nonzero().squeeze(1)

    # -- other shapes ---------------------------------------------------------------------------

    def dataset(self, layers: str | Sequence[str] | None = None, **options: Any) -> FeatureDataset:
        """A ``torch.utils.data.Dataset``: see ``FeatureDataset``."""
        return FeatureDataset(self, layers, **options)

    def to_hf(self, layers: Sequence[str] | None = None) -> Any:
        """A Hugging Face ``datasets.Dataset`` over the same memory."""
        return export.to_hf(self, layers)

    def export(self, folder: str | os.PathLike[str], layers: Sequence[str] | None = None) -> list[str]:
        """Write ``.npy`` files, one per column, and return their paths."""
        return export.to_npy(self, folder, layers)

    def statistics(self, layer: str, **options: Any) -> Statistics:
        """Mean, covariance, quantiles and top rows of a layer in one pass: see ``statistics.statistics``."""
        return statistics(self, layer, **options)

    def verify(self) -> Report:
        """Read every byte and say what is missing, truncated or altered, and how to repair it."""
        return verify(self.path)

    # -- showing ---------------------------------------------------------------------------------

    def summary(self) -> Table:
        rows = []
        for column in self.plan.columns:
            kind = str(column).removeprefix(column.name + " ")
            rows.append([column.name.removeprefix(":"), kind])
        notes = [
            f"{len(self):,} rows, {size(self.nbytes)} in {self.plan.shards} shards of {self.plan.rows_per_shard} rows",
            f"model: {self.plan.model}",
            f"transform: {self.plan.transform}",
        ]
        if self.skipped:
            notes.append(f"skipped: {len(self.skipped)} rows, see .skipped")
        if self.missing:
            notes.append(f"incomplete: {len(self.missing)} shards are missing")
        return Table(f"Features {self.path}", ["column", "row"], rows, notes)

    def __repr__(self) -> str:
        return str(self.summary())

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()


def _reopen(path: str, incomplete: bool, access: str) -> Features:
    return Features(path, incomplete=incomplete, access=access)


def _with_rows(found: Plan, rows: int) -> Plan:
    return dataclasses.replace(found, rows=rows)

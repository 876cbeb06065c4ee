"""A store as a ``torch.utils.data.Dataset``, for workers, shuffling and whole batches at once."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from torchhook._features.indexing import numbers
from torchhook._recording.tables import Table
from torchhook._words import counted
from torchhook.errors import ExtractError

if TYPE_CHECKING:
    from torchhook._features.columns import Column
    from torchhook._features.features import Features


_SMALL = 64 << 20  # the labels of eight million rows, as int64


def _unbound(rows: Any) -> Sequence[Any]:
    return rows.unbind() if isinstance(rows, Tensor) else list(rows)


class FeatureDataset(Dataset[Any]):
    """Rows of a store: ``x``, or ``(x, label)`` where there are labels, or ``(x, label, id)`` with ``ids=True``.

    ``dataset[[1, 5, 9]]`` is a batch, read at once; ``loader`` makes such batches.

    Args:
        features: The store.
        sites: One site, whose rows ``x`` are tensors, or several, whose rows are dicts; all of them by default.
        labels: Whether labels come along; by default if the store has any.
        ids: Whether ids come along.
        rows: Which rows, by number, slice, list or mask; by default all that were neither skipped nor are missing.
        transform: A function of ``x``: of one row, or of a batch where a batch is read at once.
    """

    def __init__(
        self,
        features: Features,
        sites: str | Sequence[str] | None = None,
        *,
        labels: bool | None = None,
        ids: bool = False,
        rows: Any = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.features: Features
        self.ids: bool
        self.transform: Callable[[Any], Any] | None
        self.features, self.ids, self.transform = features, ids, transform
        names = features.keys() if sites is None else [sites] if isinstance(sites, str) else list(sites)
        self.single: bool = len(names) == 1 and (sites is None or isinstance(sites, str))
        self.columns: dict[str, Column] = {name: features[name] for name in names}
        self.labels: bool = features.labels is not None if labels is None else labels
        if self.labels and features.labels is None:
            raise ExtractError(f"labels=True: {features.path} has no labels.")
        if rows is None:
            complete = not features.skipped and not features.missing
            self.rows = None if complete else features.valid()
        else:
            # Not a list: counting references would copy its pages into every forked worker (pytorch#13246).
            self.rows = torch.tensor(_numbers(rows, len(features)), dtype=torch.int64)

    def __reduce__(self) -> Any:
        sites = next(iter(self.columns)) if self.single else list(self.columns)
        return _again, (self.features, sites, self.labels, self.ids, self.rows, self.transform)

    def __repr__(self) -> str:
        extras = ", labels" * self.labels + ", ids" * self.ids
        each = ", ".join(str(column.spec) for column in list(self.columns.values())[:4])
        more = ", …" if len(self.columns) > 4 else ""
        return f"<{counted(len(self), 'row')} of {self.features.path}: {each}{more}{extras}>"

    def _repr_html_(self) -> str:
        return Table(repr(self)[1:-1], [], [])._repr_html_()

    def __len__(self) -> int:
        return len(self.features) if self.rows is None else len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            if isinstance(index, (slice, list, tuple, range)) or np.ndim(index):
                return self._batch(index)
            index = operator.index(index)  # a number of numpy's, or a tensor without dims
        # By a range: it knows negative numbers, and its IndexError is what ends a plain for loop over the data set.
        row = range(len(self))[index] if self.rows is None else int(self.rows[index])
        extras = [] if self._labels is None else [self._labels[row]]
        if self.ids:
            extras.append(self.features.ids[row])
        return self._shaped([column[row] for column in self.columns.values()], extras)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """What a ``DataLoader`` asks for: the rows of a batch, read at once."""
        rows = self._numbers(indices)
        values = [_unbound(column.take(rows)) for column in self.columns.values()]
        extras = [_unbound(extra) for extra in self._extras(rows)]
        # The common case, without a Python call for every row.
        if self.single and self.transform is None:
            return list(zip(values[0], *extras, strict=True)) if extras else list(values[0])
        samples = zip(*values, strict=True)
        return [self._shaped(x, extra) for x, extra in zip(samples, zip(*extras) if extras else repeat(()))]  # noqa: B905

    def _batch(self, index: Any) -> Any:
        rows = self._numbers(index)
        return self._shaped([column[rows] for column in self.columns.values()], self._extras(rows))

    def _extras(self, rows: list[int]) -> list[Any]:
        """Labels and ids of some rows."""
        found: list[Any] = [self._labels[rows]] if self._labels is not None else []
        if self.ids:
            ids = self.features.ids
            found.append([ids[row] for row in rows] if isinstance(ids, range) else ids[rows])
        return found

    @functools.cached_property
    def _labels(self) -> Any:
        """The labels: in memory where they are small, since there is one for every row that is read."""
        labels = self.features.labels if self.labels else None
        small = labels is not None and len(labels) * labels.spec.item_bytes <= _SMALL
        if labels is None or labels.spec.ragged or self.features.missing or not small:
            return labels
        return labels[:]

    def _numbers(self, index: Any) -> list[int]:
        chosen = _numbers(index, len(self))
        return chosen if self.rows is None else self.rows[chosen].tolist()

    def _shaped(self, values: Sequence[Any], extras: Sequence[Any]) -> Any:
        x = values[0] if self.single else dict(zip(self.columns, values, strict=True))
        x = x if self.transform is None else self.transform(x)
        return (x, *extras) if extras else x

    def loader(self, batch_size: int = 256, *, shuffle: bool = False, workers: int = 0, **options: Any) -> Any:
        """A ``DataLoader`` whose batches are read whole, without collating rows one by one."""
        generator = options.pop("generator", None)
        sampler: Any = RandomSampler(self, generator=generator) if shuffle else SequentialSampler(self)
        drop_last = options.pop("drop_last", False)
        batches: Any = BatchSampler(sampler, batch_size, drop_last)
        # With batch_size=None, each list of the sampler goes to __getitem__ whole, and nothing is collated.
        return DataLoader(self, sampler=batches, batch_size=None, num_workers=workers, generator=generator, **options)


def _numbers(index: Any, rows: int) -> list[int]:
    return numbers(range(*index.indices(rows)) if isinstance(index, slice) else index, rows, "dataset")


def _again(features: Features, sites: Any, labels: bool, ids: bool, rows: Any, transform: Any) -> FeatureDataset:
    return FeatureDataset(features, sites, labels=labels, ids=ids, rows=rows, transform=transform)

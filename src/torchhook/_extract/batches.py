"""Batches of the data: which rows they stand for, how spans of rows are cut into them, and how they come apart."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from torchhook._values import tree


class Batch(NamedTuple):
    """A batch of the data, and which rows it stands for."""

    start: int
    span: int
    """How many rows it stands for, failed ones among them."""
    value: Any
    """``None`` if every row failed."""
    failed: dict[int, str]
    """Positions in the span that could not be loaded, and why."""
    singles: Callable[[], Iterator[Batch]]
    """The same rows, one by one."""

    @property
    def good(self) -> Sequence[int]:
        return range(self.span) if not self.failed else [i for i in range(self.span) if i not in self.failed]


class SpanSampler:
    """A batch sampler over spans of rows, made as it is read: its memory does not depend on the data set.

    Batches have ``size`` rows, or those of a list of batches whose ends are given; a span's end cuts them too.
    """

    def __init__(
        self, spans: list[tuple[int, int]], size: int, order: Sequence[int], ends: Sequence[int] | None
    ) -> None:
        self.spans, self.size, self.order, self.ends = spans, size, order, ends

    def cuts(self) -> Iterator[tuple[int, int]]:
        for first, last in self.spans:
            start = first
            while start < last:
                stop = start + self.size if self.ends is None else self.ends[bisect_right(self.ends, start)]
                yield start, min(stop, last)
                start = stop

    def __iter__(self) -> Iterator[list[int]]:
        return ([int(self.order[row]) for row in range(*cut)] for cut in self.cuts())

    def __len__(self) -> int:
        return sum(self._number(first, last) for first, last in self.spans if last > first)

    def _number(self, first: int, last: int) -> int:
        if self.ends is None:
            return -(-(last - first) // self.size)
        return bisect_left(self.ends, last) - bisect_right(self.ends, first) + 1


# -- batches that come apart ---------------------------------------------------------------------


def split(start: int, rows: int, value: Any) -> Iterator[Batch]:
    """The rows of a batch as batches of one row."""
    for i in range(rows):
        yield Batch(start + i, 1, _row(value, i, rows), {}, lambda: iter(()))


def _row(value: Any, i: int, rows: int) -> Any:
    """Row ``i`` of all that has one entry per row; the rest as it is."""
    return tree.map_parts(lambda part: part[i : i + 1], value, where=lambda part: _per_row(part, rows))


def _per_row(value: Any, rows: int) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim > 0 and len(value) == rows
    if type(value) is list and len(value) == rows:  # of rows, unless it is a list of the parts of a batch
        return not any(_per_row(item, rows) for item in value)
    return type(value) is tuple and len(value) == rows and all(isinstance(item, str) for item in value)


def copied(value: Any) -> Any:
    """A batch with memory of its own: the model may change the other one in place."""
    return tree.map_tensors(Tensor.clone, value)  # and arrays


# -- rows that cannot be loaded --------------------------------------------------------------------


class _Failure(NamedTuple):
    why: str


class Tolerant:
    """A data set that hands its errors over instead of raising them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            return _Failure(why(error))


class TolerantCollate:
    """Collates the rows that could be loaded, and tells of the others."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Any, dict[int, str]]:
        failed = {i: sample.why for i, sample in enumerate(samples) if isinstance(sample, _Failure)}
        good = [sample for sample in samples if not isinstance(sample, _Failure)]
        return (self.collate(good) if good else None), failed


def why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

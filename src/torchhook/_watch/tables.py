"""The statistics of many tensors as columns: what is told of each is worked out for all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchhook._values.statistics import Measure, Measured

FIELDS = ("mean", "variance", "least", "greatest", "nonzeros", "nans")


class Table:
    """One row for each tensor.

    >>> table = Table([2], np.array([[1.0, 4.0, -1.0, 3.0, 2.0, 0.0]]))
    >>> table.summaries(["mean", "std", "zeros"])
    [{'mean': 1.0, 'std': 2.0, 'zeros': 0.0}]
    """

    def __init__(self, sizes: Sequence[int], numbers: NDArray[Any]) -> None:
        self._sizes = sizes
        self._numbers = numbers
        """The columns are ``FIELDS``."""
        self._told: tuple[Sequence[str], list[str], list[tuple[Any, ...]]] | None = None

    def measured(self, at: int, measure: Measure) -> Measured:
        """What is known of one tensor, to be put together with others."""
        numbers = dict(zip(FIELDS, self._numbers[at].tolist(), strict=True))
        return measure.only(Measured(self._sizes[at], **numbers))

    def summaries(self, wanted: Sequence[str]) -> list[dict[str, Any]]:
        """For each row what ``summarize`` would say of it alone."""
        names, rows = self.told(wanted)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def told(self, wanted: Sequence[str]) -> tuple[list[str], list[tuple[Any, ...]]]:
        """The names of what is wanted and found here, and for each row the numbers in their order."""
        if self._told is None or self._told[0] is not wanted:
            columns = self._columns()
            names = [name for name in wanted if name in columns]
            rows = list(zip(*(columns[name].tolist() for name in names), strict=True))
            self._told = wanted, names, rows or [()] * len(self._sizes)
        return self._told[1:]

    def joined(self, groups: Sequence[Sequence[int]]) -> Table:
        """For each group of rows one that says what they do together, by the parallel formula of Chan et al.

        >>> table = Table([2, 1], np.array([[1.0, 1.0, 0.0, 2.0, 1.0, 0.0], [4.0, 0.0, 4.0, 4.0, 1.0, 0.0]]))
        >>> table.joined([[0, 1]]).summaries(["mean", "max"])
        [{'mean': 2.0, 'max': 4.0}]
        """
        rows = np.concatenate([np.asarray(group) for group in groups])
        lengths = np.array([len(group) for group in groups])
        starts = np.cumsum(lengths) - lengths
        mean, variance, least, greatest, nonzeros, nans = self._numbers[rows].T
        sizes = np.array(self._sizes)[rows]
        with np.errstate(invalid="ignore", over="ignore"):
            size = np.add.reduceat(sizes, starts)
            middle = np.add.reduceat(mean * sizes, starts) / size
            gaps = mean - np.repeat(middle, lengths)
            squares = np.add.reduceat(sizes * variance, starts) + np.add.reduceat(sizes * gaps * gaps, starts)
        found = [
            middle,
            squares / size,
            np.minimum.reduceat(least, starts),  # NaN, where one is
            np.maximum.reduceat(greatest, starts),
            np.add.reduceat(nonzeros, starts),
            np.add.reduceat(nans, starts),
        ]
        return Table(size.tolist(), np.stack(found, axis=1))

    def _columns(self) -> dict[str, NDArray[Any]]:
        mean, variance, least, greatest, nonzeros, nans = self._numbers.T
        sizes = np.array(self._sizes)
        with np.errstate(invalid="ignore", over="ignore"):
            squares = sizes * variance
            norm = _root(squares + sizes * mean * mean)
            # Not a number though all values are: one is infinite, whose distance from the mean is none.
            norm[np.isnan(norm) & ~np.isnan(least)] = np.inf
            return {
                "mean": mean,
                "std": _root(squares / sizes),
                "min": least,
                "max": greatest,
                "zeros": (sizes - nonzeros) / sizes,
                "nans": nans.astype(np.int64),
                "norm": norm,
            }


def _root(squares: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = np.sqrt(np.where(squares >= 0, squares, np.nan))
    return found

"""The statistics of many tensors as columns: what is told of each is worked out for all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchhook._values.statistics import Measure, Measured
from torchhook._watch.rows import FIELDS


class Table:
    """One row for each tensor.

    >>> table = Table([2], np.array([[1.0, 4.0, -1.0, 3.0, 2.0, 0.0]]))
    >>> table.summaries(["mean", "std", "zeros"])
    [{'mean': 1.0, 'std': 2.0, 'zeros': 0.0}]
    """

    def __init__(self, sizes: Sequence[int], numbers: NDArray[Any]) -> None:
        self._sizes = sizes
        self._numbers = numbers
        """The columns are ``rows.FIELDS``."""
        self._summaries: tuple[Sequence[str], list[dict[str, Any]]] | None = None

    def measured(self, at: int, measure: Measure) -> Measured:
        """What is known of one tensor, to be put together with others."""
        numbers = dict(zip(FIELDS, self._numbers[at].tolist(), strict=True))
        return measure.only(Measured(self._sizes[at], **numbers))

    def summaries(self, wanted: Sequence[str]) -> list[dict[str, Any]]:
        """For each row what ``summarize`` would say of it alone."""
        if self._summaries is None or self._summaries[0] is not wanted:
            columns = self._columns()
            names = [name for name in wanted if name in columns]
            rows = zip(*(columns[name].tolist() for name in names), strict=True)
            self._summaries = wanted, [dict(zip(names, row, strict=True)) for row in rows]
        return self._summaries[1]

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

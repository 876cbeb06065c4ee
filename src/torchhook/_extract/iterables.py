"""Lists and iterable data sets: whether a list holds rows or batches, and whether workers repeat each other's rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from torchhook._extract import fingerprint
from torchhook._extract.inputs import fields_of, rows_in
from torchhook._values import tree
from torchhook._words import counted
from torchhook.errors import ExtractError


def holds_batches(items: Sequence[Any]) -> bool:
    """Whether a list holds batches, and not rows; where it could be either, it is refused.

    >>> import torch
    >>> holds_batches([torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(2, 3)]), holds_batches([torch.zeros(3)] * 9)
    (True, False)
    """
    if not items or _is_row(items[0]):
        return False
    shapes = [[tuple(part.shape) for part in tree.tensors(item)] for item in items]
    sizes = [{shape[0] if shape else 0 for shape in one} for one in shapes]
    # As a loader makes them: all of one size but the last, which may be smaller.
    first = next(iter(sizes[0]))
    even = all(len(one) == 1 for one in sizes) and all(one == {first} for one in sizes[:-1]) and max(sizes[-1]) <= first
    if even and any(one != shapes[0] for one in shapes):
        return True  # rows of different shapes could not be put together
    raise ExtractError(
        f"data is a list of {counted(len(items), 'item')}, the first of them {tree.describe(items[0])}: these may be "
        "rows or batches. For rows say batch_size=; for batches pass iter(data)."
    )


def _is_row(item: Any) -> bool:
    """Whether an item of a list can only be one row: it holds a number of its own, a text, or no more than a vector."""
    fields = fields_of(item)
    parts = list(fields.values()) if fields is not None else list(item) if isinstance(item, (list, tuple)) else [item]
    dims = [part.ndim for part in parts if isinstance(part, (Tensor, np.ndarray))]
    return not dims or max(dims) < 2 or 0 in dims or any(_is_single(part) for part in parts)


def _is_single(part: Any) -> bool:
    return isinstance(part, (bool, int, float, str, bytes, np.generic)) and not isinstance(part, Mapping)


class Worked:
    """The batches of a loader over an iterable data set, of which every worker has a copy."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches, workers = iter(self.loader), self.loader.num_workers
        # Workers take turns: the first batch of each comes before the second of any.
        head = list(itertools.islice(batches, workers)) if workers > 1 else []
        if len({fingerprint.of_batch(batch) for batch in head}) < len(head):
            raise ExtractError(
                f"the {workers} workers of an {type(self.loader.dataset).__name__} give the same rows, so that each "
                "would be stored more than once. Let each worker give its own share, by "
                "torch.utils.data.get_worker_info, or load without workers: workers=0, or num_workers=0 in the loader."
            )
        return self._counted(itertools.chain(head, batches))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Told apart by values, workers that add their own noise would pass: a data set with a length tells more."""
        most, seen = self._length(), 0
        for batch in batches:
            seen += rows_in(batch)
            if most is not None and seen > most:
                raise ExtractError(
                    f"an {type(self.loader.dataset).__name__} says that it has {most} rows, and gave more. Do all "
                    "workers give all rows? Let each give its own share (torch.utils.data.get_worker_info)."
                )
            yield batch

    def _length(self) -> int | None:
        try:
            # Of a loader that makes no batches, the data set gives batches, and counts them.
            return None if self.loader.batch_size is None else len(self.loader.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

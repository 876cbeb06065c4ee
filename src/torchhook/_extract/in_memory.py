"""Data that lies in memory: its batches are slices, and a part of it can be sent to another process.

Taken row by row and stacked again, as a loader does it, tensors cost four times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

Part = Tensor | np.ndarray


class InMemory:
    """Rows of tensors or arrays, in the order of a source, from row ``start`` on.

    >>> InMemory([torch.arange(4), torch.ones(4, 2)], alone=False).rows(1, 3)[0]
    tensor([1, 2])
    """

    def __init__(
        self, parts: Sequence[Part], alone: bool, order: Sequence[int] | None = None, start: int = 0, pin: bool = False
    ) -> None:
        self.parts, self.alone, self.order, self.start, self.pin = parts, alone, order, start, pin

    def rows(self, low: int, high: int) -> Any:
        """Rows ``[low, high)`` as the batch that collating them gives, in memory of their own: models work in place."""
        found = [self._rows(part, low - self.start, high - self.start) for part in self.parts]
        return found[0] if self.alone else found

    def _rows(self, part: Part, low: int, high: int) -> Tensor:
        chosen = slice(low, high) if self.order is None else list(self.order[low:high])
        if isinstance(part, np.ndarray):
            found = torch.from_numpy(np.array(part[chosen], order="C"))
            return found.pin_memory() if self.pin else found
        found = part[chosen].detach()
        if self.pin and not found.is_cuda:
            return torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found)
        # As stacked rows are, whatever the memory format of the whole: the same rows must give the same bytes.
        return found.clone(memory_format=torch.contiguous_format)

    def window(self, low: int, high: int) -> InMemory:
        """Only rows ``[low, high)``, by the same numbers."""
        whole = InMemory(self.parts, alone=False, order=self.order, start=self.start)
        return InMemory(whole.rows(low, high), self.alone, start=low, pin=self.pin)


def of(dataset: Any, order: Sequence[int], collate: Callable[[list[Any]], Any], pin: bool) -> InMemory | None:
    """The rows of a data set that is nothing but tensors or an array; ``None`` for any other."""
    alone = type(dataset) is not TensorDataset
    parts: Sequence[Any] = (dataset,) if alone else dataset.tensors
    # Exactly these: a subclass may have rows of its own making.
    if collate is not default_collate or not parts or not all(map(_plain, parts)):
        return None
    own = isinstance(order, range) and order == range(len(parts[0]))
    return InMemory(parts, alone, None if own else order, pin=pin and torch.cuda.is_available())


def _plain(part: Any) -> bool:
    if type(part) is Tensor:
        return part.layout == torch.strided and not part.is_quantized and not part.is_nested and part.dim() > 0
    # Rows that are numbers are collated by other rules, and some kinds of numbers torch has not.
    return type(part) in (np.ndarray, np.memmap) and part.ndim > 1 and _has_dtype(part)


def _has_dtype(array: np.ndarray) -> bool:
    try:
        torch.from_numpy(np.empty(0, array.dtype))
    except (TypeError, ValueError):
        return False
    return True

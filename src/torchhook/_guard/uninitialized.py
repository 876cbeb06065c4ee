"""Memory that holds whatever was there before: no fault of an operation that writes to another part of it."""

from __future__ import annotations

import math

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchhook._values.elements import floats
from torchhook._values.memory import storage


class Blank:
    """The memory of this run that was made without values. Views of it are blank too."""

    def __init__(self) -> None:
        self._memory: dict[int | None, StorageWeakRef] = {}
        """By identity, which stays its own for as long as it is referred to, also after it was freed."""

    def __contains__(self, tensor: Tensor) -> bool:
        return bool(self._memory) and storage(tensor) in self._memory

    def add(self, tensor: Tensor) -> None:
        memory = storage(tensor)
        if memory is not None:
            self._memory[memory] = StorageWeakRef(tensor.untyped_storage())

    def filled(self, tensor: Tensor) -> None:
        """All of this tensor was written; if it is a view, the rest of its memory was not."""
        if tensor in self and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            del self._memory[storage(tensor)]

    def clear(self) -> None:
        self._memory.clear()


def written(before: Tensor, after: Tensor) -> Tensor:
    """What an operation wrote to blank memory, with 0 where it left alone what was there."""
    old, new = floats(before), floats(after)
    if old is None or new is None or old.shape != new.shape:
        return after
    return new.masked_fill((old == new) | (old.isnan() & new.isnan()), 0)


def without_nan(before: Tensor) -> Tensor:
    """What was in blank memory: a NaN there is nobody's input, an infinity may have been written on purpose."""
    old = floats(before)
    return before if old is None else old.nan_to_num(0.0, math.inf, -math.inf)

"""Memory that holds whatever was there before: no fault of an operation that writes to another part of it."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from torchhook._torch import storage_ref
from torchhook._values.elements import floats
from torchhook._values.memory import storage


class Uninitialized:
    """The memory of this run that was made without values, by ``torch.empty`` and its like. Views of it count too."""

    def __init__(self) -> None:
        # By address, which may be used again once memory was freed. A weak reference keeps the address taken (not the
        # memory), so that no other tensor is mistaken for this one.
        self._memory: dict[int | None, Any] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return bool(self._memory) and storage(tensor) in self._memory

    def add(self, tensor: Tensor) -> None:
        memory = storage(tensor)
        if memory is not None:
            self._memory[memory] = storage_ref(tensor)

    def mark_filled(self, tensor: Tensor) -> None:
        """All of this tensor was written; if it is a view, the rest of its memory was not."""
        if tensor in self and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            del self._memory[storage(tensor)]

    def clear(self) -> None:
        self._memory.clear()


def only_written(before: Tensor, after: Tensor) -> Tensor:
    """What an operation wrote to uninitialized memory, with 0 where it left alone what was there."""
    old, new = floats(before), floats(after)
    if old is None or new is None or old.shape != new.shape:
        return after
    return new.masked_fill((old == new) | (old.isnan() & new.isnan()), 0)


def without_nan(before: Tensor) -> Tensor:
    """What was in uninitialized memory, less its NaNs."""
    # Nobody put a NaN there, so it is nobody's input; an infinity may be one that the model filled in as a mask.
    old = floats(before)
    return before if old is None else old.nan_to_num(0.0, math.inf, -math.inf)

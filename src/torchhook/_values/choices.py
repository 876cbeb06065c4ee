"""Choices along one dim, as users write them and as they are kept.

A choice is an integer, a slice, a list of integers, or a boolean mask; of positions also one line for each row, of
integers or of booleans. Dims stay: an integer chooses a part of size one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from torchhook._values.value_object import ValueObject

Array = np.ndarray[Any, Any]
Which = Any
"""A choice as users write it: ``int | slice | range | Sequence[int] | Sequence[bool] | Tensor``, or an ``Along``."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Along(ValueObject):
    """A choice along a dim that is named, of which ``count`` equal pieces may lie side by side in it."""

    room = "edits."
    which: Any
    dim: int
    count: int | None = None


def choice(which: Which, name: str, lines: bool = False) -> Any:
    """A choice as it is kept: an integer, a slice, a list of integers, a boolean mask, or ``lines`` of either.

    >>> import torch
    >>> choice(range(3), "rows"), choice(torch.tensor([4, -1]), "rows"), choice(np.int64(2), "rows")
    ([0, 1, 2], [4, -1], 2)
    """
    if which is None or isinstance(which, slice):
        return which
    if isinstance(which, Along):
        return dataclasses.replace(which, which=choice(which.which, name, lines))
    if isinstance(which, bool):
        _refuse(which, name)
    if name == "heads" and isinstance(which, tuple):  # may be meant as a dim and a count
        raise TypeError(
            f"heads={which}: a list, {list(which)}, chooses several heads; edits.along(which, dim=…, count=…) names "
            "the dim that they are in."
        )
    # Not by operator.index: a tensor or an array of one element has it too, and is a list.
    if isinstance(which, (int, np.integer)):
        return int(which)
    found = _as_array(which, name)
    if found.ndim > (2 if lines else 1) or (found.ndim == 0 and found.dtype == bool):
        _refuse(which, name, f" of {found.ndim} dims" if found.ndim else "")
    if found.dtype == bool or found.ndim == 2:
        return found.copy()
    numbers: int | list[int] = found.tolist()
    return numbers


def _as_array(which: Any, name: str) -> Array:
    """The integers or booleans of a choice."""
    if name == "positions" and isinstance(which, (list, tuple)) and which and all(map(_is_line, which)):
        lengths = [len(line) for line in which]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"positions={which!r}: lines for the rows have to be equally long, and these have {lengths} elements. "
                "A boolean mask, rows × tokens, chooses another number in each."
            )
    try:
        found = which.detach().cpu().numpy() if isinstance(which, Tensor) else np.asarray(which)
    except (TypeError, ValueError, RuntimeError):
        _refuse(which, name)
    if not found.size:
        raise ValueError(f"{name}={which!r} chooses nothing.")
    if found.dtype.kind not in "biu":
        _refuse(which, name)
    return found if found.dtype == bool else found.astype(np.int64)


def _is_line(which: Any) -> bool:
    return isinstance(which, (list, tuple)) or (isinstance(which, (Tensor, np.ndarray)) and which.ndim == 1)


def _refuse(which: Any, name: str, what: str = "") -> NoReturn:
    lines = ", or a line of these for each row" if name == "positions" else ""
    raise TypeError(f"{name}={which!r}{what}: give an integer, a slice, a list of integers or a boolean mask{lines}.")

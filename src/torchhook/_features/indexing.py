"""What an index of a column means, as a tensor of its shape would take it: which rows are read, and what of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_WANTED = "are chosen by number, slice, list or mask"


class Chosen(NamedTuple):
    """Rows of a column, and the index that is then applied to a tensor of these rows, if there is one."""

    rows: range | list[int]
    rest: tuple[Any, ...] | None = None


def chosen(key: Any, shape: Sequence[int], name: str) -> Chosen:
    """What an index means for a column of this shape, rows first.

    >>> chosen((slice(2, 4), 0), (9, 3), "fc")
    Chosen(rows=range(2, 4), rest=(slice(None, None, None), 0))
    """
    parts = [_plain(part, name) for part in (key if isinstance(key, tuple) else (key,))]
    at = _of_rows(parts, len(shape), name)
    if at is None:  # every row, as in v[...] or v[None]
        whole = [slice(None), *parts] if parts[:1] == [...] else parts
        return Chosen(range(shape[0]), None if parts in ([], [...]) else tuple(whole))
    part, alone = parts[at], len(parts) == 1
    if isinstance(part, slice):
        rows: range | list[int] = range(*part.indices(shape[0]))
        here: list[Any] = [slice(None)]
    elif isinstance(part, int):
        rows, here, alone = [number(part, shape[0], name)], [0], False
    else:
        places, *others = _places(part, shape, name)
        rows, alone = numbers(places.reshape(-1), shape[0], name), alone and places.dim() == 1 and not others
        if not alone:
            # Each row is read once, however often an index that is combined with others repeats it.
            unique, inverse = torch.tensor(rows, dtype=torch.int64).unique(return_inverse=True)
            rows, here = unique.tolist(), [inverse.reshape(places.shape), *others]
    return Chosen(rows) if alone else Chosen(rows, (*parts[:at], *here, *parts[at + 1 :]))


def _plain(part: Any, name: str) -> Any:
    """One part of an index as an int, slice, ``None``, ellipsis, bool, or tensor of numbers or of a mask."""
    if part is None or part is Ellipsis or isinstance(part, (bool, slice)):
        return part
    if isinstance(part, Tensor):
        if part.dtype == torch.uint8 and part.dim():
            raise TypeError(f"{name!r}: uint8 may be a mask or numbers. Say which, with .bool() or .long().")
        part = part.detach().cpu()
    elif isinstance(part, (list, range, np.ndarray, np.generic)):
        part = _tensor(part, name)
    if not isinstance(part, Tensor):
        try:
            return operator.index(part)
        except TypeError:
            raise TypeError(f"{name!r}: rows {_WANTED}, found {type(part).__name__}.") from None
    if part.is_floating_point() or part.is_complex():
        raise TypeError(f"{name!r}: rows {_WANTED}, found {part.dtype}.")
    return part if part.dim() else part.item()


def _tensor(part: Any, name: str) -> Tensor:
    found = np.asarray(part)
    if found.dtype.kind not in "biu" and found.size:
        raise TypeError(f"{name!r}: rows {_WANTED}, found {found.dtype} {found.shape}.")
    if found.dtype == np.uint64:  # beyond int64 is beyond every row: it stays so, and is refused as that
        found = np.minimum(found, np.uint64(2**63 - 1))
    return torch.as_tensor(found if found.dtype == bool else found.astype(np.int64))


def _of_rows(parts: list[Any], dims: int, name: str) -> int | None:
    """Which part of an index speaks of the rows."""
    used = sum(part.dim() if _is_mask(part) else isinstance(part, (int, slice, Tensor)) for part in parts)
    used -= sum(isinstance(part, bool) for part in parts)
    if sum(part is Ellipsis for part in parts) > 1:
        raise IndexError(f"{name!r}: an index has one ellipsis at most.")
    for at, part in enumerate(parts):
        if part is Ellipsis and dims > used:
            return None
        # None and a single bool make a new dim, and an ellipsis may stand for none at all.
        if isinstance(part, (int, slice, Tensor)) and not isinstance(part, bool):
            return at
    return None


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool


def _places(part: Tensor, shape: Sequence[int], name: str) -> tuple[Tensor, ...]:
    """Numbers of rows, and of what comes after them where a mask has more dims."""
    if not _is_mask(part):
        return (part,)
    if tuple(part.shape) != tuple(shape[: part.dim()]):
        raise IndexError(
            f"{name!r}: a mask of shape {tuple(part.shape)} for {shape[0]} rows of shape {tuple(shape[1:])}."
        )
    return part.nonzero(as_tuple=True)


def single(key: Any, rows: int, name: str, what: str = "row") -> int:
    """The row that a number stands for, and nothing that could be rounded to one; ``what`` is the word for it."""
    kind = getattr(key, "dtype", type(key).__name__)
    if kind in ("bool", torch.bool) or not hasattr(key, "__index__"):
        raise TypeError(f"{name!r}: {what}s {_WANTED}, found {kind}.")
    try:
        return number(operator.index(key), rows, name, what)
    except TypeError:  # a tensor of another kind
        raise TypeError(f"{name!r}: {what}s {_WANTED}, found {kind}.") from None


def number(row: int, rows: int, name: str, what: str = "row") -> int:
    """A row by its number, of so many; negative ones count from the end."""
    if not -rows <= row < rows:
        raise IndexError(f"{name!r}: {what} {row} of {rows}.")
    return row % rows


def numbers(key: Any, rows: int, name: str, what: str = "row") -> list[int]:
    """The row numbers that a list of them or a mask stands for, of so many rows."""
    found = np.asarray(key.detach().cpu() if isinstance(key, Tensor) else key)
    if found.dtype == bool:
        if found.shape != (rows,):
            raise IndexError(f"{name!r}: a mask of shape {found.shape} for {rows} {what}s.")
        found = found.nonzero()[0]
    if found.size == 0:
        return []
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(f"{name!r}: {what}s {_WANTED}, found {found.dtype} {found.shape}.")
    beyond = found[(found < -rows) | (found >= rows)]
    if beyond.size:
        raise IndexError(f"{name!r}: {what} {beyond[0]} of {rows}.")
    # Signed first: numpy makes floats of unsigned and negative numbers together.
    signed = found.astype(np.int64)
    listed: list[int] = np.where(signed < 0, signed + rows, signed).tolist()
    return listed

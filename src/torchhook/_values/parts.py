"""Parts of a value: chosen rows, positions and heads of a tensor, read and written back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchhook._values.choices import Along, Array, Which
from torchhook._values.heads import (
    UNKNOWN,
    HeadAxis,
    KnownHeads,
    NoPart,
    are_ids,
    by_row,
    copy_of,
    head_axis,
    is_packed,
    moved,
    refuse_other_copies,
    rows_of_heads,
    rows_of_tokens,
    token_dim,
    unpacked,
)
from torchhook._values.subclasses import is_distributed
from torchhook._values.wrappers import faked_like


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of tensors of one shape."""

    arranged: Callable[[Tensor], Tensor]
    """The same memory with heads in a dim of their own, or rows and positions first."""
    index: tuple[Any, ...]
    shape: tuple[int, ...]
    copies: tuple[Callable[[Tensor], Tensor], ...] = ()
    """The same for further copies of the heads, which have to stay alike."""
    in_order: bool = False
    """Whether dims are put together for it, which only those that lie one after the other can be."""

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor, as one of its own."""
        found = self.arranged(tensor)[self.index]
        return found if any(isinstance(one, Tensor) for one in self.index) else found.clone()

    def put(self, tensor: Tensor, new: Tensor) -> Tensor:
        """A copy of the tensor with another part; autograd follows both."""
        result = tensor.clone(memory_format=torch.contiguous_format) if self.in_order else tensor.clone()
        self.write(result, new)
        return result

    def write(self, result: Tensor, new: Tensor) -> None:
        """Put another part into a tensor itself, which is nobody else's."""
        for arranged in (self.arranged, *self.copies):
            arranged(result)[self.index] = new

    def fitted(self, new: Any, part: Tensor) -> Any:
        """What belongs to the part of a tensor that was made for the whole; any other is for the part as it is."""
        if not isinstance(new, Tensor) or new.is_nested or new.dim() != len(self.shape):
            return new
        if tuple(new.shape) == self.shape:
            return self.of(new)
        # With another number of dims, as heads that were split have, a size may fit both by chance.
        if part.dim() != len(self.shape) or _fits(new.shape, part.shape) or not _fits(new.shape, self.shape):
            return new
        return self.of(new.expand(self.shape))


def _fits(shape: Sequence[int], whole: Sequence[int]) -> bool:
    return all(size in (1, wanted) for size, wanted in zip(shape, whole, strict=True))


def part(
    tensor: Tensor,
    rows: Which = None,
    positions: Which = None,
    heads: Which = None,
    known: KnownHeads = UNKNOWN,
    otherwise: int | None = None,
) -> Part:
    """The part of a tensor that is chosen: rows of dim 0, positions of the dim of tokens, heads where they are.

    >>> x = torch.arange(24.0).reshape(2, 3, 4)
    >>> part(x, positions=-1, heads=Along(1, dim=2, count=2)).of(x)
    tensor([[[[10., 11.]]],
    <BLANKLINE>
    <BLANKLINE>
            [[[22., 23.]]]])

    ``otherwise`` is the dim of positions where no tokens are known, as in ``token_dim``.
    """
    _refuse_distributed(tensor)
    if (spread := _spread(tensor, known, rows, positions, heads)) is not None:
        inner = part(spread(tensor), rows, positions, heads, known._replace(asked=False))
        first, *others = (_then(spread, view) for view in (inner.arranged, *inner.copies))
        return Part(first, inner.index, tuple(tensor.shape), tuple(others), spread is unpacked)
    axis = None if heads is None else _head_axis(tensor, heads, known)
    added = 0 if axis is None or not axis.joined else 1 + (axis.groups > 1)
    dims: dict[str, int] = {}
    if rows is not None or _has_lines(positions):
        # A line for each of what is in dim 0 leaves no doubt.
        default = _line_dim if rows is None else _row_dim
        dims["rows"] = _named(rows, tensor, "rows", lambda: default(tensor, known, positions))
    if positions is not None:
        dims["positions"] = _named(
            positions, tensor, "positions", lambda: _position_dim(tensor, axis, known, otherwise)
        )
    if (axis is not None and len({*dims.values(), axis.dim}) != len(dims) + 1) or len({*dims.values()}) != len(dims):
        raise NoPart(f"rows, positions and heads have to be different dims of {tuple(tensor.shape)}.")
    # Splitting a dim moves those that come after it.
    dims = {name: dim + added * (axis is not None and dim > axis.dim) for name, dim in dims.items()}
    if axis is not None:
        dims["heads"] = axis.dim + (axis.joined and axis.groups > 1)
    shape = list(tensor.shape)
    if axis is not None and axis.copies > 1:
        refuse_other_copies(tensor, axis)
        shape[axis.dim] = axis.heads
    if axis is not None and axis.joined:
        sizes = [axis.groups] * (axis.groups > 1) + [axis.heads, shape[axis.dim] // (axis.groups * axis.heads)]
        shape[axis.dim : axis.dim + 1] = sizes
    chosen = {"rows": rows, "positions": positions, "heads": heads}
    found = {dim: _index(_which(chosen[name]), shape[dim], name, known) for name, dim in dims.items()}
    lines = dims.get("positions") if _has_lines(positions) else None
    arranged, index_ = _arranged(found, shape, dims.get("rows"), lines)
    placed = tuple(one if isinstance(one, slice) else _placed(one, tensor) for one in index_)
    first, *others = (_then(view, arranged) for view in _views(axis))
    return Part(first, placed, tuple(tensor.shape), tuple(others))


def positions(tensor: Tensor, known: KnownHeads = UNKNOWN, dim: int | None = None) -> int:
    """How many positions there are in a tensor to choose from, along ``dim`` if one is named.

    >>> positions(torch.zeros(2, 6, 32))
    6
    """
    _refuse_distributed(tensor)
    if dim is not None:
        return tensor.shape[_dim(dim, tensor)]
    spread = _spread(tensor, known, None, slice(None), None)
    whole = tensor if spread is None else spread(tensor)
    return whole.shape[position_dim(whole, None, known)]


def _refuse_distributed(tensor: Tensor) -> None:
    if is_distributed(tensor):
        raise NoPart(
            f"this is a DTensor of shape {tuple(tensor.shape)}, of which each rank holds a part: which ones are "
            "here is known to its mesh alone.",
            "Change all of it, or write a function that goes by value.full_tensor() or value.to_local().",
        )


def _spread(
    tensor: Tensor, known: KnownHeads, rows: Which, positions: Which, heads: Which
) -> Callable[[Tensor], Tensor] | None:
    """How rows, heads and tokens that share a dim, or lie in other ones, come to have their own; mostly they do."""
    named = any(isinstance(one, Along) for one in (rows, positions, heads))
    if not named and (positions is not None or heads is not None) and is_packed(tensor.shape, known):
        return unpacked
    if not named and (rows is not None or heads is not None) and tensor.dim() == 3 and known.folded > 1:
        count = rows_of_heads(tensor.shape, known)
        return lambda one: one.unflatten(0, (count, -1))
    whole = unflattened(tensor, known, rows, positions, heads)
    return None if whole is tensor else lambda one: one.unflatten(0, whole.shape[:2])


def unflattened(
    tensor: Tensor, known: KnownHeads, rows: Which = None, positions: Which = None, heads: Which = None
) -> Tensor:
    """``(N, T, D)`` of ``(N·T, D)``, where rows or positions are chosen and no dim of the value is named for them."""
    named = any(isinstance(one, Along) for one in (rows, positions))
    named = named or (isinstance(heads, Along) and _dim(heads.dim, tensor) != tensor.dim() - 1)
    return tensor if named or (rows is None and positions is None) else by_row(tensor, known, rows is not None)


def _which(chosen: Which) -> Any:
    return chosen.which if isinstance(chosen, Along) else chosen


def _has_lines(positions: Which) -> bool:
    which = _which(positions)
    return isinstance(which, np.ndarray) and which.ndim == 2


def _placed(numbers: Array, tensor: Tensor) -> Tensor:
    # torch takes no ordinary tensor beside a fake one, and would wait for one that comes from the host.
    index = torch.from_numpy(np.ascontiguousarray(numbers))
    return faked_like(index, tensor).to(tensor.device, non_blocking=True)


def _named(chosen: Which, tensor: Tensor, name: str, default: Callable[[], int]) -> int:
    if not isinstance(chosen, Along):
        dim = default()
        if dim >= tensor.dim():
            raise NoPart(f"{name} would be dim {dim} of a value of shape {tuple(tensor.shape)}.")
        return dim
    if chosen.count is not None:
        raise NoPart(f"count={chosen.count} splits a dim into heads: {name} have one of their own.")
    return _dim(chosen.dim, tensor)


def _dim(dim: int, tensor: Tensor) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise NoPart(f"there is no dim {dim} in a value of shape {tuple(tensor.shape)}.")
    return dim % tensor.dim()


def _head_axis(tensor: Tensor, heads: Which, known: KnownHeads) -> HeadAxis:
    if not isinstance(heads, Along):
        return head_axis(tensor.shape, known)
    dim = _dim(heads.dim, tensor)
    size = tensor.shape[dim]
    if heads.count is None:
        return HeadAxis(dim, size)
    if heads.count < 1 or size % heads.count:
        raise NoPart(f"dim {heads.dim} of {tuple(tensor.shape)} cannot be split into {heads.count} heads.")
    return HeadAxis(dim, heads.count, joined=True)


def _row_dim(tensor: Tensor, known: KnownHeads, positions: Which) -> int:
    """The dim of the rows; a product of three dims has the heads of all rows there, one after the other."""
    if tensor.dim() == 3 and known.folded > 1:
        rows_of_heads(tensor.shape, known._replace(call=None))  # which says so
    if rows_of_tokens(tensor.shape, known) is not None:
        why = f"rows and tokens share a dim in a value of shape {tuple(tensor.shape)}."
        raise NoPart(why, "Name it for both: rows=edits.along(which, dim=0).")
    there = moved(tensor.shape, known)
    return 0 if there is None else there.rows


def _line_dim(tensor: Tensor, known: KnownHeads, positions: Which) -> int:
    """The dim that has a line of positions each: the other of two, where that of positions is named."""
    if isinstance(positions, Along):
        return 1 if _dim(positions.dim, tensor) == 0 else 0
    there = moved(tensor.shape, known)
    return 0 if there is None else there.rows


def position_dim(tensor: Tensor, heads: Which, known: KnownHeads, otherwise: int | None = None) -> int:
    """The dim that positions are chosen in, where no other one is named."""
    return _position_dim(tensor, None if heads is None else _head_axis(tensor, heads, known), known, otherwise)


def _position_dim(tensor: Tensor, axis: HeadAxis | None, known: KnownHeads, otherwise: int | None = None) -> int:
    """The dim of the tokens; of (N, D) a feature would be taken for one, but not of whole numbers."""
    return 1 if are_ids(tensor) else token_dim(tensor.shape, known, axis, otherwise)


def _views(axis: HeadAxis | None) -> list[Callable[[Tensor], Tensor]]:
    """A tensor with heads in a dim of their own; of repeated heads one view for each time."""
    if axis is None or (not axis.joined and axis.copies == 1):
        return [_identity]
    if axis.joined:
        sizes = [axis.groups] * (axis.groups > 1) + [axis.heads, -1]
        return [lambda tensor: tensor.unflatten(axis.dim, sizes)]
    return [functools.partial(copy_of, axis, copy) for copy in range(axis.copies)]


def once_each(tensor: Tensor, known: KnownHeads, check: bool = True) -> Tensor:
    """Keys and values with each of their heads once, however often a kernel is given them; any other as it is.

    ``check`` that copies are the same makes the host wait for a GPU.
    """
    axis = head_axis(tensor.shape, known) if known.shared and tensor.dim() == 4 else None
    if axis is None or axis.copies == 1:
        return tensor
    if check:
        refuse_other_copies(tensor, axis)
    return copy_of(axis, 0, tensor)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _then(view: Callable[[Tensor], Tensor], arranged: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return view if arranged is _identity else lambda tensor: arranged(view(tensor))


# -- from choices to an index ---------------------------------------------------------------------------------------

# By numpy, until the end: torch would follow each step where somebody listens, traces or fakes tensors.


def _index(which: Any, size: int, name: str, known: KnownHeads) -> slice | Array:
    return _lines(which, size, name, known) if _has_lines(which) else index(which, size, name, known)


def index(which: Any, size: int, name: str, known: KnownHeads = UNKNOWN) -> slice | Array:
    """A choice as a slice that counts from the front, or as the numbers that it stands for.

    >>> index(-1, 5, "keys"), index([3, -5], 5, "keys")
    (slice(4, 5, None), array([3, 0]))
    """
    if which is None:
        return slice(None)
    if isinstance(which, int):
        at = _inside([which], size, name, known)[0]
        return slice(at, at + 1)
    if isinstance(which, slice):
        start, stop, step = which.indices(size)
        # torch has no slices that go backwards.
        return slice(start, max(start, stop), step) if step > 0 else np.arange(size)[which]
    if isinstance(which, list):
        numbers = _inside(which, size, name, known)
        _once_each(numbers, which, size, name)
        return np.array(numbers)
    if len(which) != size:
        raise NoPart(f"the mask of {name} has {len(which)} elements, and there are {size}.")
    return which.nonzero()[0]  # type: ignore[no-any-return]


def _inside(which: Sequence[int], size: int, name: str, known: KnownHeads) -> list[int]:
    outside = [number for number in which if not -size <= number < size]
    if outside:
        shared = f" ({known}: here they are counted as this value has them)" if name == "heads" and known.where else ""
        raise NoPart(f"{name}={outside[0]} is outside of the {size} that there are{shared}.")
    return [number % size for number in which]


def _lines(lines: Array, size: int, name: str, known: KnownHeads) -> Array:
    if lines.dtype == bool:
        if lines.shape[1] != size:
            raise NoPart(f"the mask of {name} is {lines.shape[1]} long, and there are {size}.")
        return lines
    for line in lines.tolist():
        _once_each(_inside(line, size, name, known), line, size, name)
    return lines % size


def _once_each(numbers: list[int], written: list[int], size: int, name: str) -> None:
    if len(set(numbers)) < len(numbers):
        # As tokenizers give them.
        mask = " A mask is of booleans: mask.bool()." if {0, 1} >= set(written) and len(written) == size else ""
        raise NoPart(f"{name}={written} names one twice among {size}.{mask}")


def _arranged(
    found: dict[int, slice | Array],
    shape: Sequence[int],
    rows: int | None,
    lines: int | None,
) -> tuple[Callable[[Tensor], Tensor], tuple[slice | Array, ...]]:
    """How to lay a tensor out, whose heads have a dim of their own, and the index into that."""
    if all(isinstance(one, slice) for one in found.values()):
        return _identity, tuple(found.get(dim, slice(None)) for dim in range(max(found) + 1))
    numbers = {dim: np.arange(shape[dim])[one] if isinstance(one, slice) else one for dim, one in found.items()}
    for dim in range(max(found)):
        numbers.setdefault(dim, np.arange(shape[dim]))
    if lines is None or rows is None:
        return _identity, tuple(_along(numbers[dim], [dim], len(numbers)) for dim in sorted(numbers))
    given = numbers[lines]
    if len(given) != shape[rows]:
        raise NoPart(f"positions have {len(given)} lines, and there are {shape[rows]} rows: give one line for each.")
    given = given[numbers[rows]]
    if given.dtype != bool:
        placed = {dim: _along(one, [dim], len(numbers)) for dim, one in numbers.items() if dim != lines}
        placed[lines] = _along(given if rows < lines else given.T, sorted((rows, lines)), len(numbers))
        return _identity, tuple(placed[dim] for dim in sorted(placed))
    # Of a mask each row may have another number: rows and positions come first and together, as torch has it.
    at, positions = given.nonzero()
    others = [dim for dim in sorted(numbers) if dim not in (rows, lines)]
    order = [rows, lines, *others, *range(max(numbers) + 1, len(shape))]
    together = [_along(one, [0], len(others) + 1) for one in (numbers[rows][at], positions)]
    apart = [_along(numbers[dim], [place], len(others) + 1) for place, dim in enumerate(others, 1)]
    return lambda tensor: tensor.permute(order), (*together, *apart)


def _along(numbers: Array, dims: Sequence[int], total: int) -> Array:
    """Numbers that vary along some dims of an index of ``total`` dims, and are the same along the others."""
    shape = [1] * total
    for dim, size in zip(dims, numbers.shape, strict=True):
        shape[dim] = size
    return numbers.reshape(shape)

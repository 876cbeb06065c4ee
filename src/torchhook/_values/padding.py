"""Which positions of a batch's rows are real: known while the model runs, so that no transform takes padding in.

A transform gives for each row what it would give for that row alone and without padding. Whoever runs the model says
with ``knowing`` what is padded; ``real`` and ``places`` are what transforms ask, in the hook.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from torchhook._torch import compiler
from torchhook._values.heads import NoPart, Where, token_dim, unknown
from torchhook.errors import TransformError

_WAY_OUT = (
    "Give lengths= with a mask of the layer's own width to extract, or, where positions of this layer are not padded "
    "(an image tower), say masked=False in the transform."
)


class Known(Protocol):
    """What is known of the padding of a batch."""

    def fits(self, rows: int, width: int) -> bool:
        """Whether a dim of this size, in a value of so many rows, may be the positions that this is about."""

    def at(self, rows: int, width: int) -> Tensor | None:
        """The mask ``(rows, width)``, true where it is real; ``None`` if all of it is, or if nobody knows."""

    def sliced(self, positions: slice) -> Known:
        """The same for values of which only some positions are left."""


@dataclasses.dataclass(frozen=True, eq=False)
class Masks:
    """Masks of one batch, each with the name under which it was found: ``(rows, width)``, true where it is real."""

    masks: tuple[tuple[str, Tensor], ...]
    cut: tuple[tuple[str, int, int], ...] = ()
    """Names and widths of masks that lack positions which a row alone would have kept, and the first of such rows."""

    def fits(self, rows: int, width: int) -> bool:
        return any(mask.shape == (rows, width) for _, mask in self.masks)

    def at(self, rows: int, width: int) -> Tensor | None:
        fitting = [(name, mask) for name, mask in self.masks if mask.shape == (rows, width)]
        if not fitting and any(mask.shape == (width, rows) for _, mask in self.masks):
            raise TransformError(
                f"the value has positions first, {rows} of them, and its {width} rows second. Dim 0 must be the rows: "
                "begin with a function that makes it so, value.transpose(0, 1)."
            )
        if not fitting:
            found = ", ".join(f"{name} {tuple(mask.shape)}" for name, mask in self.masks)
            raise TransformError(
                f"known is the mask {found}, and the value has {rows} rows of {width} positions: the layer changes "
                f"the time axis, so that nobody knows which of its positions are padding. {_WAY_OUT}"
            )
        (name, mask), *others = fitting
        for other, second in others:
            if not torch.equal(mask, second):
                raise TransformError(f"{name} and {other} both fit the value, and differ. {_WAY_OUT}")
        for row in (row for *one, row in self.cut if one == [name, width]):
            raise TransformError(
                f"{name}: narrow has cut off positions that row {row} of the batch would have kept alone and unpadded. "
                "Choose them with transforms.tokens([...]), which counts without padding, or pad on the other side."
            )
        return _checked(name, mask)

    def sliced(self, positions: slice) -> Masks:
        left, cut = [], []
        for name, mask in self.masks:
            wanted = _kept_alone(mask, positions)
            there = wanted[:, positions]
            left.append((name, there))
            # What an earlier one has cut off is gone for this one, too.
            lost = [row for one, width, row in self.cut if (one, width) == (name, mask.shape[1])]
            lost += (wanted.sum(1) > there.sum(1)).nonzero().flatten().tolist()
            cut += [(name, there.shape[1], lost[0])] if lost else []
        return Masks(tuple(left), tuple(cut))


@dataclasses.dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths of the rows of one batch, ``(rows,)``: padding is at the end."""

    lengths: Tensor
    sizes: frozenset[int] = frozenset()
    """Sizes that the inputs have: a length counts positions along one of them. Empty if nobody knows."""

    @property
    def longest(self) -> int:
        return int(self.lengths.max()) if len(self.lengths) else 0

    def fits(self, rows: int, width: int) -> bool:
        known = not self.sizes or width in self.sizes
        return known and rows == len(self.lengths) and width >= self.longest

    def at(self, rows: int, width: int) -> Tensor | None:
        if not self.fits(rows, width):
            sizes = f", for inputs of sizes {sorted(self.sizes)}" if self.sizes else ""
            raise TransformError(
                f"lengths= has {len(self.lengths)} numbers up to {self.longest}{sizes}, and the value {rows} rows of "
                f"{width} positions. Lengths count positions of the input: for a layer that changes the time axis, "
                f"give lengths= as a mask of its own width, ({rows}, {width})."
            )
        return _checked("lengths=", self._mask(width))

    def _mask(self, width: int) -> Tensor:
        return torch.arange(width) < self.lengths[:, None]

    def sliced(self, positions: slice) -> Masks:
        return Masks(tuple(("lengths=", self._mask(size)) for size in self.sizes or (self.longest,))).sliced(positions)


class Asked:
    """What is known, and whether a transform wanted it; with ``None``, rows are padded and nobody knows where."""

    def __init__(self, known: Known | None, whole: Asked | None = None) -> None:
        self.known, self.asked, self.whole = known, False, whole

    def fits(self, rows: int, width: int) -> bool:
        return self.known is None or self.known.fits(rows, width)

    def at(self, rows: int, width: int) -> Tensor | None:
        self.asked = True
        if self.whole is not None:  # of which this is a part
            self.whole.asked = True
        return None if self.known is None else self.known.at(rows, width)

    def sliced(self, positions: slice) -> Known:
        return self if self.known is None else Asked(self.known.sliced(positions), self.whole or self)


def _kept_alone(mask: Tensor, positions: slice) -> Tensor:
    """The positions of each row that a slice means of the row alone.

    >>> _kept_alone(torch.tensor([[False, True, True], [True, True, True]]), slice(1, None)).tolist()
    [[False, False, True], [False, True, True]]
    """
    kept = torch.zeros_like(mask)
    for row, real in enumerate(mask):
        kept[row, real.nonzero().squeeze(1).numpy()[positions]] = True
    return kept


def _checked(name: str, mask: Tensor) -> Tensor | None:
    if bool(mask.all()):
        return None
    empty = (~mask.any(1)).nonzero()
    if len(empty):
        raise TransformError(f"{name}: row {int(empty[0])} of the batch has no position that is not padding.")
    return mask


def given(name: str, value: Any, rows: int, sizes: Collection[int] = ()) -> Masks | Lengths:
    """What a user says about the padding of a batch: lengths ``(rows,)`` or a mask ``(rows, T)``.

    >>> given("lengths=", [2, 3], 2).at(2, 4).tolist()
    [[True, True, False, False], [True, True, True, False]]
    """
    tensor = torch.as_tensor(value).detach().cpu()
    if tensor.dim() not in (1, 2) or len(tensor) != rows:
        raise TransformError(
            f"{name} has the shape {tuple(tensor.shape)}: expected lengths ({rows},) or a mask ({rows}, T)."
        )
    if tensor.dim() == 2:
        mask = as_mask(tensor)
        if mask is None:
            raise TransformError(f"{name} has two dims and holds other values than 0 and 1, which a mask does not.")
        return Masks(((name, mask),))
    numbers = tensor.long()
    if bool((numbers != tensor).any()) or bool((numbers < 0).any()):
        raise TransformError(f"{name} holds {tensor.tolist()[:8]}: lengths are whole numbers from 0 on.")
    return Lengths(numbers, frozenset(sizes))


def as_mask(tensor: Tensor) -> Tensor | None:
    """A mask as booleans; ``None`` for floats that are added to scores, which are no yes or no."""
    if tensor.is_floating_point() and not bool(((tensor == 0) | (tensor == 1)).all()):
        return None
    # Not == 1: some masks number the sequences of a row, or mark global attention with a 2.
    return tensor.detach().cpu() != 0


# -- while the model runs ------------------------------------------------------------------------------

_known: ContextVar[Known | None] = ContextVar("padding of the batch", default=None)


@contextlib.contextmanager
def knowing(padding: Known | None) -> Iterator[None]:
    """Transforms that run inside know what is padding."""
    if padding is None and known() is None:
        yield
        return
    token = _known.set(padding)
    try:
        yield
    finally:
        _known.reset(token)


def known() -> Known | None:
    """What the transform that runs now may know."""
    # The compiler follows no contexts; compiled code runs for no batch whose padding is known.
    return None if compiler.in_trace() else _known.get()


def afterwards(transform: Any, padding: Known | None) -> Known | None:
    """What is known of the padding of what a transform returns; a function of the user's may leave it where it was."""
    after = getattr(transform, "afterwards", None)
    found: Known | None = padding if after is None else after(padding)
    return found


def real(
    tensor: Tensor, dims: Sequence[int], named: bool = False, time: int | None = None, heads: Where = unknown
) -> Tensor | None:
    """Which elements to take in where ``dims`` are reduced, in a shape that fits ``tensor``; ``None`` for all.

    >>> with knowing(given("lengths=", [1, 2], 2)):
    ...     real(torch.zeros(2, 2, 4), [1])[..., 0].tolist()
    [[True, False], [True, True]]

    ``named`` says that the user chose the dims: then the positions may be another one, which stays. ``time`` is theirs,
    where it is known; else it is the one that is as long as the mask. ``heads`` asks what is known of the heads.
    """
    padding = known()
    if padding is None or not dims:
        return None
    rows, shape = len(tensor), tensor.shape
    reduced = [dim % tensor.dim() for dim in dims]
    if time is not None:
        return _spread(_at(padding, tensor, time, heads), tensor, time) if time in reduced else None
    fitting = [dim for dim in reduced if dim and padding.fits(rows, shape[dim])]
    others = [dim for dim in range(1, tensor.dim()) if padding.fits(rows, shape[dim])] if not fitting else []
    if others and named:
        return None
    if others:
        raise TransformError(
            f"the positions of a value of shape {tuple(shape)} are dim {others[0]}, as the mask of the batch says, and "
            f"dim {reduced[0]} would be reduced: say dims={others[0]}."
        )
    found: Tensor | None = None
    for dim in fitting or reduced[:1]:
        one = _spread(_at(padding, tensor, dim, heads), tensor, dim)  # says what is wrong if no dim fits
        if one is not None:
            found = one if found is None else found & one
    return found


def _spread(mask: Tensor | None, tensor: Tensor, dim: int) -> Tensor | None:
    """A mask of rows and ``dim`` in a shape that fits ``tensor``, where that is."""
    if mask is None:
        return None
    spread = mask.reshape([size if i in (0, dim) else 1 for i, size in enumerate(tensor.shape)])
    # From the host, where it was checked; the device need not be waited for.
    return spread.to(tensor.device, non_blocking=True)


def mask_of(tensor: Tensor, dim: int = 1, heads: Where = unknown) -> Tensor | None:
    """The mask ``(N, T)``, on the host, of a value whose positions are ``dim``; ``None`` if every position is real."""
    padding = known()
    return None if padding is None else _at(padding, tensor, dim, heads)


def _at(padding: Known, tensor: Tensor, dim: int, heads: Where) -> Tensor | None:
    """The mask of ``dim``; of a product of three dims, in which each row comes once for every head."""
    rows, width = len(tensor), tensor.shape[dim]
    if tensor.dim() == 3 and not padding.fits(rows, width):
        times = heads().folded
        if rows % times == 0 and padding.fits(rows // times, width):
            mask = padding.at(rows // times, width)
            return None if mask is None else mask.repeat_interleave(times, 0)
    return padding.at(rows, width)


def places(mask: Tensor, positions: Sequence[int]) -> Tensor:
    """Where the given positions of each row are, counted among the real ones, from the end if negative.

    >>> places(torch.tensor([[False, True, True], [True, True, False]]), [0, -1])
    tensor([[1, 2],
            [0, 1]])
    """
    counts = mask.sum(1)
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    wanted = torch.tensor(positions).expand(len(mask), -1)
    wanted = torch.where(wanted < 0, wanted + counts[:, None], wanted)
    outside = ((wanted < 0) | (wanted >= counts[:, None])).any(1).nonzero()
    if len(outside):
        row = int(outside[0])
        raise TransformError(
            f"tokens at {list(positions)}: row {row} of the batch has {int(counts[row])} that are not padding."
        )
    return order.gather(1, wanted)


# -- tokens that a transform is about --------------------------------------------------------------------


def dim_of_tokens(tensor: Tensor, heads: Where, name: str) -> int:
    """The dim of the tokens; dim 1 where no attention is around."""
    if tensor.dim() == 3:  # as nearly always: nobody need be asked
        return 1
    try:
        return token_dim(tensor.shape, heads(), otherwise=1)
    except NoPart as error:
        way = "Put them next to the rows first, by a function before it: lambda value: value.transpose(1, 2)."
        raise TransformError(f"{name}: {error.why} {way}") from None


def padding_along(tensor: Tensor, dims: Sequence[int] | None, heads: Where, name: str) -> tuple[Tensor | None, int]:
    """The mask of a value's tokens, and their dim; no mask where that is none of ``dims``, which are all for ``None``.

    >>> with knowing(given("lengths=", [1, 2], 2)):
    ...     padding_along(torch.zeros(2, 2, 4), [1], unknown, "pool")[0].tolist()
    [[True, False], [True, True]]
    """
    if tensor.dim() < 3 or known() is None:
        return None, 1
    time = dim_of_tokens(tensor, heads, name)
    asked = dims is None or time in {dim % tensor.dim() for dim in dims}
    return (mask_of(tensor, time, heads) if asked else None), time


def unpadded(tensor: Tensor, mask: Tensor, time: int) -> list[Tensor]:
    """Each row as a batch of its own, without its padding."""
    # From the host: the device need not be waited for.
    places = [row.nonzero().squeeze(1).to(tensor.device, non_blocking=True) for row in mask]
    return [tensor[i : i + 1].index_select(time, places[i]) for i in range(len(tensor))]

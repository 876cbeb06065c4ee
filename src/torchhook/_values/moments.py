"""Mean, variance and norm: of a tensor, and of several values taken together.

What runs inside a training step is taken in single precision and stays on the device (``mean_and_variance``, ``norm``,
``distance``); what is only taken to be shown is taken in double precision (``exact``, ``rms``).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook._values.elements import flatten, measurable, widest

# A CPU sums squares in single precision: exactly in pieces, which stay in a core's cache between the passes over them.
# A few pieces would only cost more calls.
PIECE = 1 << 17
_WHOLE = 1 << 20
_DOUBLED = 1 << 22  # the doubles of a large tensor would need twice its memory


class Moments(NamedTuple):
    """The mean of so many values and how they are spread: numbers, or tensors with one number for each channel."""

    size: Any
    """How many values; a tensor where channels have different numbers of them."""
    mean: Any
    squares: Any
    """The sum of squared distances from the mean: from zero, a large mean would leave nothing of them. For channels
    also a matrix, of products of two of them."""
    cubes: Any = None
    fourths: Any = None
    """The sums of third and fourth powers of these distances, where they are wanted."""

    @property
    def std(self) -> float:
        return _root(self.squares / self.size)

    @property
    def norm(self) -> float:
        return _root(self.squares + self.size * self.mean * self.mean)


def merged(parts: Sequence[Moments]) -> Moments:
    """The moments of several values taken together, by the parallel formula of Chan et al.

    >>> merged([Moments(2, 1.0, 2.0), Moments(1, 4.0, 0.0)])
    Moments(size=3, mean=2.0, squares=8.0, cubes=None, fourths=None)
    """
    if len(parts) == 1:
        return parts[0]
    size = sum(part.size for part in parts)
    mean = sum(part.mean * part.size for part in parts) / at_least_one(size)
    squares = [part.squares for part in parts]
    squares += [_squared(part.mean - mean, part.size, part.squares) for part in parts]
    whole = Moments(size, mean, functools.reduce(operator.add, squares))
    if parts[0].cubes is None:
        return whole
    cubes, fourths = zip(*(seen_from(part, part.mean - mean) for part in parts), strict=True)
    return whole._replace(cubes=sum(cubes), fourths=sum(fourths))


def seen_from(part: Moments, gap: Any) -> tuple[Any, Any]:
    """The third and fourth moments of values around another mean, by so much below their own (Pébay 2008).

    >>> seen_from(Moments(2, 3.0, 2.0, 0.0, 2.0), 1.0)  # of 2 and 4, around 2
    (8.0, 16.0)
    """
    matrix = isinstance(part.squares, Tensor) and part.squares.dim() == 2
    own, square = part.squares.diagonal() if matrix else part.squares, gap * gap
    cubes = part.cubes + 3 * gap * own + part.size * gap * square
    return cubes, part.fourths + 4 * gap * part.cubes + 6 * square * own + part.size * square * square


def at_least_one(size: Any) -> Any:
    """A number to divide by: channels without a value have a sum of zero, and so a mean of zero."""
    return size.clamp(min=1) if isinstance(size, Tensor) else size


def _squared(gap: Any, times: Any, like: Any) -> Any:
    is_matrix = isinstance(like, Tensor) and like.dim() == 2
    return torch.outer(times * gap, gap) if is_matrix else times * gap * gap


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


# -- in double precision ------------------------------------------------------------------------------


def exact(values: Tensor) -> Moments:
    """The moments of all values in double precision, as numbers; of none, there are none to take.

    >>> exact(torch.tensor([1.0, 3.0]))
    Moments(size=2, mean=2.0, squares=2.0, cubes=None, fourths=None)
    """
    wide = (piece.to(widest(values.device)) for piece in values.reshape(-1).split(_DOUBLED))
    return merged([Moments(len(p), float(p.mean()), float(p.var(correction=0)) * len(p)) for p in wide])


def rms(tensor: Tensor | None) -> float | None:
    """The root mean square of a tensor, where it is a number.

    >>> rms(torch.tensor([2.0, -2.0, 2.0, -2.0]))
    2.0
    """
    if tensor is None or not measurable(tensor):
        return None
    flat = flatten(tensor)
    found = float(torch.linalg.vector_norm(flat, dtype=widest(flat.device))) / math.sqrt(flat.numel())
    return found if math.isfinite(found) else None


# -- in few passes, left on the device ----------------------------------------------------------------


def mean_and_variance(flat: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Of what ``flatten`` gives, with its least and greatest."""
    # A GPU wants few kernels; a CPU wants those that work in vectors, which var_mean does not.
    if not flat.is_cpu:
        variance, average = torch.var_mean(flat, correction=0)
        return average, variance
    average, size = flat.mean(), flat.numel()
    raw = sum_of_squares(_pieces(flat))
    # Most values lie around zero. Then the squares are mostly spread, and subtracting the rest costs half a digit; a
    # pass that writes all distances from the mean would cost as much as everything else.
    if _is_exact(raw, size) and float(raw) >= 2 * size * float(average) ** 2:
        return average, raw / size - average * average
    square = sum_of_squares(torch.sub(piece, average, out=place) for piece, place in with_places(flat))
    if not _is_exact(square, size) and math.isfinite(float(low)) and math.isfinite(float(high)) and bool(low < high):
        pieces = flat.split(PIECE)
        average = torch.stack([piece.double().sum() for piece in pieces]).sum() / size
        square = sum_of_squares(piece.double() - average for piece in pieces)
    return average, square / size


def norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm.

    >>> norm(torch.tensor([3.0, -4.0]))
    tensor(5.)
    """
    flat = flatten(tensor)
    if not flat.is_cpu:
        size: Tensor = torch.linalg.vector_norm(flat)
        return size
    square = sum_of_squares(_pieces(flat))
    if _is_exact(square, flat.numel()):
        return square.sqrt_()
    size = flat.abs().max().double()
    if not 0 < float(size) < math.inf:
        return size
    # Scaled by the greatest: the squares of doubles may be too large or too small as well.
    return sum_of_squares(piece.double() / size for piece in flat.split(PIECE)).sqrt_().mul_(size)


def distance(one: Tensor, two: Tensor) -> Tensor:
    """The Euclidean norm of the difference of two tensors of one shape."""
    one, two = flatten(one), flatten(two)
    if not one.is_cpu or one.numel() <= PIECE:
        return norm(one - two)
    scratch = torch.empty(PIECE, dtype=one.dtype)
    gaps = (torch.sub(a, b, out=scratch[: len(a)]) for a, b in zip(one.split(PIECE), two.split(PIECE), strict=True))
    return norm(torch.stack([norm(gap) for gap in gaps]))


def with_places(flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces, each with a place for what is made of it, the same for all."""
    pieces = _pieces(flat)
    scratch = torch.empty_like(pieces[0])
    return ((piece, scratch if len(pieces) == 1 else scratch[: piece.numel()]) for piece in pieces)


def sum_of_squares(pieces: Iterable[Tensor]) -> Tensor:
    squares = [torch.dot(piece, piece) for piece in pieces]
    return squares[0] if len(squares) == 1 else torch.stack(squares).double().sum()


def _pieces(flat: Tensor) -> tuple[Tensor, ...]:
    return flat.split(PIECE) if flat.numel() > _WHOLE else (flat,)


def _is_exact(square: Tensor, size: int) -> bool:
    """Whether squares in single precision were neither too large nor too small for it."""
    # What squares below 1e-38, its least normal number, lose is then no more than its rounding: 1e-38 / 1e-31 is 1e-7.
    return size * 1e-31 < float(square) < math.inf

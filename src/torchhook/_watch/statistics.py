"""Statistics of a tensor in few passes, left on its device; numbers come to the host together, once per step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

OF_VALUES = ("mean", "std", "min", "max", "zeros", "nans", "norm", "histogram")
STATISTICS = (*OF_VALUES, "dead", "grad_norm", "update_ratio")
DEFAULT = tuple(name for name in STATISTICS if name != "histogram")

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
# A CPU sums squares in single precision: exactly in pieces, which stay in a core's cache between the passes over them.
# A few pieces would only cost more calls.
PIECE = 1 << 17
_WHOLE = 1 << 20


class Histogram(NamedTuple):
    """Counts of values between edges, as ``numpy.histogram`` gives them."""

    counts: list[int]
    edges: list[float]


class Ledger:
    """Small tensors that wait on their devices until all of them are read at once."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}
        self._keys = count()  # gradients are noted from autograd's threads, one for each device

    def note(self, tensor: Tensor) -> int:
        """Hold a tensor of no or one dim; the number is its place in what ``read`` returns."""
        key = next(self._keys)
        self._held[key] = tensor
        return key

    def read(self) -> dict[int, Any]:
        """Every held tensor as Python numbers, with one transfer from each device."""
        groups: dict[torch.device, dict[torch.dtype, list[int]]] = {}
        for key, tensor in self._held.items():
            groups.setdefault(tensor.device, {}).setdefault(tensor.dtype, []).append(key)
        values: dict[int, Any] = {}
        for by_dtype in groups.values():
            ordered = sorted(by_dtype.items(), key=lambda item: -item[0].itemsize)  # wide first, for alignment
            packed = [torch.cat([self._held[key].reshape(-1) for key in keys]).view(torch.uint8) for _, keys in ordered]
            host = torch.cat(packed).cpu()
            for (dtype, keys), part in zip(ordered, host.split([len(p) for p in packed]), strict=True):
                numbers = part.view(dtype).tolist()
                start = 0
                for key in keys:
                    held = self._held[key]
                    stop = start + held.numel()
                    values[key] = numbers[start:stop] if held.dim() else numbers[start]
                    start = stop
        self._held.clear()
        return values


class Moments(NamedTuple):
    """What is known of one value: its size, and where its numbers are in the ledger."""

    size: int
    mean: int | None = None
    variance: int | None = None
    """Around the mean: around zero, a large mean would leave nothing of the spread."""
    least: int | None = None
    greatest: int | None = None
    nonzeros: int | None = None
    nans: int | None = None
    lowest: int | None = None
    """Of the finite values, as all of the histogram."""
    highest: int | None = None
    counts: int | None = None


class Measure:
    """Takes the chosen statistics of tensors."""

    def __init__(self, wanted: Iterable[str], bins: int) -> None:
        wanted = frozenset(wanted)
        self.bins = bins
        self._spread = bool(wanted & {"std", "norm"})
        self._mean = self._spread or "mean" in wanted
        self._zeros = "zeros" in wanted
        self._nans = "nans" in wanted
        self._histogram = "histogram" in wanted
        # The spread of values that are not finite, very small or very large depends on which of them they are.
        self._range = self._spread or self._nans or self._histogram or bool(wanted & {"min", "max"})
        self.needed = self._mean or self._zeros or self._range

    def __call__(self, tensor: Tensor, ledger: Ledger) -> Moments:
        flat = flatten(tensor)
        note = ledger.note
        mean = variance = least = greatest = nonzeros = nans = lowest = highest = counts = None
        if self._range:
            low, high = torch.aminmax(flat)
            least, greatest = note(low), note(high)
            # Looking at a number is free on the CPU; elsewhere it would wait for the device.
            if self._nans and (not flat.is_cpu or bool(low != low)):
                nans = note(torch.ne(flat, flat, out=torch.empty_like(flat)).sum())
            if self._histogram:
                lowest, highest, counts = map(note, self._count(flat, low, high))
        # A GPU wants few kernels; a CPU wants those that work in vectors, which var_mean and comparisons do not.
        if self._spread and flat.is_cpu:
            mean, variance = map(note, _moments(flat, low, high))
        elif self._spread:
            spread, average = torch.var_mean(flat, correction=0)
            mean, variance = note(average), note(spread)
        elif self._mean:
            mean = note(flat.mean())
        if self._zeros:
            if flat.is_cpu and nans is None:
                nonzeros = note(_total(torch.sign(piece, out=place) for piece, place in _with_places(flat)))
            else:
                nonzeros = note(torch.linalg.vector_norm(flat, 0))
        return Moments(flat.numel(), mean, variance, least, greatest, nonzeros, nans, lowest, highest, counts)

    def _count(self, flat: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The range of the finite values, and how many of them are in each of its parts."""
        if not flat.is_cpu or not bool((high - low).isfinite()):
            low = flat.nan_to_num(math.inf, math.inf, math.inf).amin()
            high = flat.nan_to_num(-math.inf, -math.inf, -math.inf).amax()
        # A range given as numbers would be read from the device, so the values are moved to [0, 1].
        width = (high - low).clamp_min(torch.finfo(flat.dtype).tiny)
        return low, high, torch.histc((flat - low) / width, self.bins, 0.0, 1.0)


def _pieces(flat: Tensor) -> tuple[Tensor, ...]:
    return flat.split(PIECE) if flat.numel() > _WHOLE else (flat,)


def _with_places(flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces, each with a place for what is made of it, the same for all."""
    pieces = _pieces(flat)
    scratch = torch.empty_like(pieces[0])
    return ((piece, scratch if len(pieces) == 1 else scratch[: piece.numel()]) for piece in pieces)


def _total(pieces: Iterable[Tensor]) -> Tensor:
    """The sum of squares."""
    squares = [torch.dot(piece, piece) for piece in pieces]
    return squares[0] if len(squares) == 1 else torch.stack(squares).double().sum()


def _is_exact(square: Tensor, size: int) -> bool:
    """Whether squares in single precision were neither too large nor too small for it."""
    return size * 1e-31 < float(square) < math.inf


def _moments(flat: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance on the CPU."""
    average = flat.mean()
    square = _total(torch.sub(piece, average, out=place) for piece, place in _with_places(flat))
    least, greatest = float(low), float(high)
    if not _is_exact(square, flat.numel()) and math.isfinite(least) and math.isfinite(greatest) and least < greatest:
        pieces = flat.split(PIECE)
        average = torch.stack([piece.double().sum() for piece in pieces]).sum() / flat.numel()
        square = _total(piece.double() - average for piece in pieces)
    return average, square / flat.numel()


def measurable(tensor: Tensor) -> bool:
    """Whether a tensor has elements that can be read."""
    return (
        tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.device.type != "meta"
        and not tensor.is_nested
        and (type(tensor) in _PLAIN or not hasattr(tensor, "placements"))  # a DTensor holds a part of its values
    )


def flatten(tensor: Tensor) -> Tensor:
    """All elements in one dim, in the order that costs least, as real numbers that statistics can be taken of."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        flat = tensor.view(-1)
    elif tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        flat = tensor.permute(0, 2, 3, 1).view(-1)
    else:
        flat = tensor.reshape(-1)
    if flat.dtype == torch.float32:
        return flat
    if flat.is_quantized:
        return flat.dequantize()
    if flat.is_complex():
        return flat.abs()
    if flat.dtype == torch.float64 or (flat.dtype in (torch.int32, torch.int64) and flat.device.type != "mps"):
        return flat.double()
    return flat.float()


def norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm, on the device."""
    flat = flatten(tensor)
    if not flat.is_cpu:
        size: Tensor = torch.linalg.vector_norm(flat)
        return size
    square = _total(_pieces(flat))
    if _is_exact(square, flat.numel()):
        return square.sqrt_()
    size = flat.abs().max().double()
    if not 0 < float(size) < math.inf:
        return size
    return _total(piece.double() / size for piece in flat.split(PIECE)).sqrt_().mul_(size)


def summarise(parts: Sequence[Moments], numbers: dict[int, Any], wanted: Iterable[str]) -> dict[str, Any]:
    """The statistics of several values taken together, by the parallel formula for means and variances."""
    size = sum(part.size for part in parts)
    found: dict[str, Any] = {}
    first = parts[0]
    if first.mean is not None:
        means = [numbers[part.mean] for part in parts if part.mean is not None]
        found["mean"] = mean = sum(m * p.size for m, p in zip(means, parts, strict=True)) / size
        if first.variance is not None:
            square = sum(
                p.size * (numbers[p.variance] + (m - mean) * (m - mean))
                for m, p in zip(means, parts, strict=True)
                if p.variance is not None
            )
            found["std"] = _root(square / size)
            found["norm"] = _root(square + size * mean * mean)
            if math.isnan(found["norm"]) and not any(
                math.isnan(numbers[p.least]) for p in parts if p.least is not None
            ):
                found["norm"] = math.inf  # a value is: its distance from the mean is not a number, its size is
    if first.least is not None:
        found["min"] = _extreme(min, [numbers[p.least] for p in parts if p.least is not None])
        found["max"] = _extreme(max, [numbers[p.greatest] for p in parts if p.greatest is not None])
    if first.nonzeros is not None:
        nonzeros = sum(numbers[p.nonzeros] for p in parts if p.nonzeros is not None)
        found["zeros"] = (size - nonzeros) / size
    found["nans"] = sum(int(numbers[p.nans]) for p in parts if p.nans is not None)
    histogram = _histogram([part for part in parts if part.counts is not None], numbers)
    if histogram is not None:
        found["histogram"] = histogram
    return {name: found[name] for name in wanted if name in found}


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan


def _extreme(choose: Any, values: list[float]) -> float:
    return math.nan if any(v != v for v in values) else float(choose(values))


def _histogram(parts: Sequence[Moments], numbers: dict[int, Any]) -> Histogram | None:
    """One histogram of several: each bin goes where its centre lies, so that totals stay exact."""
    read = [(numbers[p.lowest or 0], numbers[p.highest or 0], numbers[p.counts or 0]) for p in parts]
    known = [(least, greatest, [int(c) for c in counts]) for least, greatest, counts in read if least <= greatest]
    if not known:  # nothing is finite
        return None
    bins = len(known[0][2])
    low, high = min(least for least, _, _ in known), max(greatest for _, greatest, _ in known)
    width = high / bins - low / bins
    edges = [low + i * width for i in range(bins)] + [high]
    if len(known) == 1:
        return Histogram(known[0][2], edges)
    merged = [0] * bins
    for least, greatest, counts in known:
        own = greatest / bins - least / bins
        for i, number in enumerate(counts):
            where = int((least + (i + 0.5) * own) / width - low / width) if number and width > 0 else 0
            merged[min(max(where, 0), bins - 1)] += number
    return Histogram(merged, edges)

"""Statistics of a tensor: to be shown, row by row, or in few passes inside a training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook._values import histograms
from torchhook._values.elements import flatten, real
from torchhook._values.finite import Finite, finite
from torchhook._values.moments import Moments, exact, mean_and_variance, merged, sum_of_squares, with_places


class Summary(NamedTuple):
    """A tensor in numbers. ``min`` to ``norm`` are those of its finite values, ``None`` where it has none."""

    size: int
    nans: int
    pos_infs: int
    neg_infs: int
    zeros: int
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None


def summary(values: Tensor | Finite) -> Summary:
    """The statistics of a real tensor, in double precision.

    >>> found = summary(torch.tensor([0.0, 2.0, float("nan")]))
    >>> found.mean, found.std, found.zeros, found.nans, found.size
    (1.0, 1.0, 1, 1, 3)
    """
    part = finite(values) if isinstance(values, Tensor) else values
    good, size = part.values, part.values.numel() + part.bad
    if not good.numel():
        return Summary(size, part.nans, part.pos_infs, part.neg_infs, 0)
    moments, zeros = exact(good), int((good == 0).sum())
    ends = float(good.min()), float(good.max())
    counts = (size, part.nans, part.pos_infs, part.neg_infs, zeros)
    return Summary(*counts, *ends, moments.mean, moments.std, moments.norm)


def by_row(tensor: Tensor, dims: tuple[int, ...] | None = None) -> dict[str, Tensor]:
    """Mean, standard deviation, least, greatest and share of zeros over ``dims``, or of each row of dim 0.

    >>> {name: value.tolist() for name, value in by_row(torch.tensor([[0.0, 2.0], [4.0, 4.0]])).items()}
    {'mean': [1.0, 4.0], 'std': [1.0, 0.0], 'min': [0.0, 4.0], 'max': [2.0, 4.0], 'zeros': [0.5, 0.0]}
    """
    numbers = real(tensor)
    dims = tuple(range(1, tensor.dim())) if dims is None else dims
    # To torch, no dims are all dims.
    if not dims:
        numbers, dims = numbers[:, None], (1,)
    return {
        "mean": numbers.mean(dims),
        "std": numbers.std(dims, correction=0),
        "min": numbers.amin(dims),
        "max": numbers.amax(dims),
        "zeros": (numbers == 0).float().mean(dims),
    }


# -- in few passes, left on the device ----------------------------------------------------------------


class Measured(NamedTuple):
    """The statistics of one tensor that were asked for: small tensors on its device, later the numbers in them."""

    size: int
    mean: Any = None
    variance: Any = None
    least: Any = None
    greatest: Any = None
    nonzeros: Any = None
    nans: Any = None
    lowest: Any = None
    """Of the finite values, as all of the histogram."""
    highest: Any = None
    counts: Any = None

    def map(self, function: Callable[[Any], Any]) -> Measured:
        """The same with a function applied to all that is there but the size."""
        return Measured(self.size, *[value if value is None else function(value) for value in self[1:]])


class Measure:
    """Takes the chosen statistics of tensors.

    >>> found = Measure(["mean", "max"], bins=4)(torch.tensor([0.0, 2.0, 4.0]))
    >>> found.size, found.mean, found.greatest
    (3, tensor(2.), tensor(4.))
    """

    def __init__(self, wanted: Iterable[str], bins: int) -> None:
        wanted = frozenset(wanted)
        self.bins = bins
        self._spread = bool(wanted & {"std", "norm"})
        self._mean = self._spread or "mean" in wanted
        self._zeros = "zeros" in wanted
        self._nans = "nans" in wanted
        self.histograms: bool = "histogram" in wanted
        # The spread of values that are not finite, very small or very large depends on which of them they are.
        self._range = self._spread or self._nans or self.histograms or bool(wanted & {"min", "max"})
        self.needed: bool = self._mean or self._zeros or self._range

    def __call__(self, tensor: Tensor) -> Measured:
        flat = flatten(tensor)
        mean = variance = low = high = nonzeros = nans = lowest = highest = counts = None
        if self._range:
            low, high = torch.aminmax(flat)
            nans = _nans(flat, low) if self._nans else None
            if self.histograms:
                lowest, highest = histograms.finite_range(flat, low, high)
                counts = histograms.bin_counts(flat, lowest, highest, self.bins)
            if self._spread:
                mean, variance = mean_and_variance(flat, low, high)
        if self._mean and not self._spread:
            mean = flat.mean()
        if self._zeros:
            nonzeros = _nonzeros(flat, nans is None)
        return Measured(flat.numel(), mean, variance, low, high, nonzeros, nans, lowest, highest, counts)

    def only(self, found: Measured) -> Measured:
        """What was asked for, of statistics that were all taken together."""
        return found._replace(
            mean=found.mean if self._mean else None,
            variance=found.variance if self._spread else None,
            least=found.least if self._range else None,
            greatest=found.greatest if self._range else None,
            nonzeros=found.nonzeros if self._zeros else None,
            nans=found.nans if self._nans else None,
        )


def _nans(flat: Tensor, low: Tensor) -> Tensor | None:
    # Looking at a number is free on the CPU; elsewhere it would wait for the device.
    if flat.is_cpu and not bool(low != low):
        return None
    return torch.ne(flat, flat, out=torch.empty_like(flat)).sum()


def _nonzeros(flat: Tensor, without_nans: bool) -> Tensor:
    if flat.is_cpu and without_nans:  # comparisons do not work in vectors there
        return sum_of_squares(torch.sign(piece, out=place) for piece, place in with_places(flat))
    found: Tensor = torch.linalg.vector_norm(flat, 0)
    return found


def summarize(parts: Sequence[Measured], wanted: Iterable[str]) -> dict[str, Any]:
    """The statistics of several values taken together; they hold numbers by now.

    >>> summarize([Measured(2, mean=1.0), Measured(1, mean=4.0)], ["mean", "max"])
    {'mean': 2.0}
    """
    found = _means(parts) | _extremes(parts) | _shares(parts)
    return {name: found[name] for name in wanted if name in found}


def _means(parts: Sequence[Measured]) -> dict[str, Any]:
    if parts[0].mean is None:
        return {}
    if parts[0].variance is None:
        return {"mean": merged([Moments(part.size, part.mean, 0.0) for part in parts]).mean}
    moments = merged([Moments(part.size, part.mean, part.size * part.variance) for part in parts])
    size = moments.norm
    if math.isnan(size) and not any(math.isnan(part.least) for part in parts):
        size = math.inf  # a value is: its distance from the mean is not a number, its size is
    return {"mean": moments.mean, "std": moments.std, "norm": size}


def _extremes(parts: Sequence[Measured]) -> dict[str, Any]:
    if parts[0].least is None:
        return {}
    return {
        "min": _extreme(min, [part.least for part in parts]),
        "max": _extreme(max, [part.greatest for part in parts]),
    }


def _extreme(choose: Any, values: list[float]) -> float:
    # Python's min and max give a NaN only where it comes first.
    return math.nan if any(value != value for value in values) else float(choose(values))


def _shares(parts: Sequence[Measured]) -> dict[str, Any]:
    found: dict[str, Any] = {"nans": sum(int(part.nans) for part in parts if part.nans is not None)}
    if parts[0].nonzeros is not None:
        size = sum(part.size for part in parts)
        found["zeros"] = (size - sum(part.nonzeros for part in parts)) / size
    spread = [(part.lowest, part.highest, part.counts) for part in parts if part.counts is not None]
    histogram = histograms.merged(spread)
    return found if histogram is None else {**found, "histogram": histogram}

"""Statistics of values that come in blocks and are not kept: moments, ends, quantiles, and where the largest were.

Two that have seen parts of the data merge into what one would be that has seen all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook._values.elements import real_in_full, widest
from torchhook._values.moments import Moments, at_least_one, merged, seen_from
from torchhook._values.quantiles import Sketch

PER = ("channel", "tensor", "token")
_PIECE = {"cpu": 1 << 20}  # values that are taken at once: in double, what stays in a core's cache
_PIECE_ELSEWHERE = 1 << 24  # a GPU wants few kernels


class Block(NamedTuple):
    """Tokens ``(n, channels)`` and where each is: its row in the data, and its position in the row."""

    tokens: Tensor
    rows: Tensor
    """On the host and in ascending order, as the positions are in each row."""
    positions: Tensor


class Top(NamedTuple):
    """The largest values, best first, and where they are; ``(groups, k)``."""

    values: Tensor
    rows: Tensor
    positions: Tensor

    def best(self, k: int) -> Top:
        """The ``k`` best of each group; of equal ones, those of the rows that come first."""
        by_row = self._ordered(self.rows.argsort(dim=1, stable=True))
        return by_row._ordered(by_row.values.argsort(dim=1, descending=True, stable=True)[:, :k])

    def _ordered(self, order: Tensor) -> Top:
        return Top(*(part.gather(1, order) for part in self))

    def beside(self, other: Top) -> Top:
        """The candidates of two."""
        return Top(*(torch.cat(parts, 1) for parts in zip(self, other, strict=True)))


class Running:
    """Statistics of one site, for each channel, for each position (``"token"``), or of all values (``"tensor"``).

    >>> running = Running("channel", top=1)
    >>> running.add(Block(torch.tensor([[1.0, 5.0], [3.0, 4.0]]), torch.tensor([0, 1]), torch.tensor([0, 0])))
    >>> running.mean.tolist(), running.max.tolist(), running.top.rows.tolist()
    ([2.0, 4.5], [3.0, 5.0], [[1], [0]])
    """

    def __init__(self, per: str, *, covariance: bool = False, top: int = 0, resolution: int = 0) -> None:
        self.per: str = per
        self.covariance: bool = covariance
        self.most: int = top
        self.resolution: int = resolution
        self.moments: Moments | None = None
        self.min: Any = None
        self.max: Any = None
        self.top: Top | None = None
        self.sketches: list[Sketch] = []
        """One for all channels, which have the same number of values; one for each position, which have not."""

    @property
    def mean(self) -> Tensor:
        """NaN at positions of which every token was left out."""
        found: Tensor = self._seen.mean
        return found.masked_fill(self._seen.size == 0, float("nan")) if self.per == "token" else found

    @property
    def _seen(self) -> Moments:
        assert self.moments is not None
        return self.moments

    # -- taking in -------------------------------------------------------------------------------------

    def add(self, block: Block) -> None:
        """Take the values of some tokens; nothing waits for the device."""
        tokens = real_in_full(block.tokens.detach())
        if not tokens.numel():
            return
        size = max(1, _PIECE.get(tokens.device.type, _PIECE_ELSEWHERE) // tokens.shape[1])
        # A matrix is worth adding only if many tokens are in it.
        cuts = _cuts(block.rows, max(size, tokens.shape[1]) if self.covariance else size)
        for part in zip(*(whole.split(cuts) for whole in (tokens, block.rows, block.positions)), strict=True):
            self._add(Block(*part))

    def _add(self, block: Block) -> None:
        wide = block.tokens.to(widest(block.tokens.device))
        values = wide.reshape(-1, 1) if self.per == "tensor" else wide
        if self.per == "token":
            at = block.positions.to(wide.device, non_blocking=True)
            found = (_by_group(wide, at, block.positions), *_ends_by_group(wide, at, int(block.positions.max()) + 1))
        else:
            found = (_moments(values, self.covariance), values.amin(0), values.amax(0))
        self._include(*found)
        if self.resolution:
            self._sketch(block)
        if self.most:
            self._take_top(_candidates(block._replace(tokens=wide), self.per))

    def _include(self, moments: Moments, low: Tensor, high: Tensor) -> None:
        if self.moments is None:
            self.moments, self.min, self.max = moments, low, high
            return
        if self.per == "token":  # rows of other lengths
            size = max(len(self.moments.mean), len(moments.mean))
            self.moments, moments = _longer(self.moments, size), _longer(moments, size)
            self.min, low = (_padded(part, size, float("inf")) for part in (self.min, low))
            self.max, high = (_padded(part, size, float("-inf")) for part in (self.max, high))
        self.moments = merged([self.moments, moments])
        self.min, self.max = torch.minimum(self.min, low), torch.maximum(self.max, high)

    def _sketch(self, block: Block) -> None:
        # As exact as they came: in double, the sketch would need twice the memory for nothing.
        tokens = block.tokens if block.tokens.dtype == torch.float64 else block.tokens.float()
        groups = [tokens] if self.per == "channel" else [tokens.reshape(-1, 1)]
        if self.per == "token":
            groups = [_of_position(block.positions, tokens, at) for at in range(int(block.positions.max()) + 1)]
        self.sketches += [Sketch(self.resolution) for _ in groups[len(self.sketches) :]]
        for sketch, values in zip(self.sketches, groups, strict=False):
            if len(values):
                sketch.add(values)

    def _take_top(self, found: Top) -> None:
        if self.top is None:
            self.top = found.best(self.most)
            return
        size = max(len(self.top.values), len(found.values))
        self.top = _taller(self.top, size).beside(_taller(found, size)).best(self.most)

    def merge(self, other: Running) -> None:
        """Take what another one has seen, of other rows."""
        if other.moments is None:
            return
        self._include(other.moments, other.min, other.max)
        self.sketches += [Sketch(self.resolution) for _ in other.sketches[len(self.sketches) :]]
        for mine, theirs in zip(self.sketches, other.sketches, strict=False):
            mine.merge(theirs)
        if other.top is not None:
            self._take_top(other.top)

    # -- what is known ---------------------------------------------------------------------------------

    def quantile(self, q: float) -> Tensor:
        """The quantile of each channel or position, NaN where a value is."""
        found = torch.cat([sketch.quantile(q) for sketch in self.sketches])
        return torch.where(self.max.isnan(), self.max.to(found.dtype), found)

    @property
    def rank_error(self) -> float:
        """By such a share of the count the ranks of quantiles may be off."""
        return max((sketch.rank_error for sketch in self.sketches), default=0.0)

    def variance(self) -> Tensor:
        """As ``Tensor.var`` has it by default: divided by one less than the count."""
        squares = self._seen.squares
        found: Tensor = (squares.diagonal() if self.covariance else squares) / at_least_one(self._less_one())
        return found

    def _less_one(self) -> Any:
        size = self._seen.size
        return size - 1 if isinstance(size, Tensor) else max(1, size - 1)

    def matrix(self) -> Tensor | None:
        """The covariance of the channels, if it was asked for."""
        return self._seen.squares / self._less_one() if self.covariance else None

    def kurtosis(self) -> Tensor:
        """The mean fourth power of what is ``(value - mean) / std``: 3 for a normal distribution."""
        squares = self._seen.squares.diagonal() if self.covariance else self._seen.squares
        found: Tensor = self._seen.size * self._seen.fourths / (squares * squares)
        return found

    # -- files -----------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """All that is known, as tensors on the host."""
        if self.moments is None:
            return {}
        size, *others = self.moments
        named = dict(zip(Moments._fields[1:], others, strict=True)) | {"min": self.min, "max": self.max}
        named["size"] = size if isinstance(size, Tensor) else torch.tensor(size)
        if self.top is not None:
            named |= {f"top_{name}": part for name, part in self.top._asdict().items()}
        if self.sketches:
            kept = [sketch.kept() for sketch in self.sketches]
            named["sketch_values"] = torch.cat([values for values, _ in kept], 1)
            named["sketch_weights"] = torch.cat([weights for _, weights in kept])
            named["sketch_sizes"] = torch.tensor([len(weights) for _, weights in kept])
            named["sketch_errors"] = torch.tensor([sketch.error for sketch in self.sketches])
        return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> Running:
        """Know what ``tensors`` gave."""
        if not tensors:
            return self
        size = tensors["size"] if self.per == "token" else int(tensors["size"])
        self.moments = Moments(size, *(tensors[name] for name in Moments._fields[1:]))
        self.min, self.max = tensors["min"], tensors["max"]
        if self.most:
            self.top = Top(*(tensors[f"top_{name}"] for name in Top._fields))
        if self.resolution:
            self.sketches = list(_sketches(self.resolution, tensors))
        return self

    def on_host(self) -> Running:
        """The same on the host, where results are read."""
        again = Running(self.per, covariance=self.covariance, top=self.most, resolution=self.resolution)
        return again.load(self.tensors())


def _sketches(resolution: int, tensors: Mapping[str, Tensor]) -> Iterator[Sketch]:
    sizes, errors = tensors["sketch_sizes"].tolist(), tensors["sketch_errors"].tolist()
    parts = zip(tensors["sketch_values"].split(sizes, 1), tensors["sketch_weights"].split(sizes), errors, strict=True)
    return (Sketch.of(resolution, values, weights, error) for values, weights, error in parts)


# -- one block -----------------------------------------------------------------------------------------


def _cuts(rows: Tensor, size: int) -> list[int]:
    """Numbers of tokens that are taken together: about ``size``, and never a part of a row, which counts once.

    >>> _cuts(torch.tensor([0, 0, 1, 2, 2, 2, 2, 3]), 3)
    [3, 4, 1]
    """
    found: list[int] = []
    for count in rows.unique_consecutive(return_counts=True)[1].tolist():
        if found and found[-1] + count <= size:
            found[-1] += count
        else:
            found.append(count)
    return found


def _moments(values: Tensor, covariance: bool) -> Moments:
    mean = values.mean(0)
    # Around the block's own mean: plain sums of squares would cancel where a mean is large.
    gaps = values - mean
    squared = gaps * gaps
    squares = gaps.T @ gaps if covariance else squared.sum(0)
    return Moments(len(values), mean, squares, (squared * gaps).sum(0), (squared * squared).sum(0))


def _by_group(tokens: Tensor, at: Tensor, host: Tensor) -> Moments:
    """The moments of all values of the tokens at each position."""
    own = _moments(tokens.T, covariance=False)  # of each token by itself
    counts = torch.bincount(host).to(tokens.device, non_blocking=True)

    def total(parts: Tensor) -> Tensor:
        return torch.zeros(len(counts), dtype=tokens.dtype, device=tokens.device).index_add_(0, at, parts)

    mean = total(own.mean) / counts.clamp(min=1)
    gaps = own.mean - mean[at]
    cubes, fourths = seen_from(own, gaps)
    squares = total(own.squares + own.size * gaps * gaps)
    return Moments(counts * tokens.shape[1], mean, squares, total(cubes), total(fourths))


def _ends_by_group(tokens: Tensor, at: Tensor, size: int) -> tuple[Tensor, Tensor]:
    low = torch.full((size,), float("inf"), dtype=tokens.dtype, device=tokens.device)
    high = torch.full_like(low, float("-inf"))
    return low.scatter_reduce(0, at, tokens.amin(1), "amin"), high.scatter_reduce(0, at, tokens.amax(1), "amax")


def _of_position(positions: Tensor, tokens: Tensor, at: int) -> Tensor:
    places = (positions == at).nonzero().squeeze(1).to(tokens.device, non_blocking=True)
    return tokens.index_select(0, places).reshape(-1, 1)


def _candidates(block: Block, per: str) -> Top:
    """The best value of each row in each group, and where it is; -inf where a row has none."""
    numbers, host = block.rows.unique_consecutive(return_inverse=True)
    device = block.tokens.device
    rows, row, position = (part.to(device, non_blocking=True) for part in (numbers, host, block.positions))
    best = block.tokens if per == "channel" else block.tokens.amax(1, keepdim=True)
    if per == "token":
        size = int(block.positions.max()) + 1
        values = torch.full((size * len(rows),), float("-inf"), dtype=best.dtype, device=device)
        # Mostly one value for each row and position; the heads of a token are several.
        values = values.scatter_reduce(0, position * len(rows) + row, best[:, 0], "amax").reshape(size, -1)
        known = torch.full_like(values, -1, dtype=torch.int64)
        known[position, row] = rows[row]
        return Top(values, known, torch.arange(size, device=device)[:, None].expand(-1, len(rows)))
    index = row[:, None].expand_as(best)
    start = torch.full((len(rows), best.shape[1]), float("-inf"), dtype=best.dtype, device=device)
    values = start.scatter_reduce(0, index, best, "amax")
    is_best = (best == values[row]) | best.isnan()  # a NaN is the greatest of all, and equals nothing
    first = torch.where(is_best, position[:, None], torch.iinfo(torch.int64).max)
    nowhere = torch.full_like(values, torch.iinfo(torch.int64).max, dtype=torch.int64)
    places = nowhere.scatter_reduce(0, index, first, "amin")
    return Top(values.T, rows.expand(best.shape[1], -1), places.T)


# -- groups that were not there before -----------------------------------------------------------------


def _padded(part: Tensor, size: int, value: float) -> Tensor:
    return torch.nn.functional.pad(part, (0, size - len(part)), value=value)


def _longer(moments: Moments, size: int) -> Moments:
    return Moments(*(_padded(part, size, 0) for part in moments))


def _taller(top: Top, size: int) -> Top:
    more = (0, 0, 0, size - len(top.values))
    pad = torch.nn.functional.pad
    return Top(pad(top.values, more, value=float("-inf")), pad(top.rows, more, value=-1), pad(top.positions, more))

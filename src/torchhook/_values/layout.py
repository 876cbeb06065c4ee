"""Where the channels and the places of an activation are: channels first, channels last, or tokens.

Nobody has to write a reshape function: what is read off the shape of the input and of what other layers gave (a patch
embedding's output is the grid of the tokens) is enough. ``Layout`` says what was found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from torchhook.errors import LayoutError

_UNEVEN = 1.5  # strides of one map may differ this much: padding and rounding in small maps
_MOST_PREFIX = 16


@dataclasses.dataclass(frozen=True)
class Layout:
    """How to see an activation as batch × channels × grid.

    >>> import torch
    >>> Layout("tokens", (14, 14), prefix=1).maps(torch.zeros(2, 197, 192)).shape
    torch.Size([2, 192, 14, 14])
    """

    kind: str
    """``"channels_first"``, ``"channels_last"`` or ``"tokens"``."""
    grid: tuple[int, ...]
    prefix: int = 0
    """Tokens before those of the grid: class token, distillation token, registers."""
    batch: int = 0
    """The dimension of the examples: 1 in a sequence-first transformer."""

    @property
    def channels(self) -> int:
        """The dimension of the channels."""
        return 1 if self.kind == "channels_first" else -1

    def maps(self, tensor: Tensor) -> Tensor:
        """The activation, or its gradient, as batch × channels × grid."""
        if self.kind == "channels_first":
            return tensor
        if self.batch:
            tensor = tensor.transpose(0, self.batch)
        if self.kind == "tokens":
            tensor = tensor[:, self.prefix :].unflatten(1, self.grid)
        return tensor.movedim(-1, 1)

    def __str__(self) -> str:
        grid = "×".join(map(str, self.grid))
        before = f" after {self.prefix} prefix token{'s' * (self.prefix != 1)}" if self.prefix else ""
        return f"{self.kind.replace('_', ' ')} {grid}{before}"


def infer(
    shape: Sequence[int],
    size: Sequence[int],
    examples: int,
    seen: Iterable[tuple[int, ...]] = (),
    kind: str | None = None,
    grid: Sequence[int] | None = None,
) -> Layout:
    """The layout of an activation of this shape, for an input of this spatial size.

    ``seen`` are the grids of other layers' outputs. ``kind`` and ``grid`` are what the user knows better.

    >>> str(infer((1, 7, 7, 768), (224, 224), 1))
    'channels last 7×7'
    >>> str(infer((1, 197, 192), (224, 224), 1))
    'tokens 14×14 after 1 prefix token'
    """
    shape, size = tuple(shape), tuple(size)
    readings = list(_readings(shape, size, examples, [*map(tuple, seen)], kind, None if grid is None else tuple(grid)))
    if not readings:
        wanted = " ".join(([kind.replace("_", " ")] if kind else []) + ([f"on grid {tuple(grid)}"] if grid else []))
        raise LayoutError(
            f"an activation of shape {shape} cannot be read as maps{' ' + wanted if wanted else ''} for {examples} "
            f"example{'s' * (examples != 1)} of size {'×'.join(map(str, size))}. Choose another layer=, "
            "or say how it is laid out: layout='channels_first', 'channels_last' or 'tokens' with grid=(h, w), or a "
            "function that returns batch × channels × grid."
        )
    return min(readings, key=lambda reading: reading[0])[1]


def _readings(
    shape: tuple[int, ...],
    size: tuple[int, ...],
    examples: int,
    seen: list[tuple[int, ...]],
    kind: str | None,
    grid: tuple[int, ...] | None,
) -> Iterable[tuple[tuple[float, ...], Layout]]:
    """Every way to read the shape, each with a cost: the cheapest is the likeliest."""
    if len(shape) == len(size) + 2 and shape[0] == examples:
        for order, layout in enumerate((Layout("channels_first", shape[2:]), Layout("channels_last", shape[1:-1]))):
            uneven = _unevenness(layout.grid, size)
            known = layout.grid in seen
            believed = kind is not None or known or uneven <= _UNEVEN  # who says the kind knows the strides too
            if kind in (None, layout.kind) and (layout.grid == grid or (grid is None and believed)):
                yield (not known, round(min(uneven, _UNEVEN), 2), order), layout
    if kind in (None, "tokens") and len(shape) == 3 and (len(size) > 1 or grid is not None):
        for batch, tokens in ((0, shape[1]), (1, shape[0])):
            if shape[batch] != examples:
                continue
            for rank, found in enumerate(_grids(tokens, size, seen, grid)):
                prefix = tokens - math.prod(found)
                yield (prefix, rank, batch), Layout("tokens", found, prefix, batch)


def _grids(
    tokens: int, size: tuple[int, ...], seen: list[tuple[int, ...]], grid: tuple[int, ...] | None
) -> Iterable[tuple[int, ...]]:
    """Grids that so many tokens may stand for, the likeliest first."""

    def fits(candidate: tuple[int, ...]) -> bool:
        return math.prod(candidate) > 1 and 0 <= tokens - math.prod(candidate) <= _MOST_PREFIX

    if grid is not None:
        if math.prod(grid) <= tokens:
            yield grid
        return
    yield from (one for one in seen if len(one) == len(size) and fits(one))
    # Videos are thinned out in space, and often not in time.
    halved = [(one[0], *(-(-side // 2**k) for side in one[1:])) for k in range(1, 6) for one in seen if len(one) == 3]
    halved += [tuple(-(-side // 2**k) for side in one) for k in range(1, 6) for one in seen]
    yield from (one for one in halved if len(one) == len(size) and fits(one) and _unevenness(one, size) <= _UNEVEN)
    for prefix in range(min(_MOST_PREFIX, tokens) + 1):
        scale = (math.prod(size) / max(tokens - prefix, 1)) ** (1 / len(size))
        even = tuple(max(round(side / scale), 1) for side in size)
        if math.prod(even) == tokens - prefix and fits(even) and _unevenness(even, size) <= _UNEVEN:
            yield even


def _unevenness(grid: Sequence[int], size: Sequence[int]) -> float:
    """How much the strides of a map differ between dimensions; a map larger than its input is no map of it.

    Of three dimensions the first may be time, whose stride has nothing to do with the others.
    """
    strides = [full / max(side, 1) for full, side in zip(size, grid, strict=True)]
    if min(strides) < 1:
        return math.inf
    strides = strides[1:] if len(strides) == 3 else strides
    return max(strides) / min(strides)

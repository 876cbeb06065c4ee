"""Where the channels, the grid and the prefix tokens of an activation are.

What is known decides, and the more the better: the type of the layer (``channel_dim``), the size of the input and what
other layers gave (``infer``: a patch embedding's output is the grid of the tokens), and the shape alone where there is
nothing else (``guess``). Nobody has to write a reshape function; ``Layout`` says what was found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from torchhook._words import plural
from torchhook.errors import LayoutError

KINDS = ("channels_first", "channels_last", "tokens")
_UNEVEN = 1.5  # strides of one map may differ this much: padding and rounding in small maps
_MOST_PREFIX = 16
_PREFIXES = (0, 1, 2, 5)  # none, class token, distillation token too, class token and four registers
_LEAST_SIDE = 7  # fewer tokens than 7 × 7 may as well be words
_MANY_CHANNELS = 4  # times the side of a map: no map of so many columns


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

    def picture(self, tensor: Tensor, example: int = 0) -> Tensor:
        """One example as channels × height × width; of a volume, its middle slice."""
        maps = self.maps(tensor)[example]
        while maps.dim() > 3:
            maps = maps[:, maps.shape[1] // 2]
        return maps

    def __str__(self) -> str:
        grid = "×".join(map(str, self.grid))
        before = f" after {self.prefix} prefix {plural(self.prefix, 'token')}" if self.prefix else ""
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
            f"{plural(examples, 'example')} of size {'×'.join(map(str, size))}. Choose another layer=, "
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
                # Rounded: between strides that are about as even, the order decides, and that has channels first.
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


# -- by the shape alone -----------------------------------------------------------------------------


def guess(
    shape: Sequence[int], kind: str | None = None, grid: Sequence[int] | None = None, *, image: bool = False
) -> Layout:
    """The likeliest layout of a batch of three dims or more, by its shape; tokens on no grid are a row of places.

    ``kind`` and ``grid`` are what the user knows better; ``image`` says that an image went into the model, so that even
    a few tokens may be its patches.

    >>> str(guess((2, 64, 14, 14))), str(guess((1, 50, 96))), str(guess((1, 12, 96)))
    ('channels first 14×14', 'tokens 7×7 after 1 prefix token', 'channels last 12')
    """
    shape = tuple(shape)
    if len(shape) > 3:
        last = kind == "channels_last" or (kind is None and looks_channels_last(shape[1:]))
        return Layout("channels_last", shape[1:-1]) if last else Layout("channels_first", shape[2:])
    tokens = shape[1]
    if grid is None and kind in (None, "tokens"):
        grid = square_grid(tokens, 3, range(6)) if image else square_grid(tokens)
    if grid is None:
        return Layout("channels_first", shape[2:]) if kind == "channels_first" else Layout("channels_last", (tokens,))
    needed = math.prod(grid)
    if needed > tokens:
        raise LayoutError(f"grid={tuple(grid)}: it needs {needed} tokens, and there are {tokens}.")
    return Layout("tokens", tuple(grid), tokens - needed)


def square_grid(tokens: int, least: int = _LEAST_SIDE, prefixes: Collection[int] = _PREFIXES) -> tuple[int, int] | None:
    """The square that so many tokens stand for, of ``least`` places a side, after none or a few prefix tokens.

    >>> square_grid(197), square_grid(12)
    ((14, 14), None)
    """
    side = math.isqrt(tokens)
    return (side, side) if side >= least and tokens - side * side in prefixes else None


def over_image(tokens: int, size: Sequence[int]) -> Layout | None:
    """How so many tokens lie over an image of this size, after as few others as can be; ``None`` if in no likely way.

    The model may have seen the image in another size: a square needs no more than its own number of tokens, any other
    grid that each token has the same whole number of pixels both ways.

    >>> str(over_image(198, (224, 224))), over_image(12, (224, 224))
    ('tokens 14×14 after 2 prefix tokens', None)
    """
    found = [square_grid(tokens) or square_grid(tokens, 1, (0,))]
    for grid in _grids(tokens, tuple(size), [], None):
        stride, rest = divmod(size[0], grid[0])
        prefix = tokens - math.prod(grid)
        # As in ``guess``: the fewer places, the likelier are words that happen to fit.
        least = 1 if not prefix else 3 if prefix <= max(_PREFIXES) else _LEAST_SIDE
        if not rest and size[1] == stride * grid[1] and min(grid) >= least:
            found.append((grid[0], grid[1]))
    layouts = [Layout("tokens", grid, tokens - math.prod(grid)) for grid in found if grid is not None]
    # Of two that are as likely, the one that has whole pixels: it comes last.
    return min(reversed(layouts), key=lambda layout: layout.prefix, default=None)


def looks_channels_last(shape: Sequence[int]) -> bool:
    """Whether the shape of one example speaks for channels last: the two sides that are equal are those of the map.

    >>> looks_channels_last((56, 56, 96)), looks_channels_last((96, 56, 56)), looks_channels_last((8, 8, 8))
    (True, False, False)
    """
    if len(shape) < 3 or shape[-3] != shape[-2] or shape[-2] == shape[-1]:
        return False
    # Of a volume two sides may be equal, and the third not: it is no channel dim unless it has the most.
    return len(shape) == 3 or shape[-1] > max(shape[:-1])


def looks_like_batch(shape: Sequence[int], kind: str | None = None) -> bool:
    """Whether dim 0 of a tensor that nobody recorded is the examples: a matrix is one map, and channels × height ×
    width are one example.
    """
    if len(shape) != 3:
        return len(shape) > 3
    # Two equal sides are those of a map.
    tokens = kind is None and shape[1] not in (shape[0], shape[2]) and square_grid(shape[1]) is not None
    return shape[0] == 1 or kind == "tokens" or tokens


def known_kind(kind: str | None, also: str = "") -> str | None:
    """What a user gave as ``layout=``, if it is one; ``also`` says what else it may be."""
    if kind is not None and kind not in KINDS:
        raise LayoutError(f"layout={kind!r}: use {', '.join(map(repr, KINDS))}{also}.")
    return kind


# -- by the layers ----------------------------------------------------------------------------------

_SPATIAL = ("Conv", "ConvTranspose", "InstanceNorm", "MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool")
_BY_RANK = {rank: tuple(getattr(nn, f"{kind}{rank}d") for kind in _SPATIAL) for rank in (1, 2, 3)}
_ANY = 6  # more dims than any of these layers needs
_CHANNELS_SECOND = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm)


def spatial_dims(module: nn.Module) -> int | None:
    """How many dims come after the channels in what a layer gives, where its type says so.

    >>> spatial_dims(nn.Conv1d(3, 8, 3)), spatial_dims(nn.ReLU())
    (1, None)
    """
    return next((rank for rank, kinds in _BY_RANK.items() if isinstance(module, kinds)), None)


def channel_dim(module: nn.Module, dims: int) -> int | None:
    """The dim of the channels in what a layer gives, a tensor of so many dims, where its type says so.

    >>> channel_dim(nn.Conv1d(3, 8, 3), 3), channel_dim(nn.Linear(3, 8), 3), channel_dim(nn.ReLU(), 3)
    (1, 2, None)
    """
    rank = spatial_dims(module)
    if rank is not None:
        dim = dims - rank - 1  # one more in front, for the batch, or none
    elif isinstance(module, _CHANNELS_SECOND):
        dim = 1
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        if type(module) not in (nn.LayerNorm, nn.RMSNorm):
            return None  # the LayerNorm2d of torchvision and timm is one too, and has its channels first
        dim = dims - 1 if len(module.normalized_shape) == 1 else -1
    elif isinstance(module, (nn.Linear, nn.Embedding)):
        dim = dims - 1
    else:
        return None
    return dim if 0 <= dim < dims else None


def own_kind(module: nn.Module) -> tuple[str, bool] | None:
    """How the maps that a module gives are laid out, and whether its type says so, or only all the layers in it do.

    >>> own_kind(nn.Conv2d(3, 8, 3)), own_kind(nn.Sequential(nn.LayerNorm(8), nn.GELU())), own_kind(nn.ReLU())
    (('channels_first', True), ('channels_last', False), None)
    """
    if (kind := kind_by_type(module, _ANY)) is not None:
        return kind, True
    inside = {kind for part in module.modules() if (kind := kind_by_type(part, _ANY)) is not None}
    return (inside.pop(), False) if len(inside) == 1 else None


def kind_by_type(module: nn.Module, dims: int) -> str | None:
    """``channel_dim`` as a kind of layout."""
    dim = channel_dim(module, dims)
    return None if dim is None else "channels_last" if dim == dims - 1 else "channels_first"


def told(shape: Sequence[int], grids: Collection[tuple[int, ...]], own: tuple[str, bool] | None) -> str | None:
    """The kind of one example's maps by what is known besides their shape; ``None`` where that does not tell.

    ``grids`` are those on which other layers gave maps, ``own`` is what ``own_kind`` says of this one.

    >>> told((64, 64, 128), [(64, 128)], None), told((64, 64, 128), [], None)
    ('channels_first', None)
    """
    shape = tuple(shape)
    if own is not None and own[1]:
        return own[0]
    if (shape[1:] in grids) != (shape[:-1] in grids):
        return "channels_first" if shape[1:] in grids else "channels_last"
    # A patch embedding is a convolution, and often gives what that made turned around, with many channels.
    turned = looks_channels_last(shape) and shape[-1] >= _MANY_CHANNELS * max(shape[:-1])
    return None if own is None or turned else own[0]


class Grids:
    """The grids on which a model's convolutions gave maps: what tokens may be laid out on."""

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self.seen: dict[tuple[int, ...], None] = {}

    @staticmethod
    def concern(module: nn.Module) -> bool:
        """Whether what the module gives is worth seeing."""
        return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))

    def see(self, value: Any) -> None:
        """What a convolution gave."""
        if isinstance(value, Tensor) and value.dim() == self._dimensions + 2:
            self.seen[tuple(value.shape[2:])] = None

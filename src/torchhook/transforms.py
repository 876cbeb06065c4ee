"""The catalogue of transforms: what is kept of a value, decided in the hook, before anything is copied or moved.

A transform is any function of the passing value. Those here map over the tensors of nested values and take dim 0 for
the rows of the batch. Where the model is called with an attention mask, they give for each row what they would give for
that row alone and unpadded. They are values: they compare by what they hold, pickle, and print as
they were written, which is also how a feature store remembers them.

>>> compose(tokens("cls"), cast(torch.float16)) == compose(tokens("cls"), cast(torch.half))
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchhook._values import padding, tree
from torchhook._values.choices import Which, choice
from torchhook._values.elements import in_range, least
from torchhook._values.heads import Where, has_heads, unknown
from torchhook._values.kept_parts import Only, Placed, with_rows
from torchhook._values.padding import Known, dim_of_tokens, padding_along, unpadded
from torchhook._values.statistics import by_row
from torchhook._values.value_object import ValueObject
from torchhook.errors import TransformError

__all__ = ["Rows", "Transform", "cast", "compose", "narrow", "only", "pick", "pool", "statistics", "tokens", "topk"]


class Transform(Protocol):
    """Takes a passing value and returns what is kept of it: a tensor, a nested value of tensors, or ``Rows``.

    A plain function is enough. It runs in the hook, before anything is copied, and must not write to the value.

    >>> def norms(value: Tensor) -> Tensor:
    ...     return value.norm(dim=-1)
    >>> transform: Transform = norms
    """

    def __call__(self, value: Any, /) -> Any: ...


class Rows(list[Tensor]):
    """One tensor per row of the batch, of different lengths: what a transform returns for variable-length rows."""


@dataclass(frozen=True, eq=False, repr=False)
class _EachTensor(ValueObject):
    """A function of one tensor with its arguments and options, applied to every tensor of a value."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def __call__(self, value: Any) -> Any:
        return self.kept(value, unknown)

    def kept(self, value: Any, known: Where) -> Any:
        """What is kept at a site where this is known of the heads."""
        more = {"known": known} if self.function in _OF_TOKENS else {}
        if self.function in (_pool, _tokens, _statistics) and self.options.get("dims") is None:
            value = tree.map_tensors(lambda tensor: with_rows(tensor, known), value)
        return tree.map_tensors(lambda tensor: self.function(tensor, *self.args, **self.options, **more), value)

    @property
    def asks_where(self) -> bool:
        """Whether it is about tokens, which have another dim where heads come first."""
        return self.function in (*_OF_TOKENS, _narrow)

    @property
    def leaves_one_token(self) -> bool:
        """Whether the dim of tokens is gone from what it returns."""
        pools = self.function is _pool and self.options["dims"] is None
        return pools or (self.function is _tokens and not isinstance(self.args[0], list) and self.args[0] != "patches")

    @property
    def moves_dims(self) -> bool:
        """Whether what it returns has other dims than the value, so that sizes alone tell which they are."""
        return self.function in (_pool, _statistics)

    def __repr__(self) -> str:
        # What was not given is not written: a store compares this text with that of the run which it continues.
        given = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.options.items() if v is not None)]
        return f"{self.function.__name__.strip('_')}({', '.join(given)})"

    def afterwards(self, known: Known | None, heads: Where = unknown) -> Known | None:
        """What is known of the padding of what this returns, for the transform that comes next."""
        if known is None:
            return None
        time = 2 if heads().comes_first else 1
        if self.function is _narrow and self.options["dim"] == time:
            return known.sliced(slice(*self.args))
        dims = self.options.get("dims")
        reduces = self.function in (_pool, _statistics) and (dims is None or time in dims)
        return None if reduces or self.function is _tokens else known


# Functions of this module and their arguments, no closures: those cannot be pickled.
def _each(function: Callable[..., Any], *args: Any, **options: Any) -> Transform:
    return _EachTensor(function, args, options)


# Transforms hold the name, since a lambda cannot be pickled. amax: max takes one dim only, and returns indices too.
_POOLS: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "mean": lambda tensor, dims: tensor.mean(dims),
    "max": lambda tensor, dims: tensor.amax(dims),
    "sum": lambda tensor, dims: tensor.sum(dims),
}


def pool(how: str = "mean", dims: int | Sequence[int] | None = None, *, masked: bool = True) -> Transform:
    """Reduce positions: the tokens of ``(N, T, D)``, the pixels of ``(N, C, H, W)``; ``(N, D)`` stays as it is.

    >>> pool("mean")(torch.ones(2, 3, 4, 4)).shape
    torch.Size([2, 3])

    Of what an attention takes and gives, ``(N, heads, T, D)``, tokens are reduced, too (``@q``, ``@k``, ``@v``).
    Channels last? Name the dims: ``pool("mean", dims=(1, 2))``. Padding is left out where the model is called with an
    attention mask, or ``lengths=`` is given to ``extract``; ``masked=False`` takes it in.
    """
    if how not in _POOLS:
        raise ValueError(f"pool({how!r}): use one of {', '.join(map(repr, _POOLS))}.")
    wanted = (dims,) if isinstance(dims, int) else None if dims is None else tuple(dims)
    return _each(_pool, how, dims=wanted, masked=_unless_default(masked))


def _unless_default(masked: bool) -> bool | None:
    # What is None is not written: stores remember transforms by their text, and most are of images.
    return None if masked else False


def _pool(tensor: Tensor, how: str, dims: tuple[int, ...] | None, masked: bool | None, known: Where) -> Tensor:
    named, time = dims is not None, None
    if tensor.dim() == 4 and has_heads(tensor.shape, known()):
        time = dim_of_tokens(tensor, known, f"pool({how!r})")
    if dims is None:
        dims = (1,) if tensor.dim() == 3 else tuple(range(2, tensor.dim())) if time is None else (time,)
    # To torch, no dims are all dims.
    if not dims:
        return tensor
    real = None if masked is False else padding.real(tensor, dims, named, time, known)
    return _POOLS[how](tensor, dims) if real is None else _pool_of(tensor, how, dims, real)


def _pool_of(tensor: Tensor, how: str, dims: tuple[int, ...], real: Tensor) -> Tensor:
    """What a pool gives of the real elements; the others may hold anything, a NaN too."""
    if how == "max":
        return tensor.masked_fill(~real, least(tensor.dtype)).amax(dims)
    kept = torch.where(real, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
    if how == "sum" or not (tensor.is_floating_point() or tensor.is_complex()):
        return _POOLS[how](kept, dims)  # torch itself refuses the mean of integers
    # The sum of many halves is beyond their range, their mean is not: torch's own mean sums in float too.
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    return (kept.sum(dims, dtype=wide) / real.expand(tensor.shape).sum(dims)).to(tensor.dtype)


def tokens(
    which: str | int | Sequence[int] = "cls", prefix: int = 1, *, masked: bool = True, lengths: Any = None
) -> Transform:
    """Choose tokens of ``(N, T, ...)``: ``"cls"``, ``"last"``, ``"patches"`` (all after the prefix), or positions.

    >>> tokens("cls")(torch.zeros(2, 197, 8)).shape, tokens([0, 5])(torch.zeros(2, 197, 8)).shape
    (torch.Size([2, 8]), torch.Size([2, 2, 8]))

    Where the modules around a site say that heads come first (``@q``, ``@k``, ``@v``, what attention takes and gives),
    the tokens of ``(N, heads, T, D)`` are chosen, and the dim of heads stays. Positions are counted among the tokens
    that are not padding, on whichever side it is, where the model is called with an attention mask, or ``lengths=`` is
    given; ``masked=False`` counts all. ``lengths=`` here are those of the rows of one batch, ``(N,)``, or its mask
    ``(N, T)``:

    >>> tokens("last", lengths=[1, 3])(torch.arange(6.0).reshape(2, 3, 1)).flatten()
    tensor([0., 5.])
    """
    told = None if lengths is None else _as_written(torch.as_tensor(lengths).tolist())
    if told is not None and (not masked or which == "patches"):
        raise ValueError(f"tokens({which!r}): lengths= say what is padding, which is not asked for here.")
    if isinstance(which, str):
        if which not in (*_ENDS, "patches"):
            raise ValueError(f"tokens({which!r}): use 'cls', 'last', 'patches', a position or a list of positions.")
        # Elsewhere the prefix says nothing, and would make two equal transforms differ.
        count = prefix if which == "patches" else None
        return _each(_tokens, which, prefix=count, masked=_unless_default(masked), lengths=told)
    chosen = which if isinstance(which, int) else [int(position) for position in which]
    return _each(_tokens, chosen, prefix=None, masked=_unless_default(masked), lengths=told)


def _as_written(numbers: Any) -> Any:
    """Lists as tuples: a transform is a value, and nobody may change it."""
    return tuple(map(_as_written, numbers)) if isinstance(numbers, list) else numbers


_ENDS = {"cls": 0, "last": -1}


def _tokens(
    tensor: Tensor, which: str | int | list[int], prefix: int | None, masked: bool | None, lengths: Any, known: Where
) -> Tensor:
    # Of (N, D) a feature would be taken for a token.
    if tensor.dim() < 3:
        raise TransformError(f"tokens({which!r}) needs values of shape (N, T, ...), found {tuple(tensor.shape)}.")
    # Next to the rows, to choose; and back again, unless one was chosen.
    dim = dim_of_tokens(tensor, known, f"tokens({which!r})")
    if dim != 1:
        chosen = _tokens(tensor.movedim(dim, 1), which, prefix, masked, lengths, unknown)
        return chosen if chosen.dim() < tensor.dim() else chosen.movedim(1, dim)
    if lengths is not None:
        mask = padding.given("lengths=", lengths, len(tensor)).at(len(tensor), tensor.shape[1])
    else:
        mask = None if masked is False else padding.mask_of(tensor, 1, known)
    if which == "patches":
        if mask is not None:
            raise TransformError(
                "tokens('patches') of rows with padding have different lengths. Keep whole rows with lengths=, or say "
                "masked=False to keep the padding."
            )
        return tensor[:, prefix:]
    positions: int | list[int] = _ENDS[which] if isinstance(which, str) else which
    if mask is None:
        return tensor[:, positions]
    several = isinstance(positions, list)
    places = padding.places(mask, positions if isinstance(positions, list) else [positions])
    rows = torch.arange(len(tensor))[:, None]
    chosen = tensor[rows.to(tensor.device, non_blocking=True), places.to(tensor.device, non_blocking=True)]
    return chosen if several else chosen[:, 0]


def topk(k: int, dim: int = -1, largest: bool = True) -> Transform:
    """Keep the ``k`` largest values along ``dim`` and where they were: ``{"values", "indices"}``.

    >>> topk(2)(torch.tensor([[1.0, 3.0, 2.0]]))
    {'values': tensor([[3., 2.]]), 'indices': tensor([[1, 2]])}
    """
    return _each(_topk, k, dim=dim, largest=largest)


def _topk(tensor: Tensor, k: int, dim: int, largest: bool, known: Where) -> dict[str, Tensor]:
    mask, time = padding_along(tensor, [dim], known, f"topk({k}, dim={dim})")
    if mask is not None:
        found = [row.topk(k, dim=dim, largest=largest) for row in unpadded(tensor, mask, time)]
        values, indices = (torch.cat(parts) for parts in zip(*found, strict=True))
        return {"values": values, "indices": indices}
    values, indices = tensor.topk(k, dim=dim, largest=largest)
    return {"values": values, "indices": indices}


def cast(dtype: torch.dtype) -> Transform:
    """Change the dtype of floating-point tensors.

    >>> cast(torch.float16)(torch.ones(1)).dtype
    torch.float16
    """
    return _each(_cast, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return in_range(tensor, dtype).to(dtype) if tensor.is_floating_point() else tensor


def narrow(start: int | None = None, stop: int | None = None, step: int | None = None, *, dim: int = 1) -> Transform:
    """Keep ``start:stop:step`` of one dim, as Python slices do.

    >>> narrow(0, 2)(torch.zeros(4, 10, 3)).shape
    torch.Size([4, 2, 3])
    """
    return _each(_narrow, start, stop, step, dim=dim)


def _narrow(tensor: Tensor, start: int | None, stop: int | None, step: int | None, dim: int) -> Tensor:
    return tensor[(slice(None),) * (dim % tensor.dim()) + (slice(start, stop, step),)]


def only(positions: Which = None, rows: Which = None, heads: Which = None) -> Transform:
    """Keep a part: the one that ``edits.only``, which has the same arguments, would change. No dim is dropped.

    >>> only(positions=[0, -1])(torch.zeros(4, 10, 3)).shape
    torch.Size([4, 2, 3])

    Heads are found in a ``capture`` or ``extract``; elsewhere name their dim with ``edits.along``. With ``heads=``,
    what a kernel wants repeated of keys and values (``@k``, ``@v``) is kept once each. In ``extract``, positions are
    counted without padding, as ``tokens`` does. Of tokens that come before rows, ``(N, T, D)`` is kept.
    """
    if positions is None and rows is None and heads is None:
        raise ValueError("transforms.only needs positions=, rows= or heads=.")
    chosen = choice(positions, "positions", lines=True)
    return Only(positions=chosen, rows=choice(rows, "rows"), heads=choice(heads, "heads"))


def asks_where(transform: Any) -> bool:
    """Whether a transform wants to know what is known of the heads at its site.

    >>> asks_where(compose(only(heads=1), cast(torch.half))), asks_where(cast(torch.half))
    (True, False)
    """
    return bool(getattr(transform, "asks_where", False)) if isinstance(transform, ValueObject) else False


def placed(transform: Any, known: Where) -> Any:
    """The same transform for one site."""
    if isinstance(transform, _Compose):
        found: list[Any] = []
        for one in transform.transforms:
            found, known = [*found, placed(one, known)], heads_after(one, known)
        return _Compose(tuple(found))
    return Placed(transform, known) if asks_where(transform) else transform


def heads_after(transform: Any, known: Where) -> Where:
    """What is known of the heads in what a transform returns; a function of somebody's own may have moved dims."""
    if isinstance(transform, _Compose):
        for one in transform.transforms:
            known = heads_after(one, known)
        return known
    if isinstance(transform, _EachTensor) and transform.leaves_one_token:
        return lambda: known().without_tokens()
    if getattr(transform, "function", None) is _tokens or getattr(transform, "puts_rows_first", False):
        return lambda: known().with_rows_first()
    if transform is None or not getattr(transform, "moves_dims", True):
        return known
    return lambda: known().by_sizes()


def statistics(dims: Sequence[int] | None = None) -> Transform:
    """Mean, standard deviation (``correction=0``), least, greatest and share of zeros of each row.

    >>> sorted(statistics()(torch.ones(2, 3, 4)))
    ['max', 'mean', 'min', 'std', 'zeros']
    """
    return _each(_statistics, dims=None if dims is None else tuple(dims))


def _statistics(tensor: Tensor, dims: tuple[int, ...] | None, known: Where) -> dict[str, Tensor]:
    mask, time = padding_along(tensor, dims, known, "statistics()")
    if mask is None:
        return by_row(tensor, dims)
    # Each row by itself: five statistics with a mask would be five chances to let padding in.
    rows = [by_row(row, dims) for row in unpadded(tensor, mask, time)]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


_OF_TOKENS = (_pool, _tokens, _topk, _statistics)
"""Functions that are told what is known of the heads at their site."""


def pick(address: str | int) -> Transform:
    """Keep one part of a nested value, by its address.

    >>> pick("1.0")((torch.zeros(2), (torch.ones(1), None)))
    tensor([1.])
    """
    return _Pick(str(address))


@dataclass(frozen=True, eq=False, repr=False)
class _Pick(ValueObject):
    address: str

    def __call__(self, value: Any) -> Any:
        try:
            return tree.get(value, self.address)
        except KeyError as error:
            raise TransformError(f"transforms.{self!r}: {error.args[0]}.") from None


def compose(*transforms: Callable[[Any], Any]) -> Transform:
    """One transform after the other.

    >>> compose(pool("mean"), cast(torch.float16))
    compose(pool('mean'), cast(torch.float16))
    """
    return _Compose(transforms)


@dataclass(frozen=True, eq=False, repr=False)
class _Compose(ValueObject):
    transforms: tuple[Callable[[Any], Any], ...]

    def __call__(self, value: Any) -> Any:
        known = padding.known()
        for transform in self.transforms:
            with padding.knowing(known):
                value = transform(value)
            known = padding.afterwards(transform, known)
        return value

    @property
    def asks_where(self) -> bool:
        return any(map(asks_where, self.transforms))

    def afterwards(self, known: Known | None) -> Known | None:
        for transform in self.transforms:
            known = padding.afterwards(transform, known)
        return known

    def __repr__(self) -> str:
        # A function by its repr, not its name: a store must not take one for another of the same name.
        return f"compose({', '.join(map(repr, self.transforms))})"

"""Which dim of a value is the heads', and which the tokens': the one place where this is decided.

Heads have a dim of their own, or lie side by side in one that they share; tokens are the dim after the rows, unless
heads are there, or one dim with the rows, as experts have them; or they come before the rows (``moved``). What the
modules around a site say of their heads (``KnownHeads``), and what the model is called with (``Sizes``), is checked
against the sizes of the value; where these do not agree on one answer, ``NoPart`` says what was tried. Nothing is taken
for granted from a size alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from torchhook._torch import compiler
from torchhook._values.call_sizes import Sizes
from torchhook._values.value_object import same
from torchhook._values.wrappers import is_fake

# By what these compute of values of four dims, heads come before queries.
_HEADS_FIRST = ("scaled_dot_product_attention", "softmax")


class NoPart(ValueError):
    """The part of a value that was asked for cannot be found in it: why, and a way out."""

    def __init__(self, why: str, way: str = "") -> None:
        super().__init__(f"{why} {way}" if way else why)
        self.why, self.way = why, way


class KnownHeads(NamedTuple):
    """What is known of the heads at a site before any value has passed it."""

    where: str = ""
    """The module that says it, for errors; empty if none does."""
    queries: int | None = None
    """How many heads the queries have."""
    keys: int | None = None
    """How many the keys and values have: fewer, where queries share them in groups."""
    dims: tuple[int, ...] = ()
    """The sizes that one head may have: queries and values need not have the same."""
    sections: int | None = None
    """The size of one of query, key and value, where a projection holds them one after the other and says so."""
    op: str | None = None
    """The operation whose value it is."""
    sinks: bool = False
    """Whether the softmax is taken over one column more than there are keys."""
    joined: bool = False
    """Whether heads lie side by side here: after the projection that makes them, or before the one that joins them."""
    fused: bool = False
    """Whether more than one of query, key and value lie here, one after the other or head by head."""
    why_not: str = "the modules around a site are known in a session only"
    """Why heads do not lie side by side here, or are not known."""
    heads_first: bool = False
    """Whether heads come before tokens in values of four dims, by what is computed of them: sizes need not tell."""
    shared: bool = False
    """Whether these are keys or values, which a kernel may be given once for each head of queries."""
    asked: bool = False
    """Whether these are queries that a kernel is given, or what it makes of them: see ``is_packed``."""
    reduced: bool = False
    """Whether the tokens of four dims are gone, chosen or pooled: of three that are left, dim 1 is the heads'."""
    time_first: bool | None = None
    """Whether tokens come before rows in values of three dims; ``None`` where no module says so."""
    call: Callable[[], Sizes | None] | None = None
    """Asks for the sizes of the call that runs, where somebody knows of it."""

    @property
    def counts(self) -> tuple[int, ...]:
        """How many heads a value may have here."""
        return tuple(dict.fromkeys(count for count in (self.queries, self.keys) if count))

    @property
    def comes_first(self) -> bool:
        """Whether heads are dim 1 of four, whatever the sizes: by the operation, or by what else is known."""
        return self.heads_first or self.op in _HEADS_FIRST

    @property
    def folded(self) -> int:
        """How many heads each row has in dim 0 of a value of three dims: products may be of rows and heads as one."""
        return self.queries or 1 if self.comes_first and not self.joined else 1

    @property
    def sizes(self) -> Sizes | None:
        """What the model is called with, if anybody knows."""
        return None if self.call is None else self.call()

    def without_tokens(self) -> KnownHeads:
        """What is known once a transform has left one token of each row, or none."""
        return self._replace(reduced=True)

    def with_rows_first(self) -> KnownHeads:
        """What is known once a transform has put rows before tokens."""
        return self._replace(time_first=False)

    def by_sizes(self) -> KnownHeads:
        """What is left to know where somebody's function may have moved the dims."""
        return self._replace(op=None, heads_first=False, time_first=None)

    def __str__(self) -> str:
        shared = f" and {self.keys} of keys and values" if self.keys not in (None, self.queries) else ""
        sizes = f" of size {' or '.join(map(str, self.dims))}" if self.dims else ""
        return f"{self.where} has {self.queries} heads{shared}{sizes}" if self.where else self.why_not


UNKNOWN = KnownHeads()


Where = Callable[[], KnownHeads]
"""Asks what is known at a site, which most values never want to know."""


def unknown() -> KnownHeads:
    """Outside of a session."""
    return UNKNOWN


class HeadAxis(NamedTuple):
    """The dim that heads are found in, and how it is split: into ``groups`` × ``heads`` × the size of one.

    Of keys and values that were repeated for the heads of queries, a head is all of its ``copies``.
    """

    dim: int
    heads: int
    groups: int = 1
    joined: bool = False
    """Whether the dim has to be split first; else it is the heads' own."""
    copies: int = 1
    """How often each head comes, one after the other, in a dim of its own."""


def is_packed(shape: Sequence[int], known: KnownHeads) -> bool:
    """Whether the heads that share keys are there as queries of these: one token's, given to a kernel in this way.

    >>> known = KnownHeads("attn", queries=4, keys=2, op="scaled_dot_product_attention", asked=True)
    >>> is_packed((1, 2, 2, 8), known), is_packed((1, 4, 1, 8), known)
    (True, False)
    """
    queries, keys = known.queries or 0, known.keys or 0
    return known.asked and len(shape) == 4 and shape[1] == keys < queries == keys * shape[2]


def unpacked(tensor: Tensor) -> Tensor:
    """``(N, heads, 1, D)`` of packed queries; a view, if they lie one after the other."""
    return tensor.flatten(1, 2).unsqueeze(2)


def head_axis(shape: Sequence[int], known: KnownHeads) -> HeadAxis:
    """Where the heads are in a value of this shape.

    >>> known = KnownHeads("attn", queries=4, keys=2, dims=(8,), joined=True)
    >>> head_axis((1, 5, 32), known), head_axis((1, 5, 16), known).heads, head_axis((1, 4, 5, 8), known).dim
    (HeadAxis(dim=2, heads=4, groups=1, joined=True, copies=1), 2, 1)
    """
    if not known.counts:
        raise NoPart(f"where the heads are cannot be told: {known}.", _NAME_IT)
    if len(shape) == 4:
        _refuse_packed(shape, known)
        return _split(shape, known)
    if len(shape) == 3 and known.folded > 1:
        return HeadAxis(0, known.folded, rows_of_heads(shape, known), joined=True)
    if not known.joined:
        raise NoPart(f"there are no heads in a value of shape {tuple(shape)} here: {known.why_not}.", _NAME_IT)
    return _joined(shape, known)


_NAME_IT = "Name the dim: heads=edits.along(which, dim=…), with count=… where heads lie side by side in it."
_NAME_POSITIONS = "Name the dim: positions=edits.along(which, dim=…)."


def rows_of_heads(shape: Sequence[int], known: KnownHeads) -> int:
    """How many rows share dim 0 with their heads, in values ``(N·heads, T, D)`` that a product is taken of.

    >>> known = KnownHeads("attn", queries=4, op="softmax", call=lambda: Sizes(2, frozenset({5})))
    >>> rows_of_heads((8, 5, 5), known)
    2
    """
    sizes = known.sizes
    if sizes is not None and shape[0] == sizes.rows * known.folded:
        return sizes.rows
    raise NoPart(
        f"rows and heads share dim 0 of a value of shape {tuple(shape)} here: {known}.",
        "edits.along(which, dim=0) counts all of them, the heads of one row after those of the other.",
    )


def _joined(shape: Sequence[int], known: KnownHeads) -> HeadAxis:
    last, size = len(shape) - 1, shape[-1] if shape else 0
    for count in () if known.fused else known.counts:
        if any(count * dim == size for dim in known.dims):
            return HeadAxis(last, count, joined=True)
    queries = known.queries or 0
    # GPT-2 splits a fused projection into sections, and says how large they are: heads lie inside of each.
    section = known.sections or 0
    if section and size in (2 * section, 3 * section) and any(queries * dim == section for dim in known.dims):
        return HeadAxis(last, queries, size // section, joined=True)
    if known.fused or any((queries + 2 * (known.keys or queries)) * dim == size for dim in known.dims):
        raise NoPart(
            f"a fused projection of size {size} may hold each head's query, key and value together, or all queries "
            "before all keys: its size does not tell. Take the heads after they are split, at the operation "
            "scaled_dot_product_attention:input or softmax:input."
        )
    raise NoPart(f"the last dim of {tuple(shape)} is no number of heads times their size: {known}.", _NAME_IT)


def _refuse_packed(shape: Sequence[int], known: KnownHeads) -> None:
    whole = known.op == "scaled_dot_product_attention" and not (known.asked or known.shared)
    if is_packed(shape, known._replace(asked=known.asked or whole)):
        raise NoPart(
            f"a value of shape {tuple(shape)} may be one token's queries, packed by the heads of their keys: {known}.",
            "Name one value of the call, as ':input.args.0' does.",
        )


def _split(shape: Sequence[int], known: KnownHeads) -> HeadAxis:
    fits = {dim: shape[dim] for dim in (1, 2) if shape[dim] in known.counts}
    if known.comes_first:  # whether sizes are equal by chance says nothing then
        fits.pop(2, None)
    if len(fits) > 1:
        raise NoPart(f"heads may be dim 1 or dim 2 of {tuple(shape)}: {known}.", _NAME_IT)
    if not fits:
        raise NoPart(f"neither dim 1 nor dim 2 of {tuple(shape)} is a number of heads: {known}.", _NAME_IT)
    ((dim, count),) = fits.items()
    keys = known.keys or count
    # As keys and values have them themselves, whether or not the kernel at work wants them repeated.
    if known.shared and keys < count and count % keys == 0:
        return HeadAxis(dim, keys, copies=count // keys)
    return HeadAxis(dim, count)


def token_dim(
    shape: Sequence[int], known: KnownHeads, axis: HeadAxis | None = None, otherwise: int | None = None
) -> int:
    """Which dim of a value of this shape is that of the tokens.

    >>> known = KnownHeads("attn", queries=4, keys=2, dims=(8,))
    >>> token_dim((1, 5, 32), known), token_dim((1, 4, 5, 8), known), token_dim((1, 5, 2, 8), known)
    (1, 2, 1)

    ``axis`` is where the heads are, if somebody has said so. ``otherwise`` is for values that no attention is around,
    and for those of two dims, if no tokens are known; without it they are refused.
    """
    dims = len(shape)
    if (there := moved(shape, known)) is not None:
        return there.tokens
    if dims == 3:
        return 1
    if dims == 4 and known.comes_first and axis is None:
        _refuse_packed(shape, known)
        return 2
    if dims == 4 and (axis is not None or known.counts or otherwise is None):
        try:
            axis = head_axis(shape, known) if axis is None else axis
        except NoPart as error:
            why = f"which of four dims the positions are is known where the heads are, and {error.why}"
            raise NoPart(why, _NAME_POSITIONS) from None
        if not axis.joined and axis.dim in (1, 2):
            return 3 - axis.dim
    elif otherwise is not None and (dims < 3 or not known.counts) and not (dims == 2 and known.sizes):
        return otherwise
    raise NoPart(
        f"positions are the dim after the rows in values of 3 dims, and this has shape {tuple(shape)}.",
        _NAME_POSITIONS,
    )


def rows_first(tensor: Tensor, known: KnownHeads) -> Tensor:
    """``(N, T, D)`` of ``(T, N, D)``; any other as it is."""
    return tensor.transpose(0, 1) if moved(tensor.shape, known) == (1, 0) else tensor


class Moved(NamedTuple):
    """Where rows and tokens are, if rows are not the first dim."""

    rows: int
    tokens: int


def moved(shape: Sequence[int], known: KnownHeads) -> Moved | None:
    """Where rows and tokens are in values ``(T, N, D)`` and ``(streams, N, T, D)``; ``None`` where rows come first.

    >>> known = KnownHeads(call=lambda: Sizes(2, frozenset({6})))
    >>> moved((6, 2, 32), known), moved((4, 2, 6, 32), known), moved((2, 6, 32), known), moved((2, 6, 32), UNKNOWN)
    (Moved(rows=1, tokens=0), Moved(rows=1, tokens=2), None, None)

    What has other sizes than the call is taken as it is, such as images and windows, unless the rows are surely dim 1.
    """
    if len(shape) not in (3, 4) or known.folded > 1 or known.reduced:
        return None
    if len(shape) == 3 and known.time_first is not None:
        return Moved(1, 0) if known.time_first else None
    sizes = known.sizes
    if sizes is None or shape[0] == sizes.rows or shape[1] != sizes.rows or shape[0] in sizes.images:
        return None
    if len(shape) == 4:
        return Moved(1, 2) if shape[2] in sizes.tokens and not known.counts else None
    if shape[0] in sizes.tokens:
        return Moved(1, 0)
    if any(shape[0] == sizes.rows * count for count in known.counts):
        return None
    raise NoPart(
        f"dim 0 of {tuple(shape)} is neither the rows, of which the model is called with {sizes.rows}, as dim 1 has "
        f"them, nor their tokens, {_tokens(sizes)} in each.",
        "Name the dim: edits.along(which, dim=…).",
    )


def _tokens(sizes: Sizes) -> str:
    return " or ".join(map(str, sorted(sizes.tokens)))


def rows_of_tokens(shape: Sequence[int], known: KnownHeads) -> int | None:
    """How many rows share dim 0 with their tokens, in values ``(N·T, D)``; ``None`` where it is that of the rows.

    >>> known = KnownHeads(call=lambda: Sizes(2, frozenset({6})))
    >>> rows_of_tokens((12, 32), known), rows_of_tokens((2, 32), known), rows_of_tokens((12, 32), UNKNOWN)
    (2, None, None)
    """
    sizes = known.sizes if len(shape) == 2 else None
    if sizes is None or shape[0] in sizes.images:
        return None
    if shape[0] == sizes.rows:
        return sizes.rows if sizes.one else None
    if sizes.rows and shape[0] % sizes.rows == 0 and shape[0] // sizes.rows in sizes.tokens:
        return sizes.rows
    raise NoPart(
        f"dim 0 of {tuple(shape)} is neither the rows, of which the model is called with {sizes.rows}, nor all of "
        f"their tokens, {_tokens(sizes)} in each.",
        "Name the dim: edits.along(which, dim=0) counts what is in it.",
    )


def by_row(tensor: Tensor, known: KnownHeads, rows: bool = False) -> Tensor:
    """``(N, T, D)`` of ``(N·T, D)``; any other as it is, if ``rows`` or positions can be told in it at all."""
    try:
        count = rows_of_tokens(tensor.shape, known)
    except NoPart:
        if are_ids(tensor) and not rows:  # the same for all rows, as numbers of positions are
            return tensor
        raise
    return tensor if count is None else tensor.unflatten(0, (count, -1))


def are_ids(tensor: Tensor) -> bool:
    """Whether two dims of whole numbers are rows and tokens: of others, the second are features."""
    return tensor.dim() == 2 and not tensor.is_floating_point()


def with_one_token(tensor: Tensor, known: KnownHeads) -> tuple[Tensor, KnownHeads]:
    """``(N, heads, 1, D)`` of heads whose tokens are gone, and what is known of that; any other as it is."""
    if tensor.dim() != 3 or not known.reduced:
        return tensor, known
    whole = known._replace(reduced=False, heads_first=True)
    one = tensor.unsqueeze(2)
    return (one, whole) if tensor.shape[1] in known.counts and has_heads(one.shape, whole) else (tensor, known)


def has_heads(shape: Sequence[int], known: KnownHeads) -> bool:
    """Whether four dims are surely tokens, heads and channels, and no map ``(N, C, H, W)``, which attention has, too.

    >>> known = KnownHeads("attn", queries=4, keys=2, dims=(8,))
    >>> has_heads((1, 4, 5, 8), known), has_heads((1, 32, 4, 4), known)
    (True, False)
    """
    if len(shape) != 4 or not known.counts:
        return False
    # By two numbers that agree: a map may be as high as there are heads.
    return known.comes_first or (any(shape[dim] in known.counts for dim in (1, 2)) and shape[3] in known.dims)


def copy_of(axis: HeadAxis, copy: int, tensor: Tensor) -> Tensor:
    """One of the views of a tensor, in which repeated heads come once."""
    view: Tensor = tensor.unflatten(axis.dim, (axis.heads, axis.copies)).select(axis.dim + 1, copy)
    return view


def refuse_other_copies(tensor: Tensor, axis: HeadAxis) -> None:
    """A head that is repeated is one head only as long as all of its copies are the same."""
    if is_fake(tensor) or compiler.in_trace():
        return
    first = copy_of(axis, 0, tensor)
    for copy in range(1, axis.copies):
        if not same(first, copy_of(axis, copy, tensor)):
            raise NoPart(
                f"this value of shape {tuple(tensor.shape)} has {axis.heads} heads of keys or values, each of them "
                f"{axis.copies} times for the heads of queries, and these differ: as gradients do, or after an edit of "
                "some of them.",
                "Name the dim: heads=edits.along(which, dim=1) counts them as they are here.",
            )

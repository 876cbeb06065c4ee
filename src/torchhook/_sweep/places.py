"""What a sweep patches: one call of one site, cut into the parts that are patched one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from torchhook._core.heads import known_heads
from torchhook._core.index import Index
from torchhook._core.targets import Target
from torchhook._recording.address import shown
from torchhook._recording.records import Recording
from torchhook._values import tree
from torchhook._values.call_sizes import Sizes
from torchhook._values.heads import HeadAxis, NoPart, head_axis, refuse_other_copies
from torchhook._values.parts import position_dim, unflattened
from torchhook._values.tree import Inputs
from torchhook._words import counted, plural
from torchhook.errors import EditError, SelectorError, suggestion


class Cut(Protocol):
    """How a tensor falls into parts."""

    def length(self, tensor: Tensor) -> int:
        """How many parts there are."""
        ...

    def part(self, tensor: Tensor, position: int) -> Tensor:
        """One of them, as a view: what is written to it lands in the tensor."""
        ...


class Whole:
    """The one part is all of it."""

    def length(self, tensor: Tensor) -> int:
        return 1

    def part(self, tensor: Tensor, position: int) -> Tensor:
        return tensor


class Along(NamedTuple):
    """A part for each index of a dim."""

    dim: int

    def length(self, tensor: Tensor) -> int:
        return tensor.shape[self.dim]

    def part(self, tensor: Tensor, position: int) -> Tensor:
        return tensor.select(self.dim, position)


class Tokens(NamedTuple):
    """A part for each token, of rows that lie one after the other in dim 0, as experts have them."""

    rows: int

    def length(self, tensor: Tensor) -> int:
        return tensor.shape[0] // self.rows

    def part(self, tensor: Tensor, position: int) -> Tensor:
        by_row: Tensor = tensor.unflatten(0, (self.rows, -1))
        return by_row.select(1, position)


class Heads(NamedTuple):
    """A part for each head: in a dim of their own, or side by side in one that they share."""

    axis: HeadAxis

    def length(self, tensor: Tensor) -> int:
        return self.axis.heads

    def part(self, tensor: Tensor, position: int) -> Tensor:
        dim, heads, groups, joined, copies = self.axis
        if not joined:  # of a head that is repeated, all of its copies
            return tensor.unflatten(dim, (heads, copies)).select(dim, position)  # type: ignore[no-any-return]
        # Splitting a dim is always a view.
        split: Tensor = tensor.unflatten(dim, (groups, heads, -1))
        return split.select(dim + 1, position)


class Place(NamedTuple):
    """One call of one site: the leaves to patch there, what they were in the clean run, and how they are cut."""

    target: Target
    clean: dict[str, Tensor]
    cut: Cut
    order: int = 0
    """When it passed in the clean run."""

    @property
    def length(self) -> int:
        """How many parts can be patched here."""
        return max((self.cut.length(tensor) for tensor in self.clean.values()), default=0)


class Patch(NamedTuple):
    """One cell of the matrix."""

    row: int
    column: int
    position: int


def patchable(target: Target) -> Target:
    """Refuse what passes in the backward pass, and what does not pass at all."""
    if target.tensor is not None or target.site.port not in ("output", "input"):
        raise SelectorError(
            f"{str(target.site)!r} cannot be patched in the forward pass: sweep over outputs or inputs."
        )
    return target


Way = Callable[[Target, Tensor], Cut]
"""How the tensor that passes a target is cut; the error says why, where it cannot be."""


def by_token(index: Index, inputs: Inputs) -> Way:
    """By tokens: the dim after the rows, unless heads are there, or dim 0 has tokens, those of all rows or of each.

    Of the first, the modules around say so; of the others, the inputs that the model is called with.
    """
    sizes = Sizes.of(inputs)

    def cut(target: Target, tensor: Tensor) -> Cut:
        known = known_heads(index, target)._replace(call=lambda: sizes)
        try:
            by_row = unflattened(tensor, known, positions=slice(None))
            if by_row is not tensor:
                return Tokens(len(by_row))
            dim = position_dim(tensor, None, known, otherwise=1)
        except NoPart as error:
            raise EditError(f"{target.site}: {error.why} Name the dim of the tokens: dim=….") from None
        return along(dim)(target, tensor)

    return cut


def along(dim: int) -> Way:
    """By the indices of a dim."""

    def cut(target: Target, tensor: Tensor) -> Cut:
        if -tensor.dim() <= dim < tensor.dim():
            return Along(dim)
        raise EditError(
            f"{target.site}: dim={dim} was asked for, and the value is {tree.describe(tensor)}. Use dim=None."
        )

    return cut


def by_head(index: Index, named: tuple[int, int] | None, inputs: Inputs) -> Way:
    """By heads, where the modules around say that they are, or where ``named``, a dim and how many."""
    sizes = Sizes.of(inputs)

    def cut(target: Target, tensor: Tensor) -> Cut:
        if named is not None:
            return Heads(_named_axis(target, tensor, *named))
        try:
            axis = head_axis(tensor.shape, known_heads(index, target)._replace(call=lambda: sizes))
            if axis.copies > 1:
                refuse_other_copies(tensor, axis)
            return Heads(axis)
        except NoPart as error:
            raise EditError(
                f"{target.site}: {error.why} Name the dim and the number of heads: heads=(dim, count)."
            ) from None

    return cut


def _named_axis(target: Target, tensor: Tensor, dim: int, count: int) -> HeadAxis:
    if not -tensor.dim() <= dim < tensor.dim() or count < 1 or tensor.shape[dim] % count:
        raise EditError(
            f"{target.site}: heads=({dim}, {count}) was asked for, and the value is {tree.describe(tensor)}: give a "
            "dim that it has, and how many heads lie in it."
        )
    dim = dim % tensor.dim()
    return HeadAxis(dim, count, joined=tensor.shape[dim] != count)


def places(target: Target, recording: Recording, leaf: str | None, way: Way | None) -> list[Place]:
    """A place for each call that the clean run made of a site, cut in that way or not at all."""
    site = target.site
    records = recording.records(site)
    several = len(records) > 1 or site.call is not None
    found = []
    for record in records:
        here = target._replace(site=site.but(call=record.call if several else None))
        leaves = _leaves(record.value, str(site), leaf)
        cut = Whole() if way is None else way(here, _only(leaves, str(site)))
        found.append(Place(here, leaves, cut, record.order))
    return found


def too_late(found: list[Place], passed: Sequence[int]) -> list[str]:
    """What there is to say where a patch comes after the sites that it should go through, which ``passed`` then."""
    late = [place for place in found if all(place.order > order for order in passed)]
    if not passed or not late:
        return []
    names = ", ".join(repr(str(place.target.site)) for place in late[:3]) + (", …" if len(late) > 3 else "")
    come = plural(len(late), "comes", "come")
    return [
        f"{counted(len(late), 'site')} of {len(found)} {come} after all that through= names "
        f"({names}): no patch there goes through it, and the metric is the corrupted run's"
    ]


def _leaves(value: Any, site: str, leaf: str | None) -> dict[str, Tensor]:
    found = {address: part for address, part in tree.leaves(value) if isinstance(part, Tensor)}
    if leaf is None:
        return found
    if leaf not in found:
        # The leaf of a bare tensor is the tensor, and has no name to suggest.
        bare = f"The value is one tensor of shape {tuple(value.shape)}: leave leaf= out." if "" in found else ""
        there = bare or suggestion(leaf, found) or f"There is none in it: {tree.describe(value)}."
        raise EditError(f"{shown(site)}: no tensor at leaf={leaf!r}. {there}")
    return {leaf: found[leaf]}


def _only(leaves: dict[str, Tensor], site: str) -> Tensor:
    if len(leaves) != 1:
        listed = ", ".join(map(repr, leaves)) or "none"
        raise EditError(
            f"{site}: a position belongs to one tensor, and this value has {len(leaves)}: {listed}. Use leaf=."
        )
    (tensor,) = leaves.values()
    return tensor


def columns(found: list[Place], positions: Sequence[int] | None, what: str | None) -> list[int]:
    """The positions of the matrix: those asked for, or all that the longest place has; ``what`` they are, if any."""
    if what is None:
        if positions is not None:
            raise ValueError("positions= are indices of a dimension: leave them out, or say which with dim=.")
        return [0]
    length = max(place.length for place in found)
    if positions is None:
        return list(range(length))
    if wrong := [p for p in positions if not -length <= p < length]:
        raise ValueError(f"positions {wrong} are out of range: {what} has {length}.")
    return list(positions)


def patches(found: list[Place], at: list[int]) -> list[Patch]:
    """Every cell of the matrix that exists: not every site has all the positions."""
    return [
        Patch(row, column, position)
        for row, place in enumerate(found)
        for column, position in enumerate(at)
        if -place.length <= position < place.length
    ]

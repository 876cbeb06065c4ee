"""What a sweep patches: one call of one site, cut into the parts that are patched one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from torchhook._core.select import Target
from torchhook._recording.records import Recording
from torchhook._values import tree
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


class Place(NamedTuple):
    """One call of one site: the leaves to patch there, what they were in the clean run, and how they are cut."""

    target: Target
    clean: dict[str, Tensor]
    cut: Cut

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


def places(target: Target, recording: Recording, leaf: str | None, cut: Along | None) -> list[Place]:
    """A place for each call that the clean run made of a site."""
    site = target.site
    records = recording.records(site)
    if site.call is not None:
        records = [record for record in records if record.call == site.call]
    several = len(records) > 1 or site.call is not None
    return [
        Place(
            target._replace(site=site.but(call=record.call if several else None)),
            _leaves(record.value, str(site), leaf, cut),
            cut or Whole(),
        )
        for record in records
    ]


def _leaves(value: Any, site: str, leaf: str | None, cut: Along | None) -> dict[str, Tensor]:
    found = {address: part for address, part in tree.leaves(value) if isinstance(part, Tensor)}
    if leaf is not None:
        if leaf not in found:
            raise EditError(f"{site}: no tensor at leaf={leaf!r}. {suggestion(leaf, found)}")
        found = {leaf: found[leaf]}
    if cut is None:
        return found
    if len(found) != 1:
        listed = ", ".join(map(repr, found)) or "none"
        raise EditError(
            f"{site}: a position belongs to one tensor, and this value has {len(found)}: {listed}. Use leaf=."
        )
    (tensor,) = found.values()
    if not -tensor.dim() <= cut.dim < tensor.dim():
        raise EditError(f"{site}: dim={cut.dim} was asked for, and the value is {tree.describe(tensor)}. Use dim=None.")
    return found


def columns(found: list[Place], positions: Sequence[int] | None, dim: int | None) -> list[int]:
    """The positions of the matrix: those asked for, or all that the longest place has."""
    if dim is None:
        if positions is not None:
            raise ValueError("positions= are indices of a dimension: leave them out, or say which with dim=.")
        return [0]
    length = max(place.length for place in found)
    if positions is None:
        return list(range(length))
    if wrong := [p for p in positions if not -length <= p < length]:
        raise ValueError(f"positions {wrong} are out of range: dim {dim} has {length}.")
    return list(positions)


def patches(found: list[Place], at: list[int]) -> list[Patch]:
    """Every cell of the matrix that exists: not every site has all the positions."""
    return [
        Patch(row, column, position)
        for row, place in enumerate(found)
        for column, position in enumerate(at)
        if -place.length <= position < place.length
    ]

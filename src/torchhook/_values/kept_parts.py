"""Transforms that know where they are: the parts that ``transforms.only`` keeps, and any other at one site."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchhook._values import padding, parts, tree
from torchhook._values.choices import Along
from torchhook._values.heads import KnownHeads, NoPart, Where, rows_first, unknown
from torchhook._values.padding import Known
from torchhook._values.value_object import ValueObject
from torchhook.errors import TransformError


def with_rows(tensor: Tensor, known: Where) -> Tensor:
    """``(N, T, D)`` of ``(N·T, D)`` and ``(T, N, D)``, where the call that runs says so; any other as it is."""
    try:
        if tensor.dim() == 3:
            return rows_first(tensor, known())
        return parts.unflattened(tensor, known(), positions=slice(None)) if tensor.dim() == 2 else tensor
    except NoPart:  # rows of something else
        return tensor


@dataclass(frozen=True, eq=False, repr=False)
class Only(ValueObject):
    positions: Any = field(default=None, kw_only=True)
    rows: Any = field(default=None, kw_only=True)
    heads: Any = field(default=None, kw_only=True)

    asks_where = True
    moves_dims = False

    def __call__(self, value: Any) -> Any:
        return self.kept(value, unknown)

    def kept(self, value: Any, known: Where) -> Any:
        """What is kept at a site where this is known of the heads."""
        return tree.map_tensors(lambda tensor: self._part(tensor, known()), value)

    def _part(self, tensor: Tensor, known: KnownHeads) -> Tensor:
        try:
            tensor = parts.unflattened(tensor, known, self.rows, self.positions, self.heads)
            if self.puts_rows_first:
                tensor, known = rows_first(tensor, known), known.with_rows_first()
            return parts.part(tensor, self.rows, self._places(tensor, known), self.heads, known).of(tensor)
        except NoPart as error:
            raise TransformError(f"transforms.{self!r}: {error}") from None

    @property
    def puts_rows_first(self) -> bool:
        """Whether rows come first in what is kept, wherever they were: dims that are named stay where they are."""
        chosen = (self.rows, self.positions, self.heads)
        return not (self.rows is None and self.positions is None) and not any(isinstance(one, Along) for one in chosen)

    def _places(self, tensor: Tensor, known: KnownHeads) -> Any:
        """The positions, in each row where padding moves them to."""
        if self.positions is None or isinstance(self.positions, Along) or tensor.dim() < 3:
            return self.positions
        if padding.known() is None:
            return self.positions
        mask = padding.mask_of(tensor, parts.position_dim(tensor, self.heads, known), lambda: known)
        if mask is None:
            return self.positions
        if not isinstance(self.positions, (int, list)):
            raise NoPart("where rows have padding, positions are counted in each: give an integer or a list of them.")
        return padding.places(mask, [self.positions] if isinstance(self.positions, int) else self.positions).numpy()

    def afterwards(self, known: Known | None, heads: Where = unknown) -> Known | None:
        return known if self.positions is None and self.rows is None else None


@dataclass(frozen=True, eq=False, repr=False)
class Placed(ValueObject):
    """A transform at one site, where the modules around are known; they are asked when a value wants it."""

    transform: Any
    known: Where

    def __call__(self, value: Any) -> Any:
        return self.transform.kept(value, self.known)

    def afterwards(self, known: Known | None) -> Known | None:
        found: Known | None = self.transform.afterwards(known, self.known)
        return found

    def __repr__(self) -> str:
        return repr(self.transform)

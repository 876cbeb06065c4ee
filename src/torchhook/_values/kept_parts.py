"""What ``transforms.only`` keeps: a part of each tensor, with positions counted where padding leaves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchhook._values import padding, parts, tree
from torchhook._values.heads import UNKNOWN, KnownHeads, NoPart
from torchhook._values.padding import Known
from torchhook._values.value_object import ValueObject
from torchhook.errors import TransformError


@dataclass(frozen=True, eq=False, repr=False)
class Only(ValueObject):
    positions: Any = field(default=None, kw_only=True)
    rows: Any = field(default=None, kw_only=True)
    heads: Any = field(default=None, kw_only=True)

    def __call__(self, value: Any) -> Any:
        return self.kept(value, UNKNOWN)

    def kept(self, value: Any, known: KnownHeads) -> Any:
        """What is kept at a site where this much is known of the heads."""
        return tree.map_tensors(lambda tensor: self._part(tensor, known), value)

    def _part(self, tensor: Tensor, known: KnownHeads) -> Tensor:
        try:
            return parts.part(tensor, self.rows, self._places(tensor), self.heads, known).of(tensor)
        except NoPart as error:
            raise TransformError(f"transforms.{self!r}: {error}") from None

    def _places(self, tensor: Tensor) -> Any:
        """The positions, in each row where padding moves them to."""
        mask = None if self.positions is None or tensor.dim() < 3 else padding.mask_of(tensor)
        if mask is None:
            return self.positions
        if not isinstance(self.positions, (int, list)):
            raise NoPart("where rows have padding, positions are counted in each: give an integer or a list of them.")
        return padding.places(mask, [self.positions] if isinstance(self.positions, int) else self.positions).numpy()

    def placed(self, known: Callable[[], KnownHeads]) -> PlacedOnly:
        return PlacedOnly(self, known())

    def afterwards(self, known: Known | None) -> Known | None:
        return known if self.positions is None and self.rows is None else None


@dataclass(frozen=True, eq=False, repr=False)
class PlacedOnly(ValueObject):
    """The part at one site, where the modules around are known."""

    transform: Only
    known: KnownHeads

    def __call__(self, value: Any) -> Any:
        return self.transform.kept(value, self.known)

    def afterwards(self, known: Known | None) -> Known | None:
        return self.transform.afterwards(known)

    def __repr__(self) -> str:
        return repr(self.transform)

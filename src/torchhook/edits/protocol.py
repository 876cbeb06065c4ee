"""What an edit is: any function of a passing value, and the base of those in the catalogue."""

from __future__ import annotations

from typing import Any, Protocol

from torchhook._recording.address import Site
from torchhook._values.value_object import ValueObject


class Edit(Protocol):
    """Takes a passing value and the site that it passes, and returns the value to go on with, or ``None`` for the same.

    A plain function is enough, also one of the value alone. The new value must be like the old one: the same
    structure, shapes, dtypes and devices.

    >>> def louder(value: Tensor, site: Site) -> Tensor:
    ...     return value * 2 if site.call == 0 else value
    >>> edit: Edit = louder
    """

    def __call__(self, value: Any, site: Site, /) -> Any: ...


class CataloguedEdit(ValueObject):
    room = "edits."

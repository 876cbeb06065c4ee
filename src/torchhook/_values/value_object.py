"""Objects that are what they hold: they print as they were written, compare by value, and pickle by their fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchhook._values import tree
from torchhook._values.nodes import Node

_FEW = 4
"""A tensor of so many elements is shown by its numbers, one of more by its shape."""


class ValueObject:
    """Base of frozen dataclasses whose fields may be tensors, for which plain equality is no yes or no.

    >>> @dataclasses.dataclass(frozen=True, eq=False, repr=False)
    ... class _Scale(ValueObject):
    ...     factor: Any
    ...     dim: int = 0
    >>> _Scale(torch.tensor([1.0, 2.0])), _Scale(2, dim=1)
    (scale(tensor([1.0, 2.0])), scale(2, 1))
    >>> _Scale(torch.ones(2)) == _Scale(torch.ones(2))
    True
    """

    room: ClassVar[str] = ""
    """What stands before the name where the object is printed."""

    def parts(self) -> dict[str, Any]:
        """What the object is compared by; its fields, unless a class says otherwise."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ValueObject):
            return NotImplemented
        return self is other or (type(self) is type(other) and same(self.parts(), other.parts()))

    def __hash__(self) -> int:
        return hash((type(self), _key(self.parts())))

    def __repr__(self) -> str:
        return f"{self.room}{type(self).__name__.strip('_').lower()}({', '.join(self._written())})"

    def _written(self) -> Iterator[str]:
        """The arguments that make this object, those that say nothing new left out."""
        by_name = False
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            by_name = by_name or bool(field.kw_only)
            if field.default is not dataclasses.MISSING and same(value, field.default):
                by_name = True  # the ones after it are no longer in their place
            else:
                yield f"{field.name}={shown(value)}" if by_name else shown(value)


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same: built alike, and equal in every leaf; a NaN is like another.

    >>> same({"a": torch.ones(2)}, {"a": torch.ones(2)}), same(torch.ones(2), torch.ones(3))
    (True, False)
    """
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and _same_tensor(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return type(one) is type(other) and np.array_equal(one, other)
    first, second = _open(one), _open(other)
    if first is None or second is None:
        return first is second and bool(one == other or (one != one and other != other))
    alike = type(one) is type(other) and first.keys == second.keys
    return alike and all(map(same, first.children, second.children))


def _open(value: Any) -> Node | None:
    """One level of a nested value; another value object knows itself what it is compared by."""
    return None if isinstance(value, ValueObject) else tree.unpack(value)


def _same_tensor(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.device, one.layout, one.is_nested) != (other.dtype, other.device, other.layout, other.is_nested):
        return False
    if one.is_nested:
        return len(one.unbind()) == len(other.unbind()) and all(map(_same_tensor, one.unbind(), other.unbind()))
    if one.shape != other.shape or one.device.type == "meta":
        return one.shape == other.shape
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _key(value: Any) -> Any:
    """The same for values that are the same, and cheap: tensors go by dtype and shape."""
    if isinstance(value, Tensor):
        return value.dtype, tree.describe(value)
    node = _open(value)
    if node is not None:
        return type(value), tuple(node.keys), tuple(map(_key, node.children))
    try:
        # A NaN is hashed by its identity, and must be like another here.
        return hash(value) if value == value else "NaN"
    except (TypeError, ValueError):  # no hash, or an array
        return type(value)


def shown(value: Any) -> str:
    """An argument as one would write it, as far as that is short.

    >>> shown([torch.zeros(2), torch.zeros(2, 3), torch.relu])
    '[tensor([0.0, 0.0]), (2, 3), relu]'
    """
    if isinstance(value, Tensor):
        few = value.numel() <= _FEW and value.layout == torch.strided and value.device.type != "meta"
        return f"tensor({value.tolist()})" if few and not value.is_nested else tree.describe(value)
    if isinstance(value, np.ndarray):
        few = value.size <= _FEW and value.dtype != object
        return f"array({value.tolist()})" if few else f"({', '.join(map(str, value.shape))})"
    if type(value) in (list, tuple):
        inside = ", ".join(map(shown, value))
        return f"[{inside}]" if type(value) is list else f"({inside}{',' * (len(value) == 1)})"
    if type(value) is dict:
        return "{" + ", ".join(f"{key!r}: {shown(part)}" for key, part in value.items()) + "}"
    if callable(value) and not isinstance(value, ValueObject):
        return str(getattr(value, "__name__", None) or repr(value))
    text = repr(value)
    return text if "\n" not in text else f"<{text.splitlines()[0]}>"

"""What is remembered of an object for as long as it lives, without holding it."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class ByIdentity(Generic[V]):
    """Values by the identity of objects: a class of somebody else's may compare in its own way, or have no hash.

    A value goes with its object, so it must not hold it.

    >>> class Model: ...
    >>> model, known = Model(), ByIdentity()
    >>> known[model] = "looked at"
    >>> known.get(model), known.get(Model())
    ('looked at', None)
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def get(self, owner: object) -> V | None:
        """What is remembered of an object, if anything is."""
        entry = self._entries.get(id(owner))
        return None if entry is None or entry[0]() is not owner else entry[1]

    def __setitem__(self, owner: object, value: V) -> None:
        key = id(owner)
        self._entries[key] = weakref.ref(owner, lambda gone: self._drop(key, gone)), value

    def forget(self, owner: object) -> None:
        """Remember nothing of an object any more."""
        if self.get(owner) is not None:
            self._entries.pop(id(owner), None)

    def _drop(self, key: int, gone: weakref.ref[Any]) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry[0] is gone:  # the id may be another object's by now
            self._entries.pop(key, None)

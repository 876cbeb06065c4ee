"""The kinds of nodes: how each of them opens into its parts, and is made again from others.

``KINDS`` lists them; the first that a value belongs to opens it. What no kind opens is a leaf.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from torchhook._torch import pytree_nodes
from torchhook._values import objects
from torchhook._values.loaded import Loaded


class Node(NamedTuple):
    """A value that was opened."""

    keys: list[str]
    children: list[Any]
    rebuild: Callable[[list[Any]], Any]
    """Makes a value of the same kind from new children, in the same order."""
    below: Walker
    """What opens the children."""


class Walker:
    """Opens a value level by level.

    A plain object is looked through as a whole before it is opened. The walker below it knows that, and which of the
    parts hold themselves: these are leaves, because there is no tree to rebuild.
    """

    __slots__ = ("_loops", "shares")

    def __init__(self, loops: frozenset[int] | None = None) -> None:
        self._loops = loops
        self.shares = loops is not None
        """Whether what is opened are parts of one plain object: those may hold each other several times."""

    def open(self, value: Any) -> Node | None:
        """Open a value one level, or return ``None`` for a leaf."""
        if self._loops and id(value) in self._loops:
            return None
        opener = _EXACT.get(type(value))
        if opener is not None:
            return opener(value, self)
        for belongs, opener in KINDS:
            if belongs(value):
                return opener(value, self)
        return None

    def into(self, value: Any) -> Walker | None:
        """The walker for the parts of a plain object; none, if it is not opened."""
        if self.shares:
            return self
        found = objects.search(value)
        opened = (found.tensors or found.pure) and id(value) not in found.loops
        return Walker(found.loops) if opened else None


OUTSIDE = Walker()
"""Opens what was handed in from outside."""


# -- openers ----------------------------------------------------------------------------------------


def _leaf(value: Any, walker: Walker) -> None:
    return None


def _sequence(value: Any, walker: Walker) -> Node:
    return Node(_indices(value), list(value), type(value), walker)


def _dict(value: Any, walker: Walker) -> Node:
    return Node(_names(value), list(value.values()), lambda new: dict(zip(value, new, strict=True)), walker)


def _set(value: Any, walker: Walker) -> Node | None:
    return _sequence(value, walker) if objects.search(value).tensors else None


def _tuple(value: Any, walker: Walker) -> Node:
    kind: Any = type(value)
    fields = getattr(kind, "_fields", None)
    if fields is not None:
        # _make goes past a subclass's own __new__: PackedSequence checks and moves its arguments there.
        return Node(list(fields), list(value), kind._make, walker)
    if hasattr(kind, "n_fields"):  # torch.return_types.*
        names = list(getattr(kind, "__match_args__", ()))
        return Node(names if len(names) == len(value) else _indices(value), list(value), kind, walker)
    return Node(_indices(value), list(value), lambda new: tuple.__new__(kind, new), walker)


def _registered(value: Any, walker: Walker) -> Node:
    """A class that torch's registry knows; so are the outputs of transformers."""
    registered = pytree_nodes[type(value)]
    found, context = registered.flatten_fn(value)
    children = list(found)
    named = isinstance(value, dict) and len(value) == len(children)
    keys = _names(value) if named else _indices(children)
    return Node(keys, children, lambda new: registered.unflatten_fn(new, context), walker)


def _proxy(value: Any, walker: Walker) -> Node:
    node = _dict(dict(value), walker)
    return node._replace(rebuild=lambda new: MappingProxyType(node.rebuild(new)))


def _loaded(value: Any, walker: Walker) -> Node:
    fields = vars(value)
    return Node(list(fields), list(fields.values()), lambda new: type(value)(zip(fields, new, strict=True)), walker)


def _list(value: Any, walker: Walker) -> Node:
    """A subclass of list or deque: its items, and its attributes where those hold tensors."""
    items, base = list(value), list if isinstance(value, list) else deque
    extra = objects.other_tensors(value, ())

    def rebuild(new: list[Any]) -> Any:
        result = objects.copied(value)
        if result is value:
            return value
        base.clear(result)
        base.extend(result, new[: len(items)])
        return objects.set_attributes(result, extra, new[len(items) :])

    return Node([*_indices(items), *extra], [*items, *extra.values()], rebuild, walker)


def _mapping(value: Any, walker: Walker) -> Node:
    """A subclass of dict: its items, and its attributes where those hold tensors."""
    keys = _names(value)
    extra = objects.other_tensors(value, keys)

    def rebuild(new: list[Any]) -> Any:
        result = objects.copied(value)
        if result is value:
            return value
        for key, child in zip(value, new, strict=False):
            dict.__setitem__(result, key, child)
        for name in vars(result) if hasattr(result, "__dict__") else ():
            if name in result:  # a dict whose items are its attributes too
                vars(result)[name] = result[name]
        return objects.set_attributes(result, extra, new[len(keys) :])

    return Node([*keys, *extra], [*value.values(), *extra.values()], rebuild, walker)


def _dataclass(value: Any, walker: Walker) -> Node:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    parts = {**{name: getattr(value, name) for name in names}, **objects.other_tensors(value, names)}
    return _object_of(value, parts, walker)


def _plain_object(value: Any, walker: Walker) -> Node | None:
    below = walker.into(value)
    parts = {} if below is None else objects.attributes(value)
    return _object_of(value, parts, below) if below is not None and parts else None


def _object_of(value: Any, parts: dict[str, Any], below: Walker) -> Node:
    return Node(list(parts), list(parts.values()), lambda new: objects.with_attributes(value, parts, new), below)


_DIGITS = [str(i) for i in range(64)]


def _indices(items: Any) -> list[str]:
    count = len(items)
    return _DIGITS[:count] if count <= len(_DIGITS) else [str(i) for i in range(count)]


def _names(mapping: Any) -> list[str]:
    return [str(key) for key in mapping]


# -- kinds ----------------------------------------------------------------------------------------


Opener = Callable[[Any, Walker], Node | None]
Belongs = Callable[[Any], bool]


def _is(*kinds: type) -> Belongs:
    return lambda value: isinstance(value, kinds)


def _is_registered(value: Any) -> bool:
    return type(value) in pytree_nodes and type(value) not in objects.SIMPLE_CONTAINERS


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


_EXACT: dict[type, Opener] = {
    **dict.fromkeys(objects.LEAF_TYPES, _leaf),
    Tensor: _leaf,
    Parameter: _leaf,
    tuple: _sequence,
    list: _sequence,
    dict: _dict,
}
"""The kinds that come most often. They are the only ones known by their very type."""

KINDS: tuple[tuple[Belongs, Opener], ...] = (
    (_is(Tensor), _leaf),
    (_is(set, frozenset), _set),
    (_is(tuple), _tuple),
    (_is_registered, _registered),
    (_is(MappingProxyType), _proxy),
    (_is(list, deque), _list),
    (_is(dict), _mapping),
    (_is(Loaded), _loaded),
    (_is_dataclass, _dataclass),
    (_is(*objects.CLOSED), _leaf),
    (lambda value: True, _plain_object),
)

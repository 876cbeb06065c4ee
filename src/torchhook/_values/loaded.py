"""What a file gives back where the class of a value is not at hand: its fields, its items, or its name alone.

A class here is called what the lost one was called, and can do no more than show what it holds.
"""

from __future__ import annotations

from collections import deque, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary


class Loaded:
    """A dataclass, model output or plain object read from a file: its fields by name, position or attribute.

    >>> layer = loaded("CacheLayer", {"keys": 1, "values": 2})
    >>> layer.keys, layer["values"], layer[-1], list(layer)
    (1, 2, 2, ['keys', 'values'])
    >>> layer
    CacheLayer(keys=1, values=2)

    The fields are its ``vars``. One that is called like a method hides it from ``layer.name``, so what goes through an
    object whose fields it does not know takes ``vars(layer)``.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        vars(self).update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this {_unknown(self, name)}")

    def __getitem__(self, key: str | int | slice) -> Any:
        fields = vars(self)
        if isinstance(key, (int, slice)):
            return list(fields.values())[key]
        if key not in fields:
            raise KeyError(_unknown(self, key))
        return fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    def __contains__(self, name: object) -> bool:
        return name in vars(self)

    def keys(self) -> list[str]:
        """The names of the fields, as iterating gives them."""
        return list(vars(self))

    def values(self) -> list[Any]:
        """The fields in order."""
        return list(vars(self).values())

    def items(self) -> list[tuple[str, Any]]:
        """Name and value of every field."""
        return list(vars(self).items())

    def get(self, name: str, default: Any = None) -> Any:
        """The field of this name, or ``default``."""
        return vars(self).get(name, default)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Loaded):
            return NotImplemented
        return type(self).__name__ == type(other).__name__ and list(vars(self).items()) == list(vars(other).items())

    def __hash__(self) -> int:  # it may be the key of a dict, whatever it holds
        plain = (value for value in vars(self).values() if isinstance(value, (int, float, str, bytes)))
        return hash((type(self).__name__, *vars(self), *plain))

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({inside})"


class Opaque(NamedTuple):
    """A leaf that could not be saved: what it was, and how it showed itself."""

    type: str
    text: str

    @property
    def kind(self) -> str:
        """Its type, as one writes it."""
        return self.type.removeprefix("builtins.")

    def __str__(self) -> str:
        return self.text


def loaded(name: str, fields: Mapping[str, Any]) -> Loaded:
    """The fields of an object whose class was called ``name``."""
    made: Loaded = named(name, Loaded)(fields)
    return made


def named(name: str, base: type) -> Any:
    """A class that differs from ``base`` in its name; the same one for the same name, so that types can be compared."""
    found = _classes.get((name, base))
    if found is None:
        body = {"__reduce__": _reduced, "__copy__": _copied, "__module__": __name__}
        found = _classes[name, base] = type(name, (base,), body)
    return found


def named_tuple(name: str, fields: Sequence[str]) -> Any:
    """A class of named tuples; the same one for the same name and fields."""
    key = (name, *fields)
    found = _classes.get(key)
    if found is None:
        base = namedtuple("base", fields)  # type: ignore[misc]
        body = {"__slots__": (), "__reduce__": _reduced_tuple, "__module__": __name__}
        found = _classes[key] = type(name, (base,), body)
    return found


_classes: WeakValueDictionary[tuple[Any, ...], type] = WeakValueDictionary()


def _unknown(value: Loaded, name: object) -> str:
    return f"{type(value).__name__} has no field {name!r}; it has {', '.join(vars(value))}"


# A class that was made here cannot be found by its name again: copies and pickles make another one.


def _reduced(value: Any) -> Any:
    base = type(value).__bases__[0]
    return _remade, (type(value).__name__, base, _contents(value), {} if base is Loaded else vars(value))


def _copied(value: Any) -> Any:
    return _remade(*_reduced(value)[1])  # a deque's own way forgets the attributes


def _contents(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Loaded):
        return (dict(vars(value)),)
    if isinstance(value, dict):
        return (dict(value),)
    return (list(value), value.maxlen) if isinstance(value, deque) else (list(value),)


def _remade(name: str, base: type, contents: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    made = named(name, base)(*contents)
    vars(made).update(attributes)
    return made


def _reduced_tuple(value: Any) -> Any:
    return _remade_tuple, (type(value).__name__, value._fields, list(value))


def _remade_tuple(name: str, fields: Sequence[str], values: list[Any]) -> Any:
    return named_tuple(name, fields)._make(values)

"""Plain objects: what one carries, what is found by looking through it, and how another one like it is made."""

from __future__ import annotations

import contextlib
import copy
import enum
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchhook._values.loaded import Opaque

LEAF_TYPES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, Opaque}
)
"""What can hold nothing."""

SIMPLE_CONTAINERS = frozenset({list, dict, tuple, OrderedDict, deque})

_NUMBERS_AND_TEXT = (int, float, complex, str, bytes)

CLOSED = (
    *_NUMBERS_AND_TEXT,
    type,
    torch.nn.Module,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.GeneratorType,
    np.ndarray,
    torch.Generator,
    enum.Enum,
)
"""What is never looked into, subclasses included."""

_PURE = (*_NUMBERS_AND_TEXT, list, tuple, dict, set, frozenset, deque, enum.Enum, np.generic, type)
_DEEPEST = 100
_MOST_PARTS = 5000


# -- what it carries ------------------------------------------------------------------------------


def attributes(value: Any) -> dict[str, Any]:
    """What a plain object carries: its ``__dict__`` and its slots."""
    try:
        found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    except Exception:  # a user's own __dict__ may do anything
        return {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__")
        if slots:
            for name in _slot_names(kind, slots):
                if hasattr(value, name):
                    found[name] = getattr(value, name)
    return found


def _slot_names(kind: type, slots: str | Iterable[str]) -> list[str]:
    names = [slots] if isinstance(slots, str) else list(slots)
    # As Python itself names what is private to a class.
    private = f"_{kind.__name__.lstrip('_')}"
    mangled = [f"{private}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names]
    return [name for name in mangled if name not in ("__dict__", "__weakref__")]


def other_tensors(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """The attributes beside ``names`` that hold tensors, as far as they are trees."""
    known = set(names)
    found = {name: part for name, part in attributes(value).items() if name not in known}
    return {name: part for name, part in found.items() if (seen := search(part)).tensors and not seen.loops}


# -- looking through it -----------------------------------------------------------------------------


class Found(NamedTuple):
    """What a search came upon."""

    tensors: bool
    pure: bool
    """Whether there is nothing but data: a key-value cache before its first token is like that."""
    loops: frozenset[int]
    """The ids of the parts that hold themselves, or are nested too deeply to be gone through.

    Of every loop at least one part is among them, and the object itself if it is part of itself.
    """


def search(value: Any) -> Found:
    """Look through everything that a value holds, at any depth."""
    path: dict[int, int] = {}
    done: dict[int, Any] = {}  # holds the parts: the id of one that was made on the way would be used again
    loops: set[int] = set()
    tensors, pure, size = False, True, 0

    def visit(part: Any) -> None:
        nonlocal tensors, pure, size
        key = id(part)
        if key in path:
            loops.update(list(path)[path[key] :])
        elif len(path) > _DEEPEST:
            loops.add(key)
        elif key not in done:
            done[key] = part
            path[key] = len(path)
            below = _inside(part)
            size += len(below)
            pure = pure and (bool(below) or isinstance(part, _PURE))
            for child in below:
                if isinstance(child, Tensor):
                    tensors = True
                elif type(child) not in LEAF_TYPES:
                    visit(child)
            del path[key]

    if isinstance(value, Tensor):
        return Found(True, True, frozenset())
    visit(value)
    return Found(tensors, pure and 0 < size < _MOST_PARTS, frozenset(loops))


def _inside(value: Any) -> list[Any]:
    """What a value directly holds."""
    kind = type(value)
    if kind in LEAF_TYPES or isinstance(value, CLOSED):
        return []
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        items = list(value)
    elif isinstance(value, (dict, types.MappingProxyType)):
        items = list(value.values())
    else:
        return list(attributes(value).values())
    return items if kind in SIMPLE_CONTAINERS else [*items, *attributes(value).values()]


# -- another one like it ------------------------------------------------------------------------------


def with_attributes(value: Any, names: Iterable[str], new: list[Any]) -> Any:
    """Another object like ``value`` with new attributes; itself, if there is no other like it."""
    result = copied(value)
    if result is not value:
        with contextlib.suppress(AttributeError):  # one that cannot be set
            return set_attributes(result, names, new)
    return value


def set_attributes(value: Any, names: Iterable[str], new: list[Any]) -> Any:
    """Set attributes of an object, and return it."""
    for name, child in zip(names, new, strict=True):
        object.__setattr__(value, name, child)  # past a frozen dataclass
    return value


def copied(value: Any) -> Any:
    """Another object like ``value``, or ``value`` itself if there is no way to make one."""
    with contextlib.suppress(Exception):  # a user's class may do anything
        result = copy.copy(value)
        if isinstance(value, (deque, defaultdict)) and hasattr(value, "__dict__"):
            vars(result).update(vars(value))  # which their own way of copying forgets
        if result is not value:
            return result
    kind: Any = type(value)
    state = attributes(value)
    for make in (kind.__new__, object.__new__):  # it refuses to be copied, or is one of a kind
        with contextlib.suppress(Exception):  # as above
            result = make(kind)
            if result is not value and type(result) is kind:
                return set_attributes(result, state, list(state.values()))
    return value

"""Nested values: what a module takes and returns, seen as tensors with addresses.

A value is a tensor, or a node (tuple, list, dict, set, named tuple, dataclass, anything registered with torch's pytree,
or a plain object that holds tensors), or some other leaf (``None``, a number, a string). ``map_tensors`` rebuilds a
value with its tensors changed, ``leaves`` lists what is inside with dotted addresses (``"1.0"``,
``"hidden_states.3"``), ``get`` and ``put`` reach one of them.

This is the only file that knows torch's pytree registry.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree


class Inputs(NamedTuple):
    """What a module was called with, when that is not just one positional argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Loops = frozenset[int]
"""The ids of the parts of a plain object that hold themselves. They are leaves: there is no tree to rebuild."""


class Node(NamedTuple):
    keys: list[str]
    children: list[Any]
    rebuild: Callable[[list[Any]], Any]
    inside: Loops | None = None
    """If the children are parts of a plain object that was looked through: the loops that were found in it."""


def unpack(value: Any, inside: Loops | None = None) -> Node | None:
    """Open a nested value one level, or return ``None`` for a leaf.

    ``inside`` says that it is a part of a plain object that was looked through, so that it need not be searched.
    """
    if inside and id(value) in inside:
        return None
    kind = type(value)
    if kind in _LEAF_TYPES or isinstance(value, Tensor):
        return None
    if kind is tuple or kind is list:
        return Node(_indices(value), list(value), kind)
    if kind is dict:
        return Node([str(k) for k in value], list(value.values()), lambda new: dict(zip(value, new, strict=True)))
    if isinstance(value, (set, frozenset)):
        return Node(_indices(value), list(value), kind) if _holds_tensors(value) else None
    if isinstance(value, tuple):
        return _unpack_tuple(value)
    registered = _pytree.SUPPORTED_NODES.get(kind)
    if registered is not None and kind not in _SIMPLE_CONTAINERS:
        children, context = registered.flatten_fn(value)
        children = list(children)
        named = isinstance(value, dict) and len(value) == len(children)
        keys = [str(k) for k in value] if named else _indices(children)
        return Node(keys, children, lambda new: registered.unflatten_fn(new, context))
    if isinstance(value, types.MappingProxyType):
        inner = dict(value)
        return Node(
            [str(k) for k in inner],
            list(inner.values()),
            lambda new: types.MappingProxyType(dict(zip(inner, new, strict=True))),
        )
    if isinstance(value, (list, deque, dict)):
        return _unpack_container(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        parts = {**{n: getattr(value, n) for n in names}, **_extra(value, names)}
        return Node(list(parts), list(parts.values()), lambda new: _with_attributes(value, parts, new))
    if not isinstance(value, _NOT_DATA) and (inside is not None or _is_data(value)):
        loops = _loops(value) if inside is None else inside
        state = _attributes(value)
        if state and id(value) not in loops:
            return Node(list(state), list(state.values()), lambda new: _with_attributes(value, state, new), loops)
    return None


def register(kind: type, flatten: Callable[[Any], tuple[list[Any], Any]], rebuild: Callable[[Any, Any], Any]) -> None:
    """Let torch open a class of this library as it opens tuples; ``torch.export`` returns no others."""
    _pytree.register_pytree_node(kind, flatten, rebuild, serialized_type_name=f"torchhook.{kind.__name__}")


_LEAF_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})
_SIMPLE_CONTAINERS = frozenset({list, dict, tuple, OrderedDict, deque})
_NOT_DATA = (
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


def _indices(items: Any) -> list[str]:
    return [str(i) for i in range(len(items))]


def _unpack_tuple(value: tuple[Any, ...]) -> Node:
    kind: Any = type(value)
    fields = getattr(kind, "_fields", None)
    if fields is not None:
        # _make goes past a subclass's own __new__: PackedSequence checks and moves its arguments there.
        return Node(list(fields), list(value), kind._make)
    if hasattr(kind, "n_fields"):  # torch.return_types.*
        names = list(getattr(kind, "__match_args__", ()))
        return Node(names if len(names) == len(value) else _indices(value), list(value), kind)
    return Node(_indices(value), list(value), lambda new: tuple.__new__(kind, new))


def _unpack_container(value: Any) -> Node:
    """A subclass of list, deque or dict: its items, and its attributes where those hold tensors."""
    keyed = isinstance(value, dict)
    keys = [str(k) for k in value] if keyed else _indices(value)
    items = list(value.values()) if keyed else list(value)
    extra = _extra(value, keys)

    def rebuild(new: list[Any]) -> Any:
        result = _copied(value)
        if result is value:
            return value
        if keyed:
            for key, child in zip(value, new, strict=False):
                dict.__setitem__(result, key, child)
            for name in vars(result) if hasattr(result, "__dict__") else ():
                if name in result:  # a dict whose items are its attributes too
                    vars(result)[name] = result[name]
        else:
            base = list if isinstance(value, list) else deque
            base.clear(result)
            base.extend(result, new[: len(items)])
        return _set_attributes(result, extra, new[len(items) :])

    return Node([*keys, *extra], [*items, *extra.values()], rebuild)


def _extra(value: Any, names: list[str]) -> dict[str, Any]:
    """The attributes beside ``names`` that hold tensors, as far as they are trees."""
    return {n: v for n, v in _attributes(value).items() if n not in names and _holds_tensors(v) and not _loops(v)}


def _attributes(value: Any) -> dict[str, Any]:
    """What a plain object carries: its ``__dict__`` and its slots."""
    try:
        found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    except Exception:  # a user's own __dict__ may do anything
        return {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            name = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _with_attributes(value: Any, names: Any, new: list[Any]) -> Any:
    result = _copied(value)
    if result is not value:
        with contextlib.suppress(AttributeError):  # one that cannot be set: then there is no other like it
            return _set_attributes(result, names, new)
    return value


def _set_attributes(value: Any, names: Any, new: list[Any]) -> Any:
    for name, child in zip(names, new, strict=True):
        object.__setattr__(value, name, child)  # past a frozen dataclass
    return value


def _copied(value: Any) -> Any:
    """Another object like ``value``, or ``value`` itself if there is no way to make one."""
    kind: Any = type(value)
    state = _attributes(value)
    with contextlib.suppress(Exception):  # a user's class may do anything
        result = copy.copy(value)
        if result is not value:
            return result
    for make in (kind.__new__, object.__new__):  # it refuses to be copied, or is one of a kind
        with contextlib.suppress(Exception):
            result = make(kind)
            if result is not value and type(result) is kind:
                return _set_attributes(result, state, list(state.values()))
    return value


def _inside(value: Any) -> list[Any]:
    """What a value directly holds, for the searches below."""
    if type(value) in _LEAF_TYPES or isinstance(value, (Tensor, *_NOT_DATA)):
        return []
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return [*value, *(_attributes(value).values() if type(value) not in _SIMPLE_CONTAINERS else ())]
    if isinstance(value, (dict, types.MappingProxyType)):
        return [*value.values(), *(_attributes(value).values() if type(value) not in _SIMPLE_CONTAINERS else ())]
    return list(_attributes(value).values())


def _holds_tensors(value: Any) -> bool:
    """Whether a plain object (a key-value cache, a container of the user's own) has tensors inside, at any depth."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            return True
        if id(part) not in seen:
            seen.add(id(part))
            waiting += _inside(part)
    return False


def _is_data(value: Any) -> bool:
    """Whether a plain object is opened: one that holds tensors, or nothing but data.

    The second is a key-value cache before its first token: what is put into it later must not show in a record.
    """
    seen: set[int] = set()
    waiting = [value]
    pure = True
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            return True
        if id(part) in seen:
            continue
        seen.add(id(part))
        known = type(part) in _LEAF_TYPES or isinstance(part, (list, tuple, dict, set, frozenset, deque, enum.Enum))
        below = _inside(part)
        pure = pure and (known or bool(below) or isinstance(part, np.generic)) and len(seen) < 5000
        waiting += below
    return pure and len(seen) > 1


def _loops(value: Any) -> Loops:
    """What of an object holds itself, or is nested too deeply to be gone through; at least one part of every loop.

    If the object is part of itself, it is among them.
    """
    path: dict[int, int] = {}
    done: set[int] = set()
    found: set[int] = set()

    def visit(part: Any) -> None:
        key = id(part)
        if key in path:
            found.update(list(path)[path[key] :])
        elif len(path) > 100:
            found.add(key)
        elif key not in done:
            path[key] = len(path)
            for child in _inside(part):
                visit(child)
            del path[key]
            done.add(key)

    visit(value)
    return frozenset(found)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Rebuild ``value`` with ``function`` applied to every tensor; other leaves stay as they are.

    >>> map_tensors(lambda t: t + 1, {"a": torch.zeros(2), "b": None})
    {'a': tensor([1., 1.]), 'b': None}
    """
    if isinstance(value, Tensor):
        return function(value)
    return _map(function, value, {})


def _map(
    function: Callable[[Tensor], Any], value: Any, done: dict[int, tuple[Any, Any]], inside: Loops | None = None
) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if id(value) in done:  # an object that several others hold
        return done[id(value)][1]
    node = unpack(value, inside)
    if node is None:
        return value.copy() if isinstance(value, np.ndarray) else value
    below = node.inside if inside is None else inside
    result = node.rebuild([_map(function, child, done, below) for child in node.children])
    done[id(value)] = value, result  # the value is held: the id of one that was made on the way would be used again
    return result


def leaves(value: Any, address: str = "", inside: Loops | None = None) -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted address; the address of a bare leaf is ``""``."""
    node = unpack(value, inside)
    if node is None:
        yield address, value
        return
    below = node.inside if inside is None else inside
    for key, child in zip(node.keys, node.children, strict=True):
        yield from leaves(child, f"{address}.{key}" if address else key, below)


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor inside ``value``, in order; what several plain objects share comes once."""
    return _tensors(value, set(), None)


def _tensors(value: Any, seen: set[int], inside: Loops | None) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    node = None if inside is not None and id(value) in seen else unpack(value, inside)
    if node is not None:
        seen.add(id(value))
        below = node.inside if inside is None else inside
        for child in node.children:
            yield from _tensors(child, seen, below)


def with_tensors(value: Any, new: Iterable[Any]) -> Any:
    """Rebuild ``value`` with ``new`` in the place of its tensors, in the order of ``tensors``.

    By place and not by identity: a value may hold one tensor several times, and get another for each.
    """
    return _filled(value, iter(new), {}, None)


def _filled(value: Any, new: Iterator[Any], done: dict[int, tuple[Any, Any]], inside: Loops | None) -> Any:
    if isinstance(value, Tensor):
        return next(new)
    if inside is not None and id(value) in done:
        return done[id(value)][1]
    node = unpack(value, inside)
    if node is None:
        return value
    below = node.inside if inside is None else inside
    result = node.rebuild([_filled(child, new, done, below) for child in node.children])
    done[id(value)] = value, result
    return result


def get(value: Any, address: str) -> Any:
    """The part of ``value`` at ``address``; a ``KeyError`` lists what is there when it is not."""
    return _walk(value, address, None)


def put(value: Any, address: str, change: Callable[[Any], Any]) -> Any:
    """Rebuild ``value`` with the part at ``address`` replaced by ``change(part)``."""
    return _walk(value, address, change)


def _walk(value: Any, address: str, change: Callable[[Any], Any] | None, inside: Loops | None = None) -> Any:
    if not address:
        return value if change is None else change(value)
    node = unpack(value, inside)
    keys = [] if node is None else node.keys
    # A dict key may itself hold dots: take the longest key that the address starts with.
    for key in sorted(keys, key=len, reverse=True):
        if address == key or address.startswith(key + "."):
            assert node is not None
            index, rest = keys.index(key), address[len(key) + 1 :]
            found = _walk(node.children[index], rest, change, node.inside if inside is None else inside)
            if change is None:
                return found
            children = list(node.children)
            children[index] = found
            return node.rebuild(children)
    there = ", ".join(repr(a) for a, _ in leaves(value) if a) or f"a bare {type(value).__name__}"
    raise KeyError(f"no leaf {address!r} here; there are: {there}")


def same_structure(one: Any, other: Any) -> bool:
    """Whether two values are nested in the same way: the same kinds of nodes, the same keys."""
    return _same(one, None, other, None)


def _same(one: Any, inside_one: Loops | None, other: Any, inside_other: Loops | None) -> bool:
    first, second = unpack(one, inside_one), unpack(other, inside_other)
    if first is None or second is None:
        return first is second
    below = first.inside if inside_one is None else inside_one
    beside = second.inside if inside_other is None else inside_other
    return (
        type(one) is type(other)
        and first.keys == second.keys
        and all(_same(a, below, b, beside) for a, b in zip(first.children, second.children, strict=True))
    )


def describe(value: Any, inside: Loops | None = None) -> str:
    """The shape of a value in a few characters.

    >>> describe((torch.zeros(2, 3), None))
    '((2, 3), None)'
    """
    if isinstance(value, Tensor):
        return _shape(value)
    node = unpack(value, inside)
    if node is None:
        if value is None or isinstance(value, (bool, int, float, str)):
            text = repr(value)
            return text if len(text) <= 24 else text[:21] + "..."
        return type(value).__name__
    below = node.inside if inside is None else inside
    if type(value) in (tuple, list):
        inner = ", ".join(describe(c, below) for c in node.children[:4])
        more = f", … {len(node.children)} in all" if len(node.children) > 4 else ""
        left, right = ("(", ")") if type(value) is tuple else ("[", "]")
        return f"{left}{inner}{more}{right}"
    parts = [f"{k}={describe(c, below)}" for k, c in zip(node.keys, node.children, strict=True) if c is not None]
    name = "" if type(value) is dict else type(value).__name__
    more = ", …" if len(parts) > 4 else ""
    return f"{name}{{{', '.join(parts[:4])}{more}}}"


def _shape(tensor: Tensor) -> str:
    if tensor.is_nested:  # a jagged size is symbolic, and a strided one has no shape at all
        return f"({tensor.size(0)}, ragged)"
    return "(" + ", ".join(str(s) for s in tensor.shape) + ("," if tensor.dim() == 1 else "") + ")"

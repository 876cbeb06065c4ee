"""Nested values: what a module takes and returns, seen as tensors with addresses.

A value is a tensor, or a node (a tuple, a dict, a model output, a plain object that holds tensors: ``nodes`` lists the
kinds), or some other leaf (``None``, a number, a string). ``map_tensors`` rebuilds a value with its tensors changed,
``leaves`` lists what is inside with dotted addresses (``"1.0"``, ``"hidden_states.3"``), ``get`` and ``put`` reach one
of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from torchhook._values.loaded import Opaque
from torchhook._values.nodes import OUTSIDE, Node, Walker
from torchhook._words import plural

__all__ = [
    "Inputs",
    "describe",
    "get",
    "leaves",
    "map_parts",
    "map_tensors",
    "put",
    "same_structure",
    "tensors",
    "unpack",
    "with_tensors",
]


class Inputs(NamedTuple):
    """What a module was called with, when that is not just one positional argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def unpack(value: Any) -> Node | None:
    """Open a nested value one level, or return ``None`` for a leaf."""
    return OUTSIDE.open(value)


# -- rebuilding -------------------------------------------------------------------------------------


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Rebuild ``value`` with ``function`` applied to every tensor; other leaves stay as they are.

    >>> import torch
    >>> map_tensors(lambda t: t + 1, {"a": torch.zeros(2), "b": None})
    {'a': tensor([1., 1.]), 'b': None}
    """
    if isinstance(value, Tensor):
        return function(value)
    return _map(function, value, {}, OUTSIDE)


def _map(function: Callable[[Tensor], Any], value: Any, done: dict[int, tuple[Any, Any]], walker: Walker) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if id(value) in done:  # an object that several others hold
        return done[id(value)][1]
    node = walker.open(value)
    if node is None:
        return value.copy() if isinstance(value, np.ndarray) else value
    result = node.rebuild([_map(function, child, done, node.below) for child in node.children])
    done[id(value)] = value, result  # the value is held: the id of one that was made on the way would be used again
    return result


def map_parts(function: Callable[[Any], Any], value: Any, where: Callable[[Any], bool]) -> Any:
    """Rebuild ``value`` with ``function`` applied to every part of which ``where`` is true; the others are opened.

    >>> map_parts(len, {"a": [1, 2], "b": ([], None)}, where=lambda part: isinstance(part, list))
    {'a': 2, 'b': (0, None)}
    """
    return _map_parts(function, value, where, OUTSIDE)


def _map_parts(function: Callable[[Any], Any], value: Any, where: Callable[[Any], bool], walker: Walker) -> Any:
    if where(value):
        return function(value)
    node = walker.open(value)
    if node is None:
        return value
    return node.rebuild([_map_parts(function, child, where, node.below) for child in node.children])


def with_tensors(value: Any, new: Iterable[Any]) -> Any:
    """Rebuild ``value`` with ``new`` in the place of its tensors, in the order of ``tensors``.

    By place and not by identity: a value may hold one tensor several times, and get another for each.
    """
    return _filled(value, iter(new), {}, OUTSIDE)


def _filled(value: Any, new: Iterator[Any], done: dict[int, tuple[Any, Any]], walker: Walker) -> Any:
    if isinstance(value, Tensor):
        return next(new)
    if walker.shares and id(value) in done:
        return done[id(value)][1]
    node = walker.open(value)
    if node is None:
        return value
    result = node.rebuild([_filled(child, new, done, node.below) for child in node.children])
    done[id(value)] = value, result
    return result


# -- listing ------------------------------------------------------------------------------------------


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted address; the address of a bare leaf is ``""``."""
    return _leaves(value, "", OUTSIDE)


def _leaves(value: Any, address: str, walker: Walker) -> Iterator[tuple[str, Any]]:
    node = walker.open(value)
    if node is None:
        yield address, value
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _leaves(child, f"{address}.{key}" if address else key, node.below)


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor inside ``value``, in order; what several plain objects share comes once."""
    return iter((value,)) if isinstance(value, Tensor) else _tensors(value, {}, OUTSIDE)


def _tensors(value: Any, seen: dict[int, Any], walker: Walker) -> Iterator[Tensor]:
    node = None if walker.shares and id(value) in seen else walker.open(value)
    if node is None:
        return
    seen[id(value)] = value
    for child in node.children:
        if isinstance(child, Tensor):
            yield child
        else:
            yield from _tensors(child, seen, node.below)


# -- reaching one part ----------------------------------------------------------------------------------


def get(value: Any, address: str) -> Any:
    """The part of ``value`` at ``address``; a ``KeyError`` lists what is there when it is not."""
    return _walk(value, address, None, OUTSIDE)


def put(value: Any, address: str, change: Callable[[Any], Any]) -> Any:
    """Rebuild ``value`` with the part at ``address`` replaced by ``change(part)``."""
    return _walk(value, address, change, OUTSIDE)


def _walk(value: Any, address: str, change: Callable[[Any], Any] | None, walker: Walker) -> Any:
    if not address:
        return value if change is None else change(value)
    node = walker.open(value)
    keys = [] if node is None else node.keys
    # A dict key may itself hold dots: take the longest key that the address starts with.
    for key in sorted(keys, key=len, reverse=True):
        if address == key or address.startswith(key + "."):
            assert node is not None
            index, rest = keys.index(key), address[len(key) + 1 :]
            found = _walk(node.children[index], rest, change, node.below)
            if change is None:
                return found
            children = list(node.children)
            children[index] = found
            return node.rebuild(children)
    there = ", ".join(repr(a) for a, _ in _leaves(value, "", walker) if a) or f"a bare {type(value).__name__}"
    raise KeyError(f"no leaf {address!r} here; there are: {there}")


# -- comparing and showing --------------------------------------------------------------------------------


def same_structure(one: Any, other: Any) -> bool:
    """Whether two values are nested in the same way: the same kinds of nodes, the same keys."""
    return _same(one, OUTSIDE, other, OUTSIDE)


def _same(one: Any, walker: Walker, other: Any, beside: Walker) -> bool:
    first, second = walker.open(one), beside.open(other)
    if first is None or second is None:
        return first is second
    return (
        type(one) is type(other)
        and first.keys == second.keys
        and all(_same(a, first.below, b, second.below) for a, b in zip(first.children, second.children, strict=True))
    )


_WIDE = 72  # of a line of a table, with the name of a layer before it and numbers behind


def describe(value: Any) -> str:
    """The shape of a value in a few characters; of one with many parts, a summary that still fits a line.

    >>> import torch
    >>> describe((torch.zeros(2, 3), None))
    '((2, 3), None)'
    >>> describe({"logits": torch.zeros(2, 3), "hidden_states": (torch.zeros(2, 9, 8),) * 13, "loss": torch.zeros(())})
    'logits (2, 3) + hidden_states 13 × (2, 9, 8) + loss ()'
    """
    text = _described(value, OUTSIDE)
    return text if len(text) <= _WIDE else _fitting(value)


def _described(value: Any, walker: Walker) -> str:
    if isinstance(value, Tensor):
        return _shape(value)
    node = walker.open(value)
    if node is None:
        return _described_leaf(value)
    kind, below = type(value), node.below
    if kind in (tuple, list):
        inner = ", ".join(_described(child, below) for child in node.children[:4])
        more = f", … {len(node.children)} in all" if len(node.children) > 4 else ""
        # As Python writes it: without the comma, a tuple of one would read as its part.
        alone = "," if kind is tuple and len(node.children) == 1 else ""
        return f"({inner}{more}{alone})" if kind is tuple else f"[{inner}{more}]"
    shown = [(key, child) for key, child in zip(node.keys, node.children, strict=True) if child is not None]
    parts = [f"{key}={_described(child, below)}" for key, child in shown[:4]]
    more = ", …" if len(shown) > 4 else ""
    return f"{'' if kind is dict else kind.__name__}{{{', '.join(parts)}{more}}}"


def _fitting(value: Any) -> str:
    """One part after the other, each in a few words, for as long as there is room."""
    node = OUTSIDE.open(value)
    assert node is not None  # a leaf is short
    several = _several(value, node)
    if several:
        return several
    plain = type(value) in (tuple, list)
    named = [(key, child) for key, child in zip(node.keys, node.children, strict=True) if child is not None or plain]
    # What holds a tensor comes before flags and settings, which nobody asks the shape of.
    if not plain:
        named.sort(key=lambda part: next(_tensors((part[1],), {}, node.below), None) is None)
    parts = [_part("" if plain else key, child, node.below) for key, child in named]
    gap = ", " if plain else " + "
    for shown in range(len(parts), 0, -1):
        more = [] if shown == len(parts) else [f"{len(parts) - shown} more"]
        text = gap.join([*parts[:shown], *more])
        if len(text) <= _WIDE - 2 * plain:
            break
    text = text if len(text) <= _WIDE - 2 * plain else f"{text[: _WIDE - 3]}…"
    return text if not plain else f"({text})" if type(value) is tuple else f"[{text}]"


def _part(key: str, value: Any, walker: Walker) -> str:
    node = None if isinstance(value, Tensor) else walker.open(value)
    if node is None:
        text = _described(value, walker)
        return f"{key} {text}" if key and isinstance(value, Tensor) else f"{key}={text}" if key else text
    if several := _several(value, node):
        return f"{key} {several}" if key else several
    known, tensors_in = type(value).__name__, sum(1 for _ in _tensors(value, {}, walker))
    held = f"{tensors_in} {plural(tensors_in, 'tensor')}"
    lists = [(k, c) for k, c in zip(node.keys, node.children, strict=True) if type(c) in (tuple, list) and c]
    if type(value) in (dict, tuple, list):
        text = f"{known} of {held}" if tensors_in else f"{known} of {len(node.children)}"
        return f"{key}: {text}" if key else text
    # A cache keeps its tensors in one list, and counts by that: DynamicCache{layers=[…]} is a cache of 12 layers.
    noun = re.findall("[A-Z]+[a-z0-9]*|[a-z0-9]+", known)[-1].lower() if known.isascii() and known.isalnum() else known
    if len(lists) == 1 and not lists[0][0].isdigit():
        word, count = lists[0][0], len(lists[0][1])
        return f"{noun} of {count} {word}" if count != 1 else f"{noun} of 1 {word.removesuffix('s')}"
    return f"{noun} of {held}"


def _several(value: Any, node: Node) -> str:
    """``13 × (1, 10, 64)`` for a tuple or list of equals; nothing for others."""
    if type(value) not in (tuple, list) or len(node.children) < 2:
        return ""
    texts = {_described(child, node.below) for child in node.children}
    text = texts.pop()
    return "" if texts or len(text) > _WIDE // 2 else f"{len(node.children)} × {text}"


def _described_leaf(value: Any) -> str:
    if isinstance(value, Opaque):
        return f"{value.kind} (not saved)"
    if value is None or isinstance(value, (bool, int, float, str)):
        text = repr(value)
        return text if len(text) <= 24 else text[:21] + "..."
    return type(value).__name__


def _shape(tensor: Tensor) -> str:
    if tensor.is_nested:  # a jagged size is symbolic, and a strided one has no shape at all
        return f"({tensor.size(0)}, ragged)"
    return "(" + ", ".join(str(s) for s in tensor.shape) + ("," if tensor.dim() == 1 else "") + ")"

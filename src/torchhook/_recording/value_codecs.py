"""Codecs of everything around the tensors: plain leaves, arrays, containers, objects.

Only types of Python, numpy and torch come back as what they were: no class of the user's is looked for in a file.
"""

from __future__ import annotations

import base64
import json
import keyword
import math
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from torchhook._recording.codecs import OPAQUE, Codec, Reader, Writer
from torchhook._recording.tensor_codecs import name
from torchhook._values.loaded import loaded, named, named_tuple
from torchhook._values.nodes import Node
from torchhook._values.tree import Inputs

Takes = Callable[[Any, Node | None], bool]


def _of(*kinds: type) -> Takes:
    """Takes values of these very types: what a subclass adds would be lost."""
    return lambda value, node: type(value) in kinds


def _where(test: Callable[[Any], bool]) -> Takes:
    return lambda value, node: test(value)


# -- leaves -------------------------------------------------------------------------------------------


def _is_json(value: Any) -> bool:
    kind = type(value)
    return kind is str or kind is int or kind is bool or value is None or (kind is float and math.isfinite(value))


def _as_is(value: Any, _: Any) -> Any:
    return value


def _write_bytes(value: Any, _: Any) -> str:
    return base64.b64encode(value).decode()


def _constant(tag: str, kind: type, since: int) -> Codec:
    """Something that torch has a name for: a dtype, a layout."""
    return Codec(tag, _of(kind), lambda value, _: name(value), lambda body, _: getattr(torch, body), since)


def _is_number(value: Any) -> bool:
    return isinstance(value, np.generic) and value.dtype.char in _NUMERIC


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.char in _NUMERIC and not isinstance(value, np.ma.MaskedArray)


_NUMERIC = "?bBhHiIlLqQefdFD"


def _write_array(value: Any, writer: Writer) -> Any:
    native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")  # fresh: writable, of positive strides
    return writer.one(torch.from_numpy(native))


def _is_text(value: Any) -> bool:
    """Whether it is an array of strings, bytes or times, or one time."""
    return isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "USMm"


def _write_text(value: Any, writer: Writer) -> Any:
    shape = list(value.shape) if isinstance(value, np.ndarray) else None
    return [value.dtype.str, shape, _write_bytes(value.tobytes(), writer)]


def _read_text(body: Any, reader: Reader) -> Any:
    dtype, shape, data = np.dtype(body[0]), body[1] or [], base64.b64decode(body[2])
    array = np.frombuffer(data, dtype).reshape(shape).copy() if data else np.empty(shape, dtype)
    return array[()] if body[1] is None else array


LEAVES: tuple[Codec, ...] = (
    Codec("leaf", _where(_is_json), _as_is, _as_is),
    Codec("float", _of(float), lambda value, _: repr(value), lambda body, _: float(body)),
    Codec(
        "complex",
        _of(complex),
        lambda value, _: [repr(value.real), repr(value.imag)],
        lambda body, _: complex(float(body[0]), float(body[1])),
    ),
    Codec("bytes", _of(bytes), _write_bytes, lambda body, _: base64.b64decode(body)),
    Codec("bytearray", _of(bytearray), _write_bytes, lambda body, _: bytearray(base64.b64decode(body)), since=2),
    Codec("ellipsis", _of(types.EllipsisType), lambda *_: None, lambda *_: ..., since=2),
    Codec("size", _of(torch.Size), lambda value, _: list(value), lambda body, _: torch.Size(body)),
    _constant("dtype", torch.dtype, since=1),
    _constant("layout", torch.layout, since=2),
    _constant("memory_format", torch.memory_format, since=2),
    _constant("qscheme", torch.qscheme, since=2),
    Codec("device", _of(torch.device), lambda value, _: str(value), lambda body, _: torch.device(body)),
    Codec("array", _where(_is_array), _write_array, lambda body, reader: reader.one(body).numpy()),
    Codec("number", _where(_is_number), _write_array, lambda body, reader: reader.one(body).numpy()[()]),
    Codec("numpy_str", _of(np.str_), lambda value, _: str(value), lambda body, _: np.str_(body), since=2),
    Codec("numpy_bytes", _of(np.bytes_), _write_bytes, lambda body, _: np.bytes_(base64.b64decode(body)), since=2),
    Codec("text", _where(_is_text), _write_text, _read_text, since=2),
)


# -- what has parts and is not opened -------------------------------------------------------------------


def _write_range(value: Any, _: Any) -> Any:
    return [value.start, value.stop, value.step]


def _write_slice(value: Any, writer: Writer) -> Any:
    return writer.several([value.start, value.stop, value.step])


def _write_set(value: Any, writer: Writer) -> Any:
    return sorted(writer.several(value), key=json.dumps)  # its own order changes from run to run


UNOPENED: tuple[Codec, ...] = (
    Codec("range", _of(range), _write_range, lambda body, _: range(*body), since=2),
    Codec("slice", _of(slice), _write_slice, lambda body, reader: slice(*reader.several(body)), since=2),
    Codec("set", _of(set), _write_set, lambda body, reader: set(reader.distinct(body)), since=2),
    Codec("frozenset", _of(frozenset), _write_set, lambda body, reader: frozenset(reader.distinct(body)), since=2),
    OPAQUE,
)
"""After these there is nothing left but nodes."""


# -- tuples and lists -----------------------------------------------------------------------------------


def _write_items(value: Any, writer: Writer) -> Any:
    return writer.several(value)


def _is_return_type(value: Any) -> bool:
    return type(value) is getattr(torch.return_types, type(value).__name__, None)


def _is_named_tuple(value: Any) -> bool:
    fields = getattr(value, "_fields", ()) if isinstance(value, tuple) else ()
    fit = (str.isidentifier(f) and not keyword.iskeyword(f) and not f.startswith("_") for f in fields)
    return len(fields) == len(set(fields)) > 0 and all(fit)


def _write_named(value: Any, writer: Writer) -> Any:
    return [type(value).__name__, writer.opened.keys, writer.several(value)]


def _read_return_type(body: Any, reader: Reader) -> Any:
    kind = getattr(torch.return_types, body[0], None)  # another torch may not have it
    return _read_named(body, reader) if kind is None else kind(reader.several(body[2]))


def _read_named(body: Any, reader: Reader) -> Any:
    return named_tuple(body[0], body[1])._make(reader.several(body[2]))


_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, deque, set, frozenset)}


def _write_sequence(value: Any, writer: Writer) -> Any:
    """A subclass: which of Python's own it extends, and the attributes that hold tensors."""
    base = next(name for name, kind in _SEQUENCES.items() if isinstance(value, kind))
    items = writer.several(value)
    keys, children = writer.opened.keys[len(items) :], writer.opened.children[len(items) :]
    return [base, type(value).__name__, items, getattr(value, "maxlen", None), keys, writer.several(children)]


def _read_sequence(body: Any, reader: Reader) -> Any:
    base, name, items, maxlen, keys, children = body
    more = () if maxlen is None else (maxlen,)
    made = named(name, _SEQUENCES[base])(reader.several(items), *more)
    vars(made).update(zip(keys, reader.several(children), strict=True))
    return made


SEQUENCES: tuple[Codec, ...] = (
    Codec("inputs", _of(Inputs), _write_items, lambda body, reader: Inputs(*reader.several(body))),
    Codec("tuple", _of(tuple), _write_items, lambda body, reader: tuple(reader.several(body))),
    Codec("list", _of(list), _write_items, lambda body, reader: reader.several(body)),
    Codec(
        "deque",
        _of(deque),
        lambda value, writer: [value.maxlen, writer.several(value)],
        lambda body, reader: deque(reader.several(body[1]), body[0]),
        since=2,
    ),
    Codec(
        "packed_sequence",
        _of(PackedSequence),
        _write_items,
        lambda body, reader: PackedSequence._make(reader.several(body)),
        since=2,
    ),
    Codec("return_type", _where(_is_return_type), _write_named, _read_return_type, since=2),
    Codec("named_tuple", _where(_is_named_tuple), _write_named, _read_named, since=2),
    Codec(
        "sequence",
        _where(lambda value: isinstance(value, tuple(_SEQUENCES.values())) and not hasattr(value, "_fields")),
        _write_sequence,
        _read_sequence,
        since=2,
    ),
)


# -- dicts and objects ------------------------------------------------------------------------------------


def _only_items(*kinds: type) -> Takes:
    """Takes mappings of these very types that have no attributes with tensors beside their items."""
    return lambda value, node: type(value) in kinds and node is not None and len(node.keys) == len(value)


def _write_pairs(value: Any, writer: Writer) -> Any:
    return writer.pairs(value)


_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}


def _write_defaultdict(value: Any, writer: Writer) -> Any:
    known = [name for name, kind in _FACTORIES.items() if kind is value.default_factory]
    return [known[0] if known else None, writer.pairs(value)]


def _read_defaultdict(body: Any, reader: Reader) -> Any:
    return defaultdict(_FACTORIES[body[0]] if body[0] else None, reader.pairs(body[1]))


def _write_mapping(value: Any, writer: Writer) -> Any:
    pairs = writer.pairs(value)
    keys, children = writer.opened.keys[len(pairs) :], writer.opened.children[len(pairs) :]
    return [type(value).__name__, pairs, keys, writer.several(children)]


def _read_mapping(body: Any, reader: Reader) -> Any:
    made = named(body[0], dict)(reader.pairs(body[1]))
    vars(made).update(zip(body[2], reader.several(body[3]), strict=True))
    return made


def _write_fields(value: Any, writer: Writer) -> Any:
    return [type(value).__name__, writer.opened.keys, writer.several(writer.opened.children)]


def _read_fields(body: Any, reader: Reader) -> Any:
    return loaded(body[0], dict(zip(body[1], reader.several(body[2]), strict=True)))


MAPPINGS: tuple[Codec, ...] = (
    Codec("dict", _of(dict), _write_pairs, lambda body, reader: reader.pairs(body)),
    Codec(
        "ordered_dict", _only_items(OrderedDict), _write_pairs, lambda body, reader: OrderedDict(reader.pairs(body)), 2
    ),
    Codec("counter", _only_items(Counter), _write_pairs, lambda body, reader: Counter(reader.pairs(body)), since=2),
    Codec("defaultdict", _of(defaultdict), _write_defaultdict, _read_defaultdict, since=2),
    Codec(
        "proxy", _of(MappingProxyType), _write_pairs, lambda body, reader: MappingProxyType(reader.pairs(body)), since=2
    ),
    Codec(
        "mapping",
        _where(lambda value: isinstance(value, dict) and any(type(key) is not str for key in value)),
        _write_mapping,
        _read_mapping,
    ),
    Codec("fields", _where(lambda value: True), _write_fields, _read_fields),
)

VALUES: tuple[Codec, ...] = (*LEAVES, *UNOPENED, *SEQUENCES, *MAPPINGS)

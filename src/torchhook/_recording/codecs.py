"""How values become JSON: a codec for each kind, and the writer and reader that go through a value with them.

A code is a JSON object with one tag and its body: ``{"complex": ["1.0", "-2.0"]}``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

from torch import Tensor

from torchhook._values.loaded import Opaque
from torchhook._values.nodes import OUTSIDE, Node
from torchhook._values.subclasses import is_distributed, is_partial, local
from torchhook._values.wrappers import is_wrapper
from torchhook.errors import warn

Code = dict[str, Any]

_DEEPEST = 64
"""Levels of a value that are written. Python and other readers of JSON stop at some depth; no output gets near it."""


class Codec(NamedTuple):
    """How one kind of value is written under a tag, and read again."""

    tag: str
    takes: Callable[[Any, Node | None], bool]
    """Whether it writes a value, seen with its node; ``None`` for a leaf."""
    write: Callable[[Any, Writer], Any]
    read: Callable[[Any, Reader], Any]
    since: int = 1
    """The version of the format that brought the tag."""


class Writer:
    """Writes values as codes, each with the first codec that takes it, and puts their tensors aside."""

    def __init__(self, of_tensors: Sequence[Codec], of_values: Sequence[Codec]) -> None:
        self._of_tensors, self._of_values = of_tensors, of_values
        self.tensors: dict[str, Tensor] = {}
        """By names that other readers of safetensors show: ``layer4``, ``relu#1``, ``encoder[last_hidden_state]``."""
        self._name, self._address = "value", ""
        self._keys: dict[int, str] = {}
        self._node: Node | None = None
        # A set and not a number, so that the writers below, which are copies, add to the same one.
        self._versions = {1}
        # Only what a value is inside of: that it is held twice, side by side, is no loop.
        self._above: set[int] = set()
        self._tensor_codes: dict[int, tuple[Tensor, Code]] = {}

    @property
    def version(self) -> int:
        """The lowest version of the format that has every tag written so far."""
        return max(self._versions)

    @property
    def opened(self) -> Node:
        """The node whose parts are written."""
        assert self._node is not None
        return self._node

    def named(self, name: str, value: Any) -> Code:
        """The code of a value whose tensors are to be found under ``name``."""
        writer = copy.copy(self)
        writer._name = name
        return writer.one(value)

    def one(self, value: Any) -> Code:
        """The code of a value. A tensor that is held several times is written once."""
        address = ".".join(filter(None, (self._address, self._keys.get(id(value)))))
        if isinstance(value, Tensor):
            if id(value) not in self._tensor_codes:
                # The tensor is held: the id of one that was made on the way would be used again.
                self._tensor_codes[id(value)] = value, self._code(_part(value), None, address)
            return self._tensor_codes[id(value)][1]
        if id(value) in self._above or len(self._above) > _DEEPEST:
            return {OPAQUE.tag: list(opaque(value))}
        self._above.add(id(value))
        node = (OUTSIDE if self._node is None else self._node.below).open(value)
        code = self._code(value, node, address)
        self._above.discard(id(value))
        return code

    def several(self, values: Iterable[Any]) -> list[Code]:
        """The codes of several values."""
        return [self.one(value) for value in values]

    def pairs(self, mapping: Mapping[Any, Any]) -> list[list[Code]]:
        """The codes of the keys and values of a mapping."""
        return [[self._key(key), self.one(value)] for key, value in mapping.items()]

    def keep(self, tensor: Tensor) -> str:
        """Put a tensor aside, and return its name."""
        own = f"{self._name}[{self._address}]" if self._address else self._name
        # A sparse tensor is made of several, and names of modules may be anything: the format's own one, too.
        others = (f"{own} ({number})" for number in count(2))
        name = next(name for name in chain((own,), others) if name not in self.tensors and name != "__metadata__")
        self.tensors[name] = tensor
        return name

    def _key(self, key: Any) -> Code:
        """A key that cannot be written keeps its address in the value: that is its ``str``."""
        code = self.one(key)
        return {OPAQUE.tag: list(opaque(key, str))} if OPAQUE.tag in code else code

    def _code(self, value: Any, node: Node | None, address: str) -> Code:
        codecs = self._of_tensors if isinstance(value, Tensor) else self._of_values
        codec = next(codec for codec in codecs if codec.takes(value, node))
        self._versions.add(codec.since)
        return {codec.tag: codec.write(value, self._below(node, address))}

    def _below(self, node: Node | None, address: str) -> Writer:
        writer = copy.copy(self)  # which puts everything into the same places
        writer._address, writer._keys = address, {}
        if node is not None:
            writer._node = node
            writer._keys = {id(child): key for key, child in zip(node.keys, node.children, strict=True)}
        return writer


def _part(tensor: Tensor) -> Tensor:
    """What is written of a tensor: the numbers that a wrapper stands for, and of a DTensor those on this rank.

    Asking the other ranks for theirs would wait for those that do not save.
    """
    if not is_distributed(tensor):
        return local(tensor.detach()) if is_wrapper(tensor) else tensor
    part = local(tensor.detach())
    if is_partial(tensor) or part.shape != tensor.shape:
        warn(
            f"a DTensor of shape {tuple(tensor.shape)} is saved as this rank's part of it, {tuple(part.shape)}. To "
            "save the whole, capture it with gather='full' on every rank.",
            UserWarning,
        )
    return part


class Reader:
    """Makes values of codes again."""

    def __init__(self, codecs: Sequence[Codec], tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self._codecs = {codec.tag: codec for codec in codecs}

    def one(self, code: Code) -> Any:
        """The value of a code."""
        # More tags or none are a broken file, and raise a ValueError as an unknown one does.
        ((tag, body),) = code.items()
        if tag not in self._codecs:
            raise ValueError(f"unknown tag {tag!r}")
        return self._codecs[tag].read(body, self)

    def several(self, codes: Iterable[Code]) -> list[Any]:
        """The values of several codes."""
        return [self.one(code) for code in codes]

    def distinct(self, codes: Iterable[Code]) -> list[Any]:
        """The values of several codes, as members of a set or keys of a dict."""
        found: dict[Any, None] = {}
        for value in self.several(codes):
            found[_distinct(value, found)] = None
        return list(found)

    def pairs(self, codes: Sequence[Sequence[Code]]) -> dict[Any, Any]:
        """A dict of the codes of its keys and values."""
        keys = self.distinct(key for key, _ in codes)
        return dict(zip(keys, self.several(value for _, value in codes), strict=True))


def opaque(value: Any, show: Callable[[Any], str] = repr) -> Opaque:
    """What is left of a value that cannot be written: itself, if that is all that was left of another."""
    if isinstance(value, Opaque):
        return value
    kind = type(value)
    try:
        text = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else show(value)[:200]
    except Exception as error:  # a user's class may do anything
        text = f"its {show.__name__} raised {type(error).__name__}"
    return Opaque(f"{kind.__module__}.{kind.__qualname__}", text)


OPAQUE = Codec(
    "opaque", lambda value, node: node is None, lambda value, _: list(opaque(value)), lambda body, _: Opaque(*body)
)
"""Takes whatever no codec before it took, unless it is a node."""


def _distinct(value: Any, taken: Mapping[Any, Any]) -> Any:
    """The value itself; its text with a number, if it reads like another.

    Objects may have been told apart by identity alone, and what is left of a class may have no hash, or hold tensors
    that cannot be compared.
    """
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if value not in taken:
            return value
    kind, text = opaque(value)
    names = (Opaque(kind, f"{text} ({number})") for number in count(2))
    return next(name for name in names if name not in taken)

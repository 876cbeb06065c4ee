"""What a function is made of: its bytecode, that of the functions which it calls, and the values that they use.

Bytecode, not source: it is what runs, it is there for lambdas and notebooks, and comments do not change it. It is
another one in another version of Python; a store knows which one wrote it, and does not compare code then.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchhook._extract import fingerprint
from torchhook._extract.code_objects import (
    doc_of,
    functions_of,
    is_library,
    is_written,
    names_in,
    of_library,
    reads,
    uncached,
)
from torchhook._features.api import OBJECT

_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|meta)(:\d+)?")
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.Size)
# Of configurations of transformers: what they have since they were saved or loaded, and what the weights tell.
_NO_SETTINGS = frozenset({"transformers_version", "model_type", "architectures", "dtype", "torch_dtype"})
_SHOWN = 80  # longer lists of values are shown by their digest


def of_function(value: Any, values: bool = True) -> str:
    """How a transform or any other function is told from another one; without the ``values`` that it uses, by its code.

    >>> from torchhook import transforms
    >>> of_function(transforms.pool("mean"))
    "pool('mean')"
    """
    return Texts(values=values).of(value)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# -- values ---------------------------------------------------------------------------------------------


class Texts:
    """Values as texts that are the same in every process.

    ``known`` are the ids of modules that are looked at elsewhere; ``deep`` is for objects of any class, else only plain
    values and settings are opened: what else a model holds on to is no part of what it computes.
    """

    def __init__(self, *, values: bool = True, deep: bool = True, known: Collection[int] = ()) -> None:
        self.values, self.deep, self.known = values, deep, known

    def of(self, value: Any, around: tuple[int, ...] = ()) -> str:
        """``around`` are the ids of the values that this one is a part of: objects may hold themselves."""
        if id(value) in around:
            return "…"
        plain = self._plain(value)
        if plain is not None:
            return plain
        around = (*around, id(value))
        if isinstance(value, nn.Module):
            return type(value).__name__ if id(value) in self.known else fingerprint.of_model(value)
        if isinstance(value, (Mapping, list, tuple, set, frozenset)):
            return self._container(value, around)
        if callable(value):
            called = self._callable(value, around)
            if called is not None:
                return called
        return self._object(value, around)

    def _plain(self, value: Any) -> str | None:
        # The same model on another device is the same: ranks differ in nothing else.
        if isinstance(value, torch.device) or (isinstance(value, str) and _DEVICE.fullmatch(value)):
            return "device"
        if value is os.environ:  # of this process
            return "environment"
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if value is None or isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, np.generic):
            return repr(value.item())
        if isinstance(value, (Tensor, np.ndarray)):
            return _array(value)
        return None

    def _container(self, value: Any, around: tuple[int, ...]) -> str:
        if isinstance(value, Mapping):
            # Sorted: those made of a set have another order in each process.
            return "{" + ", ".join(sorted(f"{key}: {self.of(item, around)}" for key, item in value.items())) + "}"
        texts = [self.of(item, around) for item in value]
        if isinstance(value, (set, frozenset)):  # their order is another one in each process
            return "{" + ", ".join(sorted(texts)) + "}"
        return "[" + ", ".join(texts) + "]"

    def _callable(self, value: Any, around: tuple[int, ...]) -> str | None:
        if isinstance(value, functools.partial):
            return f"partial({self.of([value.func, value.args, value.keywords], around)})"
        if isinstance(value, types.MethodType):
            return f"{self.of(value.__self__, around)}.{self.of(value.__func__, around)}"
        value = uncached(value)
        if isinstance(value, types.FunctionType):
            return self._function(value, around)
        if isinstance(value, type):
            return _name(value)
        if isinstance(value, types.BuiltinFunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        return None

    def _function(self, function: types.FunctionType, around: tuple[int, ...]) -> str:
        name = function.__qualname__.rpartition("<locals>.")[2]
        code = Code()
        code.add(function)
        text = f"{name} {code.digest()}"
        used = ", ".join(f"{n}={self.of(v, around)}" for n, v in code.values.items()) if self.values else ""
        return f"{text} [{used if len(used) <= _SHOWN else digest(used)}]" if used else text

    def _object(self, value: Any, around: tuple[int, ...]) -> str:
        name = _name(type(value))
        held = _settings(value)
        if held is not None:
            return f"{name}({self.of(held, around)})"
        if not self.deep:
            return name if callable(value) else f"{OBJECT}{name}"
        code = self._call(value)
        # One of its own: the repr of object shows where it lies, and that is new in each process.
        own = "__repr__" in {n for c in type(value).__mro__[:-1] for n in vars(c)}
        if own and not fingerprint.ADDRESS.search(repr(value)):
            told = _untold(value)
            return f"{value!r}{self.of(told, around) if told else ''}{code}"
        return f"{name}({self.of(getattr(value, '__dict__', {}), around)}){code}"

    def _call(self, value: Any) -> str:
        """The code of an object that is called like a function, of a class that is the user's."""
        call = next((vars(base)["__call__"] for base in type(value).__mro__ if "__call__" in vars(base)), None)
        if not isinstance(call, types.FunctionType) or is_library(call.__code__):
            return ""
        return f" {self._function(call, (id(value),))}"


def _untold(value: Any) -> dict[str, Any]:
    """What the repr of an object may keep to itself: everything of a user's, and the functions in a library's."""
    held = getattr(value, "__dict__", {})
    if type(value).__module__.partition(".")[0] == "torchhook":
        return {}
    return {name: one for name, one in held.items() if not of_library(type(value)) or _runs(one)}


def _runs(value: Any) -> bool:
    return any(map(_runs, value)) if isinstance(value, (list, tuple)) else callable(value)


def _name(cls: type) -> str:
    # A user's module has one name when it is imported, and another when it is run.
    return f"{cls.__module__}.{cls.__qualname__}" if of_library(cls) else cls.__qualname__


def _array(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return f"array({value.shape}, {fingerprint.of_batch(value)})"
    try:
        tensor = torch.as_tensor(value)
    except TypeError:  # texts, dates: numpy's own
        return f"array({value.shape}, {digest(repr(value.tolist()))})"
    return f"tensor({tuple(tensor.shape)}, {fingerprint.contents(tensor)})"


def _settings(value: Any) -> Any:
    """The fields of an object that holds settings, or ``None`` if it is not known to be one."""
    # One that writes its own repr says there what it is.
    if dataclasses.is_dataclass(value) and value.__dataclass_params__.repr:  # type: ignore[union-attr]
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.repr}
    if isinstance(value, types.SimpleNamespace) or type(value).__name__ == "Namespace":
        return vars(value)
    if type(value).__name__.endswith("Config") and hasattr(value, "__dict__"):
        # Private ones say where a configuration came from.
        return {key: held for key, held in vars(value).items() if key[0] != "_" and key not in _NO_SETTINGS}
    return None


# -- code -----------------------------------------------------------------------------------------------


class Code:
    """The code that a function reaches: its own, and that of the user's functions which it names."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        """What the functions use that is no code, by its name there."""
        self._parts: list[str] = []
        self._seen: dict[int, Any] = {}  # by id, and alive: the same code may use other values

    def digest(self) -> str:
        return digest("\n".join(self._parts))

    def add(self, function: types.FunctionType) -> None:
        code = function.__code__
        if id(function) in self._seen:
            return
        self._seen[id(function)] = function
        self._parts.append(bytecode(code, function.__doc__))
        for name, value in _held(function):
            self._use(name, value, code)
        # What a library reads of itself is its own affair: registries, loggers, caches.
        if not is_library(code):
            for path in reads(code):
                found = _reached(function.__globals__, path)
                if found is not None:
                    self._use(*found, code)

    def methods(self, cls: type, names: Iterable[str]) -> bool:
        """Add what methods of these names run of a class, and every method whose name that reaches."""
        bases = [base for base in cls.__mro__ if base.__module__.split(".")[0] not in ("torch", "builtins")]
        pending, done = [*names], set()
        while pending:
            name = pending.pop()
            if name in done:
                continue
            done.add(name)
            for base in bases:  # not only the first: super() reaches the others
                held = vars(base).get(name)
                for function in functions_of(held):
                    self.add(function)
                    pending += sorted(names_in(function.__code__))
                if isinstance(held, _OF_CLASS):
                    self.values[name] = held
        return bool(bases)

    def _class(self, cls: type, caller: types.CodeType) -> None:
        """A class of the user's that a function names: of its methods, what the function may run."""
        self._parts.append(cls.__qualname__)
        if id(cls) in self._seen or of_library(cls) or issubclass(cls, nn.Module):
            return
        self._seen[id(cls)] = cls
        written = [name for name, held in vars(cls).items() if any(map(is_written, functions_of(held)))]
        begun = {*_BEGUN, *names_in(caller)}
        self.methods(cls, [name for name in written if name in begun])

    def _use(self, name: str, value: Any, caller: types.CodeType) -> None:
        value = uncached(value)
        if isinstance(value, (types.MethodType, types.BuiltinMethodType)) and isinstance(value.__self__, type):
            # apply of a class of autograd, say, which newer versions of torch have built in.
            self._class(value.__self__, caller)
            value = getattr(value, "__func__", value)
        if isinstance(value, types.FunctionType):
            if is_library(value.__code__):
                self._parts.append(f"{value.__module__}.{value.__qualname__}")
            else:
                self.add(value)
        elif isinstance(value, type):
            self._class(value, caller)
        elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType)):
            self._parts.append(getattr(value, "__qualname__", value.__name__))
        else:
            while name in self.values and self.values[name] is not value:
                name += "'"  # two functions may have variables of one name
            self.values[name] = value


_BEGUN = frozenset({"__init__", "__new__", "__call__", "forward"})
"""What runs of a class without being named: ``forward`` of those of autograd."""
_OF_CLASS = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset, Tensor, np.ndarray)
"""Attributes of a class that are values."""


def _held(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables around a function, and its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if name != "__class__":  # what super() needs
            yield name, value
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _reached(names: Mapping[str, Any], path: tuple[str, ...]) -> tuple[str, Any] | None:
    """The value of a global, or of an attribute of the user's own module or class; as far as code names it."""
    if path[0] not in names:
        return None
    value, at = names[path[0]], 1
    while at < len(path) and isinstance(value, (types.ModuleType, type)):
        if of_library(value) or not hasattr(value, path[at]):
            break
        value, at = getattr(value, path[at]), at + 1
    return ".".join(path[:at]), value


def bytecode(code: types.CodeType, doc: str | None = None) -> str:
    """What code does, without where it stands and what it says about itself."""
    first = code.co_consts[:1] if doc is None or code.co_consts[:1] != (doc,) else (None,)
    constants = (*first, *code.co_consts[1:])
    held = [bytecode(c, doc_of(c)) if isinstance(c, types.CodeType) else Texts().of(c) for c in constants]
    return f"{code.co_code.hex()} {held} {code.co_names}"

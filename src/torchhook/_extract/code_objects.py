"""What code objects, functions and classes say of themselves: what they read, whose they are, what they stand for."""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

_CACHED: Any = type(functools.cache(len))


def uncached(value: Any) -> Any:
    """The function that ``functools.lru_cache`` remembers the values of; anything else itself."""
    while isinstance(value, _CACHED):
        value = value.__wrapped__
    return value


def functions_of(value: Any) -> Iterator[types.FunctionType]:
    """The functions that stand behind an attribute of a class."""
    value = uncached(value)
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield from functions_of(value.__func__)
    elif isinstance(value, property):
        yield from functions_of(value.fget)
    elif isinstance(value, functools.cached_property):
        yield from functions_of(value.func)


def is_written(function: types.FunctionType) -> bool:
    """Whether somebody wrote it: data classes make some of their methods themselves."""
    return function.__code__.co_filename != "<string>"


@functools.lru_cache(4096)
def reads(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """The globals that code reads, each with the attributes that it takes of it at once.

    >>> reads((lambda: torch.nn.functional).__code__)
    (('torch', 'nn', 'functional'),)
    """
    found: dict[tuple[str, ...], None] = {}
    path: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            path = (step.argval,)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and path:
            found.pop(path, None)
            path = (*path, step.argval)
        else:
            path = ()
        if path:
            found[path] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= dict.fromkeys(reads(inner))
    return tuple(found)


def names_in(code: types.CodeType) -> set[str]:
    """Every name that code takes of something, methods of its own among them."""
    inner = [names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return {*code.co_names}.union(*inner)


def doc_of(code: types.CodeType) -> str | None:
    first = code.co_consts[0] if code.co_consts else None
    # Later versions of Python say whether there is one; before, only comprehensions and their like begin with others.
    marked = dis.COMPILER_FLAG_NAMES.get(_HAS_DOC) == "HAS_DOCSTRING"
    has = bool(code.co_flags & _HAS_DOC) if marked else not code.co_name.startswith("<")
    return first if has and isinstance(first, str) else None


_HAS_DOC = 0x4000000


# -- whose code -----------------------------------------------------------------------------------------


def is_library(code: types.CodeType) -> bool:
    """Whether code was installed, rather than written by the user."""
    return is_library_file(code.co_filename)


@functools.lru_cache(4096)
def is_library_file(path: str) -> bool:
    text = path.replace("\\", "/")
    if "/site-packages/" in text or "/dist-packages/" in text or "/torchhook/_" in text or text.startswith("<frozen"):
        return True
    return not text or any(text.startswith(folder) for folder in _STANDARD)


_STANDARD = tuple(
    {sysconfig.get_paths()[name].replace("\\", "/") + "/" for name in ("stdlib", "platstdlib")}
    | {__file__.replace("\\", "/").rpartition("/_extract/")[0] + "/"}
)


def of_library(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return is_library_file(getattr(value, "__file__", None) or "")
    # What was run is the user's, though a tool of some library may have run it.
    module = None if value.__module__ == "__main__" else sys.modules.get(value.__module__)
    return module is not None and is_library_file(getattr(module, "__file__", None) or "")

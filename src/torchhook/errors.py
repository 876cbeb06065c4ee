"""Everything TorchHook raises or warns about; each is also the builtin that a caller would catch.

What is raised, and what is warned about:

    TorchHookError
    ├── SelectorError        (ValueError, AttributeError)  a selector chose nothing, or cannot be read
    ├── MissingRecordError   (KeyError)                    the recording has no such site
    │   └── NeverRanError                                  the site was selected and did not run
    ├── AmbiguousCallError   (LookupError, ValueError)     the site ran more than once: say which call
    ├── RecordingFileError   (ValueError)                  a saved file is truncated, altered or not ours
    ├── EditError            (ValueError)                  an edit does not fit the value it meets
    ├── TransformError       (ValueError)                  a transform does not fit the value it meets
    ├── ArgumentError        (TypeError, ValueError, AssertionError)  a classic name was given what it does not take
    ├── SessionError         (RuntimeError)                a session was used in a way it does not allow
    ├── GuardError           (FloatingPointError)          a guarded model made a NaN or Inf
    ├── NoAttentionError     (LookupError)                 the model ran without an attention call that can be seen
    ├── LayoutError          (ValueError)                  an activation cannot be laid out on a grid
    ├── TargetError          (ValueError, IndexError)      the score or class that is meant is not in the output
    ├── ExtractError         (RuntimeError)                the model, the data or the disk does not fit
    │   ├── StoreMismatchError   (ValueError)              the store was made by another run: the differences are named
    │   ├── IncompleteStoreError (LookupError)             shards are missing
    │   └── BrokenShardError     (ValueError)              a shard is truncated, altered or not ours
    ├── TorchVersionError    (RuntimeError)                this torch is too old, or lacks something that is needed here
    └── MissingExtraError    (ImportError)                 an optional package is not installed

    NeverRanWarning          (UserWarning)                 the exit report of a session
    NeverOpenedWarning       (UserWarning)                 a session or tool was dropped without ever being opened
    GuardWarning             (UserWarning)                 a guarded model made a NaN or Inf, and went on
    TrainingWarning          (UserWarning)                 a watched training run looks wrong
    RecomputeWarning         (UserWarning)                 an edit ended before a checkpointed part is computed again
    TorchVersionWarning      (UserWarning)                 this torch is newer than any that TorchHook was tested with
    CompiledWarning          (UserWarning)                 a compiled model runs eagerly inside a session
    PaddingWarning           (UserWarning)                 padding gets into the features that are kept
    DataWarning              (UserWarning)                 the rows that are kept may not be those that one expects
"""

from __future__ import annotations

import difflib
import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from torchhook._words import listed

__all__ = [
    "AmbiguousCallError",
    "ArgumentError",
    "BrokenShardError",
    "CompiledWarning",
    "DataWarning",
    "EditError",
    "ExtractError",
    "GuardError",
    "GuardWarning",
    "IncompleteStoreError",
    "LayoutError",
    "MissingExtraError",
    "MissingRecordError",
    "NeverOpenedWarning",
    "NeverRanError",
    "NeverRanWarning",
    "NoAttentionError",
    "PaddingWarning",
    "RecomputeWarning",
    "RecordingFileError",
    "SelectorError",
    "SessionError",
    "StoreMismatchError",
    "TargetError",
    "TorchHookError",
    "TorchVersionError",
    "TorchVersionWarning",
    "TrainingWarning",
    "TransformError",
]


SITE = ""
"""The address of the documentation site, with a slash at its end; empty where the site has none.

It is also pyproject.toml's ``Documentation`` and mkdocs.yml's ``site_url``.
"""
_HERE = Path(__file__).resolve().parent
# exceptiongroup puts itself in traceback's place on Python 3.10, and many packages import it there (anyio, pytest).
_PRINTERS = frozenset(
    {"traceback", "threading", "exceptiongroup._formatting", "IPython.core.ultratb", "rich.traceback"}
)


def about(kind: type) -> str:
    """A line that leads to the page of an error or warning."""
    return _about(next((base.__name__ for base in kind.__mro__ if base.__name__ in __all__), "index"))


@functools.cache
def _about(name: str) -> str:
    if SITE:
        return f"About {name}: {SITE}errors/{name}.html"
    # In the package that is installed, or beside the sources.
    pages = (_HERE / "_pages" / "errors", _HERE.parent.parent / "docs" / "errors")
    page = next((page for folder in pages if (page := folder / f"{name}.md").is_file()), None)
    return f"About {name}: {page.as_uri() if page else f'docs/errors/{name}.md'}"


# No note: Python 3.10 has none, torch's compiler cannot follow a constructor that adds one, and to pytest notes are a
# part of the message.
def _is_printed() -> bool:
    """Whether the message of an error is asked for by what prints tracebacks."""
    try:
        asks = sys._getframe(2)
    except ValueError:  # nobody in Python: the interpreter, about to end
        return True
    return asks.f_globals.get("__name__") in _PRINTERS


class _Printed:
    """A warning that leads to its page where it is printed: the message alone is ``str`` of it."""

    def __format__(self, spec: str) -> str:
        return f"{format(str(self), spec)}\n{about(type(self))}"


class TorchHookError(Exception):
    """Base of every error that TorchHook raises.

    A traceback ends with the address of its page, which is no part of the message: ``str(error)`` is that alone.
    """

    def __str__(self) -> str:
        text = BaseException.__str__(self)  # not KeyError's own, which shows the message as a repr
        return f"{text}\n{about(type(self))}" if _is_printed() else text


class SelectorError(TorchHookError, ValueError, AttributeError):
    """A selector chose nothing, or cannot be read.

    It is a ``ValueError`` and an ``AttributeError`` because callers of the older hook libraries
    catch one or the other for a wrong layer name.
    """


class MissingRecordError(TorchHookError, KeyError):
    """The recording has no such site."""


class NeverRanError(MissingRecordError):
    """The site was selected, but the model never ran it while the session was open."""


class AmbiguousCallError(TorchHookError, LookupError, ValueError):
    """The site ran more than once, so its address alone does not name one value."""


class RecordingFileError(TorchHookError, ValueError):
    """A saved file is truncated, altered, or was not written by TorchHook."""


class EditError(TorchHookError, ValueError):
    """An edit produced a value that does not fit the place it was made for."""


class TransformError(TorchHookError, ValueError):
    """A transform does not fit the value it meets."""


class ArgumentError(TorchHookError, TypeError, ValueError, AssertionError):
    """A classic name was given what it does not take; an ``AssertionError`` too, as its ancestors raised."""


class SessionError(TorchHookError, RuntimeError):
    """A session was used in a way it does not allow."""


class GuardError(TorchHookError, FloatingPointError):
    """A guarded model made a NaN or Inf; ``finding``, a ``torchhook.types.Finding``, says where and from what."""

    def __init__(self, finding: Any) -> None:  # not its type: errors import nothing of the library
        super().__init__(str(finding))
        self.finding = finding

    def __reduce__(self) -> Any:  # an exception is pickled by its message, which is not what this one is made from
        return GuardError, (self.finding,)


class NoAttentionError(TorchHookError, LookupError):
    """The model ran without an attention call that hooks can see into."""


class LayoutError(TorchHookError, ValueError):
    """An activation cannot be laid out on a grid."""


class TargetError(TorchHookError, ValueError, IndexError):
    """The score or class that is meant is not in the model's output.

    It is a ``ValueError`` and an ``IndexError`` because a class may be of the wrong kind or beyond the last.
    """


class ExtractError(TorchHookError, RuntimeError):
    """The model, the data or the disk does not fit what was asked for."""


class StoreMismatchError(ExtractError, ValueError):
    """The store at this path was made with another model, layer list, transform or row count."""


class IncompleteStoreError(ExtractError, LookupError):
    """Shards of the store are missing."""


class BrokenShardError(ExtractError, ValueError):
    """A shard is truncated, altered, or was not written by TorchHook."""


class TorchVersionError(TorchHookError, RuntimeError):
    """This version of torch is too old, or lacks something that TorchHook cannot do without here."""


class MissingExtraError(TorchHookError, ImportError):
    """An optional package is not installed."""


class NeverRanWarning(_Printed, UserWarning):
    """Sites that were selected and never ran, with the likely cause of each."""


class NeverOpenedWarning(_Printed, UserWarning):
    """A session, guard, watch or clip was made and dropped without ever being opened, so it did nothing."""


class GuardWarning(_Printed, UserWarning):
    """A guarded model made a NaN or Inf, and ``guard(action="warn")`` let it go on."""


class TrainingWarning(_Printed, UserWarning):
    """Something in a watched training run looks wrong: dead units, vanishing or exploding gradients."""


class RecomputeWarning(_Printed, UserWarning):
    """An edit inside a checkpointed part ended before the backward pass, which computes that part again without it."""


class TorchVersionWarning(_Printed, UserWarning):
    """This version of torch is newer than any that TorchHook was tested with."""


class CompiledWarning(_Printed, UserWarning):
    """A compiled model runs eagerly inside a session; said once in a process."""


class DataWarning(_Printed, UserWarning):
    """The rows that are kept may not be those that one expects.

    A loader drops some, their dim cannot be told, or they are others each time they are read.
    """


class PaddingWarning(_Printed, UserWarning):
    """Padding gets into the features: no mask is known, or the model itself does not leave it out."""


def warn(message: str, category: type[Warning], known: int = 1) -> None:
    """Warn at the user's line: the innermost frame that is neither this library's nor torch's.

    ``known`` is how many of the callers are this library's for certain.
    """
    frame = _users_frame(known)
    _warn_at(frame.f_code, frame.f_lineno, frame.f_globals, message, category)


def later_warning(known: int = 1) -> Callable[[str, type[Warning]], None]:
    """What warns as ``warn`` does, at the line that is the user's now, when it is called later."""
    frame = _users_frame(known)
    code, at, names = frame.f_code, frame.f_lasti, frame.f_globals

    def warn_there(message: str, category: type[Warning]) -> None:
        # Not the frame's own line: that is looked for through the whole function, and mostly nobody asks.
        line = next((line for start, end, line in code.co_lines() if start <= at < end and line), code.co_firstlineno)
        _warn_at(code, line, names, message, category)

    return warn_there


def _warn_at(code: CodeType, line: int, names: dict[str, Any], message: str, category: type[Warning]) -> None:
    # Not warnings.warn, which would look for the frame once more.
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, code.co_filename, line, names.get("__name__"), registry)


def _users_frame(known: int) -> FrameType:
    frame = sys._getframe(known + 1)
    # The name first: to ask for a frame makes it.
    while _is_not_the_users(frame.f_globals.get("__name__", "")) and (above := frame.f_back) is not None:
        frame = above
    return frame


_NOT_THE_USERS = frozenset({"torchhook", "torch", "contextlib", "functools", "importlib", "weakref"})


@functools.lru_cache(maxsize=256)
def _is_not_the_users(module: str) -> bool:
    return module.split(".")[0] in _NOT_THE_USERS


def never_opened(
    what: str, how: str = "was dropped without ever being opened", warn: Callable[[str, type[Warning]], None] = warn
) -> None:
    """Say that something was forgotten; for ``__del__`` and the end of the program."""
    warn(
        f"{what} {how}, so it did nothing. It is inert until then: use it in a with block, or call open() and later "
        "close().",
        NeverOpenedWarning,
    )


def closest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known names nearest to ``name``, best first.

    >>> closest("layer4.1.rel", ["layer4.1.relu", "layer4.1.bn1", "fc"])
    ['layer4.1.relu', 'layer4.1.bn1']
    """
    names = list(dict.fromkeys(known))
    folded: dict[str, str] = {}
    for candidate in names:
        folded.setdefault(candidate.casefold(), candidate)
    wanted = name.casefold()
    found = [folded[match] for match in difflib.get_close_matches(wanted, folded, n=limit, cutoff=0.5)]
    # A name remembered without its prefix ("relu" for "layer1.0.relu") is far away by edit distance.
    tail = wanted.rsplit(".", 1)[-1]
    found += [n for n in names if tail and n.casefold().rsplit(".", 1)[-1] == tail]
    return list(dict.fromkeys(found))[:limit]


def suggestion(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the closest names, or the first few when none is close."""
    names = [n for n in dict.fromkeys(known) if n]
    near = closest(name, names)
    if near:
        return f"Closest: {', '.join(map(repr, near))}."
    if not names:
        return ""
    return f"There are: {listed(list(map(repr, names)), most=6)}."


def require(package: str, extra: str) -> ModuleType:
    """Import an optional package, or say in one sentence how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        packages = " ".join(_packages_of(extra)) or _INSTALLED_AS.get(package.split(".")[0], package.split(".")[0])
        raise MissingExtraError(
            f'{package} is needed for this and is not installed: pip install {packages} (torchhook\'s extra "{extra}")'
        ) from error


def _packages_of(extra: str) -> list[str]:
    """The packages of an extra; empty where torchhook runs from its sources, without being installed."""
    # The packages themselves, not ``torchhook[extra]``: the package index has another, older package of that name.
    try:
        lines = metadata.requires("torchhook") or []
    except metadata.PackageNotFoundError:
        return []
    found = [re.match(rf"""([^ ;<>=!~]+).*;.*\bextra == ['"]{extra}['"]""", line) for line in lines]
    # Some shells read brackets as a pattern.
    return [f'"{match[1]}"' if "[" in match[1] else match[1] for match in found if match]


# Where a package is imported by another name than it is installed by.
_INSTALLED_AS = {"PIL": "pillow", "skimage": "scikit-image"}


def hint(error: BaseException, text: str) -> None:
    """Add to an error that passes through what its reader may want to know."""
    add = getattr(error, "add_note", None)  # Python 3.11
    if add is not None:
        add(f"torchhook: {text}")


def note(error: BaseException, text: str) -> None:
    """Add to an error that ends a run what its reader may want to know."""
    hint(error, f"{text} Committed shards are safe: the same call does only what is missing.")

"""What extracting and reading features raises.

TorchHookError
└── ExtractError             (RuntimeError)   the model, the data or the disk does not fit
    ├── StoreMismatchError   (ValueError)     the store was made by another run: the differences are named
    ├── IncompleteStoreError (LookupError)    shards are missing
    └── BrokenShardError     (ValueError)     a shard is truncated, altered or not ours
"""

from __future__ import annotations

from torchhook.errors import TorchHookError


class ExtractError(TorchHookError, RuntimeError):
    """The model, the data or the disk does not fit what was asked for."""


class StoreMismatchError(ExtractError, ValueError):
    """The store at this path was made with another model, layer list, transform or row count."""


class IncompleteStoreError(ExtractError, LookupError):
    """Shards of the store are missing."""


class BrokenShardError(ExtractError, ValueError):
    """A shard is truncated, altered, or was not written by TorchHook."""


def note(error: BaseException, text: str) -> None:
    """Add to an error that ends a run what its reader may want to know."""
    add = getattr(error, "add_note", None)  # Python 3.11
    if add is not None:
        add(f"torchhook: {text} Committed shards are safe: the same call does only what is missing.")

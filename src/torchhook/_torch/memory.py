"""What a tensor shares: its memory, its views, how often it was written to."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchhook._torch.finding import find, missing

lazy_clone: Callable[[Tensor], Tensor] = find("_lazy_clone", torch.clone)
"""A tensor that shares memory until someone writes to it; an ordinary copy where torch cannot."""

is_lazy_clone: Callable[[Tensor], bool] = find("_C._is_cow_tensor", lambda tensor: False)
"""Whether a tensor's memory has been shared by ``lazy_clone`` and not been written to since."""

_start: Callable[[Tensor], int] | None = find("_C._data_address", None)


def start_of(tensor: Tensor) -> int:
    """Where the memory begins that a tensor is a part of; the same for all that share it, copy-on-write too.

    Where nobody can look without ending that: a number of the tensor's own.
    """
    return id(tensor) if _start is None else _start(tensor)


def is_only_owner(tensor: Tensor) -> bool:
    """End copy-on-write: whether the memory stayed where it was, since nobody else shares it; no where nobody knows.

    If somebody does, the tensor has moved to a copy of its own. Views are not looked for: a plain tensor stays.
    """
    if _start is None:
        return False
    before = _start(tensor)
    try:
        tensor.data_ptr()
    except RuntimeError:  # no room for the copy
        return False
    return _start(tensor) == before


base_of: Callable[[Tensor], Tensor | None] = find("_base.__get__", lambda tensor: tensor, Tensor)
"""The tensor that this one is a view of, if it is one; itself where nobody knows: that only costs a closer look."""

use_count: Callable[[Tensor], int] = find("_use_count", lambda tensor: sys.maxsize, Tensor)
"""How many hold a tensor inside of torch, its views among them, and Python as one; very many where nobody knows."""


def storage_key(tensor: Tensor) -> int | None:
    """The identity of a tensor's memory, which its views share; ``None`` where it has none.

    Its address would do too, but asking for it ends copy-on-write.
    """
    try:
        storage = tensor.untyped_storage()
        key = getattr(storage, "_cdata", None)
        return int(key) if key is not None else storage.data_ptr() or None
    except (NotImplementedError, RuntimeError, TypeError, ValueError):  # sparse, fake, functional tensors
        return None


class _HeldStorage:
    """Stands for ``StorageWeakRef``: the key of held memory is not used again either, at the price of the memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


def storage_ref(tensor: Tensor) -> Any:
    """Something that keeps the key of a tensor's memory its own for as long as it is held."""
    with contextlib.suppress(ImportError):
        from torch.multiprocessing.reductions import StorageWeakRef

        return StorageWeakRef(tensor.untyped_storage())
    return _HeldStorage(tensor.untyped_storage())


version_of: Callable[[Tensor], int] = find("_version.__get__", lambda tensor: -1, Tensor)
"""As ``version``, for those who can do without it: -1 where nobody knows. Of an inference tensor, it raises."""


def version(tensor: Tensor) -> int:
    """How often a tensor's memory was written to; its views count together."""
    found: int | None = getattr(tensor, "_version", None)
    return _no_versions() if found is None else found


def base(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of."""
    found: Any = getattr(tensor, "_base", _GONE)
    return _no_bases() if found is _GONE else found  # type: ignore[no-any-return]


_GONE = object()
_no_versions = missing("Tensor._version", "to tell gradients before and after an in-place layer apart")
_no_bases = missing("Tensor._base", "to find the gradients of views")

"""Where a private name of torch is, or what is done without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from torchhook.errors import TorchVersionError


def find(path: str, default: Any, root: Any = torch) -> Any:
    """What a dotted path leads to, or ``default`` where a part of it has vanished."""
    for name in path.split("."):
        root = getattr(root, name, None)
        if root is None:
            return default
    return root


def missing(path: str, purpose: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise TorchVersionError(
            f"torch {torch.__version__} has no {path}, which TorchHook needs {purpose}. Use a version of torch that "
            "docs/compatibility.md names, or a newer TorchHook."
        )

    return refuse

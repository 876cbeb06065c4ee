"""Operations of checkpointed functions: who listens to them hears them again when the backward pass recomputes them.

A module says by its hooks that it runs again. A function that a module checkpoints inside of its own call, as those of
transformers do, says nothing: what the segment will call is wrapped, once for each listener, and goes with the graph.
"""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakSet, ref

from torch import nn

from torchhook import _torch


class HearsAgain(Protocol):
    """Who listens to operations."""

    def hearing_again(self, module: nn.Module, counts: Counter[str]) -> AbstractContextManager[None]:
        """Listen while a part of the module runs again, before which its operations came this often."""


def follow(listener: HearsAgain, module: nn.Module, counts: Counter[str], known: WeakSet[Any]) -> bool:
    """Let a listener hear the running code of a module again; false where torch does not say what it will call.

    ``known`` are the segments that the listener follows already.
    """
    for segment in _torch.bare_segments():
        if segment not in known:
            if not _torch.around_recomputation(segment, functools.partial(_again, ref(listener), module, counts)):
                return False
            known.add(segment)
    return True


def _again(
    listener: ref[HearsAgain], module: nn.Module, counts: Counter[str], function: Any, *args: Any, **kwargs: Any
) -> Any:
    hears = listener()
    if hears is None:
        return function(*args, **kwargs)
    with hears.hearing_again(module, counts):
        return function(*args, **kwargs)

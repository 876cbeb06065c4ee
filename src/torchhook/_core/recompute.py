"""Forward calls inside a backward pass: activation checkpointing runs a part of the model again.

Such a call is the same call as before, not a new one. Which one it is follows from the checkpointed segment around it,
an object of ``torch.utils.checkpoint`` that is the same in the first run and in the recomputation. A segment inside
another is made anew whenever that one is recomputed, so a call is noted for every segment around it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch.utils import checkpoint

graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""The backward pass that is running in this thread; -1 for none."""

_saved_tensor_hooks: Callable[[bool], Any] = getattr(
    getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", lambda ignore_tracing: True
)
_REMEMBERED = 1024  # segments whose backward pass may still come
_MARK = "_torchhook_segment"  # on an object that goes with the graph: its id may be used again
_tokens = count()


class Segments:
    """Which calls of one tap belong to which checkpointed segment."""

    __slots__ = ("_again", "_calls")

    def __init__(self) -> None:
        self._calls: dict[int, list[int]] = {}
        self._again: tuple[int | None, int, int] = (None, -1, 0)

    def note(self, call: int) -> None:
        """Remember the segment of a call that runs for the first time."""
        # Every checkpoint runs without gradients, or with hooks on what autograd saves.
        if torch.is_grad_enabled() and _saved_tensor_hooks(True) is None:
            return
        for segment in _around()[1]:
            self._note(segment, call)

    def is_known(self) -> bool:
        """Whether the running call is in a segment that was noted."""
        return bool(self._calls) and getattr(_around()[0], _MARK, None) in self._calls

    def call_again(self, ran: int) -> int:
        """The index that a recomputed call had the first time."""
        (segment, inside), task = _around(), graph_task()
        token = getattr(segment, _MARK, None)
        known = None if token is None else self._calls.get(token)
        key = ran if known is None or token is None else token
        before, before_task, position = self._again
        position = position + 1 if (before, before_task) == (key, task) else 0
        self._again = (key, task, position)
        if known is None:
            return max(ran - 1 - position, 0)  # backward goes through the calls in reverse
        call = known[position % len(known)]
        for segment in inside:
            self._note(segment, call)
        return call

    def _note(self, segment: Any, call: int) -> None:
        token = getattr(segment, _MARK, None)
        if token is None:
            token = next(_tokens)
            setattr(segment, _MARK, token)
        if token not in self._calls and len(self._calls) >= _REMEMBERED:
            del self._calls[next(iter(self._calls))]
        self._calls.setdefault(token, []).append(call)


def in_bare_segment() -> bool:
    """Whether the running code is in a checkpointed function directly, and not in a module that the function calls."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") != "torch.nn.modules.module":
        if frame.f_globals is vars(checkpoint):
            return True
        frame = frame.f_back
    return False


def _around() -> tuple[Any, list[Any]]:
    """The segment that is being recomputed, if one is, and the segments in it that run for the first time.

    They are torch's own objects for them.
    """
    frame, first = sys._getframe(2), []
    while frame.f_back is not None:
        if frame.f_globals is vars(checkpoint):
            name, known = frame.f_code.co_name, frame.f_locals
            if name == "checkpoint" and "gen" in known:
                inner = getattr(known["gen"], "gi_frame", None)
                if inner is not None and "new_frame" in inner.f_locals:
                    first.append(inner.f_locals["new_frame"])
            elif name == "forward" and "ctx" in known:  # reentrant
                first.append(known["ctx"])
            elif name == "unpack_hook" and "frame" in known:
                return known["frame"], first
            elif name == "backward" and "ctx" in known:  # reentrant
                return known["ctx"], first
        frame = frame.f_back
    return None, first

"""Forward calls inside a backward pass: activation checkpointing runs a part of the model again.

Such a call is the same call as before, not a new one. Which one it is follows from the checkpointed segment around it,
an object of ``torch.utils.checkpoint`` that is the same in the first run and in the recomputation. A segment inside
another is made anew whenever that one is recomputed, so a call is noted for every segment around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any
from weakref import ref

import torch

from torchhook import _torch
from torchhook._torch import graph_task
from torchhook.errors import SessionError

_REMEMBERED = 1024  # segments whose backward pass may still come
_MARK = "_torchhook_segment"  # on an object that goes with the graph: its id may be used again
_tokens = count()


def segments_around() -> Sequence[Any]:
    """The segments around the running code that run for the first time; mostly there are none."""
    # Every checkpoint runs without gradients, or with hooks on what autograd saves: nothing else is looked at.
    return () if torch.is_grad_enabled() and _torch.saved_tensor_hooks() is None else _torch.segments()[1]


class Segments:
    """Which calls of one tap belong to which checkpointed segment."""

    __slots__ = ("_again", "_calls", "_forgotten", "_waiting")

    def __init__(self) -> None:
        self._calls: dict[int, list[int]] = {}
        self._forgotten = -1
        self._waiting: dict[int, ref[Any]] = {}
        self._again: tuple[int | None, int, int] = (None, -1, 0)

    def note(self, call: int) -> None:
        """Remember the segments of a call that runs for the first time."""
        for segment in segments_around():
            self._note(segment, call)

    @property
    def noted(self) -> bool:
        """Whether any call was in a segment, and may run again."""
        return bool(self._calls)

    def is_waiting(self) -> bool:
        """Whether a segment that was noted may still be recomputed: its graph is alive, and its turn did not come."""
        alive = [segment for segment in (waiting() for waiting in self._waiting.values()) if segment is not None]
        # One that still runs has opened the session itself, and will do so again.
        running = set(map(id, _torch.segments()[1])) if alive else ()
        return any(id(segment) not in running for segment in alive)

    def is_known(self) -> bool:
        """Whether the running call is in a segment that was noted."""
        if not self._calls:
            return False
        token = getattr(_torch.segments()[0], _MARK, None)
        self._refuse_forgotten(token)
        return token in self._calls

    def is_older(self) -> bool:
        """Whether the running call is in a segment that first ran before the session: nothing of it may change."""
        segment = _torch.segments()[0]
        token = getattr(segment, _MARK, None)
        if segment is None or token in self._calls or not _torch.understands_checkpoints():
            return False
        self._refuse_forgotten(token)
        return True

    def _refuse_forgotten(self, token: int | None) -> None:
        if token is not None and token not in self._calls and token <= self._forgotten:
            raise SessionError(
                f"more than {_REMEMBERED} checkpointed segments ran before the backward pass of this one, so that "
                "TorchHook no longer knows which call it is. Run backward earlier, or without activation checkpointing."
            )

    def call_again(self, ran: int) -> int:
        """The index that a recomputed call had the first time."""
        (segment, inside), task = _torch.segments(), graph_task()
        token = getattr(segment, _MARK, None)
        known = None if token is None else self._calls.get(token)
        key = ran if known is None or token is None else token
        before, before_task, position = self._again
        position = position + 1 if (before, before_task) == (key, task) else 0
        self._again = (key, task, position)
        if known is None:
            return self._guess(ran, position)
        self._waiting.pop(key, None)
        call = known[position % len(known)]
        for segment in inside:
            self._note(segment, call)
        return call

    def _guess(self, ran: int, position: int) -> int:
        """For a recomputation that is not torch's own: backward goes through the calls in reverse."""
        if ran > 1 and not _torch.understands_checkpoints():
            # A wrong guess would give wrong gradients without a word.
            raise SessionError(
                f"a module that ran {ran} times is recomputed in the backward pass, and torch {torch.__version__} does "
                "not let TorchHook see which call it is. Edit or watch it without activation checkpointing, or use a "
                "version of torch that docs/compatibility.md names."
            )
        return max(ran - 1 - position, 0)

    def _note(self, segment: Any, call: int) -> None:
        token = getattr(segment, _MARK, None)
        if token is None:
            token = next(_tokens)
            setattr(segment, _MARK, token)
        if token not in self._calls:
            self._waiting[token] = ref(segment)
        if token not in self._calls and len(self._calls) >= _REMEMBERED:
            oldest = next(iter(self._calls))
            self._forgotten = max(self._forgotten, oldest)
            del self._calls[oldest]
            self._waiting.pop(oldest, None)
        self._calls.setdefault(token, []).append(call)

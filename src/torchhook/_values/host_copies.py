"""Copies from a GPU to the host that the model does not wait for.

``.cpu()`` in a hook makes the model wait for every transfer. Here each device has one stream for them, on which they
run in the order in which the values were made; the host memory is pinned; and whoever reads it waits.

A small value takes longer to start than to copy, so what is done for each is counted: events are used again, and the
stream is switched by hand. The memory is torch's own: its cache gives a pinned block out again when the last view of it
is gone and the last copy into it is done, which nobody outside of it could tell.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque

import torch
from torch import Tensor

_SHARE = 16
"""What is on its way holds at most one part in so many of a device's memory."""


class _Lane:
    """The stream of a device that all copies from it share, and what starting one needs."""

    def __init__(self, device: int) -> None:
        self.stream = torch.cuda.Stream(device)
        self.made = torch.cuda.Event()
        self.unused: list[torch.cuda.Event] = []
        # Not a plain lock: what is freed meanwhile may run a user's code, which may come back here.
        self.lock = threading.RLock()
        self.most = torch.cuda.get_device_properties(device).total_memory // _SHARE

    def start(self, source: Tensor, into: Tensor, current: torch.cuda.Stream) -> torch.cuda.Event:
        """Copy once ``current`` has made the source; the event is over when that is done."""
        with self.lock:
            done = self.unused.pop() if self.unused else torch.cuda.Event()
            self.made.record(current)
            self.stream.wait_event(self.made)
            # Not torch.cuda.stream(): it asks three times which stream and device are current.
            try:
                torch.cuda.set_stream(self.stream)
                into.copy_(source, non_blocking=True)
                done.record(self.stream)
            finally:
                torch.cuda.set_stream(current)
        return done


_lanes: dict[int, _Lane] = {}
_making = threading.Lock()
_alive: weakref.WeakSet[HostCopies] = weakref.WeakSet()


def _lane(device: int) -> _Lane:
    with _making:
        at_fork = getattr(os, "register_at_fork", None)  # not on Windows
        if not _lanes and at_fork is not None:
            # A child has no CUDA to ask whether a copy is done; it has the memory.
            at_fork(before=_wait_for_all)
        return _lanes.setdefault(device, _Lane(device))


def _wait_for_all() -> None:
    for copies in list(_alive):
        copies.wait()


class _Pending:
    """A copy that may not be done."""

    __slots__ = ("done", "lane", "source", "stream")

    def __init__(self, done: torch.cuda.Event, source: Tensor, stream: torch.cuda.Stream, lane: _Lane) -> None:
        self.done, self.stream, self.lane = done, stream, lane
        # Held until the copy is done. Once it is dropped, its memory may be given to someone else, or the last owner of
        # a copy-on-write storage may write to it in place, while the copy still reads it.
        self.source: Tensor | None = source


class HostCopies:
    """Copies to host memory, from CUDA on a side stream; from anywhere else they are done at once.

    Threads may share one: gradients come in on autograd's own.

    >>> HostCopies().copy(torch.ones(2), into=torch.zeros(2, dtype=torch.float16))
    tensor([1., 1.], dtype=torch.float16)
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()
        self._bytes = 0  # held by what is pending
        self._lock = threading.RLock()

    def copy(self, source: Tensor, into: Tensor | None = None) -> Tensor:
        """Start copying ``source``, which nobody may write to any more, and return the host tensor to be filled.

        That is ``into``, pinned memory of the caller's, with its own dtype; or a fresh tensor like the source.
        """
        if not source.is_cuda:
            return torch.empty_like(source, device="cpu").copy_(source) if into is None else into.copy_(source)
        if into is None:
            into = torch.empty_like(source, device="cpu", pin_memory=True)
        device = source.get_device()
        if device == torch.cuda.current_device():
            self._copy(source, into, device)
        else:  # to choose a stream is to choose its device, too
            with torch.cuda.device(device):
                self._copy(source, into, device)
        return into

    def _copy(self, source: Tensor, into: Tensor, device: int) -> None:
        lane, current = _lanes.get(device) or _lane(device), torch.cuda.current_stream()
        done = lane.start(source, into, current)
        with self._lock:
            if not self._pending:
                _alive.add(self)
            self._pending.append(_Pending(done, source, current, lane))
            self._bytes += source.nbytes
            self._forget_done()
            if self._bytes > lane.most:
                # The copies cannot keep up with the model.
                self._let_go(lane.most)

    def _forget_done(self) -> None:
        pending = self._pending
        while pending and pending[0].done.query():
            over = pending.popleft()
            over.lane.unused.append(over.done)
            self._bytes -= 0 if over.source is None else over.source.nbytes

    def _let_go(self, most: int) -> None:
        """Hold on to so many bytes at most: the streams that made the others wait for the copies, not the host."""
        going, last = [], {}
        for one in self._pending:
            if self._bytes <= most:
                break
            if one.source is not None:
                going.append(one.source)
                self._bytes -= one.source.nbytes
                one.source = None
                last[one.stream] = one.done  # copies are done one after the other
        for stream, done in last.items():
            stream.wait_event(done)
        del going  # not before: a freed one could be given out again at once

    def settle(self) -> None:
        """Hold on to no source any more, without waiting: what comes next on the device comes after the copies."""
        with self._lock:
            self._forget_done()
            self._let_go(-1)

    def events(self) -> list[torch.cuda.Event]:
        """Events that are over when every copy so far is, for another thread to wait for."""
        events = []
        with self._lock:
            lanes = {id(one.lane): one.lane for one in self._pending}
        for lane in lanes.values():
            event = torch.cuda.Event()
            event.record(lane.stream)
            events.append(event)
        return events

    def wait(self) -> None:
        """Return when every copy so far is done."""
        # Whoever reads at the same time waits for the same ones: what another thread has taken over is not done yet.
        for one in list(self._pending):
            one.done.synchronize()
        with self._lock:
            self._forget_done()

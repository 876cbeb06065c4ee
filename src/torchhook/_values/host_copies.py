"""Copies from a GPU to the host that the model does not wait for.

``.cpu()`` in a hook makes the model wait for every transfer. Here each device has one stream for them, on which they
run in the order in which the values were made; the host memory is pinned; and whoever reads it waits.

To start a copy takes the host several calls of the driver, between two layers of a model that may be waiting for just
this host (58 µs, a tenth of a decoder's block): small values are therefore started together, and events are used again.
The memory is torch's own: its cache gives a pinned block out again when the last view of it is gone and the last copy
from or into it is done, which nobody outside of it could tell.

A session that closes holds nothing any more, while its last copies may still run. Torch's allocator then is told who
reads what is let go, and the next forward pass runs beside the copies of this one; the device waits for them first only
where that would not do: for memory that is somebody else's too, who may write to it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from torchhook._torch import is_only_owner, start_of
from torchhook._torch.cuda import current_raw_stream, is_freed_by_torch

_TOGETHER = 64 << 20
"""So many bytes are worth a start; the bus takes a millisecond for them."""
_WORTH = 1 << 20
"""Smaller values may wait until the model has done what it does after them: they take no time."""
_SHARE = 16
"""What is on its way holds one part in so many of a device's memory at most; what sessions left, as much again."""


class _Lane:
    """The stream of a device that all copies from it share, and the events that nobody waits for any more."""

    def __init__(self, device: int) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.unused: list[torch.cuda.Event] = []
        self.known: dict[int, torch.cuda.Stream] = {}
        self.most = torch.cuda.get_device_properties(device).total_memory // _SHARE
        self._heeds_readers = torch.cuda.get_allocator_backend() in ("native", "cudaMallocAsync")
        self._left: deque[tuple[torch.cuda.Event, int]] = deque()  # events of what is left to it, and bytes
        self._leaving = threading.Lock()

    def event(self) -> torch.cuda.Event:
        try:
            return self.unused.pop()
        except IndexError:
            return torch.cuda.Event()

    def current(self, raw: int) -> torch.cuda.Stream:
        """The current stream of the device, whose handle is ``raw``: to be told its name takes longer than all else."""
        stream = self.known.get(raw)
        if stream is None:
            stream = self.known[raw] = torch.cuda.current_stream(self.device)
        return stream

    def leave(self, sources: list[Tensor], nbytes: int, streams: Iterable[torch.cuda.Stream]) -> bool:
        """Whether ``sources`` may be let go before their copies are done; what ``streams`` do next runs beside them.

        Their memory is the allocator's then, which gives it out again when the lane has come so far. What was left
        before comes first: a device is never further ahead than by one session.
        """
        # Nobody waits here: another thread may be at it, or a session that the garbage collector closes just now.
        if not self._heeds_readers or not self._leaving.acquire(blocking=False):
            return False
        try:
            left = self._left
            while left and left[0][0].query():
                self.unused.append(left.popleft()[0])
            if nbytes + sum(others for _, others in left) > self.most:
                return False
            if not all(is_only_owner(source) and is_freed_by_torch(source) for source in sources):
                return False
            for source in sources:
                source.record_stream(self.stream)
            if left:
                for stream in streams:
                    stream.wait_event(left[-1][0])
            event = self.event()
            event.record(self.stream)
            left.append((event, nbytes))
        finally:
            self._leaving.release()
        return True


_HOST = torch.device("cpu")
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


_WAITS, _STARTS, _STARTED, _LET_GO = range(4)
"""How far a group has come."""


class _Group:
    """Values that one stream has made, and that are copied together."""

    __slots__ = ("done", "is_noted", "lane", "made", "nbytes", "owners", "raw", "stage", "stream", "values")

    def __init__(self, lane: _Lane, raw: int) -> None:
        self.lane, self.raw, self.stream = lane, raw, lane.current(raw)
        self.made, self.done = lane.event(), lane.event()
        self.nbytes, self.is_noted, self.stage = 0, False, _WAITS
        # Sources, and what they are copied into. Held until the copy is done: once a source is dropped, its memory may
        # be given to someone else, or the last owner of a copy-on-write storage may write to it in place, while the
        # copy still reads it.
        self.values: list[tuple[Tensor, Tensor]] = []
        self.owners: list[weakref.ref[Tensor]] = []

    def add(self, source: Tensor, into: Tensor, shared_with: Tensor | None) -> None:
        self.values.append((source, into))
        nbytes = source.nbytes
        self.nbytes += nbytes
        # Now, and not when they start: what the model does after the last of them need not be done by then.
        self.is_noted = nbytes >= _WORTH
        if self.is_noted:
            self.made.record(self.stream)
            if shared_with is not None:
                self.owners.append(weakref.ref(shared_with))

    def start(self) -> None:
        """Copy, on the lane's stream; its device is the current one."""
        side, current = self.lane.stream, self.lane.current(current_raw_stream(self.lane.device))
        if not self.is_noted:
            self.made.record(self.stream)
        side.wait_event(self.made)
        # Not torch.cuda.stream(): it asks three times which stream and device are current.
        try:
            torch.cuda.set_stream(side)
            for source, into in self.values:
                into.copy_(source, non_blocking=True)
        finally:
            try:
                self.done.record(side)  # after an error, of those before it
            finally:
                torch.cuda.set_stream(current)

    def let_go(self) -> None:
        self.stage, self.values = _LET_GO, []

    def recycle(self) -> None:
        self.lane.unused += (self.made, self.done)


class HostCopies:
    """Copies to host memory, from CUDA on a side stream; from anywhere else they are done at once.

    Threads may share one: gradients come in on autograd's own.

    >>> HostCopies().copy(torch.ones(2), into=torch.zeros(2, dtype=torch.float16))
    tensor([1., 1.], dtype=torch.float16)
    """

    def __init__(self) -> None:
        self._next: _Group | None = None
        self._started: deque[_Group] = deque()
        # Not a plain lock: what is freed meanwhile may run a user's code, which may come back here.
        self._lock = threading.RLock()

    def copy(self, source: Tensor, into: Tensor | None = None, *, shared_with: Tensor | None = None) -> Tensor:
        """Begin to copy ``source``, which nobody may write to any more, and return the host tensor to be filled.

        That is ``into``, pinned memory of the caller's, with its own dtype; or a fresh tensor like the source.
        ``shared_with`` is the tensor that a source shares its memory with, copy-on-write, or may do so.
        """
        if not source.is_cuda:
            return torch.empty_like(source, device="cpu").copy_(source) if into is None else into.copy_(source)
        if into is None:
            into = torch.empty_like(source, device=_HOST, pin_memory=True)
        device = source.get_device()
        raw = current_raw_stream(device)
        with self._lock:
            group = self._next
            if group is None or group.raw != raw or group.lane.device != device:
                self._start()
                _alive.add(self)
                group = self._next = _Group(_lanes.get(device) or _lane(device), raw)
            group.add(source, into, shared_with)
            if group.nbytes >= _TOGETHER:
                self._start()
        return into

    def _start(self) -> None:
        """Start what waits to be started; after an interrupt, again."""
        # Before it starts: should that fail in the middle, what it began is held, and waited for.
        if self._next is not None and not (self._started and self._started[-1] is self._next):
            self._started.append(self._next)
        self._next = (
            None  # a user's code may run meanwhile, in the place of what is freed: its values are the next ones
        )
        waiting = [group for group in self._started if group.stage == _WAITS]
        for group in waiting:
            group.stage = _STARTS
            try:
                if group.lane.device == torch.cuda.current_device():
                    group.start()
                else:  # to choose a stream is to choose its device, too
                    with torch.cuda.device(group.lane.device):
                        group.start()
                group.stage = _STARTED
            except BaseException as error:
                group.stage = _STARTED if isinstance(error, Exception) else _WAITS
                raise
        if waiting:
            self._forget_done()
            if self._held() > (most := waiting[-1].lane.most):
                # The copies cannot keep up with the model.
                self._let_go(most)

    def _held(self) -> int:
        """Bytes that are held by what was started."""
        return sum(group.nbytes for group in self._started if group.stage != _LET_GO)

    def _forget_done(self) -> None:
        started = self._started
        while started and started[0].stage >= _STARTED and started[0].done.query():
            started.popleft().recycle()

    def _let_go(self, most: int, *, closing: bool = False) -> None:
        """Hold on to so many bytes at most: the streams that made the others wait for the copies, not the host.

        At the close of a session they need not wait, where the others may be left to the lane.
        """
        groups: list[_Group] = []
        held = self._held()
        for group in self._started:
            if held <= most:
                break
            if group.stage == _STARTED:
                groups.append(group)
                held -= group.nbytes
        last = {group.stream: group.done for group in groups}  # copies are done one after the other
        if not (closing and _leave(groups, last)):
            for stream, done in last.items():
                stream.wait_event(done)
        for group in groups:  # not before: a freed source could be given out again at once
            group.let_go()

    def settle(self) -> None:
        """Hold on to no source any more, without waiting."""
        with self._lock:
            self._start()
            self._forget_done()
            self._let_go(-1, closing=True)

    def events(self) -> list[torch.cuda.Event]:
        """Events that are over when every copy so far is, for another thread to wait for."""
        events = []
        with self._lock:
            self._start()
            lanes = {group.lane.device: group.lane for group in self._started}
        for lane in lanes.values():
            event = torch.cuda.Event()
            event.record(lane.stream)
            events.append(event)
        return events

    def wait(self) -> None:
        """Return when every copy so far is done."""
        with self._lock:
            self._start()
            started = list(self._started)
        # Whoever reads at the same time waits for the same ones: none is forgotten before it is done.
        for group in started:
            group.done.synchronize()
        with self._lock:
            self._forget_done()


def _leave(groups: list[_Group], streams: Iterable[torch.cuda.Stream]) -> bool:
    """Whether the sources of these groups are left to their lane, which then says what becomes of them."""
    nbytes = sum(group.nbytes for group in groups)
    # A device waits for a few bytes more quickly than it is told how it need not.
    if nbytes < _TOGETHER // 2 or len({group.lane.device for group in groups}) > 1:
        return False
    # Otherwise a copy would be made of what is shared, only to find that out.
    if any(owner() is not None for group in groups for owner in group.owners):
        return False
    # Of those that share memory the last one is enough; then it can be told whether somebody else has it.
    last = {start_of(source): source for group in groups for source, _ in group.values}
    for group in groups:
        group.values = [(source, into) for source, into in group.values if last[start_of(source)] is source]
    return groups[0].lane.leave(list(last.values()), nbytes, streams)

"""Copies from a GPU to the host that the model does not wait for.

``.cpu()`` in a hook makes the model wait for every transfer. Here each device has a stream of its own for them, the
host memory is pinned, and whoever reads it waits once: for all copies, or for the events that say when they are over.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class HostCopies:
    """Copies to host memory, from CUDA on a side stream; from anywhere else they are done at once.

    >>> HostCopies().copy(torch.ones(2), into=torch.zeros(2, dtype=torch.float16))
    tensor([1., 1.], dtype=torch.float16)
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pending: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def copy(self, source: Tensor, into: Tensor | None = None) -> Tensor:
        """Start copying ``source``, which nobody may write to any more, and return the host tensor to be filled.

        That is ``into``, pinned memory of the caller's, with its own dtype; or a fresh tensor like the source.
        """
        if not source.is_cuda:
            return torch.empty_like(source, device="cpu").copy_(source) if into is None else into.copy_(source)
        stream = self._streams.get(source.device)
        if stream is None:
            stream = self._streams[source.device] = torch.cuda.Stream(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            if into is None:
                into = torch.empty_like(source, device="cpu", pin_memory=True)
            into.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        # The source is held until the copy is done. Once it is dropped, its memory may be given to someone else, or the
        # last owner of a copy-on-write storage may write to it in place, while the copy still reads it.
        while self._pending and self._pending[0][0].query():
            self._pending.popleft()
        self._pending.append((done, source))
        return into

    def events(self) -> list[torch.cuda.Event]:
        """Events that are over when every copy so far is, for another thread to wait for."""
        events = []
        for stream in self._streams.values():
            event = torch.cuda.Event()
            event.record(stream)
            events.append(event)
        return events

    def wait(self) -> None:
        """Return when every copy so far is done."""
        while self._pending:
            event, source = self._pending[0]
            event.synchronize()
            self._pending.popleft()
            del source  # before the next wait: it may be large

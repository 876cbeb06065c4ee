"""Bytes to a file around the page cache, and back into it when the work is done.

Written the usual way, features are first copied into pages of the cache. That takes time from the cores that the model
runs on, most of all on virtual machines, which must first ask their host for those pages: there, 200 MB cost as much as
half a second. Direct writes leave both to the disk. Where the system has none, the usual way is taken.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

try:
    fcntl: Any = importlib.import_module("fcntl")
except ImportError:  # not a POSIX system
    fcntl = None

Chunks = Sequence[bytes | memoryview]
Bytes = npt.NDArray[np.uint8]
_DIRECT = getattr(os, "O_DIRECT", 0) if fcntl is not None else 0
BLOCK = 4096
"""Direct writes begin and end at a multiple of it, in the file and in memory."""
_ROOM = 1 << 20  # what does not begin with a block is copied through so much memory
_SMALL = 1 << 20  # files for which it is not worth it
_MOST_BUFFERS = 512  # for one writev; Linux takes 1024
_MOST_BYTES = 1 << 30  # for one write; macOS takes 2 GiB less a byte, and Linux cuts there


def empty(shape: Sequence[int], dtype: torch.dtype, pin: bool = False) -> Tensor:
    """Memory for a tensor that begins where a block can."""
    nbytes = math.prod(shape) * dtype.itemsize
    # Pinned memory is whole pages. Not a byte more than is needed: torch rounds it up to a power of two.
    room = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if pin else None
    if room is None or room.data_ptr() % BLOCK:
        # Torch cannot be asked for an alignment: a block more, of which the beginning is left out.
        room = torch.empty(nbytes + BLOCK, dtype=torch.uint8, pin_memory=pin)
    skip = -room.data_ptr() % BLOCK
    return room[skip : skip + nbytes].view(dtype).view(tuple(shape))


def write(handle: int, chunks: Chunks) -> None:
    """Write the chunks, one after the other, to a new file."""
    left = [np.frombuffer(chunk, np.uint8) for chunk in chunks if len(chunk)]
    if _DIRECT and sum(map(len, left)) >= _SMALL:
        _write_directly(handle, left)
    while left:
        _drop(left, _write(handle, left))


def _write(handle: int, left: list[Bytes]) -> int:
    """Write as much as the system takes at once, and return how much that was."""
    room, buffers = _MOST_BYTES, []
    for chunk in left[:_MOST_BUFFERS]:
        if room:
            buffers.append(chunk[:room])
            room -= len(buffers[-1])
    if hasattr(os, "writev"):
        return os.writev(handle, buffers)  # type: ignore[arg-type]
    return os.write(handle, buffers[0].data)  # on Windows, one after the other


def _drop(left: list[Bytes], done: int) -> None:
    """Forget what is written, which may be less than was given."""
    while left and done >= len(left[0]):
        done -= len(left.pop(0))
    if done:
        left[0] = left[0][done:]


def _write_directly(handle: int, left: list[Bytes]) -> None:
    """Write as many whole blocks as the system takes this way."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        # Switched on and off on the one handle: the end of a file, less than a block, can only go the usual way.
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | _DIRECT)
        room = empty((_ROOM,), torch.uint8).numpy()
        while len(blocks := _blocks(left, room)):
            _drop(left, _write(handle, [blocks]))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not on this file system, or not any further
            raise
    finally:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags)


def _blocks(left: list[Bytes], room: Bytes) -> Bytes:
    """Whole blocks from the beginning of what is left: in place where it begins with one, else copied to ``room``."""
    first = left[0] if left else room[:0]
    whole = len(first) // BLOCK * BLOCK
    if whole and first.ctypes.data % BLOCK == 0:
        return first[:whole]
    at = 0
    for number, chunk in enumerate(left):
        if number and not at % BLOCK and chunk.ctypes.data % BLOCK == 0:
            break  # the next one begins with a block
        length = min(len(chunk), len(room) - at)
        np.copyto(room[at : at + length], chunk[:length])
        at += length
    return room[: at // BLOCK * BLOCK]


def warm(files: dict[Path, int]) -> None:
    """Ask the system to have files (and their sizes) in memory if they fit easily: what was written is read next.

    It returns at once; the system reads on its own.
    """
    # What was written the usual way is in the cache already.
    if _DIRECT and sum(files.values()) <= _available() // 4:
        threading.Thread(target=_will_need, args=(list(files),), name="warm", daemon=True).start()


def _will_need(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # gone again
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(handle)


def _available() -> int:
    """Bytes of memory that could be used without swapping."""
    with contextlib.suppress(OSError, StopIteration, ValueError), open("/proc/meminfo") as lines:
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    return 0

"""Streams by their handles, and whose memory it is: what torch's public names do not say, or not fast enough."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _public(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public)
"""The handle of the stream that is current on a device; a build without CUDA has none, and is not asked.

The public way to ask for the stream takes as long as to start a kernel.
"""

_is_freed_by_torch: Callable[[int], bool] = getattr(torch._C, "_has_Standard_Deleter", lambda storage: False)


def is_freed_by_torch(tensor: Tensor) -> bool:
    """Whether the memory goes back to torch's allocator, which then heeds ``record_stream``.

    That of another library does not, nor does what is shared copy-on-write.
    """
    return _is_freed_by_torch(tensor.untyped_storage()._cdata)

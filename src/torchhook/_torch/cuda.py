"""Streams by their handles: the public way to ask for the current one takes as long as to start a kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _public(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public)
"""The handle of the stream that is current on a device; a build without CUDA has none, and is not asked."""

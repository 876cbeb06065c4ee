"""Many numbers of one device in one tensor: what comes over in one transfer is put together in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchhook._torch import foreach

_KNOWN = 16  # the most that are kept; a watch needs two or three


class Joiner:
    """Puts numbers together. What it needs for that is made once: ``torch.stack`` makes a view of each, each time.

    >>> Joiner().join([torch.tensor(1.0), torch.tensor(2.0)])
    tensor([1., 2.])
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Tensor, list[Tensor]]] = {}

    def join(self, numbers: Sequence[Tensor]) -> Tensor:
        """Tensors without dims, of one device and dtype, as one; in memory of its own."""
        first = numbers[0]
        # On another stream, the memory might still be in use.
        stream = torch.cuda.current_stream(first.device).cuda_stream if first.is_cuda else 0
        key = len(numbers), first.device, first.dtype, stream
        with torch.no_grad():  # a backward pass that makes a graph has gradients with a history
            if key not in self._known:
                self._known = {} if len(self._known) >= _KNOWN else self._known
                self._known[key] = self._made(len(numbers), first)
            whole, parts = self._known[key]
            foreach.copy_(parts, numbers)
            return whole.clone()

    @staticmethod
    def _made(number: int, like: Tensor) -> tuple[Tensor, list[Tensor]]:
        with torch.inference_mode(False):  # what is made in inference mode can be written to there only
            whole = torch.empty(number, dtype=like.dtype, device=like.device)
            return whole, list(whole.unbind())

"""Whose memory a tensor is: the identity of its storage, and which part of it the tensor reaches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchhook import _torch


def storage(tensor: Tensor) -> int | None:
    """The identity of a tensor's memory, which its views share; ``None`` where it has none of its own.

    >>> x = torch.zeros(2, 3)
    >>> storage(x) == storage(x[0]), storage(x) == storage(x.clone())
    (True, False)
    """
    return _torch.storage_key(tensor)


class Origin(NamedTuple):
    """Whose memory a tensor is."""

    storage: int | None
    offset: int
    learned: bool
    """Whether it is a parameter, or a view of one."""


def origin(tensor: Tensor) -> Origin:
    """Where a tensor begins, and whether that is learned."""
    learned = isinstance(tensor, nn.Parameter) or isinstance(_torch.base(tensor), nn.Parameter)
    return Origin(storage(tensor), int(tensor.storage_offset()) if tensor.layout == torch.strided else 0, learned)


def reach(tensor: Tensor) -> range:
    """The elements of its memory that a tensor reaches from its first to its last.

    >>> reach(torch.zeros(4, 3)[1:3, 0])
    range(3, 7)
    """
    if tensor.layout != torch.strided or not tensor.numel():
        return range(1)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    return range(first, first + 1 + sum((size - 1) * stride for size, stride in steps))

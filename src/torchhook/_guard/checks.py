"""Looking at one tensor: what are its numbers, and what was in it before it is overwritten."""

from __future__ import annotations

import torch
from torch import Tensor

from torchhook._guard.findings import Statistics
from torchhook._values.elements import UNREADABLE, floats
from torchhook._values.statistics import summary


def describe(name: str, tensor: Tensor) -> Statistics:
    """A tensor in numbers; a complex one by its real and imaginary parts."""
    plain = floats(tensor)
    if plain is None:
        plain = torch.empty(0)
    elif plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    found = summary(plain)
    shape = () if tensor.is_nested else tuple(tensor.shape)
    spread = (found.min, found.max, found.mean, found.std)
    return Statistics(name, shape, tensor.dtype, *spread, found.nans, found.pos_infs, found.neg_infs)


def copied(tensor: Tensor) -> Tensor:
    """A copy of a tensor that is about to be overwritten, where it can be copied."""
    try:
        return tensor.detach().clone()
    except UNREADABLE:
        return tensor

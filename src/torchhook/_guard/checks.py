"""Looking at one tensor: may it hold a NaN or Inf, what are its numbers, and whose memory is it.

The check is one sum: a finite sum has finite terms. Only where it is not finite are the terms looked at, because the
sum itself may overflow.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchhook._guard.findings import Statistics

UNREADABLE = (RuntimeError, NotImplementedError, TypeError)
"""What fake tensors raise, and layouts and subclasses that lack an operation."""

# Sums of half precision overflow too easily, and those of a byte do not exist.
_SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_FLOAT8 = tuple(d for name, d in vars(torch).items() if name.startswith("float8") and isinstance(d, torch.dtype))
_in_functorch: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def elements(tensor: Tensor) -> Tensor | None:
    """A tensor's elements as a plain one without a graph; ``None`` if they are integers or cannot be read."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or _in_functorch():
        return None
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_nested:
        try:
            tensor = tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
        except UNREADABLE:
            tensor = tensor.to_dense()
    return tensor.float() if tensor.dtype in _FLOAT8 else tensor


def probe(tensor: Tensor) -> bool | Tensor:
    """Whether a tensor may hold a NaN or Inf; off the CPU, where asking means waiting, its sum instead."""
    try:
        plain = elements(tensor)
        if plain is None:
            return False
        total = plain.sum(dtype=_SUMMED_AS.get(plain.dtype))
        return not cmath.isfinite(total.item()) if total.is_cpu else total
    except UNREADABLE:
        return False


def may_be_bad(tensor: Tensor) -> bool:
    """Whether a tensor may hold a NaN or Inf, wherever it is."""
    answer = probe(tensor)
    return answer if isinstance(answer, bool) else not cmath.isfinite(answer.item())


def describe(name: str, tensor: Tensor) -> Statistics:
    """A tensor in numbers."""
    plain = elements(tensor)
    if plain is None:
        plain = torch.empty(0)
    elif plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    good = plain[plain.isfinite()].to(torch.float32 if plain.device.type == "mps" else torch.float64)
    low = high = mean = std = None
    if good.numel():
        low, high, mean, std = float(good.min()), float(good.max()), float(good.mean()), float(good.std(correction=0))
    shape = () if tensor.is_nested else tuple(tensor.shape)
    nan, inf, neg_inf = (int(test(plain).sum()) for test in (torch.isnan, torch.isposinf, torch.isneginf))
    return Statistics(name, shape, tensor.dtype, low, high, mean, std, nan, inf, neg_inf)


class Origin(NamedTuple):
    """Whose memory a tensor is."""

    storage: int | None
    offset: int
    learned: bool


def origin(tensor: Tensor) -> Origin:
    learned = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    return Origin(storage(tensor), int(tensor.storage_offset()) if tensor.layout == torch.strided else 0, learned)


def reach(tensor: Tensor) -> range:
    """The elements of its memory that a tensor reaches from its first to its last."""
    if tensor.layout != torch.strided or not tensor.numel():
        return range(1)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    return range(first, first + 1 + sum((size - 1) * stride for size, stride in steps))


def storage(tensor: Tensor) -> int | None:
    """The identity of a tensor's memory, which its views share."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except UNREADABLE:
        return None


def copied(tensor: Tensor) -> Tensor:
    """A copy of a tensor that is about to be overwritten, where it can be copied."""
    try:
        return tensor.detach().clone()
    except UNREADABLE:
        return tensor

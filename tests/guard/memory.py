"""Ways to copy a tensor, and to write to memory that was made without values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda y: y.t().contiguous().t(),
    "reshape": lambda y: y.t().reshape(2, 4),
    "flatten": lambda y: y.t().flatten().view(2, 4),
    "a list of rows": lambda y: y[[1, 0]],
    "a mask of rows": lambda y: y[y > 0].view(2, 4),
}


def halves(x: Tensor, write: Callable[[Tensor, int, Tensor], object]) -> Tensor:
    """Memory without values, written in two halves, then made to length 1 in place."""
    out = x.new_empty(2, 4)
    write(out, 0, x[:, :2])
    write(out, 1, -x[:, 2:])
    out /= out.norm(dim=1, keepdim=True)
    return out


def _columns(out: Tensor, first: int) -> Tensor:
    return torch.arange(first, 4, 2, device=out.device)


WRITES: dict[str, Callable[[Tensor, int, Tensor], object]] = {
    "slices": lambda out, first, half: out.__setitem__((slice(None), slice(first, None, 2)), half),
    "index_copy_": lambda out, first, half: out.index_copy_(1, _columns(out, first), half),
    "scatter_": lambda out, first, half: out.scatter_(1, _columns(out, first).expand(2, 2), half),
}

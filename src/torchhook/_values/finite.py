"""NaN and Inf: whether a tensor may hold one, how many, and what is left without them.

The first is one sum: a finite sum has finite terms. Only where it is not finite are the terms looked at, because the
sum itself may overflow.
"""

from __future__ import annotations

import cmath
from typing import NamedTuple

import torch
from torch import Tensor

from torchhook._values.elements import UNREADABLE, floats, in_one_dim

# Sums of half precision overflow too easily.
_SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def probe(tensor: Tensor) -> bool | Tensor:
    """Whether a tensor may hold a NaN or Inf; off the CPU, where asking means waiting, its sum instead.

    >>> probe(torch.ones(3)), probe(torch.tensor([1.0, float("nan")])), probe(torch.tensor([1]))
    (False, True, False)
    """
    try:
        plain = floats(tensor)
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


class Finite(NamedTuple):
    """The finite values of a tensor in one dim, and how many others there are."""

    values: Tensor
    nans: int
    pos_infs: int
    neg_infs: int

    @property
    def bad(self) -> int:
        return self.nans + self.pos_infs + self.neg_infs


def finite(tensor: Tensor) -> Finite:
    """The finite values of a real tensor.

    >>> finite(torch.tensor([1.0, float("nan"), 2.0, -float("inf")]))
    Finite(values=tensor([1., 2.]), nans=1, pos_infs=0, neg_infs=1)
    """
    flat = in_one_dim(tensor)
    good = flat.isfinite()
    if bool(good.all()):
        return Finite(flat, 0, 0, 0)
    bad = flat[~good]
    nans, pos_infs = int(bad.isnan().sum()), int(bad.isposinf().sum())
    return Finite(flat[good], nans, pos_infs, bad.numel() - nans - pos_infs)

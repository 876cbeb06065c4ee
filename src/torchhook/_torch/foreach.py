"""Torch's private functions over lists of tensors: where one is gone, the tensors are taken one by one.

On a GPU they need one launch for many tensors; a model has hundreds of parameters, most of them small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = Sequence[Tensor]


def _copy(into: Tensors, tensors: Tensors) -> None:
    for copy, tensor in zip(into, tensors, strict=True):
        copy.copy_(tensor)


def _subtract(from_: Tensors, tensors: Tensors) -> None:
    for one, other in zip(from_, tensors, strict=True):
        one.sub_(other)


def _norms(tensors: Tensors, order: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


_each_norm: Callable[[Tensors, int, torch.dtype], Any] = getattr(torch, "_foreach_norm", _norms)


def norms(tensors: Tensors) -> Any:
    """The Euclidean norm of each, in double precision: no square is too large or too small for it."""
    return _each_norm(tensors, 2, torch.float64)


copy_: Callable[[Tensors, Tensors], Any] = getattr(torch, "_foreach_copy_", _copy)
"""The first of each pair becomes like the second."""

sub_: Callable[[Tensors, Tensors], Any] = getattr(torch, "_foreach_sub_", _subtract)
"""From the first of each pair, the second is taken."""

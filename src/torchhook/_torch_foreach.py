"""Torch's private functions over lists of tensors, as ``_torch``: where one is gone, the tensors are taken one by one.

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


norms: Callable[[Tensors], Any] = getattr(
    torch, "_foreach_norm", lambda tensors: [torch.linalg.vector_norm(tensor) for tensor in tensors]
)
"""The Euclidean norm of each."""

copy_: Callable[[Tensors, Tensors], Any] = getattr(torch, "_foreach_copy_", _copy)
"""The first of each pair becomes like the second."""

sub_: Callable[[Tensors, Tensors], Any] = getattr(torch, "_foreach_sub_", _subtract)
"""From the first of each pair, the second is taken."""

"""Whether a model still has the weights that it was made with."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from torchhook._core.index import Index
from torchhook._core.offload import loaded
from torchhook._values.elements import measurable
from torchhook._values.subclasses import local

_FEW = 64  # with fewer weights, that all stay within a bound is no sign


def untrained(index: Index) -> bool:
    """Whether the weights of a model look random, wherever that can be told.

    >>> untrained(Index(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))))
    True
    """
    told = False
    for module in index.distinct.values():
        made = _as_made(module)
        if made is False:
            return False  # and no other weight is looked at
        told = told or made is True
    return told


def _as_made(module: nn.Module) -> bool | None:
    """Whether the weights of a module are as it was made; ``None`` where they do not tell."""
    own = [p for p in module._parameters.values() if p is not None]
    if not own or not all(measurable(p) and p.is_floating_point() for p in own):
        return None
    with loaded(module), torch.no_grad():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return True if _all(module.bias, 0.0) else _within_bound(module)
        # A norm, of torch or of a library: a scale of ones and a shift of zeros.
        scale, shift = getattr(module, "weight", None), getattr(module, "bias", None)
        if not isinstance(scale, Tensor) or scale.dim() != 1:
            return None
        made = _all(scale, 1.0)
        return made if not isinstance(shift, Tensor) else bool(made and _all(shift, 0.0))


def _all(tensor: Tensor | None, value: float) -> bool | None:
    return None if tensor is None else bool((local(tensor) == value).all())


def _within_bound(module: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) -> bool | None:
    """Whether the weights fill PyTorch's own bounds to the edge, and stay inside: training keeps to no bound."""
    weight = local(module.weight)
    bound, top = 1 / math.sqrt(weight[0].numel()), float(weight.abs().max())
    if weight.numel() < _FEW and top <= bound:
        return None
    if 0.95 * bound <= top <= bound * (1 + 1e-3):
        return True
    # Other ways to draw weights keep to other bounds, but leave the bias at zero, which was asked before.
    return None if module.bias is None else False

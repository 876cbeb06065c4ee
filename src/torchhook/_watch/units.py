"""Units of a rectifier: where they are in a value, and whether they live."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._core.index import Index
from torchhook._core.select import Target
from torchhook._core.taps import Look
from torchhook._recording.address import Site
from torchhook._values.elements import measurable, real
from torchhook._values.layout import channel_dim, spatial_dims

# Only those whose output is exactly zero for all that is below zero: a unit of a GELU or a leaky ReLU still learns.
_RECTIFIERS = (nn.ReLU, nn.ReLU6)
_RECTIFYING = frozenset({"relu", "relu_", "relu6"})


def rectifies(module: nn.Module, op: str | None) -> bool:
    """Whether nothing passes here that is below zero, and zero is what a dead unit says."""
    return op in _RECTIFYING if op is not None else isinstance(module, _RECTIFIERS)


class Units:
    """Finds the dim of a value's units by the layer that last made a value of this shape: ``(N, C, T)`` of a Conv1d
    and ``(N, T, D)`` of a Linear look the same."""

    def __init__(self, index: Index) -> None:
        self._sequences = any(spatial_dims(module) == 1 for module in index.modules.values())
        self.dims: dict[torch.Size, int] = {}
        """By shape, in the running step."""

    def look(self, module: nn.Module) -> Look:
        """At the output of a layer."""

        by_dims: dict[int, int | None] = {}

        def look(value: Any, call: int) -> None:
            if isinstance(value, Tensor) and not value.is_nested:  # which may have no shape at all
                dims = value.ndim
                if dims not in by_dims:
                    by_dims[dims] = channel_dim(module, dims)
                if (dim := by_dims[dims]) is not None:
                    self.dims[value.shape] = dim

        return look

    def begin(self) -> None:
        """A step begins: what the layers made in another says nothing of it."""
        self.dims.clear()

    def dim(self, tensor: Tensor) -> int | None:
        """Which dim of what a rectifier returns tells its units apart; none where that is unknown."""
        if tensor.dim() < 2 or not measurable(tensor):
            return None
        unit = self.dims.get(tensor.shape)
        if unit is None:
            # In a model with both kinds, three dims may be (N, C, T) or (N, T, D): better no answer than a wrong one.
            if tensor.dim() == 3 and self._sequences:
                return None
            unit = 2 if tensor.dim() == 3 else 1
        return unit


def alive(tensor: Tensor, unit: int) -> Tensor:
    """For each unit of a rectifier, whether it is anything but zero somewhere."""
    # Nothing is below zero after a rectifier, so the greatest value tells, in one pass and without a copy.
    return real(tensor.detach()).amax([dim for dim in range(tensor.dim()) if dim != unit]) != 0


def layers(index: Index) -> Iterator[Target]:
    """The layers that tell where units are."""
    for module in index.distinct.values():
        if channel_dim(module, 4) is not None:
            yield Target(Site(index.names(module)[0]), module)

"""Units of a rectifier: where they are in a value, and whether they live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchhook._core.index import Index
from torchhook._core.taps import Look
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._values.elements import measurable, real
from torchhook._values.layout import channel_dim, spatial_dims

# Only those whose output is exactly zero for all that is below zero: a unit of a GELU or a leaky ReLU still learns.
_RECTIFIERS = (nn.ReLU, nn.ReLU6)
_RECTIFYING = frozenset({"relu", "relu_", "relu6"})


def rectifies(module: nn.Module, op: str | None) -> bool:
    """Whether nothing passes here that is below zero, and zero is what a dead unit says."""
    return op in _RECTIFYING if op is not None else isinstance(module, _RECTIFIERS)


class Made:
    """Whose units a value has: those of a layer, as it made them, or as they are when a rectifier has seen them.

    A rectifier that is called behind two layers has the units of both; one that is called twice behind the same layer,
    in a loop say, has the same units twice.
    """

    __slots__ = ("_after", "dim", "key")

    def __init__(self, dim: int, layer: int, uses: int = 0) -> None:
        self.dim: int = dim
        """Which dim of the value tells them apart."""
        self.key: tuple[int, int] = (layer, uses)
        """The same in every step."""
        self._after: Made | None = None

    @property
    def after(self) -> Made:
        """Once a rectifier has seen them: what it makes of a value that no layer made since has other units."""
        if self._after is None:
            self._after = Made(self.dim, self.key[0], self.key[1] + 1)
        return self._after


class Living(NamedTuple):
    """Which units of a rectifier live, of those that it has in one or several of its calls."""

    call: int
    """The first of them."""
    key: tuple[int, int]
    mask: NDArray[Any]


class Units:
    """Finds the units of a value by the layer that last made one of this shape: ``(N, C, T)`` of a Conv1d and
    ``(N, T, D)`` of a Linear look the same."""

    def __init__(self, index: Index) -> None:
        self._sequences = any(spatial_dims(module) == 1 for module in index.modules.values())
        self.made: dict[torch.Size, Made] = {}
        """By shape, in the running call of the model."""
        self._unknown: dict[str, int] = {}

    def look(self, module: nn.Module) -> Look:
        """At the output of a layer."""

        by_dims: dict[int, Made | None] = {}

        def look(value: Any, call: int) -> None:
            if isinstance(value, Tensor) and not value.is_nested:  # which may have no shape at all
                dims = value.ndim
                if dims not in by_dims:
                    dim = channel_dim(module, dims)
                    by_dims[dims] = None if dim is None else Made(dim, id(module))
                if (made := by_dims[dims]) is not None:
                    self.made[value.shape] = made

        return look

    def begin(self) -> None:
        """A call of the model begins: what the layers made in another says nothing of it."""
        self.made.clear()
        self._unknown.clear()

    def take(self, tensor: Tensor, site: str) -> Made | None:
        """The units of what a rectifier returns; none where they are unknown."""
        if tensor.dim() < 2 or not measurable(tensor):
            return None
        made = self.made.get(tensor.shape)
        if made is not None:
            self.made[tensor.shape] = made.after
            return made
        # In a model with both kinds, three dims may be (N, C, T) or (N, T, D): better no answer than a wrong one.
        if tensor.dim() == 3 and self._sequences:
            return None
        # No layer is known to have made them, so that nothing says that two calls have the same.
        call = self._unknown[site] = self._unknown.get(site, -1) + 1
        return Made(2 if tensor.dim() == 3 else 1, 0, call)


def alive(tensor: Tensor, unit: int) -> Tensor:
    """For each unit of a rectifier, whether it is anything but zero somewhere."""
    # Nothing is below zero after a rectifier, so the greatest value tells, in one pass and without a copy.
    return real(tensor.detach()).amax([dim for dim in range(tensor.dim()) if dim != unit]) != 0


def living(calls: Sequence[tuple[NDArray[Any], Made] | None]) -> list[Living]:
    """Which units live, of the calls of a rectifier in a step; a call with the same units as another is no new one."""
    if len(calls) == 1:  # as most
        return [] if calls[0] is None else [Living(0, calls[0][1].key, calls[0][0])]
    found: dict[Any, Living] = {}
    for call, units in enumerate(calls):
        if units is not None:
            mask, made = units
            which = made.key, mask.size
            known = found.get(which)
            # A unit that lives in any call of the step is alive.
            found[which] = Living(call, made.key, mask) if known is None else known._replace(mask=known.mask | mask)
    return list(found.values())


def layers(index: Index) -> Iterator[Target]:
    """The layers that tell where units are."""
    for module in index.distinct.values():
        if channel_dim(module, 4) is not None:
            yield Target(Site(index.names(module)[0]), module)

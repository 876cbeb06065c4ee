"""What the dimensions of a value mean: maps of channels, tokens, rows."""

from __future__ import annotations

import math

from torch import Tensor

_FEW_POSITIONS = 16  # with fewer, a channel that is zero everywhere says nothing
_PREFIX = 6  # class, distillation and register tokens come before the patches


def maps_of(value: Tensor, patches: bool = False) -> Tensor | None:
    """The first sample as channels × height × width, or ``None`` if it has no such shape.

    ``patches`` says that the input was an image, so that tokens may be its patches.

    >>> import torch
    >>> maps_of(torch.zeros(2, 8, 5, 5)).shape, maps_of(torch.zeros(1, 10, 64), patches=True).shape
    (torch.Size([8, 5, 5]), torch.Size([64, 3, 3]))
    """
    if value.dim() == 5:
        value = value[:, :, value.shape[2] // 2]
    if value.dim() == 4:
        sample = value[0]
        if _is_channels_last(value):
            sample = sample.permute(2, 0, 1)
        return sample if min(sample.shape[1:]) > 1 else None
    if value.dim() == 3 and patches:
        tokens = value.shape[1]
        side = math.isqrt(tokens)
        if side > 2 and 0 <= tokens - side * side < _PREFIX:
            return value[0, tokens - side * side :].T.reshape(-1, side, side)
    return None


def channels_first(value: Tensor) -> Tensor | None:
    """A value as channels × positions, or ``None`` where that cannot be told or there are too few positions."""
    if value.dim() < 3 or value.is_quantized or value.is_complex():
        return None
    last = value.dim() == 3 or (value.dim() == 4 and _is_channels_last(value))
    channels = value.movedim(-1 if last else 1, 0).flatten(1)
    return channels if channels.shape[1] >= _FEW_POSITIONS and channels.shape[0] > 1 else None


def _is_channels_last(value: Tensor) -> bool:
    _, a, b, c = value.shape
    return a == b != c and c >= 16

"""What the dimensions of a value mean: maps of channels, tokens, rows."""

from __future__ import annotations

import math

from torch import Tensor, nn

from torchhook._cam.layer_choice import Grids
from torchhook._cam.layout import infer
from torchhook._core.session import Session
from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook.errors import LayoutError
from torchhook.plot.values import looks_channels_last

_FEW_POSITIONS = 16  # with fewer, a channel that is zero everywhere says nothing
_PREFIX = 6  # class, distillation and register tokens come before the patches
_FIRST = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
)


class Channels:
    """Where the channels of a run's values are: by the layer, by the size of the input and the grids of convolutions,
    and by the shape alone where these do not tell."""

    def __init__(self, inputs: Inputs) -> None:
        images = [t for t in tree.tensors(inputs) if t.is_floating_point() and t.dim() >= 4]
        image = max(images, key=Tensor.dim, default=None)
        self._size = () if image is None else tuple(image.shape[2:])
        self._examples = 0 if image is None else image.shape[0]
        self._grids = Grids(len(self._size))

    def watch(self, session: Session) -> None:
        """See the grids of the convolutions; before anything else looks at them."""
        self._grids.watch(session)

    def last(self, module: nn.Module, value: Tensor) -> bool:
        """Whether what the module gave has its channels last."""
        if value.dim() < 4:
            return value.dim() == 3 and not isinstance(module, _FIRST)
        if isinstance(module, _FIRST):
            return False
        if isinstance(module, nn.Linear) or type(module) is nn.LayerNorm:
            return not isinstance(module, nn.LayerNorm) or len(module.normalized_shape) == 1
        if value.dim() == len(self._size) + 2:
            try:
                return infer(value.shape, self._size, self._examples, self._grids.seen).kind == "channels_last"
            except LayoutError:
                pass
        return looks_channels_last(value.shape[1:])


def maps_of(value: Tensor, patches: bool = False, last: bool | None = None) -> Tensor | None:
    """The first sample as channels × height × width, or ``None`` if it has no such shape.

    ``patches`` says that the input was an image, so that tokens may be its patches; ``last`` that channels are last,
    where that is known.

    >>> import torch
    >>> maps_of(torch.zeros(2, 8, 5, 5)).shape, maps_of(torch.zeros(1, 10, 64), patches=True).shape
    (torch.Size([8, 5, 5]), torch.Size([64, 3, 3]))
    """
    if value.dim() in (4, 5):
        sample = value[0].movedim(-1, 0) if _is_last(value, last) else value[0]
        sample = sample[:, sample.shape[1] // 2] if sample.dim() == 4 else sample
        return sample if min(sample.shape[1:]) > 1 else None
    if value.dim() == 3 and patches:
        tokens = value.shape[1]
        side = math.isqrt(tokens)
        if side > 2 and 0 <= tokens - side * side < _PREFIX:
            return value[0, tokens - side * side :].T.reshape(-1, side, side)
    return None


def channels_first(value: Tensor, last: bool | None = None) -> Tensor | None:
    """A value as channels × positions, or ``None`` where that cannot be told or there are too few positions."""
    if value.dim() < 3 or value.is_quantized or value.is_complex():
        return None
    channels = value.movedim(-1 if _is_last(value, last) else 1, 0).flatten(1)
    return channels if channels.shape[1] >= _FEW_POSITIONS and channels.shape[0] > 1 else None


def _is_last(value: Tensor, last: bool | None) -> bool:
    if last is not None:
        return last
    return value.dim() == 3 or looks_channels_last(value.shape[1:])

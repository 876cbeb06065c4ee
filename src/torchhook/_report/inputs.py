"""What went in, as something to look at: an image, or tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchhook._report import pictures
from torchhook._report.facts import Picture, Token
from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook.errors import require

_SIDE = 448
_BYTES = 64  # bytes go further than this, unless the picture is nearly black
_TOKENS = 512


def image_tensor(inputs: Inputs) -> Tensor | None:
    """The first input that looks like a batch of images."""
    for tensor in tree.tensors(inputs):
        if tensor.dim() == 4 and tensor.shape[1] in (1, 3) and min(tensor.shape[2:]) > 7 and tensor.is_floating_point():
            return tensor
    return None


def picture(image: Any, tensor: Tensor | None) -> Picture | None:
    """The image that was given, or the input turned back into one."""
    pixels = _pixels(tensor[0]) if image is None and tensor is not None else _given(image)
    if pixels is None:
        return None
    pillow = require("PIL.Image", "report")
    shown = pillow.fromarray(pixels)
    shown.thumbnail((_SIDE, _SIDE))
    return Picture(pictures.uri(shown.convert("RGB"), "WEBP", quality=85), *shown.size)


def _given(image: Any) -> Any:
    if image is None:
        return None
    if isinstance(image, (str, os.PathLike)):
        with require("PIL.Image", "report").open(image) as opened:
            return np.asarray(opened.convert("RGB"))
    if isinstance(image, Tensor):
        image = image[0] if image.dim() == 4 else image
        return _pixels(image) if image.is_floating_point() else _last(image).cpu().numpy()
    return np.asarray(image.convert("RGB") if hasattr(image, "convert") else image)


def _last(image: Tensor) -> Tensor:
    image = image.permute(1, 2, 0) if image.dim() == 3 and image.shape[0] in (1, 3) else image
    return image[..., 0] if image.dim() == 3 and image.shape[-1] == 1 else image


def _pixels(image: Tensor) -> Any:
    """Undo the usual normalisations: none, bytes, [-1, 1], or the means of ImageNet; else stretch what there is."""
    image = image.detach().float().cpu().nan_to_num(0.0, 0.0, 0.0)
    low, high = float(image.min()), float(image.max())
    if low >= 0 and _BYTES < high <= 255:
        image = image / 255
    elif low < 0 and low >= -1.001 and high <= 1.001:
        image = (image + 1) / 2
    elif low < 0 and image.shape[0] == 3:
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        image = image * std[:, None, None] + mean[:, None, None]
    elif low < 0 or high > 1.02:
        image = (image - low) / max(high - low, 1e-12)
    return _last(image).clamp(0, 1).mul(255).round().byte().numpy()


def tokens_of(inputs: Inputs, texts: Sequence[str] | None) -> list[Token]:
    """The tokens of the first sample: as text where that was given, as numbers where not."""
    if texts is not None:
        return [Token(str(text)) for text in texts[:_TOKENS]]
    for tensor in tree.tensors(inputs):
        if tensor.dtype in (torch.int64, torch.int32) and tensor.dim() == 2 and tensor.shape[1] > 0:
            return [Token(str(number)) for number in tensor[0, :_TOKENS].tolist()]
    return []

"""What went in, as something to look at: an image, or tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchhook._report import pictures
from torchhook._report.facts import Picture, Token
from torchhook._values import tree
from torchhook._values.images import pixels
from torchhook._values.tree import Inputs
from torchhook.errors import require

# Shown at most 340 pixels wide, see report.css; the rest is for dense screens.
_SIDE = 448
_TOKENS = 512


def image_tensor(inputs: Inputs) -> Tensor | None:
    """The first input that looks like a batch of images."""
    for tensor in tree.tensors(inputs):
        if tensor.dim() == 4 and tensor.shape[1] in (1, 3) and min(tensor.shape[2:]) > 7 and tensor.is_floating_point():
            return tensor
    return None


def reads(inputs: Inputs) -> bool:
    """Whether the input is tokens: a table of whole numbers, and no image beside it."""
    return image_tensor(inputs) is None and bool(tokens_of(inputs, None))


def picture(image: Any, tensor: Tensor | None) -> Picture | None:
    """The image that was given, or the input turned back into one."""
    given = image if image is not None or tensor is None else tensor[:1]
    if given is None:
        return None
    unit = pixels(given)[0].astype(np.float32)  # bytes over 255 are whole again at this precision
    shown = require("PIL.Image", "report").fromarray((unit * 255).round().astype(np.uint8))
    # Not resize(): this keeps the proportions, and never enlarges.
    shown.thumbnail((_SIDE, _SIDE))
    return Picture(pictures.uri(shown, "WEBP", quality=85), *shown.size)


def tokens_of(inputs: Inputs, texts: Sequence[str] | None) -> list[Token]:
    """The tokens of the first sample: as text where that was given, as numbers where not."""
    if texts is not None:
        return [Token(str(text)) for text in texts[:_TOKENS]]
    for tensor in tree.tensors(inputs):
        # The first will do: masks and segments are whole numbers too, and tokenizers put the ids before them.
        if tensor.dtype in (torch.int64, torch.int32) and tensor.dim() == 2 and tensor.shape[1] > 0:
            return [Token(str(number)) for number in tensor[0, :_TOKENS].tolist()]
    return []

"""What a user calls an image, as pixels: read, channels last, and its normalization undone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchhook.errors import require

Array: TypeAlias = NDArray[Any]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_NEAR = 0.02
_RINGING = 0.25  # an image that was normalized and then resized goes beyond its ends at sharp edges
_BYTES = 64  # bytes go further than this, unless the picture is nearly black


def pixels(image: Any) -> list[Array]:
    """Images as height × width × 3 in [0, 1], whatever they were.

    >>> [one.shape for one in pixels(torch.zeros(2, 1, 4, 5))]
    [(4, 5, 3), (4, 5, 3)]

    That is a path, an image of pillow, or a list of these; a tensor or array, channels first or last, of one image or a
    batch, of a volume (its middle slice); in bytes, in [0, 1], in [-1, 1] or normalized as for ImageNet.
    """
    if isinstance(image, (list, tuple)) and image and all(_is_file(one) or _is_pillow(one) for one in image):
        return [found for one in image for found in pixels(one)]
    array = _array(image)
    shape = array.shape
    if array.ndim == 5:
        array = array[:, :, array.shape[2] // 2]
    if array.ndim == 2:
        array = array[None]
    if array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or not {array.shape[1], array.shape[-1]} & {1, 3, 4}:
        raise ValueError(
            f"image: expected height × width, with 1, 3 or 4 channels first or last, or a batch of these; found shape "
            f"{shape}."
        )
    if array.shape[-1] not in (1, 3, 4):
        array = np.moveaxis(array, 1, -1)
    units = map(_unit, array[..., :3])  # without opacity
    return [np.repeat(one, 3, -1) if one.shape[-1] == 1 else one for one in units]


def _array(image: Any) -> Array:
    """The numbers of an image; bytes are brought to [0, 1], since they cannot be anything else."""
    if _is_file(image):
        with require("PIL.Image", "images").open(image) as opened:
            image = _of_pillow(opened)
    elif _is_pillow(image):
        image = _of_pillow(image)
    if isinstance(image, Tensor):
        array: Array = (image if image.dtype == torch.uint8 else image.detach().float()).cpu().numpy()
    else:
        array = np.asarray(image)
    return array.astype(np.float64) / (255 if array.dtype == np.uint8 else 1)


def _of_pillow(image: Any) -> Array:
    # Wide numbers are kept: pillow would cut them off at 255.
    return np.asarray(image if image.mode[0] in "FI" else image.convert("RGB"))


def _is_file(image: Any) -> bool:
    return isinstance(image, (str, os.PathLike))


def _is_pillow(image: Any) -> bool:
    return hasattr(image, "convert") and hasattr(image, "mode")


def _unit(image: Array) -> Array:
    """An image in [0, 1], by the likeliest of the usual scales; stretched where none of them is likely."""
    known: Array = np.where(np.isfinite(image), image, np.nan)
    if np.isnan(known).all():
        return np.zeros_like(image)
    likely = (one for one, beyond in _usual(known) if np.nanmin(one) >= -beyond and np.nanmax(one) <= 1 + beyond)
    found = next(likely, None)
    unit: Array = np.nan_to_num(np.clip(_stretched(known) if found is None else found, 0, 1))
    return unit


def _usual(image: Array) -> Iterator[tuple[Array, float]]:
    """An image by each of the usual scales, and how far beyond [0, 1] it may go."""
    yield image, _NEAR
    if np.nanmin(image) < 0:
        yield (image + 1) / 2, _NEAR
        if image.shape[-1] == 3:
            yield image * IMAGENET_STD + IMAGENET_MEAN, _RINGING
    elif np.nanmax(image) > _BYTES:
        yield image / 255, _NEAR


def _stretched(image: Array) -> Array:
    """From the smallest to the largest value as 0 to 1, a few outliers aside; what is constant is grey."""
    low, high = np.nanpercentile(image, [0.1, 99.9])
    if low == high:
        low, high = np.nanmin(image), np.nanmax(image)
    stretched: Array = (image - low) / (high - low) if high > low else np.where(np.isnan(image), image, 0.5)
    return stretched

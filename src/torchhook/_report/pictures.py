"""Tensors as small PNG pictures in data URIs."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchhook._report.facts import Sprite
from torchhook._values.layout import Layout
from torchhook._values.subclasses import local
from torchhook._words import counted
from torchhook.errors import require

# Written out here: only the plots import matplotlib.
# A few colors of each map; those between are mixed from their neighbors.
_VIRIDIS = "440154 472d7b 3b528b 2c728e 21918c 28ae80 5ec962 addc30 fde725"
_MAGMA = "000004 1d1147 51127c 822681 b73779 e75263 fc8961 fec488 fcfdbf"
_NOT_FINITE = (255, 0, 128)
_LEVELS = 254  # the last color is kept for what is not finite
_COLUMNS = 8


def uri(image: Any, kind: str = "PNG", **options: Any) -> str:
    """A pillow image as a data URI."""
    data = io.BytesIO()
    image.save(data, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"


def colors(anchors: str) -> Tensor:
    """256 colors, each as three bytes."""
    known = torch.tensor([list(bytes.fromhex(color)) for color in anchors.split()], dtype=torch.float32)
    mixed = F.interpolate(known.T[None], _LEVELS + 1, mode="linear", align_corners=True)[0].T
    return torch.cat([mixed.round().byte(), torch.tensor([_NOT_FINITE], dtype=torch.uint8)])


def levels(maps: Tensor) -> Tensor:
    """Each map from its smallest to its largest value as 0 to 254, outliers clipped; what is not finite is 255."""
    # Maps come here small: quantiles of more than 2**24 values are refused.
    maps = maps.detach().float()
    flat = maps.flatten(1)
    known = torch.where(flat.isfinite(), flat, flat.new_full((), torch.nan))
    low, high = known.nanquantile(torch.tensor([0.002, 0.998], device=flat.device), dim=1)[..., None, None]
    span = torch.where(high > low, high - low, torch.ones_like(high))
    scaled = ((maps - low) / span).clamp(0, 1).mul(_LEVELS).round()
    # Huge values overflow their own span, Inf / Inf, and what a NaN becomes as a byte is undefined.
    return torch.where(maps.isfinite(), scaled, 255.0).nan_to_num(255.0).byte()


def sprite(maps: Tensor, labels: Sequence[str], what: str, side: int) -> Sprite:
    """Maps (number × height × width) beside each other, none larger than ``side``."""
    maps = _smaller(maps, side, side)
    number, height, width = maps.shape
    columns = min(number, _COLUMNS)
    rows = -(-number // columns)
    sheet = torch.zeros(rows * columns, height, width, dtype=torch.uint8)
    sheet[:number] = levels(maps).cpu()
    pixels = sheet.reshape(rows, columns, height, width).permute(0, 2, 1, 3).reshape(rows * height, columns * width)
    return Sprite(_indexed(pixels), columns, width, height, list(labels), what)


def feature_maps(value: Tensor, layout: Layout | None, number: int, side: int, tokens: bool = False) -> Sprite | None:
    """The strongest channels of the first sample, or all of a value that has no maps as one picture.

    ``tokens`` says that the input is tokens, and so is what lies along the places of a value.
    """
    value = local(value)
    if not value.numel() or value.is_complex() or value.dim() == 0:
        return None
    value = value.dequantize() if value.is_quantized else value.detach().float()
    if layout is None or len(layout.grid) not in (2, 3) or min(layout.grid[-2:]) < 2:
        return _matrix(value, layout, side, tokens)
    maps = layout.picture(value)
    # A sort takes NaN for the largest of all: one bad pixel would bring its channel to the front.
    finite = maps.nan_to_num(0.0, 0.0, 0.0)
    # Stable, for dead channels are all alike: the same page each time.
    order = finite.flatten(1).std(1, correction=0).argsort(descending=True, stable=True)[:number]
    # Not their mean: before an activation, signs cancel in it, and of deep layers noise is left. Where no channel is
    # finite there is nothing to show either.
    norm = finite.norm(dim=0, keepdim=True).where(maps.isfinite().any(0, keepdim=True), torch.nan)
    chosen = torch.cat([norm if len(maps) > 1 else maps, maps[order]])
    labels = ["norm", *(f"channel {int(i)}" for i in order)]
    which = (
        f"the {len(order)} of {len(maps)} channels" if len(order) < len(maps) else f"all {len(maps)} channels, those"
    )
    what = f"norm and {which} that vary most{' first' if len(order) == len(maps) else ''}"
    return sprite(chosen, labels, what if len(maps) > 1 else "the only channel", side)


def _matrix(value: Tensor, layout: Layout | None, side: int, tokens: bool) -> Sprite | None:
    rows = value[0] if value.dim() >= 3 else value
    rows = rows.reshape(-1, rows.shape[-1]) if rows.dim() > 1 else rows[None]
    if rows.shape[1] < 2:
        return None
    down, across = ("example", "feature") if value.dim() < 3 else ("row", "column")
    if layout is not None and value.dim() == 3:
        down, across = "token" if tokens else "position", "channel"
        if layout.channels == 1:
            down, across = across, down
    what = f"{counted(rows.shape[0], down)} (down) × {counted(rows.shape[1], across)} (across)"
    small = _smaller(rows[None], 2 * side, 4 * side)
    small = small[:, :, : small.shape[2]]
    return Sprite(_indexed(levels(small)[0].cpu()), 1, small.shape[2], small.shape[1], ["all values"], what, "Values")


def heads(weights: Tensor, side: int, number: int = 16) -> Sprite:
    """The attention maps of the first sample: their mean, and the heads."""
    maps = weights[0].float()
    labels = ["mean", *(f"head {i}" for i in range(min(len(maps), number)))]
    what = f"{maps.shape[1]} queries (down) × {maps.shape[2]} keys (across), {counted(len(maps), 'head')}"
    made = sprite(torch.cat([maps.mean(0, keepdim=True), maps[:number]]), labels, what, side)
    made.title = "Attention"
    return made


def heat(map_: Tensor, width: int, height: int) -> str:
    """One map over an image: clear where it is low, warm where it is high."""
    pillow = require("PIL.Image", "report")
    large = F.interpolate(map_[None, None].float().cpu(), (height, width), mode="bilinear", align_corners=False)[0]
    level = levels(large)[0]
    alpha = level.float().div(_LEVELS).clamp(0, 1).sqrt().mul(255).byte()
    pixels = torch.cat([colors(_MAGMA)[level.long()], alpha[..., None]], -1)
    # JPEG has no opacity, and a PNG of soft gradients is large.
    return uri(pillow.fromarray(pixels.numpy()), "WEBP", quality=80)


def _indexed(pixels: Tensor) -> str:
    pillow = require("PIL.Image", "report")
    image = pillow.fromarray(pixels.numpy())
    # A palette takes a byte for each pixel, not three, and PNG keeps every level as it is.
    image.putpalette(bytes(colors(_VIRIDIS).flatten().tolist()))
    return uri(image, "PNG", optimize=True)


def _smaller(maps: Tensor, height: int, width: int) -> Tensor:
    size = (min(maps.shape[1], height), min(maps.shape[2], width))
    if size == tuple(maps.shape[1:]):
        return maps
    if maps.shape[1] == maps.shape[2] == 0:
        return maps
    if height == width:  # keep the shape of a map that is not square
        scale = max(maps.shape[1] / height, maps.shape[2] / width)
        size = (max(1, round(maps.shape[1] / scale)), max(1, round(maps.shape[2] / scale)))
    # Every value counts, where interpolation would look at a few and miss a lone bright pixel.
    return F.adaptive_avg_pool2d(maps.float(), size)

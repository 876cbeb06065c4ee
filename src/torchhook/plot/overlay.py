"""``overlay``: heat maps on the images they belong to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from torchhook._values.images import pixels
from torchhook._words import counted
from torchhook.plot import style
from torchhook.plot.values import Array, flaws, limits


def overlay(
    image: Any,
    heat: Any,
    *,
    alpha: float = 0.65,
    cmap: str = "inferno",
    titles: list[str] | None = None,
    bar: bool = True,
    ax: Any = None,
    fig: Any = None,
) -> Any:
    """Draw heat maps over images; where a map is low, the image shows through.

    >>> figure = overlay(torch.rand(1, 3, 32, 32), torch.rand(1, 8, 8))

    ``image`` is a path, an image of pillow, or a list of these; or a tensor or array, channels first or last, gray or
    color, of one image or a batch, in bytes, in [0, 1], in [-1, 1] or normalized as for ImageNet. ``heat`` is a map, or
    one for each image, of any size; of a volume the middle slice is shown. ``alpha`` is the opacity of the highest
    value.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}: give an opacity from 0 to 1.")
    pictures, heats = pixels(image), _heats(heat)
    if len(pictures) != len(heats) and len(pictures) != 1:
        raise ValueError(f"{counted(len(heats), 'map')} cannot lie over {counted(len(pictures), 'image')}.")
    given = [""] * len(heats) if titles is None else list(titles)
    if len(given) != len(heats):
        raise ValueError(f"{counted(len(given), 'title')} cannot stand over {counted(len(heats), 'map')}.")
    labels = [" · ".join(part for part in (text, flaws(one)) if part) for text, one in zip(given, heats, strict=True)]
    side = 3.4 if len(heats) == 1 else 2.2
    figure, axes = style.panels(len(heats), ax, fig, side, head=False, titles=any(labels), bar=bar)
    drawn = None
    for i, (panel, one, label) in enumerate(zip(axes, heats, labels, strict=True)):
        picture = pictures[min(i, len(pictures) - 1)]
        drawn = draw(panel, picture, one, alpha, cmap)
        if label:
            style.title(panel, label, small=True)
    # A bar beside all panels is true only if it is true of each.
    one_scale = all(np.allclose(limits(one, clip=0), limits(heats[0], clip=0), rtol=0.1, atol=0.1) for one in heats)
    if bar and ax is None and drawn is not None and one_scale:
        style.colorbar(axes[0], drawn, over=axes)
    return figure


def draw(ax: Any, picture: Array, heat: Array, alpha: float, cmap: str, clip: float = 0.0) -> Any:
    """One image with its map, and the scale of its colors, which leaves out ``clip`` percent at either end."""
    size = picture.shape[:2]
    # imshow counts in pixels: a map of 8 × 8 would lie in the corner of its image.
    resized = F.interpolate(torch.from_numpy(heat)[None, None].float(), size, mode="bilinear")[0, 0].numpy()
    low, high = limits(heat, clip)
    scaled = np.nan_to_num(np.clip((resized - low) / (high - low), 0, 1), nan=0.0)
    # A map without differences points nowhere, and would tint all of the image.
    if not np.ptp(heat[np.isfinite(heat)] if np.isfinite(heat).any() else np.zeros(1)):
        scaled = np.zeros_like(scaled)
    ax.imshow(picture, interpolation="bilinear")
    colors = style.scale(low, high, cmap)
    # In the map's own numbers again, which the color bar shows. An exponent below 1 keeps the middle of them visible.
    ax.imshow(scaled * (high - low) + low, cmap=colors.cmap, norm=colors.norm, alpha=alpha * scaled**0.75)
    style.quiet(ax)
    return colors


def _heats(heat: Any) -> list[Array]:
    array: Array = heat.detach().cpu().float().numpy() if isinstance(heat, Tensor) else np.asarray(heat, np.float32)
    # Not channels: maps have none, so that a further dim is the depth of a volume.
    if array.ndim == 4 and array.shape[1] > 1:
        array = array[:, array.shape[1] // 2]
    if array.ndim == 4:
        array = array[:, 0]
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3:
        raise ValueError(f"heat: expected a map or a batch of maps, found shape {tuple(np.shape(heat))}.")
    return list(array)

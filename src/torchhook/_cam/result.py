"""What ``cam`` returns."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchhook._recording.address import Site
from torchhook._recording.tables import Table, facts, picture

_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
_SHOWN = 4  # maps that a notebook shows
_ROUNDING = 32  # units in the last place: what convolving and resizing a constant leaves behind


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CAM:
    """Class activation maps, one for each example, and how they were made."""

    map: Tensor
    """Batch × size of the input, each example's map stretched to [0, 1]; zero where a map is constant."""
    raw: Tensor
    """Batch × grid of the layer, as the formula gives it: with its sign, before ReLU, resizing and stretching."""
    layer: Site
    """The layer, by its address."""
    chosen: bool
    """Whether the layer was chosen by rule: the last whose map the score depends on in more than one place."""
    target: list[int] | str
    """The class of each example, or the name of the function that was asked."""
    scores: Tensor
    """The score that is explained, one for each example."""
    method: str
    layout: str
    """How the layer's output was read."""
    names: list[str] | None = None
    """What the class of each example is called, with its number; ``None`` where nobody knows."""

    def overlay(self, image: Any, **options: Any) -> Any:
        """Draw the maps over the images and return the figure; options are those of ``th.plot.overlay``."""
        from torchhook.plot import overlay

        return overlay(image, self.map, **{"titles": self._titles(), **options})

    def table(self) -> Table:
        """How the maps were made."""
        how = "chosen by rule: " if self.chosen else ""
        told = {
            "map": _size(self.map),
            "grid": f"{_size(self.raw)} ({self.layout})",
            "layer": f"{how}{self.layer.shown}",
            "method": self.method,
            "target": self._target(),
            "score": ", ".join(f"{score:.4g}" for score in self.scores[:_SHOWN].tolist()),
        }
        left_out = len(self.map) - _SHOWN
        return facts("Class activation maps", told, [f"… and {left_out} more examples"] if left_out > 0 else [])

    def _repr_html_(self) -> str:
        return self.table()._repr_html_() + self._pictures()

    def _pictures(self) -> str:
        """The first maps as a picture in HTML, where matplotlib is installed and they are pictures."""
        if self.map.dim() < 3 or importlib.util.find_spec("matplotlib") is None:
            return ""
        from torchhook.plot import feature_maps

        maps = {f"{i}: {title}": self.map[i : i + 1, None] for i, title in enumerate(self._titles()[:_SHOWN])}
        return picture(feature_maps(maps, cmap="inferno")._repr_png_(), f"maps of {', '.join(maps)}")

    def _titles(self) -> list[str]:
        """What each map is of: a picture that is passed on has lost the call that made it."""
        if isinstance(self.target, str):
            return [self.target] * len(self.map)
        return self.names or [f"class {number}" for number in self.target]

    def _target(self) -> str:
        return self.target if isinstance(self.target, str) else _short(self.names or self.target)

    def __repr__(self) -> str:
        how = ", chosen by rule" if self.chosen else ""
        return (
            f"CAM(map {_size(self.map)} from {_size(self.raw)}; method {self.method!r}; "
            f"layer {self.layer.shown!r}{how}: {self.layout}; target {self._target()})"
        )


def _size(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape))


def _short(parts: list[int] | list[str]) -> str:
    some = ", ".join(map(str, parts[:8]))
    return f"[{some}]" if len(parts) <= 8 else f"[{some}]… of {len(parts)}"


def upsample(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Batch × grid, resized linearly to batch × size."""
    if tuple(maps.shape[1:]) == tuple(size) or len(size) not in _MODES or maps.dim() != len(size) + 1:
        return maps
    # Pixels by their centers, as OpenCV resizes: the maps of other libraries agree.
    return F.interpolate(maps[:, None], tuple(size), mode=_MODES[len(size)], align_corners=False)[:, 0]


def stretch(maps: Tensor) -> Tensor:
    """Each map to [0, 1]; a constant one, give or take its rounding errors, to zero."""
    flat = maps.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    spread = high - low
    noise = _ROUNDING * torch.finfo(maps.dtype).eps * torch.maximum(low.abs(), high.abs())
    constant = (spread <= noise) & spread.isfinite()  # what is not finite must show, not become zero
    return ((flat - low) / spread.where(~constant, 1.0)).where(~constant, 0.0).reshape(maps.shape)

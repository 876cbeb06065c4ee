"""A folder of images as a data set, prepared the way a model wants them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from torchhook._values.images import IMAGENET_MEAN, IMAGENET_STD
from torchhook.errors import ExtractError, require

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"})


class ImageFolder(Dataset[Any]):
    """Every image below a folder, in the order of their paths. Images in folders of their own are labelled by them.

    ``ids`` are the paths, relative to the folder. Images are resized by the shorter side, cropped in the middle and
    normalized; ``for_model`` takes these settings from a timm model.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        size: int | tuple[int, int] = 224,
        crop: float = 0.875,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        interpolation: str = "bicubic",
    ) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(f"{self.root} is not a folder: data= needs the path of a folder of images.")
        found = [path for path in self.root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()]
        self.ids = sorted(path.relative_to(self.root).as_posix() for path in found)
        if not self.ids:
            raise ExtractError(f"no images below {self.root}; looked for {', '.join(sorted(SUFFIXES))}.")
        folders = [path.rpartition("/")[0] for path in self.ids]
        self.classes = sorted(set(folders)) if all(folders) else []
        numbers = {name: i for i, name in enumerate(self.classes)}
        self.labels = [numbers[folder] for folder in folders] if self.classes else None
        self.size = (size, size) if isinstance(size, int) else tuple(size)
        self.crop, self.interpolation = crop, interpolation
        self.mean = torch.tensor(mean).reshape(-1, 1, 1)
        self.std = torch.tensor(std).reshape(-1, 1, 1)

    @classmethod
    def for_model(cls, root: str | os.PathLike[str], model: nn.Module, **changes: Any) -> ImageFolder:
        """With the settings that the model carries (``pretrained_cfg``, as timm's do), else those of ImageNet."""
        known = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
        settings: dict[str, Any] = {}
        if isinstance(known, dict):
            names = {"mean": "mean", "std": "std", "crop_pct": "crop", "interpolation": "interpolation"}
            settings = {ours: known[theirs] for theirs, ours in names.items() if known.get(theirs)}
            if known.get("input_size"):
                settings["size"] = tuple(known["input_size"][-2:])
        return cls(root, **{**settings, **changes})

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        image = self.load(self.ids[index])
        return image if self.labels is None else (image, self.labels[index])

    def load(self, name: str) -> Tensor:
        """One image as the model sees it."""
        pillow = require("PIL.Image", "images")
        height, width = self.size
        with pillow.open(self.root / name) as opened:
            image = opened.convert("RGB")
        scale = max(height / self.crop / image.height, width / self.crop / image.width)
        large = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
        image = image.resize(large, getattr(pillow.Resampling, self.interpolation.upper()))
        left, top = (large[0] - width) // 2, (large[1] - height) // 2
        pixels = np.array(image.crop((left, top, left + width, top + height)))
        return (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - self.mean) / self.std

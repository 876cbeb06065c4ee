"""A folder of images as a data set, prepared the way a model wants them."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from torchhook._extract.fingerprint import ADDRESS
from torchhook._recording.tables import Table
from torchhook._values.images import IMAGENET_MEAN, IMAGENET_STD
from torchhook._words import counted
from torchhook.errors import DataWarning, ExtractError, require, warn

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"})


class ImageFolder(Dataset[Any]):
    """Every image below a folder, in the order of their paths. Images in folders of their own are labelled by them.

    ``ids`` are the paths, relative to the folder. Images are turned as their camera was held, resized by the shorter
    side, cropped in the middle and normalized, to the pixel as torchvision's ``Resize``, ``CenterCrop`` and
    ``Normalize`` do it; ``for_model`` takes these settings from a timm model.

    Args:
        root: The folder.
        size: The height and width that the model wants, one number for both.
        crop: The share of the resized image that is left of it.
        mean: What is subtracted from each channel of an image in [0, 1].
        std: What each channel is divided by afterwards.
        interpolation: How pillow resizes.
        prepare: A function of an RGB image of pillow's, in place of all of the above: ``weights.transforms()`` of
            torchvision's, say.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        size: int | tuple[int, int] = 224,
        crop: float = 0.875,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        interpolation: str = "bilinear",
        prepare: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.root: Path = Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(f"{self.root} is not a folder: data= needs the path of a folder of images.")
        found = [path for path in self.root.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file()]
        # Rows are known by number: the order of the file system differs between machines, and so do its separators.
        self.ids: list[str] = sorted(path.relative_to(self.root).as_posix() for path in found)
        if not self.ids:
            raise ExtractError(f"no images below {self.root}; looked for {', '.join(sorted(SUFFIXES))}.")
        folders = [path.rpartition("/")[0] for path in self.ids]
        # An image beside the folders has no class: then folders are only where images lie.
        self.classes: list[str] = sorted(set(folders)) if all(folders) else []
        numbers = {name: i for i, name in enumerate(self.classes)}
        self.labels: list[int] | None = [numbers[folder] for folder in folders] if self.classes else None
        self.size: tuple[int, ...] = (size, size) if isinstance(size, int) else tuple(size)
        self.crop: float
        self.interpolation: str
        self.prepare: Callable[[Any], Tensor] | None
        self.crop, self.interpolation, self.prepare = crop, interpolation, prepare
        self.guessed: tuple[str, ...] = ()
        """Those of size, mean and std that are ImageNet's because neither the model nor the caller has said others."""
        self.mean: Tensor = torch.tensor(mean).reshape(-1, 1, 1)
        self.std: Tensor = torch.tensor(std).reshape(-1, 1, 1)

    @classmethod
    def for_model(cls, root: str | os.PathLike[str], model: nn.Module, **changes: Any) -> ImageFolder:
        """With the settings that the model carries (``pretrained_cfg``, as timm's do), else those of ImageNet.

        Images for a model of timm's are prepared by timm itself.
        """
        known = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
        settings: dict[str, Any] = {}
        if isinstance(known, dict) and known:
            # Who writes such settings leaves out what is timm's default, which is not torchvision's.
            settings = {"interpolation": "bicubic"}
            settings |= {ours: known[theirs] for ours, theirs in _SETTINGS.items() if known.get(theirs)}
            if known.get("input_size"):
                settings["size"] = tuple(known["input_size"][-2:])
        settings |= changes
        if "prepare" not in settings and type(model).__module__.startswith("timm."):
            settings["prepare"] = _timms_own(model, changes)
        made = cls(root, **settings)
        made.guessed = () if "prepare" in settings else tuple(n for n in ("size", "mean", "std") if n not in settings)
        return made

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        classes = f" of {counted(len(self.classes), 'class', 'classes')}" if self.classes else ""
        return f"<ImageFolder {str(self.root)!r}: {counted(len(self), 'image')}{classes}>"

    def _repr_html_(self) -> str:
        numbers = Counter(self.labels or ())
        rows = [[name, f"{numbers[i]:,}"] for i, name in enumerate(self.classes)]
        columns = ["class", ">images"] if rows else []
        return Table(repr(self)[1:-1], columns, rows, [f"prepared by: {self.preparation}"])._repr_html_()

    def __getitem__(self, index: int) -> Any:
        path = self.root / self.ids[index]
        try:
            opened = self._opened(self.ids[index])
        except (OSError, SyntaxError, ValueError) as error:  # pillow has its own errors for each format
            why = str(error).rstrip(".") or type(error).__name__
            raise ExtractError(f"{path}, row {int(index)} of the data, cannot be read as an image: {why}.") from error
        image = self._prepared(opened)
        return image if self.labels is None else (image, self.labels[index])

    @property
    def preparation(self) -> str:
        """How an image is prepared, for people."""
        if self.prepare is not None:
            return re.sub(r"\s+", " ", ADDRESS.sub("", repr(self.prepare))).replace("( ", "(").replace(" )", ")")
        height, width = self.size
        mean, std = (", ".join(f"{n:g}" for n in part.flatten().tolist()) for part in (self.mean, self.std))
        large = " × ".join(map(str, dict.fromkeys(self._large())))
        return f"{self.interpolation} to {large}, cropped to {height} × {width}, mean {mean}, std {std}"

    def load(self, name: str) -> Tensor:
        """One image as the model sees it."""
        return self._prepared(self._opened(name))

    def _opened(self, name: str) -> Any:
        with require("PIL.Image", "images").open(self.root / name) as opened:
            return _colors(name, opened)  # reads the file, which is closed after this

    def _large(self) -> tuple[int, ...]:
        """What height and width are resized to at least, before the middle is cut out."""
        # Cut off, as timm does it; the little more is for 224 / (224 / 232), which is 232 in the hands of people only.
        return tuple(math.floor(side / self.crop + 1e-6) for side in self.size)

    def _prepared(self, image: Any) -> Tensor:
        pillow = require("PIL.Image", "images")
        if self.prepare is not None:
            return self.prepare(image)
        height, width = self.size
        high, wide = self._large()
        # To the pixel as torchvision: the tighter side is as wanted, the other cut off to a whole number.
        if image.width * high < image.height * wide:
            high = image.height * wide // image.width
        else:
            wide = image.width * high // image.height
        # A share above 1 leaves less than is wanted, and a crop beyond the edge would be black there.
        wide, high = max(width, wide), max(height, high)
        image = image.resize((wide, high), getattr(pillow.Resampling, self.interpolation.upper()))
        # Rounded, and halves to the even number, which is how torchvision finds the middle.
        left, top = round((wide - width) / 2), round((high - height) / 2)
        # Not asarray: it gives memory that cannot be written to, and torch warns of that.
        pixels = np.array(image.crop((left, top, left + width, top + height)))
        return (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - self.mean) / self.std


# Our names of timm's settings.
_SETTINGS = {"mean": "mean", "std": "std", "crop": "crop_pct", "interpolation": "interpolation"}


def _timms_own(model: nn.Module, changes: dict[str, Any]) -> Callable[[Any], Tensor]:
    """What timm prepares images with for this model, changed where the user says so."""
    timm = importlib.import_module("timm.data")
    config = dict(timm.resolve_model_data_config(model))
    config |= {_SETTINGS[name]: value for name, value in changes.items() if name in _SETTINGS}
    if "size" in changes:
        size = changes["size"]
        config["input_size"] = (3, size, size) if isinstance(size, int) else (3, *size)
    prepare: Callable[[Any], Tensor] = timm.create_transform(**config, is_training=False)
    return prepare


def _colors(name: str, opened: Any) -> Any:
    """An RGB image, turned upright, of eight bits; pillow itself would cut off all above 255."""
    image = require("PIL.ImageOps", "images").exif_transpose(opened)
    if image.mode == "F" or image.mode.startswith("I"):
        pixels = np.array(image)
        # Sixteen bits are whole numbers up to 65,535; floats have no range of their own, but everybody's is [0, 1].
        most = 1 if image.mode == "F" else 65535
        low, high = float(pixels.min()), float(pixels.max())
        if not (low >= 0 and high <= most):
            raise ValueError(
                f"{name}: {'float' if most == 1 else 'integer'} pixels from {low:g} to {high:g}, expected 0 to {most}. "
                "Convert such images, or load them in a data set of your own."
            )
        image = require("PIL.Image", "images").fromarray((pixels / most * 255).round().astype(np.uint8))
    return image.convert("RGB")


def opened(data: Any, model: nn.Module) -> Any:
    """The images of a folder where data is a path, prepared for the model; anything else as it is."""
    if not isinstance(data, (str, os.PathLike)):
        return data
    folder = ImageFolder.for_model(data, model)
    if folder.guessed:
        warn(
            f"the model does not say how it wants its images, so they are prepared as for ImageNet: "
            f"{folder.preparation}. Pass data=torchhook.types.ImageFolder(path, size=…, mean=…, std=…), or with "
            "prepare=weights.transforms(), to say it.",
            DataWarning,
        )
    return folder

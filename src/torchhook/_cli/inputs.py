"""From a file, a text or a shape on the command line to what a model is called with."""

from __future__ import annotations

import importlib
import math
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torchhook._cli import console
from torchhook._cli.errors import Trouble, short
from torchhook._cli.models import config_of, imports_of, library, own_preparation
from torchhook._extract.api import SUFFIXES, ImageFolder
from torchhook._recording import arrays
from torchhook._values import tree


class Given(NamedTuple):
    """An input: what the model is called with, and what to show of it."""

    x: Any
    tokens: list[str] | None = None


class Options(NamedTuple):
    """What the command line says about the input."""

    file: Path | None = None
    text: str | None = None
    shape: str | None = None
    size: int | None = None
    mean: str | None = None
    std: str | None = None
    seed: int = 0
    tokens: str | None = None

    @property
    def given(self) -> bool:
        return bool(self.chosen)

    @property
    def chosen(self) -> list[Path | str]:
        """The inputs that were named, of which one is wanted."""
        # By None and not by truth: an empty text is an input too.
        return [part for part in (self.file, self.text, self.tokens, self.shape) if part is not None]


def load(options: Options, model: nn.Module, name: str) -> Given:
    """The input on the device of the model."""
    if len(options.chosen) != 1:
        raise Trouble(
            "give one input: --input FILE (image, .safetensors, .npz, .npy or .txt), --text TEXT, --tokens 1,2,3 or "
            "--shape 1x3x224x224."
        )
    if options.text is not None:
        given = _text(options.text, name)
    elif options.tokens is not None:
        given = Given(_tokens(options.tokens, model))
    elif options.shape is not None:
        given = Given(_random(options.shape, options.seed))
    else:
        assert options.file is not None
        given = _file(options.file, model, name, options)
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    return given._replace(x=tree.map_tensors(lambda t: t.to(device), given.x))


def _file(path: Path, model: nn.Module, name: str, options: Options) -> Given:
    if not path.is_file():
        raise Trouble(f"no input file {path}.")
    kind = path.suffix.lower()
    if kind in SUFFIXES:
        return Given(image(path, model, name, options))
    if kind in arrays.FILES:
        return Given(_tensors(path))
    if kind == ".txt":
        return _text(path.read_text("utf-8").strip(), name)
    raise Trouble(f"{path}: an input is an image ({', '.join(sorted(SUFFIXES))}), .safetensors, .npz, .npy or .txt.")


def preparation(options: Options) -> dict[str, Any]:
    """How images are prepared, where the command line says so."""
    # Who gives a size wants no margin cut off, as ImageNet's 0.875 or the model's own setting would.
    found: dict[str, Any] = {} if options.size is None else {"size": options.size, "crop": 1.0}
    for key, text in (("mean", options.mean), ("std", options.std)):
        if text is not None:
            try:
                numbers = [float(part) for part in text.split(",")]
            except ValueError:
                numbers = []
            if len(numbers) not in (1, 3) or not all(map(math.isfinite, numbers)):
                raise Trouble(f"--{key} {text}: give one number, or three with commas between.")
            if key == "std" and min(numbers) <= 0:
                raise Trouble(f"--std {text}: give positive numbers, since images are divided by them.")
            found[key] = numbers * 3 if len(numbers) == 1 else numbers
    for key, other in (("mean", "std"), ("std", "mean")):
        if key in found and other not in found:
            raise Trouble(f"--{key} {getattr(options, key)}: give --{other} too, since images are normalized by both.")
    return found


_GUESSED = {
    ("size", "mean", "std"): "as for ImageNet: the model does not say; --size, --mean and --std do",
    ("mean", "std"): "normalized as for ImageNet: the model does not say; --mean and --std do",
    ("size",): "resized as for ImageNet: the model does not say; --size does",
}


def say_preparation(what: str, images: ImageFolder) -> None:
    """Say how images are prepared, and what of it nobody asked for."""
    guess = _GUESSED.get(images.guessed, "")
    console.say(f"{what}, prepared so: {images.preparation}{guess and f' ({guess})'}")


def preparation_for(name: str, options: Options) -> dict[str, Any]:
    """How images are prepared for a model of this name: as its library does, where the command line does not differ."""
    own, said = own_preparation(name), preparation(options)
    if own is None or not said:
        return said if own is None else {"prepare": own}
    # Its settings, as far as it has such: presets for other tasks than classification have fewer.
    known = {key: getattr(own, key) for key in ("mean", "std") if getattr(own, key, None)}
    if getattr(own, "crop_size", None) and getattr(own, "resize_size", None):
        known |= {"size": own.crop_size[0], "crop": own.crop_size[0] / own.resize_size[0]}
        known["interpolation"] = own.interpolation.value
    return {**known, **said}


def image(path: Path, model: nn.Module, name: str, options: Options) -> torch.Tensor:
    settings = preparation_for(name, options)
    with tempfile.TemporaryDirectory() as folder:  # a data set of one image
        copy = Path(folder, path.name)
        try:
            shutil.copy(path, copy)
            images = ImageFolder.for_model(folder, model, **settings)
            loaded = images.load(path.name)[None]
        except (OSError, SyntaxError, ValueError) as error:  # pillow has its own errors for each format
            # Pillow names the copy, which is gone by the time someone reads it.
            raise Trouble(f"{path} cannot be read as an image: {short(error).replace(str(copy), path.name)}") from error
    say_preparation(path.name, images)
    return loaded


def _tensors(path: Path) -> Any:
    try:
        if path.suffix.lower() == ".safetensors":
            found = importlib.import_module("safetensors.torch").load_file(path)
        else:
            found = {key: torch.from_numpy(array) for key, array in arrays.of_numpy(path).items()}
    except Exception as error:  # SafetensorError has no public home in older versions; numpy's are of all kinds
        raise Trouble(f"{path} cannot be read: {short(error)}") from error
    if not found:
        raise Trouble(f"{path} holds no tensors.")
    # One tensor is the argument; several are arguments by name.
    return next(iter(found.values())) if len(found) == 1 else dict(found)


def _random(shape: str, seed: int) -> torch.Tensor:
    if not re.fullmatch(r"\d+([x,×]\d+)*", shape):
        raise Trouble(f"--shape {shape}: give sizes with x between, as in 1x3x224x224.")
    sizes = [int(part) for part in re.split("[x,×]", shape)]
    # A generator of its own: the same input each time, and nobody else's random numbers move.
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def _tokens(text: str, model: nn.Module) -> torch.Tensor:
    if not re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text):
        raise Trouble(f"--tokens {text}: give whole numbers with commas between, as in 464,2068,7586.")
    ids = [int(part) for part in text.split(",")]
    # Beyond its table a model would fail deep inside, on a GPU with a message about something else.
    table: Any = getattr(model, "get_input_embeddings", None)
    known = getattr(None if table is None else table(), "num_embeddings", None)
    if known is not None and max(ids) >= known:
        raise Trouble(f"--tokens {text}: the model has {known:,} tokens, 0 to {known - 1}, and {max(ids)} is none.")
    return torch.tensor([ids])


def _text(text: str, name: str) -> Given:
    path = config_of(name)
    if path is None:
        raise Trouble(
            "text needs a tokenizer: name the model as transformers:FOLDER, or give token ids by --tokens 1,2,3."
        )
    hugging_face = library("transformers")
    # A config may be named by its file; the tokenizer's files lie beside it.
    folder = path if Path(path).is_dir() else str(Path(path).parent)
    with imports_of("transformers"):
        try:
            tokenizer = hugging_face.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise Trouble(f"{folder} holds no tokenizer: {short(error)}") from error
    # Cut at the model's own limit: many have no embedding for further positions, and would fail deep inside.
    batch = dict(tokenizer(text, return_tensors="pt", truncation=True))
    if not batch["input_ids"].numel():
        raise Trouble(
            f"the tokenizer in {folder} makes no token of {text!r}: look at its vocabulary, or give token ids: "
            "--tokens 1,2,3."
        )
    return Given(batch, tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist()))

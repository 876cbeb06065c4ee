"""From a name to a model: ``torchvision:resnet18``, ``package.module:callable``, a ``.pt2`` file."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._cli import console
from torchhook._cli.errors import Trouble, short
from torchhook.errors import suggestion

FORMS = "torchvision:NAME, timm:NAME, transformers:PATH, package.module:callable, or a .pt2 file"


def load(
    name: str, *, weights: Path | None = None, allow_pickle: bool = False, pretrained: bool = False, device: str = "cpu"
) -> nn.Module:
    """The model that ``name`` means, with its weights, in eval mode, on its device.

    Random weights are the same each time.
    """
    # Models are built on the CPU. torch.manual_seed would seed the GPUs as well, and with no devices named here nobody
    # would put those back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = _named(name, pretrained, allow_pickle)
    if weights is not None:
        _fill(model, weights, allow_pickle)
    for module in model.modules():  # not eval(): exported programs refuse it
        module.training = False
    return model.to(_device(device))


def is_random(name: str, weights: Path | None, pretrained: bool) -> bool:
    """Whether a model of this name is built without anybody's weights; a function of the user's knows its own."""
    home, _, rest = name.partition(":")
    if weights is not None or pretrained:
        return False
    return home in ("torchvision", "timm") or (home == "transformers" and not _has_weights(Path(rest)))


def refuse_random(name: str, weights: Path | None, pretrained: bool) -> None:
    """Features of a whole data set are made to be used: those of a random network are hardly ever meant."""
    if is_random(name, weights, pretrained):
        raise Trouble(
            f"{name} has random weights, and so would have its features: add --pretrained to fetch its own, "
            "--weights FILE for others, or --random if random ones are meant."
        )


def say_random(name: str, weights: Path | None, pretrained: bool) -> None:
    if is_random(name, weights, pretrained):
        console.say(f"{name} has random weights; add --weights or --pretrained.")


def _has_weights(folder: Path) -> bool:
    # Pickled weights do not count: nothing opens them unasked.
    return folder.is_dir() and any(folder.glob("*.safetensors"))


def _named(name: str, pretrained: bool, allow_pickle: bool) -> nn.Module:
    if name.endswith(".pt2"):
        return _exported(Path(name), allow_pickle)
    home, colon, rest = name.partition(":")
    if not colon or not rest:
        raise Trouble(f"{name!r} names no model: use {FORMS}.")
    makers: dict[str, Callable[[str, bool], nn.Module]] = {
        "torchvision": _torchvision,
        "timm": _timm,
        "transformers": _transformers,
    }
    return makers[home](rest, pretrained) if home in makers else _imported(home, rest)


def library(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Trouble(f"{package} is not installed, or not whole ({short(error)}): pip install {package}") from error
    except (RuntimeError, AttributeError) as error:
        raise Trouble(_not_importable(package, error)) from error


def _not_importable(package: str, error: BaseException) -> str:
    return (
        f"{package} is installed and cannot be imported ({short(error)}). A torchvision that was built for another "
        "torch looks like this: install the two together, from one index (https://pytorch.org/get-started)."
    )


@contextlib.contextmanager
def imports_of(package: str) -> Iterator[None]:
    """Explain the imports that a library puts off until something of it is used, as transformers does."""
    try:
        yield
    except ImportError as error:
        cause: BaseException = error
        # What it says itself is that a name of its own could not be imported; why is what it was raised from.
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, ImportError):
            raise Trouble(f"{package} cannot import what this model needs: {short(cause)}") from error
        raise Trouble(_not_importable(package, cause)) from error


def _torchvision(name: str, pretrained: bool) -> nn.Module:
    models = library("torchvision").models
    if name not in models.list_models():
        raise Trouble(f"torchvision has no model {name!r}. {suggestion(name, models.list_models())}")
    # Left to their default, these two warn, and take long to draw their random weights.
    options: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    # Detection and segmentation fetch the weights of their backbone by default; their own come with those of it.
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None
    model: nn.Module = models.get_model(name, weights="DEFAULT" if pretrained else None, **options)
    return model


def own_preparation(name: str) -> Any:
    """What torchvision prepares images with for a model of its own, with the weights that it has now; else ``None``."""
    home, _, rest = name.partition(":")
    if home != "torchvision":
        return None  # a model of timm's says itself
    try:
        return library("torchvision").models.get_model_weights(rest).DEFAULT.transforms()
    except (AttributeError, ValueError):  # no weights are known for it
        return None


def _timm(name: str, pretrained: bool) -> nn.Module:
    timm = library("timm")
    # What follows the dot is a set of weights, which the registry of models does not list.
    if not timm.is_model(name.partition(".")[0]):
        raise Trouble(f"timm has no model {name!r}. {suggestion(name, timm.list_models())}")
    model: nn.Module = timm.create_model(name, pretrained=pretrained)
    return model


def _transformers(name: str, pretrained: bool) -> nn.Module:
    """A folder with weights is loaded; a config, in a file or a folder, is built with random ones."""
    hugging_face = library("transformers")
    path = Path(name)
    if not path.exists() and not pretrained:
        raise Trouble(
            f"no folder or config file {name!r}. To fetch a model of that name from the hub, add --pretrained."
        )
    with imports_of("transformers"):
        try:
            config = hugging_face.AutoConfig.from_pretrained(name, local_files_only=not pretrained)
        except (OSError, ValueError, KeyError) as error:
            raise Trouble(f"{name} holds no config that transformers can read: {short(error)}") from error
        # The class that the config names, with its head: AutoModel would be the trunk alone.
        kind = getattr(hugging_face, (config.architectures or [""])[0], None)
        if pretrained or _has_weights(path):
            options = {"local_files_only": not pretrained, "use_safetensors": True}
            model: nn.Module = (kind or hugging_face.AutoModel).from_pretrained(name, **options)
            return model
        return kind(config) if kind is not None else hugging_face.AutoModel.from_config(config)  # type: ignore[no-any-return]


def _imported(home: str, name: str) -> nn.Module:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as ``python -m`` does
    try:
        found: Any = importlib.import_module(home)
    except ModuleNotFoundError as error:
        # The module is there, and imports something that is not: to call the module missing would mislead.
        if error.name is not None and not f"{home}.".startswith(f"{error.name}."):
            raise Trouble(f"importing {home} failed: {short(error)}") from error
        raise Trouble(f"no Python module {home!r} here or installed; models are named as {FORMS}.") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise Trouble(f"{home} has no {name!r}. {suggestion(part, [n for n in dir(found) if n[0] != '_'])}")
        found = getattr(found, part)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise Trouble(f"{home}:{name} is a {type(found).__name__}: name a module, or a function that returns one.")
        found = found()
    if not isinstance(found, nn.Module):
        raise Trouble(f"{home}:{name}() returned a {type(found).__name__}, not a torch.nn.Module.")
    return found


def _exported(path: Path, allow_pickle: bool) -> nn.Module:
    if not path.is_file():
        raise Trouble(f"no file {path}.")
    if not allow_pickle:  # torch.export.load falls back to plain unpickling
        raise Trouble(f"{path} may hold pickles, which can run any code: add --allow-pickle if you trust it.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its own files
            # Unflattened, it has the modules of the original again, and hooks on them fire.
            return torch.export.unflatten(torch.export.load(path))
    except (RuntimeError, ValueError, KeyError, OSError, AssertionError, pickle.UnpicklingError) as error:
        raise Trouble(f"{path} cannot be read as an exported program: {short(error)}") from error


def _device(name: str) -> torch.device:
    try:
        # Any device has a name; only memory on it shows whether it is there.
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise Trouble(f"--device {name} cannot be used: {short(error)}") from error
    return device


# -- weights ------------------------------------------------------------------------------------------


def _fill(model: nn.Module, path: Path, allow_pickle: bool) -> None:
    if not path.is_file():
        raise Trouble(f"no weights file {path}.")
    state = _state(path, allow_pickle)
    own = model.state_dict().keys()
    # DDP and torch.compile leave these in front. Only where no name fits: a model may have a part called module.
    if state and not own & state.keys():
        state = {name.removeprefix("module.").removeprefix("_orig_mod."): tensor for name, tensor in state.items()}
    try:
        # Not strict: torch would list every name, hundreds for a wrong file. What does not fit is refused below.
        found = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise Trouble(f"{path} does not fit the model: {short(error)}") from error
    wrong = [f"{len(names)} {what} ({', '.join(names[:3])}{', …' * (len(names) > 3)})" for what, names in (
        ("missing", found.missing_keys), ("unexpected", found.unexpected_keys)) if names]  # fmt: skip
    if wrong:
        raise Trouble(f"{path} does not fit the model: {' and '.join(wrong)}.")


def _state(path: Path, allow_pickle: bool) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        load_file = importlib.import_module("safetensors.torch").load_file
        try:
            return dict(load_file(path))
        except Exception as error:  # SafetensorError has no public home in older versions
            raise Trouble(f"{path} cannot be read: {short(error)}") from error
    if not allow_pickle:
        raise Trouble(
            f"{path} is a pickle, which can run any code when it is opened: add --allow-pickle if you trust it."
        )
    loaded = _unpickled(path)
    if isinstance(loaded, nn.Module):
        return loaded.state_dict()
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise Trouble(f"{path} holds no state dict: expected names and tensors, found {type(loaded).__name__}.")
    return dict(loaded)


def _unpickled(path: Path) -> Any:
    """Tensors alone if that is enough; whatever is in the file otherwise, since the user said so."""
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            return torch.load(path, map_location="cpu", weights_only=False)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, AttributeError, ImportError) as error:
        raise Trouble(f"{path} cannot be read: {short(error)}") from error


def config_of(name: str) -> str | None:
    """The path after ``transformers:``, which is where the tokenizer is too."""
    return name.partition(":")[2] if name.startswith("transformers:") else None


def read_classes(path: Path) -> list[str]:
    """Class names from a text file, one on a line, or from a JSON list, or from a JSON object of names by number."""
    if not path.is_file():
        raise Trouble(f"no file {path} with class names.")
    text = path.read_text("utf-8")
    if path.suffix != ".json":
        return text.splitlines()
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise Trouble(f"{path} is not JSON: {short(error)}") from error
    if isinstance(found, dict) and all(key.isdecimal() for key in found):
        numbers = sorted(map(int, found))
        if numbers == list(range(len(found))):
            return [str(found[key]) for key in sorted(found, key=int)]
    if not isinstance(found, list):
        raise Trouble(f"{path}: give a list of class names, or an object with the keys 0, 1, 2 and so on.")
    return [str(name) for name in found]

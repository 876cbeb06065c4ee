"""What a model is tried with: the inputs that were given, or some that fit a model of transformers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._core import calling
from torchhook._core.scope import unseen
from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook.errors import SelectorError

_TOKENS = 9
_LIMITS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")


@contextlib.contextmanager
def alone(model: nn.Module) -> Iterator[Callable[[], None]]:
    """The model in eval mode and by itself: names belong to it, whatever a session around does to it just now.

    It is left as it was; what is yielded makes it so at once.
    """
    with unseen(), torch.no_grad(), calling.undisturbed(model) as restore, calling.evaluating(model):
        yield restore


def runs(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a model takes inputs that were guessed, with nothing of ours on it: if so, an error was not its own."""
    try:
        calling.call(model, inputs)
    except Exception:  # a model may raise anything
        return False
    return True


_FIRST = "standard names are found by running it, so call th.roles(model, inputs) first"


def made_for(model: nn.Module, way: str = _FIRST) -> Inputs:
    """Inputs for a model whose config says how it is called, as those of transformers do; ``way`` is the other way."""
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    name = type(model).__name__
    if config is None or not isinstance(main, str):
        raise SelectorError(f"a {name} does not say with which inputs it runs: {way}.")
    inputs: dict[str, Any] = {}
    if main == "input_ids":
        inputs[main] = _ids(config, model, way)
    elif main == "pixel_values":
        inputs[main] = _pixels(config, model, way)
    else:
        raise SelectorError(f"a {name} takes {main!r}, which cannot be made from its config: {way}.")
    if getattr(config, "is_encoder_decoder", False):
        tokens = inputs[main] if main == "input_ids" else _ids(config, model, way)
        inputs["decoder_input_ids"] = tokens[:, : max(3, tokens.shape[1] - 2)]  # of another length, if it can be
    return Inputs((), inputs)


def _ids(config: Any, model: nn.Module, way: str) -> Tensor:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "vocab_size", None)
    if not isinstance(count, int):
        raise SelectorError(f"the config of a {type(model).__name__} has no vocab_size: {way}.")
    generator = torch.Generator().manual_seed(0)
    # From the upper half: the first tokens are often special, and padding may be left out.
    return torch.randint(count // 2, count, (2, _tokens(text)), generator=generator).to(_device(model))


def _tokens(config: Any) -> int:
    """How many tokens a model is tried with: less than usual, if it has few positions."""
    found = (getattr(config, name, None) for name in _LIMITS)
    limit = min((one for one in found if type(one) is int and one > 0), default=_TOKENS + 2)
    # Two to spare: some count from where padding ends. But three are needed to tell a token from those around it.
    return min(_TOKENS, max(limit - 2, min(limit, 3)))


def _pixels(config: Any, model: nn.Module, way: str) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    if isinstance(size, int):
        size = (size, size)
    if not isinstance(size, (tuple, list)):
        raise SelectorError(f"the config of a {type(model).__name__} has no image_size: {way}.")
    pixels = torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return pixels.to(_device(model), dtype)


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def given(inputs: Any) -> Inputs:
    return calling.arguments(inputs)


def other_calls(model: nn.Module, inputs: Inputs) -> list[tuple[str, Inputs]]:
    """Other ways to call a model of transformers: how many operations run, and so their numbers, may depend on it."""
    known = inspect.signature(model.forward).parameters
    ids = inputs.kwargs.get("input_ids")
    if not isinstance(ids, Tensor) or "decoder_input_ids" in inputs.kwargs or "input_ids" not in known:
        return []
    found: list[tuple[str, Inputs]] = []
    if "attention_mask" in known and "attention_mask" not in inputs.kwargs:
        mask = torch.ones_like(ids)
        mask[0, : ids.shape[1] // 3] = 0
        found.append(("with a mask for padding", Inputs((), {**inputs.kwargs, "attention_mask": mask})))
    if "use_cache" in known and "past_key_values" in known and ids.shape[1] > 1:
        found.append(("without a cache", Inputs((), {**inputs.kwargs, "use_cache": False})))
        cache = _cache(model, {**inputs.kwargs, "input_ids": ids[:, :-1], "use_cache": True})
        if cache is not None:
            step = {**inputs.kwargs, "input_ids": ids[:, -1:], "past_key_values": cache}
            found.append(("for one more token, with a cache", Inputs((), step)))
    return found


def _cache(model: nn.Module, inputs: dict[str, Any]) -> Any:
    try:
        return getattr(model(**inputs), "past_key_values", None)
    except Exception:  # it is a guess that it can be called so
        return None


def varied(inputs: Inputs) -> Inputs:
    """Other inputs of the same kind: nothing may hold for one alone. Masks and types of tokens stay as they are."""

    def vary(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.flip(-1) * 0.7 + 0.1
        if tensor.dtype not in (torch.int64, torch.int32) or not tensor.numel() or int(tensor.max()) < 2:
            return tensor
        return tensor.roll(1, -1)

    varied: Inputs = tree.map_tensors(vary, inputs)
    return varied

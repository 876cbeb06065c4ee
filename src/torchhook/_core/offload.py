"""Weights that are elsewhere until their module runs: accelerate keeps them on the host or on disk, and puts tensors
without numbers, on the meta device, into the model meanwhile.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn

from torchhook.errors import SessionError


def is_offloaded(module: nn.Module) -> bool:
    """Whether the module's own parameters or buffers are elsewhere now."""
    own = (*module._parameters.values(), *module._buffers.values())
    if all(tensor is None or tensor.device.type != "meta" for tensor in own):
        return False
    # accelerate leaves a hook of its own with the modules that it takes care of. A model that is on the meta device
    # without one is meant to be there.
    return bool(_of_accelerate(vars(module).values()))


def has_offloaded(model: nn.Module) -> bool:
    """Whether any part of the model is elsewhere now: then where its parameters are says nothing of where it runs."""
    return any(is_offloaded(module) for module in model.modules())


@contextlib.contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """The module's own parameters and buffers with their numbers, as while it runs."""
    # accelerate loads them inside of forward, which it replaces: hooks run before and after that.
    if not is_offloaded(module) or "accelerate" not in sys.modules:
        yield
        return
    with sys.modules["accelerate"].utils.align_module_device(module):
        yield


@contextlib.contextmanager
def read(module: nn.Module, name: str) -> Iterator[Tensor]:
    """The parameter or buffer with its numbers."""
    with loaded(module):
        tensor = getattr(module, name)
        if tensor.device.type == "meta" and is_offloaded(module):
            raise SessionError(
                f"{name!r} of this {type(module).__name__} is offloaded by accelerate, which does not say how to load "
                "it: its numbers cannot be read. Capture what the module makes of it, or load the model whole."
            )
        yield tensor


def may_have_loaded() -> bool:
    """Whether anybody can have loaded weights for a call."""
    return "accelerate" in sys.modules


def take_back(frames: Sequence[FrameType]) -> None:
    """Have accelerate take back the weights of the modules that were running in these frames, and are not any more."""
    # What it puts in the place of forward is a function; its hooks, which are objects, are called before and after it.
    for frame in reversed(frames) if may_have_loaded() else ():
        module = frame.f_locals.get("module") if frame.f_globals.get("__name__") == "accelerate.hooks" else None
        if isinstance(module, nn.Module) and "self" not in frame.f_locals:
            for held in _of_accelerate(vars(module).values()):
                for hook in _of_accelerate(getattr(held, "hooks", (held,))):  # another one may want to see an output
                    getattr(hook, "post_forward", _nothing)(module, None)


def _of_accelerate(objects: Iterable[Any]) -> list[Any]:
    return [one for one in objects if type(one).__module__.partition(".")[0] == "accelerate"]


def _nothing(module: nn.Module, output: Any) -> None:
    """What else accelerate leaves with a module."""

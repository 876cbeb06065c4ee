"""Run a model on what a user has at hand, and leave the model, the inputs and the process as they were."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchhook._core.index import walk
from torchhook._values import tree
from torchhook._values.tree import Inputs


def arguments(inputs: Any) -> Inputs:
    """How a model is called with ``inputs``: with a tuple as arguments, a mapping as keywords, else with it alone.

    >>> arguments({"input_ids": 1})
    Inputs(args=(), kwargs={'input_ids': 1})
    """
    if isinstance(inputs, Inputs):
        return inputs
    if isinstance(inputs, Mapping):  # a tokeniser's batch is a mapping and no dict
        return Inputs((), {str(name): value for name, value in inputs.items()})
    return Inputs(inputs if type(inputs) is tuple else (inputs,), {})


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Call the model with copies of the inputs: a first layer that works in place must not change the caller's."""
    args, kwargs = tree.map_tensors(Tensor.clone, inputs)
    return model(*args, **kwargs)


def random_numbers() -> Callable[[], None]:
    """Remember the state of every random number generator; call what is returned to go back to it."""
    torch_state, python, legacy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        torch.set_rng_state(torch_state)
        random.setstate(python)
        np.random.set_state(legacy)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return restore


def set_evaluation(modules: Iterable[nn.Module]) -> None:
    """Evaluation mode, and nothing else: a model's own ``eval`` may do more, merge weights for one."""
    for module in modules:
        module.training = False


def evaluating(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """The model in evaluation mode, and every module of it as before afterwards."""
    return mode(model, training=False)


@contextlib.contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode, as ``set_evaluation``, and every module of it as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = training
        yield
    finally:
        for module, before in modes:
            module.training = before


@contextlib.contextmanager
def undisturbed(*models: nn.Module) -> Iterator[Callable[[], None]]:
    """Give the models their buffers back on leaving (running statistics move in training mode), and the process its
    random numbers. What is yielded does so at once, so that several runs can start from the same state.
    """
    owners = {id(module): module for model in models for _, module in walk(model)}
    held = [(m, name, t, _copy(t)) for m in owners.values() for name, t in m._buffers.items() if t is not None]
    again = random_numbers()

    def restore() -> None:
        for module, name, buffer, copy in held:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
            if copy is not None and not torch.equal(buffer, copy):
                with torch.no_grad():
                    buffer.copy_(copy)
        again()

    try:
        yield restore
    finally:
        restore()


def _copy(buffer: Tensor) -> Tensor | None:
    if isinstance(buffer, nn.parameter.UninitializedBuffer):
        return None
    plain = buffer.layout == torch.strided and not buffer.is_nested and buffer.device.type != "meta"
    return buffer.detach().clone() if plain else None

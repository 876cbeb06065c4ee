"""Run a model on what a user has at hand, and leave the model, the inputs and the process as they were."""

from __future__ import annotations

import contextlib
import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and every module of it as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        set_evaluation(module for module, _ in modes)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def undisturbed(*models: nn.Module) -> Iterator[Callable[[], None]]:
    """Give the models back on leaving what a forward pass may change, and the process its random numbers.

    That is buffers (running statistics move in training mode), plain attributes (caches, counters), gradients and
    modes. What is yielded does so at once, modes aside, so that several runs can start from the same state.
    """
    modules = list({id(module): module for model in models for _, module in walk(model)}.values())
    seen: set[int] = set()
    steps = [step for module in modules for step in _ways_back(module, seen)]
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters(recurse=False)]
    modes = [(module, module.training) for module in modules]
    again = random_numbers()

    def restore() -> None:
        for step in steps:
            step()
        # Gradients are set aside, not copied: a model that trains itself makes new ones meanwhile.
        for parameter, _ in gradients:
            parameter.grad = None
        again()

    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield restore
    finally:
        restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers", "_non_persistent_buffers_set"}


def _ways_back(module: nn.Module, seen: set[int]) -> Iterator[Callable[[], None]]:
    """What puts back the buffers and plain attributes of a module, step by step."""
    if isinstance(module, torch.jit.ScriptModule):  # it holds its attributes elsewhere
        for buffer in module.buffers(recurse=False):
            yield from _into(buffer, seen)
        return
    held = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    if any(t is not None and is_lazy(t) for t in (*module._parameters.values(), *module._buffers.values())):
        held = {"_buffers": module._buffers}  # its first run makes it another module, and that is meant to stay
    else:
        yield functools.partial(_reassign, module, held)
    for value in held.values():
        yield from _into(value, seen)


def _reassign(module: nn.Module, held: dict[str, Any]) -> None:
    own = vars(module)
    for name in [name for name in own if name not in held and name not in _OF_EVERY_MODULE]:
        del own[name]
    own.update(held)


def _into(value: Any, seen: set[int]) -> Iterator[Callable[[], None]]:
    """What puts back the contents of a value, where it is a tensor or a container."""
    if id(value) in seen:
        return
    if isinstance(value, Tensor):
        copy = _copy(value)
        if copy is not None:
            seen.add(id(value))
            yield functools.partial(_refill, value, copy)
    elif isinstance(value, (list, deque, set, dict)):
        seen.add(id(value))
        kind: Any = next(kind for kind in (list, deque, set, dict) if isinstance(value, kind))
        yield functools.partial(_replace_items, value, kind, kind(value))
        for part in list(value.values() if isinstance(value, dict) else value):
            yield from _into(part, seen)


def _replace_items(container: Any, kind: Any, items: Any) -> None:
    if _ids(container) != _ids(items):
        kind.clear(container)
        (kind.extend if kind in (list, deque) else kind.update)(container, items)


def _ids(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [id(part) for part in container]


@torch.no_grad()
def _refill(tensor: Tensor, copy: Tensor) -> None:
    if tensor.shape != copy.shape or tensor.dtype != copy.dtype or tensor.device != copy.device:
        tensor.data = copy.clone()
    elif not torch.equal(tensor, copy):
        tensor.copy_(copy)


def _copy(tensor: Tensor) -> Tensor | None:
    """A copy of what a forward pass may write to; a parameter is for the optimizer alone."""
    if isinstance(tensor, (nn.Parameter, nn.parameter.UninitializedBuffer)):
        return None
    plain = tensor.layout == torch.strided and not tensor.is_nested and tensor.device.type != "meta"
    empty = plain and tensor.numel() and not tensor.untyped_storage().nbytes()  # sharded: its memory is elsewhere now
    return tensor.detach().clone() if plain and not empty else None

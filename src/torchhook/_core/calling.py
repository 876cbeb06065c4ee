"""Run a model on what a user has at hand, and leave the model, the inputs and the process as they were."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchhook import _torch
from torchhook._core.hooks import AtEnd, Turn
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
    return called(model, args, kwargs)


def called(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the model as Python does. A model that takes no path fails in some layer, with many lines: it is said here.

    >>> called(nn.Linear(2, 1), ("cat.jpg",), {})
    Traceback (most recent call last):
    TypeError: the model was called with the path 'cat.jpg', and takes tensors: load the file, and pass what is in it.
    """
    try:
        return model(*args, **kwargs)
    except (TypeError, AttributeError) as error:
        path = next((str(value) for value in (*args, *kwargs.values()) if _is_path(value)), None)
        if path is None:
            raise
        raise TypeError(
            f"the model was called with the path {path!r}, and takes tensors: load the file, and pass what is in it."
        ) from error


def _is_path(value: Any) -> bool:
    if not isinstance(value, str):
        return isinstance(value, os.PathLike)
    # A text of the user's may end with anything, but hardly with a suffix and without a blank.
    return re.fullmatch(r"\S+\.\w{1,11}", value) is not None


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


@dataclasses.dataclass
class _Mode:
    """The mode of a module before anyone asked for another, and what those ask for who use it now, by their numbers."""

    before: bool
    asked: dict[int, bool] = dataclasses.field(default_factory=dict)


# By id: a user's class may define equality, or no hash. Those in use are alive, and the last user removes them.
_modes: dict[int, _Mode] = {}
_modes_turn = Turn()


_askers = itertools.count()


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in one mode. Blocks may nest, and overlap in threads: the last to leave puts every module back.

    Only the flags are set: a model's own ``train`` and ``eval`` may do more, merge weights for one.
    """
    modules, asker = list(model.modules()), next(_askers)
    end = AtEnd(lambda: _leave_modes(modules, asker))
    try:
        with _modes_turn:
            for module in modules:
                _modes.setdefault(id(module), _Mode(module.training)).asked[asker] = training
                module.training = training
        yield
    finally:
        end()


def _leave_modes(modules: list[nn.Module], asker: int) -> None:
    with _modes_turn:
        for module in modules:
            mode = _modes.get(id(module))
            if mode is None:
                continue  # interrupted before it got that far, or done before
            if asker in mode.asked:
                others = [asked for other, asked in mode.asked.items() if other != asker]
                module.training = others[-1] if others else mode.before
                del mode.asked[asker]
            if not mode.asked:
                del _modes[id(module)]


def evaluating(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """The model in evaluation mode, and every module of it as before afterwards."""
    return in_mode(model, training=False)


def buffers(*models: nn.Module) -> Callable[[], None]:
    """Remember every buffer of the models; call what is returned to give them back, the same objects."""
    owners = {id(module): module for model in models for _, module in walk(model)}
    held = [(m, name, t, _copy(t)) for m in owners.values() for name, t in m._buffers.items() if t is not None]

    def restore() -> None:
        for module, name, buffer, copy in held:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
            if copy is not None and not torch.equal(buffer, copy):
                with torch.no_grad():
                    buffer.copy_(copy)

    return restore


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

    def give_back() -> None:
        restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            if id(module) not in _modes:  # else whoever asked for another mode puts it back
                module.training = mode

    end = AtEnd(give_back)
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield restore
    finally:
        end()


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


def _as_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A subclass may refuse whatever it was not made for, as the causal bias of torch 2.6 does: it is not asked."""

    @functools.wraps(function)
    def unasked(*args: Any) -> Any:
        with _torch.unheard():
            return function(*args)

    return unasked


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
@_as_plain
def _refill(tensor: Tensor, copy: Tensor) -> None:
    if tensor.shape != copy.shape or tensor.dtype != copy.dtype or tensor.device != copy.device:
        tensor.data = copy.clone()
    elif not torch.equal(tensor, copy):
        tensor.copy_(copy)


@_as_plain
def _copy(tensor: Tensor) -> Tensor | None:
    """A copy of what a forward pass may write to; a parameter is for the optimizer alone."""
    if isinstance(tensor, (nn.Parameter, nn.parameter.UninitializedBuffer)):
        return None
    plain = tensor.layout == torch.strided and not tensor.is_nested and tensor.device.type != "meta"
    empty = plain and tensor.numel() and not tensor.untyped_storage().nbytes()  # sharded: its memory is elsewhere now
    return tensor.detach().clone() if plain and not empty else None

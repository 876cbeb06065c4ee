"""Run a model on what a user has at hand, and leave the model, the inputs and the process as they were."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import os
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchhook._core import index
from torchhook._core.hooks import AtEnd, Turn
from torchhook._core.remembering import put_back, remembered
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


def parameter_names(model: nn.Module) -> list[str]:
    """The names of what a model's forward takes; none of one that is no Python function.

    >>> parameter_names(nn.Linear(2, 1))
    ['input']
    """
    try:
        return list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return []


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
    modules, asker = list(index.all_modules(model)), next(_askers)
    end = AtEnd(lambda: _leave_modes(modules, asker))
    try:
        with _modes_turn:
            for module in modules:
                _modes.setdefault(id(module), _Mode(module.training)).asked[asker] = training
                _set_mode(module, training)
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
                _set_mode(module, others[-1] if others else mode.before)
                del mode.asked[asker]
            if not mode.asked:
                del _modes[id(module)]


def _set_mode(module: nn.Module, training: bool) -> None:
    if module.training != training:  # most are as they should be, and to set an attribute of a module is slow
        module.training = training


def evaluating(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """The model in evaluation mode, and every module of it as before afterwards."""
    return in_mode(model, training=False)


class SetAside:
    """What a forward pass may change of modules, as it is now: buffers, plain attributes (caches, counters), gradients.

    With ``only``, buffers and attributes are those of the modules with these ids.
    """

    def __init__(self, modules: Collection[nn.Module], only: Collection[int] | None = None) -> None:
        self._kept = remembered(module for module in modules if only is None or id(module) in only)
        self._gradients = [(p, p.grad) for module in modules for p in module._parameters.values() if p is not None]

    def clear_gradients(self) -> None:
        # They are set aside, not copied: a model that trains itself makes new ones meanwhile.
        for parameter, _ in self._gradients:
            parameter.grad = None

    def restore(self) -> None:
        """Put everything back, so that another run can start from the same state."""
        put_back(self._kept)
        self.clear_gradients()

    def give_back(self) -> None:
        """Put everything back, gradients too."""
        self.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


@contextlib.contextmanager
def undisturbed(*models: nn.Module, only: Collection[int] | None = None) -> Iterator[Callable[[], None]]:
    """Give the models back on leaving what a forward pass may change, and the process its random numbers.

    That is buffers (running statistics move in training mode), plain attributes (caches, counters), gradients and
    modes. What is yielded does so at once, modes aside, so that several runs can start from the same state. With
    ``only``, buffers and attributes are those of the modules with these ids.
    """
    modules = all_modules(*models)
    aside, again = SetAside(modules, only), random_numbers()
    modes = [(module, module.training) for module in modules]

    def restore() -> None:
        aside.restore()
        again()

    def give_back() -> None:
        aside.give_back()
        again()
        for module, mode in modes:
            if id(module) not in _modes:  # else whoever asked for another mode puts it back
                module.training = mode

    end = AtEnd(give_back)
    try:
        aside.clear_gradients()
        yield restore
    finally:
        end()


def all_modules(*models: nn.Module) -> list[nn.Module]:
    """Every module of the models once, without what wraps them."""
    return list({id(module): module for model in models for _, module in index.walk(model)}.values())

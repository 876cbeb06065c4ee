"""Run a model on what a user has at hand, and leave the model, the inputs and the process as they were."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import random
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchhook import _torch
from torchhook._core import index
from torchhook._core.hooks import AtEnd, Turn
from torchhook._values import tree
from torchhook._values.elements import UNREADABLE, is_alike
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
        for one in self._kept:
            one.put_back()
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


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers", "_non_persistent_buffers_set"}


class Remembered(NamedTuple):
    """Something of a module that a forward pass may change."""

    module: nn.Module
    has_changed: Callable[[], bool]
    put_back: Callable[[], None]
    tensor: Tensor | None = None
    copy: Tensor | None = None
    """Of a tensor, whose contents are put back."""


def remembered(modules: Iterable[nn.Module], graphs: bool = True) -> list[Remembered]:
    """The buffers and plain attributes of modules as they are now; without ``graphs``, detached from theirs.

    What goes with a graph must hold no other: a model that keeps its last output would keep all of them.
    """
    seen: set[int] = set()
    return [Remembered(module, *ways) for module in modules for ways in _ways_back(module, seen, graphs)]


_Ways = tuple[Any, ...]
"""What tells whether something has changed, what puts it back, and the tensor that it is."""


@contextlib.contextmanager
def rewound(kept: Iterable[Remembered], modules: Iterable[nn.Module]) -> Iterator[None]:
    """Modules as they were remembered, for a run that nobody may notice, in a block of ``undisturbed``.

    There are stand-ins for their tensors: copies of what the run may write to, because a graph may hold the tensors,
    and others with the same memory for the parameters, because hooks and gradients are on these.
    """
    modules, copies, parameters = list(modules), dict[int, Tensor](), dict[int, tuple[Tensor, Tensor]]()
    for one in kept:
        if one.tensor is None or one.copy is None:
            one.put_back()
        else:
            copies[id(one.tensor)] = one.copy.clone()
    for parameter in (p for module in modules for p in module._parameters.values()):
        # A subclass may be more than its numbers, and a lazy one has none.
        if type(parameter) is nn.Parameter and type(parameter.data) is Tensor:
            parameters[id(parameter)] = parameter, nn.Parameter(parameter.detach(), parameter.requires_grad)
    back = {id(stand_in): parameter for parameter, stand_in in parameters.values()}
    end = AtEnd(lambda: _substitute(modules, back))
    try:
        _substitute(modules, copies | {key: stand_in for key, (_, stand_in) in parameters.items()})
        yield
    finally:
        end()


def _substitute(modules: Iterable[nn.Module], stand_ins: Mapping[int, Tensor]) -> None:
    """Put other tensors, by the ids of those that are there, into modules and the lists and dicts that they hold."""
    for own in map(vars, modules):
        holders: list[Any] = [own, *(value for value in own.values() if isinstance(value, (list, dict, deque)))]
        for held in holders:
            for key in range(len(held)) if isinstance(held, (list, deque)) else list(held):
                if id(held[key]) in stand_ins:
                    held[key] = stand_ins[id(held[key])]


def _ways_back(module: nn.Module, seen: set[int], graphs: bool) -> Iterator[_Ways]:
    if isinstance(module, torch.jit.ScriptModule):  # it holds its attributes elsewhere
        for buffer in module.buffers(recurse=False):
            yield from _into(buffer, seen, graphs)
        return
    held = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    if not graphs:
        held = {name: _detached(value) for name, value in held.items()}
    if any(t is not None and is_lazy(t) for t in (*module._parameters.values(), *module._buffers.values())):
        held = {"_buffers": module._buffers}  # its first run makes it another module, and that is meant to stay
    else:
        yield functools.partial(_is_reassigned, module, held), functools.partial(_reassign, module, held)
    for value in held.values():
        yield from _into(value, seen, graphs)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.grad_fn is not None else value


def _is_reassigned(module: nn.Module, held: dict[str, Any]) -> bool:
    own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    return own.keys() != held.keys() or any(own[name] is not value for name, value in held.items())


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


def _into(value: Any, seen: set[int], graphs: bool) -> Iterator[_Ways]:
    """What tells of and puts back the contents of a value, where it is a tensor or a container."""
    if id(value) in seen:
        return
    if isinstance(value, Tensor):
        copy = _copy(value)
        if copy is not None:
            seen.add(id(value))
            yield functools.partial(_differs, value, copy), functools.partial(_refill, value, copy), value, copy
    elif isinstance(value, (list, deque, set, dict)):
        seen.add(id(value))
        kind: Any = next(kind for kind in (list, deque, set, dict) if isinstance(value, kind))
        items = kind(value) if graphs else _detached_items(value, kind)
        yield lambda: _ids(value) != _ids(items), functools.partial(_replace_items, value, kind, items)
        for part in list(value.values() if isinstance(value, dict) else value):
            if graphs or _detached(part) is part:
                yield from _into(part, seen, graphs)


def _detached_items(value: Any, kind: Any) -> Any:
    if kind is dict:
        return {key: _detached(part) for key, part in value.items()}
    return kind(map(_detached, value))


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
    if not is_alike(tensor, copy):
        tensor.data = copy.clone()
    elif not _is_equal(tensor, copy):  # a graph may hold it, and does not go with what is written to once more
        tensor.copy_(copy)


@torch.no_grad()
@_as_plain
def _differs(tensor: Tensor, copy: Tensor) -> bool:
    return not (is_alike(tensor, copy) and _is_equal(tensor, copy))


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Also in its NaNs. Versions do not tell: batch norm writes to its statistics without raising them."""
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    try:
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    except UNREADABLE:  # numbers that torch stores and does not compare
        return False


@_as_plain
def _copy(tensor: Tensor) -> Tensor | None:
    """A copy of what a forward pass may write to; a parameter is for the optimizer alone."""
    if isinstance(tensor, (nn.Parameter, nn.parameter.UninitializedBuffer)):
        return None
    plain = tensor.layout == torch.strided and not tensor.is_nested and tensor.device.type != "meta"
    empty = plain and tensor.numel() and not tensor.untyped_storage().nbytes()  # sharded: its memory is elsewhere now
    return tensor.detach().clone() if plain and not empty else None

"""What is remembered of a run of the model, so that it can be repeated as it was.

Inputs, random numbers, buffers and plain attributes of modules. Copies are made in the first runs, and later of what
was seen to change: most models write to neither their inputs nor their buffers, and a copy of what nobody writes to is
wasted.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchhook import _torch
from torchhook._core import calling, remembering
from torchhook._core.remembering import Remembered
from torchhook._core.wiring import opened
from torchhook._values import tree
from torchhook._values.elements import UNREADABLE
from torchhook._values.objects import LEAF_TYPES
from torchhook._values.tree import Inputs

# What is larger is not copied. If the model writes to it, its run cannot be repeated, and that is said.
_MOST_BYTES = 1 << 26
# Leaves of a call that a repetition may be given again: nothing in them moves on.
_STILL = (int, float, complex, str, bytes, type, enum.Enum, np.ndarray, np.generic, set, frozenset, *LEAF_TYPES)


repeating: list[object] = []
"""Whose run is being repeated, innermost last: other guards on the same model take no notice of it."""


class CannotRepeat(Exception):
    """Why a run cannot be repeated, as the end of a sentence."""


class Given(NamedTuple):
    """A tensor that the model was called with."""

    tensor: Tensor
    """Without its graph, which may hold what holds this."""
    version: int
    copy: Tensor | None
    requires_grad: bool
    is_leaf: bool

    @property
    def is_written(self) -> bool:
        return self.version != _version(self.tensor)

    @property
    def as_given(self) -> Tensor:
        """As it was, where that is known."""
        return self.copy if self.copy is not None and self.is_written else self.tensor

    def again(self) -> Tensor:
        """The same tensor, to call the model with once more."""
        if isinstance(self.tensor, nn.Parameter):
            return self.tensor
        if self.is_written and self.copy is None:
            raise CannotRepeat(f"an input of shape {tuple(self.tensor.shape)} was written to since")
        # A copy may be written to again, and is still needed.
        tensor = self.copy.clone() if self.is_written and self.copy is not None else self.tensor.detach()
        if _torch.in_transform():  # which knows itself what it differentiates by, and lets nobody else say so
            return tensor
        tensor.requires_grad_(self.requires_grad)
        return tensor if self.is_leaf or not self.requires_grad else tensor.view_as(tensor)


class Run:
    """One call of the outermost module, from outside."""

    def __init__(self, number: int, module: nn.Module, inputs: Inputs, calls: dict[int, int]) -> None:
        self.number = number
        self.module = module
        self.calls = calls
        """How often each module had been called before, by id."""
        self.given: list[Given] = []
        self.state: list[Remembered] = []
        self.large: list[tuple[Tensor, int]] = []
        """Buffers that were not copied, and how often they had been written to."""
        self.parameters: list[tuple[int, int]] = []
        """Those that the model had when it began, by id, and how often each had been written to."""
        self.gradients: dict[int, Tensor] = {}
        """What came back to its outputs in the backward pass that runs, by their number."""
        self.seen_by: dict[int, int] = {}
        """Taps of other sessions by id, and how often each had been passed before."""
        self._inputs = inputs
        self._random = calling.random_numbers()
        self._context = contextvars.copy_context()
        self._modes = _modes()

    def inputs(self) -> Inputs:
        """What the model was called with, once more."""
        for _, leaf in tree.leaves(self._inputs):
            if not (isinstance(leaf, (Tensor, *_STILL)) or callable(leaf)) or isinstance(leaf, nn.Module):
                raise CannotRepeat(f"it was given a {type(leaf).__name__}, which may have moved on")
        for tensor, version in self.large:
            if _version(tensor) != version:
                raise CannotRepeat(f"a buffer of shape {tuple(tensor.shape)} was written to, and is too large to copy")
        again: Inputs = tree.with_tensors(self._inputs, [given.again() for given in self.given])
        return again

    @contextlib.contextmanager
    def rewound(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """The modules and the random numbers as they were when it began."""
        with remembering.rewound(self.state, modules):
            self._random()
            yield

    def inside(self, function: Callable[[], Any]) -> Any:
        """Call a function as from where the run was: in its context, which another thread does not have."""
        return self._context.copy().run(function)

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode())
            yield


def _modes() -> list[Callable[[], contextlib.AbstractContextManager[Any]]]:
    """What decides how operations run, and is not the same on autograd's threads."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    found: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [
        lambda: torch.inference_mode(inference),
        lambda: torch.set_grad_enabled(grad),
    ]
    for device in ("cpu", "cuda"):
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        if enabled:
            found.append(lambda device=device, dtype=dtype: torch.autocast(device, dtype))  # type: ignore[misc]
    return found


class Memory:
    """Makes runs, and learns what has to be copied for them."""

    def __init__(self, root: nn.Module, modules: Iterable[nn.Module], owner: object) -> None:
        self._owner = owner
        self._root = root
        self._small = [module for module in modules if _bytes(module) <= _MOST_BYTES]
        small = set(map(id, self._small))
        self._large = [b for module in modules if id(module) not in small for b in module.buffers(recurse=False)]
        self._changing: dict[int, nn.Module] = {}
        self._written: set[int] = set()
        """Inputs that were written to, by their place."""
        self._holders = [module for module in root.modules() if module._parameters]

    def close(self) -> None:
        """Forget whose it was."""
        self._owner = None

    @property
    def small(self) -> set[int]:
        """The modules whose state is remembered, by id."""
        return set(map(id, self._small))

    def run(self, number: int, module: nn.Module, inputs: Inputs, calls: dict[int, int]) -> Run:
        """Remember how things are, before the model runs."""
        learns = _learns(number)
        given: list[Given] = []

        def take(tensor: Tensor) -> Tensor:
            copies = learns or len(given) in self._written
            given.append(_given(tensor, copies))
            return given[-1].tensor

        run = Run(number, module, tree.map_tensors(take, inputs), calls)
        run.given = given
        run.state = remembering.remembered(self._small if learns else self._changing.values(), graphs=False)
        run.large = [(tensor, _version(tensor)) for tensor in self._large]
        run.parameters = self._parameters()
        for taps in list(opened.values()):
            if taps.listener is not self._owner:
                run.seen_by.update({id(tap): tap.ran for tap in taps.all()})
        return run

    def learn(self, run: Run) -> None:
        """Note what the run changed, after it."""
        if _learns(run.number):
            self._written.update(i for i, given in enumerate(run.given) if given.is_written)
            self._changing.update({id(one.module): one.module for one in run.state if one.has_changed()})

    def check_parameters(self, run: Run) -> None:
        """Refuse to repeat a run that would go on from other parameters than it began with."""
        now = dict(self._parameters())
        for key, version in run.parameters:
            if key not in now:
                raise CannotRepeat("other tensors stood for its parameters in the forward pass")
            if now[key] != version:
                raise CannotRepeat("parameters were written to since the forward pass began")

    def _parameters(self) -> list[tuple[int, int]]:
        held = [p for module in self._holders for p in module._parameters.values() if p is not None]
        # One that the first run makes is none that it writes to, nor one that is loaded for each.
        return [
            (id(parameter), _version(parameter)) for parameter in held if not (is_lazy(parameter) or parameter.is_meta)
        ]


def _learns(number: int) -> bool:
    # In the first run, the second, the fourth, the eighth: a model may begin to keep something.
    return number & (number + 1) == 0


def _given(tensor: Tensor, copies: bool) -> Given:
    requires_grad, is_leaf = tensor.requires_grad, tensor.is_leaf
    try:
        plain = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
        copy = plain.clone() if copies and plain is not tensor and plain.nbytes <= _MOST_BYTES else None
    except UNREADABLE:
        plain, copy = tensor, None
    return Given(plain, _version(plain), copy, requires_grad, is_leaf)


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to, as far as anybody counts."""
    try:
        return -1 if tensor.is_inference() else _torch.version(tensor)
    except UNREADABLE:
        return -1


def _bytes(module: nn.Module) -> int:
    """The size of what a module holds beside its parameters."""
    held = [*module._buffers.values()]
    for value in vars(module).values():
        held += value if isinstance(value, (list, tuple)) else [value]
    return sum(t.nbytes for t in held if isinstance(t, Tensor) and not isinstance(t, nn.Parameter))

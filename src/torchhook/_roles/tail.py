"""From the last value of the stream to the logits: the model's own operations, written down once and run again.

They are written down and not known: the norm, the head, and whatever a model does then (a soft cap, a scale).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._core import calling
from torchhook._core.functional import Listener
from torchhook._core.scope import Scope
from torchhook._core.select import resolve
from torchhook._core.session import Session
from torchhook._recording.address import Site
from torchhook._roles.claims import different
from torchhook._roles.probe import alone
from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook.errors import SelectorError


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for what an earlier operation made."""

    number: int


@dataclasses.dataclass(slots=True)
class Tail:
    """Operations in order; slot 0 is what goes in, the others are what operations made."""

    steps: list[tuple[Callable[..., Any], Any, Any, list[int]]]
    result: int
    device: torch.device
    dtype: torch.dtype

    @torch.no_grad()
    def __call__(self, value: Tensor) -> Tensor:
        """The logits of a value of the stream: batch × tokens × channels, or batch × channels."""
        flat = value.dim() == 2
        value = value.unsqueeze(1) if flat else value
        # A copy: an operation in place must not change what was recorded.
        slots: dict[int, Any] = {0: value.to(self.device, self.dtype, copy=True)}
        for function, args, kwargs, made in self.steps:
            found = function(*_filled(args, slots), **_filled(kwargs, slots))
            parts = found if isinstance(found, (tuple, list)) else (found,)
            slots |= zip(made, parts, strict=True)
        logits: Tensor = slots[self.result]
        return logits.squeeze(1) if flat else logits


def _filled(value: Any, slots: dict[int, Any]) -> Any:
    if isinstance(value, _Slot):
        return slots[value.number]
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(part, slots) for part in value)
    if isinstance(value, dict):
        return {key: _filled(part, slots) for key, part in value.items()}
    return value


class _Writer(Listener):
    """Writes down every operation that takes what comes from one tensor."""

    def __init__(self, scope: Scope | None) -> None:
        super().__init__(scope)
        self.slots: dict[int, tuple[Tensor, int]] = {}
        self.steps: list[tuple[Callable[..., Any], Any, Any, list[int]]] = []
        self._count = 0
        self._function: Callable[..., Any] | None = None
        self._args: Any = None

    def start(self, tensor: Tensor) -> None:
        self.slots, self.steps, self._count = {id(tensor): (tensor, 0)}, [], 1

    def where(self, function: Callable[..., Any], name: str) -> nn.Module | None:
        self._function = function
        return super().where(function, name)

    def before(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Before it runs: one in place makes a new value of the same tensor.
        self._args = (self._slotted(args), self._slotted(kwargs)) if self.slots else None
        return args, kwargs

    def after(self, name: str, module: nn.Module, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._args is not None and _has_slot(self._args) and self._function is not None:
            parts = output if isinstance(output, (tuple, list)) else (output,)
            made = [self._made(part) for part in parts]
            if name in ("view", "reshape") and isinstance(output, Tensor) and output.shape == args[0].shape:
                # Back to the shape that it has: with other inputs, the numbers that are written there are others.
                self.steps.append((_same, (self._args[0][0],), {}, made))
            else:
                self.steps.append((self._function, *self._args, made))
        return output

    def _made(self, part: Any) -> int:
        number, self._count = self._count, self._count + 1
        if isinstance(part, Tensor):
            self.slots[id(part)] = (part, number)  # held, so that no other tensor gets its id
        return number

    def _slotted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Slot(self.slots[id(value)][1]) if id(value) in self.slots else value
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return type(value)(self._slotted(part) for part in value)
        if isinstance(value, dict):
            return {key: self._slotted(part) for key, part in value.items()}
        return value


def _same(value: Tensor) -> Tensor:
    return value


def _has_slot(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_slot, value))
    return any(map(_has_slot, value.values())) if isinstance(value, dict) else isinstance(value, _Slot)


def written(model: nn.Module, inputs: list[Inputs], stream: Site, logits: Site) -> Tail:
    """The operations from one site to another, shown to give the model's own logits on every one of the inputs."""
    with alone(model) as restore:
        tail = _one_pass(model, inputs[0], stream)
        for given in inputs:
            restore()
            value, wanted = _both(model, given, stream, logits)
            try:
                why = different(tail(value), wanted)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                why = str(error).splitlines()[0]
            if why is not None:
                raise SelectorError(
                    f"no lens: the model's own operations after {stream.shown!r}, run again, do not give its logits: "
                    f"{why}. They depend on more than that value."
                )
    return tail


def _one_pass(model: nn.Module, inputs: Inputs, stream: Site) -> Tail:
    session = Session(model, warn=False)
    writer = _Writer(session.scope)
    session.listen(writer)
    start, result = list[Tensor](), list[int]()

    def begin(value: Tensor, call: int) -> None:
        start.append(value)
        writer.start(value)

    def end(value: Any, call: int) -> None:
        made = [(leaf, part) for leaf, part in tree.leaves(value) if id(part) in writer.slots]
        named = [part for leaf, part in made if leaf.split(".")[-1] == "logits"] or [part for _, part in made]
        result.extend(writer.slots[id(part)][1] for part in named[:1])

    session.look(resolve(session.index, stream)[0], begin)
    # Not the site of the logits, which may be an operation: this session hears of all of them, not of those with sites.
    session.look(resolve(session.index, Site(""))[0], end)
    with session:
        calling.call(model, inputs)
    if not start or not result:
        raise SelectorError(f"no lens: what the model returns is not made from {stream.shown!r} by operations.")
    return Tail(_needed(writer.steps, result[-1]), result[-1], start[0].device, start[0].dtype)


def _needed(steps: list[tuple[Callable[..., Any], Any, Any, list[int]]], result: int) -> list[Any]:
    """Those that the result is made by, in order; what is written in place stays."""
    wanted, kept = {result}, list[Any]()
    for step in reversed(steps):
        if wanted & set(step[3]):
            wanted |= set(_numbers(step[1])) | set(_numbers(step[2]))
            kept.append(step)
    return kept[::-1]


def _numbers(value: Any) -> list[int]:
    if isinstance(value, _Slot):
        return [value.number]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [number for part in parts for number in _numbers(part)]


def _both(model: nn.Module, inputs: Inputs, stream: Site, logits: Site) -> tuple[Tensor, Tensor]:
    session, found = Session(model, warn=False), dict[str, Tensor]()
    session.look(resolve(session.index, stream)[0], lambda value, call: found.update(stream=value.clone()))
    session.look(resolve(session.index, logits)[0], lambda value, call: found.update(logits=value.clone()))
    with session:
        calling.call(model, inputs)
    return found["stream"], found["logits"]

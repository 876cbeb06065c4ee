"""Functional sites: values that no module owns, such as ``F.relu``, ``out += x`` or a fused attention.

A ``TorchFunctionMode`` sees every functional call, and a stack of modules, kept by hooks on all of them, says in
which module it happened. The mode is only there while a module of a session that asks for operations runs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchhook import _torch
from torchhook._core.scope import Scope
from torchhook._core.taps import EnterTap, LeaveTap, Tap, as_arguments, as_value, listening, own_work
from torchhook._values import tree
from torchhook.errors import SessionError

# Python's names for operators, where they differ from the name of the tensor method.
_OPERATORS = {
    "__rsub__": "sub",
    "__rdiv__": "div",
    "__rtruediv__": "div",
    "__rpow__": "pow",
    "__rmatmul__": "matmul",
    "__floordiv__": "floor_divide",
    "__rfloordiv__": "floor_divide",
    "__rmod__": "remainder",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__invert__": "bitwise_not",
    "__iand__": "bitwise_and_",
    "__ior__": "bitwise_or_",
    "__ixor__": "bitwise_xor_",
    "__ipow__": "pow_",
    "__ifloordiv__": "floor_divide_",
}


def op_name(function: Callable[..., Any]) -> str | None:
    """What a functional call is called in an address; ``None`` for attribute access."""
    name: str = getattr(function, "__name__", "__get__")
    if name in ("__get__", "__set__"):
        return None
    return _OPERATORS.get(name, name.strip("_") if name.startswith("__") else name)


class Listener:
    """The operations of one session: which module is running, and the taps on its operations."""

    def __init__(self, scope: Scope | None) -> None:
        # By the id of the module and the name of the operation.
        self.inputs: dict[tuple[int, str], Tap] = {}
        self.outputs: dict[tuple[int, str], Tap] = {}
        self.seen: dict[int, Counter[str]] = {}
        """Operations that returned tensors, by the id of the module, counted."""
        self._gate = Tap("operations", scope)
        self._running: list[nn.Module] = []

    def boundaries(self) -> tuple[EnterTap, LeaveTap]:
        """The hooks that every module of the model needs, for the stack of running modules to be right."""
        return EnterTap(self.enter), LeaveTap(self.leave)

    def enter(self, module: nn.Module) -> None:
        if not self._gate.is_foreign():
            if self._running and module is self._running[0] and _torch.times_running(module) < 2:
                self.unwind(0)  # left by an interrupt, which hooks do not see
            if not self._running:
                own_work.busy = False  # an interrupt may have left it so
            self._running.append(module)
            if len(self._running) == 1:
                _modes.mode.listen(self)

    def leave(self, module: nn.Module) -> None:
        if any(module is other for other in self._running) and not self._gate.is_foreign():
            while self._running.pop() is not module:
                pass  # left by an exception that the model caught
            if not self._running:
                _modes.mode.ignore(self)

    def unwind(self, depth: int) -> None:
        """Forget modules beyond ``depth``: hooks do not run when a ``BaseException`` goes through them."""
        if len(self._running) > depth:
            del self._running[depth:]
            if not self._running:
                _modes.mode.ignore(self)

    def close(self) -> None:
        self.unwind(0)
        _modes.mode.ignore(self)  # an interrupt may have come between the two before

    @property
    def depth(self) -> int:
        return len(self._running)

    @property
    def current(self) -> nn.Module:
        return self._running[-1]

    def before(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tap = self.inputs.get((id(self.current), name))
        if tap is None:
            return args, kwargs
        _check_recomputable(tap, name)
        passing = as_value(args, kwargs)
        value = tap.take(passing)
        return (args, kwargs) if value is passing else as_arguments(value)

    def after(self, name: str, module: nn.Module, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(True for _ in tree.tensors(output)):
            self.seen.setdefault(id(module), Counter())[name] += 1
        tap = self.outputs.get((id(module), name))
        if tap is None:
            return output
        _check_recomputable(tap, name)
        value = tap.take(output, (args, kwargs))
        written = kwargs.get("out", args[0] if args else None)
        if value is not output and output is written and isinstance(output, Tensor) and tap.edits:
            # The model may go on with the tensor that was written to, and not with what the operation returns.
            return output.copy_(value)
        return value


def _check_recomputable(tap: Tap, name: str) -> None:
    if tap.edits and _torch.in_bare_segment():
        raise SessionError(
            f"{tap.label}/{name} cannot be edited here: it runs in a checkpointed function that is no module, and "
            "would not be edited when that is recomputed. Checkpoint a module instead, or edit a module's output."
        )


def depths() -> dict[int, int]:
    """How deep every listener of this thread is in its model, for ``unwind``."""
    return {id(listener): listener.depth for listener in _modes.mode.listeners}


def unwind(depths: dict[int, int]) -> None:
    """After an exception went through models: forget what was entered since ``depths`` was taken."""
    for listener in list(_modes.mode.listeners):
        listener.unwind(depths.get(id(listener), 0))


class _Mode(TorchFunctionMode):
    """One for each thread, shared by all sessions. Whether it is on is read off torch's own stack, never remembered: an
    interrupt may come between any two lines."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        self.listeners.append(listener)
        self._settle()

    def ignore(self, listener: Listener) -> None:
        if listener in self.listeners:
            self.listeners.remove(listener)
        self._settle()

    def _settle(self) -> None:
        """On while anybody listens, and off otherwise."""
        if self.listeners:
            listening.add(self)
            if not _torch.mode_is_on(self):
                self.__enter__()  # type: ignore[no-untyped-call]
        else:
            _torch.turn_off(self)
            listening.discard(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        name = op_name(func)
        if name is None or own_work.busy or _torch.in_fsdp():
            return func(*args, **kwargs)
        heard = [(listener, listener.current) for listener in self.listeners if listener.depth]
        for listener, _ in heard:
            args, kwargs = listener.before(name, args, kwargs)
        output = func(*args, **kwargs)
        for listener, module in heard:
            output = listener.after(name, module, output, args, kwargs)
        return output


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.mode = _Mode()


_modes = _PerThread()

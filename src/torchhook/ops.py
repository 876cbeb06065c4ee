"""Functional sites: values that no module owns, such as ``F.relu``, ``out += x`` or a fused attention.

A ``TorchFunctionMode`` sees every functional call, and a stack of modules, kept by hooks on all of them, says in
which module it happened. The mode is only there while a module of a session that asks for operations runs.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from torchhook import tree
from torchhook.hooks import EnterTap, LeaveTap, Scope, Tap, as_arguments, as_value

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
        self.inputs: dict[tuple[nn.Module, str], Tap] = {}
        self.outputs: dict[tuple[nn.Module, str], Tap] = {}
        self.seen: dict[nn.Module, Counter[str]] = {}
        """Operations that returned tensors, by module, counted: what a never-ran report can offer instead."""
        self._gate = Tap("operations", scope)
        self._running: list[nn.Module] = []

    def boundaries(self) -> tuple[EnterTap, LeaveTap]:
        """The hooks that every module of the model needs, for the stack of running modules to be right."""
        return EnterTap(self.enter), LeaveTap(self.leave)

    def enter(self, module: nn.Module) -> None:
        if not self._gate.is_foreign():
            if not self._running:
                _modes.mode.listen(self)
            self._running.append(module)

    def leave(self, module: nn.Module) -> None:
        if module in self._running and not self._gate.is_foreign():
            while self._running.pop() is not module:
                pass  # left by an exception that the model caught
            if not self._running:
                _modes.mode.ignore(self)

    def close(self) -> None:
        if self._running:
            self._running.clear()
            _modes.mode.ignore(self)

    def before(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tap = self.inputs.get((self._running[-1], name))
        if tap is None:
            return args, kwargs
        passing = as_value(args, kwargs)
        value = tap.take(passing)
        return (args, kwargs) if value is passing else as_arguments(value)

    def after(self, name: str, module: nn.Module, output: Any) -> Any:
        if any(True for _ in tree.tensors(output)):
            self.seen.setdefault(module, Counter())[name] += 1
        tap = self.outputs.get((module, name))
        return output if tap is None else tap.take(output)

    @property
    def current(self) -> nn.Module:
        return self._running[-1]


class _Mode(TorchFunctionMode):
    """One for each thread, shared by all sessions, so that it is entered and left in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)
        if len(self._listeners) == 1:
            self.__enter__()  # type: ignore[no-untyped-call]

    def ignore(self, listener: Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)
            if not self._listeners:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        name = op_name(func)
        if name is None or _is_our_own_doing():
            return func(*args, **kwargs)
        listeners = [(listener, listener.current) for listener in self._listeners]
        for listener, _ in listeners:
            args, kwargs = listener.before(name, args, kwargs)
        output = func(*args, **kwargs)
        for listener, module in listeners:
            output = listener.after(name, module, output)
        return output


def _is_our_own_doing() -> bool:
    """Whether the call comes from a hook of this library (a copy, a user's transform) and not from the model."""
    frame = sys._getframe(2)
    while (name := frame.f_globals.get("__name__", "")) != "torch.nn.modules.module" and frame.f_back is not None:
        if name.startswith("torchhook."):
            return True
        frame = frame.f_back
    return False


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.mode = _Mode()


_modes = _PerThread()

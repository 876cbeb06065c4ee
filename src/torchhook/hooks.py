"""The only place that registers hooks, and takes them away again.

A ``Tap`` is the one hook of a module in one direction. It counts its calls and hands each passing value
to its actions in order; an action returns the value to go on with.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchhook.tree import Inputs

Action = Callable[[Any, int], Any]
"""Takes a passing value and the index of the call, returns the value that the model goes on with."""


class Scope:
    """The identity of one open session."""

    __slots__ = ("stopped_at",)

    def __init__(self) -> None:
        self.stopped_at: str | None = None


_active: contextvars.ContextVar[frozenset[Scope]] = contextvars.ContextVar("torchhook_active", default=frozenset())


def enter(scope: Scope) -> None:
    """From here on, calls made in this context (thread, asyncio task) belong to ``scope``."""
    _active.set(_active.get() | {scope})


def leave(scope: Scope) -> None:
    # Not ContextVar.reset: sessions may overlap, and close in another context than they opened in.
    _active.set(_active.get() - {scope})


class Stop(BaseException):
    """Ends a forward pass at the last needed site. Not an ``Exception``: models catch those."""

    def __init__(self, scope: Scope) -> None:
        super().__init__("a torchhook session with stop=True ended this forward pass")
        self.scope = scope


class Tap:
    """What the hooks of one module in one direction have in common."""

    __slots__ = ("actions", "calls", "elsewhere", "label", "ran", "scope")

    def __init__(self, label: str, scope: Scope | None) -> None:
        self.label = label
        self.scope = scope
        """Calls from outside this scope are only counted; ``None`` takes calls from everywhere."""
        self.actions: list[Action] = []
        self.calls = count()
        self.ran = 0
        self.elsewhere = 0

    # A copied or unpickled model must not write into the recording of the original, and must load
    # where torchhook is not installed: the copy of a tap is a do-nothing from the standard library.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class OutputTap(Tap):
    """A forward hook."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.scope is not None and self.scope not in _active.get():
            self.elsewhere += 1
            return None
        call = next(self.calls)
        self.ran = call + 1
        value = output
        for action in self.actions:
            value = action(value, call)
        return None if value is output else value

    def attach(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(self)


class CustomTap(OutputTap):
    """A forward hook whose passing value is what a function in PyTorch's own style makes of the call."""

    __slots__ = ("function",)

    def __init__(self, label: str, scope: Scope | None, function: Callable[[nn.Module, Any, Any], Any]) -> None:
        super().__init__(label, scope)
        self.function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        value = self.function(module, args, output)
        if value is not None:
            super().__call__(module, args, value)


class InputTap(Tap):
    """A forward pre-hook. One positional argument passes as itself, anything else as ``Inputs``."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.scope is not None and self.scope not in _active.get():
            self.elsewhere += 1
            return None
        call = next(self.calls)
        self.ran = call + 1
        value = passing = args[0] if len(args) == 1 and not kwargs else Inputs(args, kwargs)
        for action in self.actions:
            value = action(value, call)
        if value is passing:
            return None
        return (value.args, value.kwargs) if isinstance(value, Inputs) else ((value,), {})

    def attach(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(self, with_kwargs=True)


def on_gradient(tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Call ``function`` with the tensor's gradient when it is computed; what it returns takes its place."""
    handle: RemovableHandle = tensor.register_hook(function)
    return handle


class Attachment:
    """Hooks that go away together, whatever happens."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def attach(self, tap: OutputTap | InputTap, module: nn.Module) -> None:
        self._undo.append(tap.attach(module).remove)

    def defer(self, undo: Callable[[], None]) -> None:
        """Call ``undo``, which may be called twice, when the hooks go."""
        self._undo.append(undo)

    def remove(self) -> None:
        try:
            self._remove()
        except BaseException:  # an interrupt while removing: finish first, then let it pass
            self._remove()
            raise

    def _remove(self) -> None:
        while self._undo:
            self._undo[-1]()
            self._undo.pop()


class _EagerStance:
    """Compiled code ignores hooks that came after compiling (pytorch#117758): run it eagerly meanwhile.

    The stance belongs to the process and sessions may overlap, so the first one in sets it and the last
    one out restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._stance: Any = None

    def hold(self) -> Callable[[], None]:
        """Force eager until the returned function is called."""
        if "torch._dynamo" not in sys.modules:  # then nothing was compiled, and importing it takes seconds
            return lambda: None
        with self._lock:
            if self._holders == 0:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._holders += 1
        held = [True]

        def release() -> None:
            with self._lock:
                if held and held.pop():
                    self._holders -= 1
                    if self._holders == 0:
                        self._stance.__exit__(None, None, None)
                        self._stance = None

        return release


eager_stance = _EagerStance()

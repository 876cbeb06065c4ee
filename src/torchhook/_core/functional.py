"""Functional sites: values that no module owns, such as ``F.relu``, ``out += x`` or a fused attention.

A ``TorchFunctionMode`` sees functional calls, and a stack of modules, kept by hooks on them, says in which module one
happened. The mode is only there while a module runs that a session listens to: any module for those who want to hear
of everything (``Listener``), those that have sites for the others (``SiteListener``), which let all other functions
pass as quickly as can be.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from operator import attrgetter
from sys import getrefcount
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchhook import _torch
from torchhook._core.boundaries import EnterTap, LeaveTap
from torchhook._core.hooks import Attachable, Attachment
from torchhook._core.index import Index
from torchhook._core.scope import Scope, active
from torchhook._core.taps import Tap, listeners, own_work
from torchhook._torch import modes_on, sharded, turn_off, turn_on
from torchhook._torch.compiler import in_trace
from torchhook._torch.hooks import held_by_name
from torchhook._values import tree

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


_openings = count()
Recorder = Callable[[Any, bool], None]


class _Place(threading.local):
    """Where a listener is in a thread: the modules that run there."""

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.counts: dict[int, list[Counter[str]]] = {}
        """How often each operation came in the calls of a module that are on their way, where that is counted."""


class Listener:
    """Every operation of a model: which module is running, and what happens in it."""

    def __init__(self, scope: Scope | None, last: bool = False) -> None:
        self._comes_last = last
        """Whether it comes after those of all other sessions, to hear of what they have made of a call."""
        self.turn: tuple[bool, int] = (last, 0)
        self.ignored: set[Callable[..., Any]] = set()
        """Functions that are let through without a look."""
        self.seen: dict[int, Counter[str]] = {}
        """Operations that returned tensors, by the id of the module, counted."""
        self._gate = Tap("operations", scope)
        self._place = _Place()
        self._is_open = False

    def opened(self) -> None:
        """Its session opens: like hooks on one module, listeners take turns in this order.

        The order in which they begin to listen says nothing: one hears of the whole model, another of one layer in it.
        """
        self.turn = (self._comes_last, next(_openings))
        self._is_open = True

    def attach(self, attachment: Attachment, index: Index) -> None:
        """Put on the hooks that modules need for the stack of running modules to be right."""
        attachment.attach_all(self.boundaries(index))

    def boundaries(self, index: Index) -> Iterable[tuple[nn.Module, Attachable]]:
        """These hooks."""
        enter, leave = EnterTap(self.enter), LeaveTap(self.leave)
        for module in index.distinct.values():
            yield module, enter
            yield module, leave

    def enter(self, module: nn.Module) -> None:
        if self._gate.is_foreign():
            return
        running = self._place.running  # and no call for it: this is done for each call of a module
        if running and module is running[0] and _torch.times_running(module) < 2:
            self.unwind(0)  # left by an interrupt, which hooks do not see
        if running:
            running.append(module)
        else:
            own_work.busy = 0  # an interrupt may have left it so
            running.append(module)
            _modes.mode.listen(self)

    def enter_running(self, model: nn.Module) -> None:
        """The model runs already: its own hooks come too late to say so."""
        self.enter(model)

    def leave(self, module: nn.Module) -> None:
        running = self._place.running
        if not running or (running[-1] is not module and not any(module is other for other in running)):
            return
        if not self._gate.is_foreign():
            while running.pop() is not module:
                pass  # left by an exception that the model caught
            if not running:
                _modes.mode.ignore(self)

    def unwind(self, depth: int) -> None:
        """Forget modules beyond ``depth``: hooks do not run when a ``BaseException`` goes through them."""
        if len(self._running) > depth:
            del self._running[depth:]
            if not self._running:
                _modes.mode.ignore(self)

    @contextlib.contextmanager
    def hearing_again(self, module: nn.Module, counts: Counter[str]) -> Iterator[None]:
        """Listen while a part of a module is recomputed, in whichever thread that is."""
        mode, depth = _modes.mode, len(self._running)
        listens = self._is_open and self not in mode.listeners
        if self._is_open:
            self._running.append(module)
        if listens:
            mode.listen(self)
        try:
            yield
        finally:
            del self._running[depth:]
            if listens:
                mode.ignore(self)

    def close(self) -> None:
        self._is_open = False
        self.unwind(0)
        _modes.mode.ignore(self)  # an interrupt may have come between the two before

    @property
    def _running(self) -> list[nn.Module]:
        return self._place.running

    @property
    def depth(self) -> int:
        return len(self._running)

    @property
    def current(self) -> nn.Module:
        return self._running[-1]

    def where(self, function: Callable[..., Any], name: str) -> nn.Module | None:
        """The module in which a call happens that is to be heard of."""
        return self._running[-1] if self._running else None

    def recorder(self, function: Callable[..., Any]) -> Recorder | None:
        """Takes what a call returns, and whether it is new, where nothing else is to be done about that call."""
        return None

    def before(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def after(self, name: str, module: nn.Module, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(output) is Tensor or any(True for _ in tree.tensors(output)):
            self.seen.setdefault(id(module), Counter())[name] += 1
        return output


def depths() -> dict[int, int]:
    """How deep every listener of this thread is in its model, for ``unwind``."""
    listeners = _modes.mode.listeners
    return {id(listener): listener.depth for listener in listeners} if listeners else {}


def unwind(depths: Mapping[int, int]) -> None:
    """After an exception went through models: forget what was entered since ``depths`` was taken."""
    for listener in list(_modes.mode.listeners):
        listener.unwind(depths.get(id(listener), 0))


class _Mode(TorchFunctionMode):
    """One for each thread, shared by all sessions. Whether it is on is read off torch's own stack, never remembered: an
    interrupt may come between any two lines."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Listener] = []
        self.made_here = False
        """Whether the newest call has made what it returned: nobody else holds that."""
        self.ignored: set[Callable[..., Any]] = set()
        """What the only listener ignores, or nothing: this is asked for every function that runs."""

    def listen(self, listener: Listener) -> None:
        if not self.listeners and not modes_on():  # as nearly always: what all that follows comes to then
            self.listeners, self.ignored = [listener], listener.ignored
            listeners.add(self)
            turn_on(self)
            return
        # An interrupt may have kept it from being taken away.
        turns = [*(other for other in self.listeners if other is not listener), listener]
        self.listeners = sorted(turns, key=attrgetter("turn")) if len(turns) > 1 else turns
        self._settle()

    def ignore(self, listener: Listener) -> None:
        if len(self.listeners) == 1 and self.listeners[0] is listener:
            self.listeners = []
            turn_off(self)
            listeners.discard(self)
            return
        if listener in self.listeners:
            self.listeners.remove(listener)
        self._settle()

    def _settle(self) -> None:
        """On while anybody listens, and off otherwise."""
        self.ignored = self.listeners[0].ignored if len(self.listeners) == 1 else set()
        if self.listeners:
            listeners.add(self)
            if not _torch.mode_is_on(self):
                turn_on(self)
        else:
            turn_off(self)
            listeners.discard(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.ignored:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = {} if kwargs is None else kwargs
        if len(self.listeners) == 1 and (record := self.listeners[0].recorder(func)) is not None and not own_work.busy:
            output = func(*args, **kwargs)
            made_here = getrefcount(output) <= held_by_name  # on a line of its own, for arguments are references too
            record(output, made_here)
            return output
        name = op_name(func)
        if name is None:
            for listener in self.listeners:
                listener.ignored.add(func)
            return func(*args, **kwargs)
        if own_work.busy:
            return func(*args, **kwargs)
        heard = [
            (listener, module) for listener in self.listeners if (module := listener.where(func, name)) is not None
        ]
        if not heard or sharded.is_moving_weights(heard[0][1]):
            return func(*args, **kwargs)
        for listener, module in heard:
            args, kwargs = listener.before(name, module, args, kwargs)
        output = func(*args, **kwargs)
        self.made_here = getrefcount(output) <= held_by_name  # here, where it is known how many hold it
        for listener, module in heard:
            passed = listener.after(name, module, output, args, kwargs)
            if passed is not output:  # nobody knows who holds what an edit has put in its place
                self.made_here, output = False, passed
        return output


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.mode = _Mode()


def made_here() -> bool:
    """While listeners hear of a call that is over: whether that has made what it returned, which nobody else holds."""
    return _modes.mode.made_here


_modes = _PerThread()


# What a listener's enter and leave come to where no module of its is around, and nobody else listens: on one level, for
# these run once for each call of a module, and find nothing of themselves in the processor's caches.


class BeginTap(EnterTap):
    """Says when a module begins to run."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener.enter)
        self._listener = listener

    def __call__(self, module: nn.Module, args: Any) -> None:
        listener, mode = self._listener, _modes.mode
        scope, running = listener._gate.scope, listener._place.running
        if (
            scope is None
            or (scope.runs_eagerly and in_trace())
            or scope not in active.get()
            or running
            or mode.listeners
            or modes_on()
        ):
            self.function(module)
            return
        own_work.busy = 0  # an interrupt may have left it so
        running.append(module)
        mode.listeners, mode.ignored = [listener], listener.ignored
        listeners.add(mode)
        turn_on(mode)


class EndTap(LeaveTap):
    """Says when it has run, or raised."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(listener.leave)
        self._listener = listener

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        listener, mode = self._listener, _modes.mode
        scope, running = listener._gate.scope, listener._place.running
        if (
            scope is None
            or (scope.runs_eagerly and in_trace())
            or scope not in active.get()
            or len(running) != 1
            or running[0] is not module
            or len(mode.listeners) != 1
            or mode.listeners[0] is not listener
        ):
            self.function(module)
            return
        running.pop()
        mode.listeners = []
        turn_off(mode)
        listeners.discard(mode)

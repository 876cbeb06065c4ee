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
from torchhook._core.hooks import Attachable
from torchhook._core.index import Index
from torchhook._core.scope import Scope
from torchhook._core.taps import EnterTap, LeaveTap, Tap, listeners, own_work
from torchhook._torch import dispatcher, modes_on, sharded, turn_off, turn_on
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
        self.hears_all = True
        """Whether every function is to be heard of; else those that the dispatcher tells of are all that is wanted."""
        self.counts: dict[int, list[Counter[str]]] = {}
        """How often each operation came in the calls of a module that are on their way, where that is counted."""
        self.ran: dict[int, int] = {}
        """How often those of a module had come before its present call, where the dispatcher tells of them."""


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
        self.unheard: set[int] = set()
        """Modules, by id, that made no call of what was to be told of them, though they had made some before."""
        self._gate = Tap("operations", scope)
        self._place = _Place()
        self._is_open = False

    def opened(self) -> None:
        """Its session opens: like hooks on one module, listeners take turns in this order.

        The order in which they begin to listen says nothing: one hears of the whole model, another of one layer in it.
        """
        self.turn = (self._comes_last, next(_openings))
        self._is_open = True

    def boundaries(self, index: Index) -> Iterable[tuple[nn.Module, Attachable]]:
        """The hooks that modules need for the stack of running modules to be right."""
        enter, leave = EnterTap(self.enter), LeaveTap(self.leave)
        for module in index.distinct.values():
            yield module, enter
            yield module, leave

    def enter(self, module: nn.Module, hears_all: bool = True) -> None:
        """A module begins to run. ``hears_all``: every function that it calls has to be heard of."""
        if self._gate.is_foreign():
            return
        place = self._place
        running = place.running  # and no call for it: this is done for each call of a module
        if running and module is running[0] and _torch.times_running(module) < 2:
            self.unwind(0)  # left by an interrupt, which hooks do not see
        if not running:
            own_work.busy = 0  # an interrupt may have left it so
            running.append(module)
            place.hears_all = hears_all
            _modes.mode.listen(self)
            return
        running.append(module)
        if hears_all and not place.hears_all:
            place.hears_all = True
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
    def hears_all(self) -> bool:
        return self._place.hears_all

    @property
    def depth(self) -> int:
        return len(self._running)

    @property
    def current(self) -> nn.Module:
        return self._running[-1]

    def where(self, function: Callable[..., Any], name: str) -> nn.Module | None:
        """The module in which a call happens that is to be heard of."""
        return self._running[-1] if self._running else None

    def recorder(self, function: Callable[..., Any], is_plain: bool) -> Recorder | None:
        """Takes what a call returns, and whether it is new, where nothing else is to be done about that call.

        ``is_plain`` says that none of its arguments is of a class that has a say in what is done.
        """
        return None

    def heard_plain(self, name: str, module: nn.Module) -> None:
        """A call with such arguments was heard in a module."""

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
    interrupt may come between any two lines.

    Where all that anybody wants to hear of is what the dispatcher tells of, it stays off, and is called by that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Listener] = []
        self.made_here = False
        """Whether the newest call has made what it returned: nobody else holds that."""
        self._ignored: set[Callable[..., Any]] = set()
        """What the only listener ignores, or nothing: this is asked for every function that runs."""

    def listen(self, listener: Listener) -> None:
        if not self.listeners and not modes_on():  # as nearly always: what all that follows comes to then
            self.listeners, self._ignored = [listener], listener.ignored
            listeners.add(self)
            if listener.hears_all:
                turn_on(self)
            else:
                dispatcher.turn_on(self.__torch_function__)
            return
        # An interrupt may have kept it from being taken away.
        turns = [*(other for other in self.listeners if other is not listener), listener]
        self.listeners = sorted(turns, key=attrgetter("turn")) if len(turns) > 1 else turns
        self._settle()

    def ignore(self, listener: Listener) -> None:
        if len(self.listeners) == 1 and self.listeners[0] is listener:
            self.listeners = []
            if modes_on():
                turn_off(self)
            dispatcher.turn_off()
            listeners.discard(self)
            return
        if listener in self.listeners:
            self.listeners.remove(listener)
        self._settle()

    def _settle(self) -> None:
        """On while anybody listens, and off otherwise; never in both ways, or each call would be heard twice."""
        self._ignored = self.listeners[0].ignored if len(self.listeners) == 1 else set()
        if not self.listeners:
            turn_off(self)
            dispatcher.turn_off()
            listeners.discard(self)
            return
        listeners.add(self)
        is_on = _torch.mode_is_on(self)
        # Another mode may have a say in what is called, and those that hear of all come before who hears of one.
        if modes_on() > is_on or any(listener.hears_all for listener in self.listeners):
            dispatcher.turn_off()
            if not is_on:
                turn_on(self)
        else:
            turn_off(self)
            dispatcher.turn_on(self.__torch_function__)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._ignored:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = {} if kwargs is None else kwargs
        if (
            len(self.listeners) == 1
            and (record := self.listeners[0].recorder(func, not types)) is not None
            and not own_work.busy
        ):
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
            if not types:
                listener.heard_plain(name, module)
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

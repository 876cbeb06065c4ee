"""Taps: what passes a site is counted, edited, looked at, and aliased where its gradient is wanted.

A ``Tap`` is the one hook of a module in one direction, or of one operation in it. Everything it does was decided
before the model ran::

    value ──▶ edits: value → value ──▶ looks: only look ──▶ aliases: the same, with a gradient of its own ──▶ value
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from torchhook._core.hooks import after_call, before_call
from torchhook._core.recompute import Segments
from torchhook._core.scope import Scope, active
from torchhook._torch import graph_task
from torchhook._torch_compiler import in_trace
from torchhook._values.tree import Inputs

Edit = Callable[[Any, int], Any]
"""Takes a passing value and the index of the call, returns the value that the model goes on with."""

Look = Callable[[Any, int], None]
"""Takes a passing value and the index of the call."""

Alias = Callable[[Any, int, Any, bool], Any]
"""Takes a passing value, the index of the call, what the value was made from and whether the call is recomputed, and
returns the value to go on with."""


class OwnWork(threading.local):
    """Whether hooks of this library run in this thread: whoever listens to operations takes no notice of theirs."""

    def __init__(self) -> None:
        self.busy = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before


own_work = OwnWork()
listening: set[Any] = set()
"""Those who listen to operations now, in any thread. While there are none, taps need not say that they are at work."""


repeated: dict[int, Iterator[int]] = {}
"""Taps by id, each with the calls to come, while a run of the model is repeated that they have seen: what passes them
is edited as it was then, and is neither counted nor looked at again. The id stands for a tap of an open session."""


class Tap:
    """What passes one site: counted, edited, looked at."""

    __slots__ = (
        "_made_in",
        "_segments",
        "aliases",
        "calls",
        "edits",
        "elsewhere",
        "label",
        "looks",
        "ran",
        "recomputed",
        "scope",
    )

    def __init__(self, label: str, scope: Scope | None = None) -> None:
        self.label = label
        self.scope = scope
        """Calls from outside this scope are only counted; ``None`` takes calls from everywhere."""
        self.edits: list[Edit] = []
        self.looks: list[Look] = []
        self.aliases: Sequence[Alias] = ()  # most have none, and a session makes many taps
        self.calls = count()
        self.ran = 0
        self.elsewhere = 0
        self.recomputed = 0
        self._segments: Segments | None = None
        self._made_in = graph_task()  # a session that a recomputed segment opens is as new as its calls

    @property
    def segments(self) -> Segments:
        """Which calls belong to which checkpointed segment."""
        if self._segments is None:
            self._segments = Segments()
        return self._segments

    @property
    def is_waiting(self) -> bool:
        """Whether a call of this may still be recomputed."""
        return self._segments is not None and self._segments.is_waiting()

    # A copied or unpickled model must not write into the recording of the original, and must load
    # where torchhook is not installed: the copy of a tap is a do-nothing from the standard library.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def is_foreign(self) -> bool:
        """Whether this call was made in a context that the tap does not belong to."""
        if self.scope is None:
            return False
        if self.scope.runs_eagerly and in_trace():  # the compiler was at work when another thread opened the session
            return True
        if self.scope in active.get():
            return False
        if graph_task() != -1 and self.segments.is_known():
            return False  # autograd recomputes on threads of its own
        self.elsewhere += 1
        return True

    @property
    def recomputing(self) -> bool:
        return self.ran > 0 and (graph_task() != -1 or id(self) in repeated)

    def take(self, value: Any, source: Any = ()) -> Any:
        """Pass a value, and return the one to go on with. ``source`` is what the value was made from."""
        if not listening:
            return self._take(value, source)
        with own_work():
            return self._take(value, source)

    def _take(self, value: Any, source: Any) -> Any:
        if repeated and id(self) in repeated:
            call = next(repeated[id(self)])
            for edit in self.edits:
                value = edit(value, call)
            return value
        again, changes = self.recomputing, bool(self.edits or self.aliases)
        if changes and graph_task() not in (-1, self._made_in) and self.segments.is_older():
            return value
        if again:
            self.recomputed += 1
            if not changes:
                return value  # looks have seen it before
            call = self.segments.call_again(self.ran)
        else:
            call = next(self.calls)
            self.ran = call + 1
            if changes:
                self.segments.note(call)
        for edit in self.edits:
            value = edit(value, call)
        if not again:
            for look in self.looks:
                look(value, call)
        for alias in self.aliases:
            value = alias(value, call, source, again)
        return value


class OutputTap(Tap):
    """A forward hook."""

    __slots__ = ("_only_looks",)

    def __init__(self, label: str, scope: Scope | None = None) -> None:
        super().__init__(label, scope)
        self._only_looks = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        scope = self.scope
        if (
            scope is not None
            and ((scope.runs_eagerly and in_trace()) or scope not in active.get())
            and self.is_foreign()
        ):
            return None
        if self._only_looks and not listening and graph_task() == -1:
            # What take does then, without the call: this runs once for every captured layer.
            call = next(self.calls)
            self.ran = call + 1
            for look in self.looks:
                look(output, call)
            return None
        value = self.take(output, args)
        return None if value is output else value

    def attach(self, module: nn.Module) -> RemovableHandle:
        self._only_looks = not self.edits and not self.aliases
        return after_call(module, self)


class CustomTap(OutputTap):
    """A forward hook whose passing value is what a function in PyTorch's own style makes of the call."""

    __slots__ = ("function",)

    def __init__(self, label: str, scope: Scope | None, function: Callable[[nn.Module, Any, Any], Any]) -> None:
        super().__init__(label, scope)
        self.function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.is_foreign():
            return
        with own_work():
            value = self.function(module, args, output)
        if value is not None:
            self.take(value)


class InputTap(Tap):
    """A forward pre-hook. One positional argument passes as itself, anything else as ``Inputs``."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs is None or self.is_foreign():  # without kwargs: removed by a hook that ran just before
            return None
        passing = as_value(args, kwargs)
        value = self.take(passing)
        return None if value is passing else as_arguments(value)

    def attach(self, module: nn.Module) -> RemovableHandle:
        return before_call(module, self, with_kwargs=True)


class EnterTap(Tap):
    """Says when a module begins to run."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[nn.Module], None]) -> None:
        super().__init__("enter")
        self.function = function

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.function(module)

    def attach(self, module: nn.Module) -> RemovableHandle:
        return before_call(module, self)


class LeaveTap(EnterTap):
    """Says when a module has run, also when it raised; first of all hooks, so that the others run outside of it."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self.function(module)

    def attach(self, module: nn.Module) -> RemovableHandle:
        return after_call(module, self, prepend=True, always_call=True)


def as_value(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What passes a module's entrance, given how it is called."""
    return args[0] if len(args) == 1 and not kwargs else Inputs(args, kwargs)


def as_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How to call a module with what passes its entrance."""
    return (value.args, value.kwargs) if isinstance(value, Inputs) else ((value,), {})

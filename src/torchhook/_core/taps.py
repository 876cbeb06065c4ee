"""Taps: what passes a site is counted, edited, looked at, and aliased where its gradient is wanted.

A ``Tap`` is the one hook of a module in one direction, or of one operation in it. Everything it does was decided
before the model ran::

    value ──▶ edits: value → value ──▶ looks: only look ──▶ aliases: the same, with a gradient of its own ──▶ value
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from sys import getrefcount
from typing import Any

from torch import nn

from torchhook._core.keep import Keep
from torchhook._core.recompute import Segments, segments_around
from torchhook._core.scope import UNSEEN, Scope, active
from torchhook._recording.records import Rows
from torchhook._torch import dispatch_modes, graph_task, kept_out, out_of_checkpoints, torch_task
from torchhook._torch.compiler import in_trace
from torchhook._torch.hooks import Undo, held_by_call, put_after, put_before
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
        self.busy = 0
        """How many of them, one in the other."""

    def __enter__(self) -> None:
        self.busy += 1

    def __exit__(self, *exc_info: object) -> None:
        self.busy = max(0, self.busy - 1)  # what an interrupt had left was put right meanwhile


own_work = OwnWork()
listeners: set[Any] = set()
"""Those who listen to operations now, in any thread. While there are none, taps need not say that they are at work."""


repeated: dict[int, Iterator[int]] = {}
"""Taps by id, each with the calls to come, while a run of the model is repeated that they have seen: what passes them
is edited as it was then, and is neither counted nor looked at again. The id stands for a tap of an open session."""


class Tap:
    """What passes one site: counted, edited, looked at."""

    # What most taps never ask for is the class's. The rest is their own: what is read at each call is found sooner so.
    made_unseen: bool = False
    """Whether one that takes calls from everywhere was put there by what is seen by nobody else."""
    _segments: Segments | None = None

    def __init__(self, label: str, scope: Scope | None = None) -> None:
        self.label = label
        self.scope = scope
        """Calls from outside this scope are only counted; ``None`` takes calls from everywhere that is seen at all."""
        self.calls = count()
        # A session that a recomputed segment opens is as new as its calls. As graph_task, without the call.
        self.made_in = -1 if torch_task() == -1 else graph_task()
        self.edits: Sequence[Edit] = ()
        self.looks: Sequence[Look] = ()
        self.aliases: Sequence[Alias] = ()
        self.ran = self.elsewhere = self.recomputed = 0

    def add_edit(self, edit: Edit, first: bool = False) -> None:
        self.edits = [edit, *self.edits] if first else [*self.edits, edit]

    def add_look(self, look: Look, first: bool = False) -> None:
        self.looks = [look, *self.looks] if first else [*self.looks, look]

    def add_alias(self, alias: Alias) -> None:
        self.aliases = [*self.aliases, alias]

    def forget(self, task: int) -> None:
        """Begin to count anew, as if made in the backward pass ``task`` or in none."""
        self.calls, self._segments, self.made_in = count(), None, task
        self.ran = self.elsewhere = self.recomputed = 0

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
        return contextlib.nullcontext().__exit__  # remove_copied knows it by this

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def is_foreign(self) -> bool:
        """Whether this call was made in a context that the tap does not belong to."""
        if self.scope is None:
            return not self.made_unseen and UNSEEN in active.get()
        if self.scope.runs_eagerly and in_trace():  # the compiler was at work when another thread opened the session
            return True
        if self.scope in active.get():
            return False
        if graph_task() != -1 and self.segments.is_known():
            return False  # autograd recomputes on threads of its own
        self.elsewhere += UNSEEN not in active.get()
        return True

    @property
    def recomputing(self) -> bool:
        return self.ran > 0 and (graph_task() != -1 or id(self) in repeated)

    def take(self, value: Any, source: Any = ()) -> Any:
        """Pass a value, and return the one to go on with. ``source`` is what the value was made from."""
        if not listeners:
            return self._take(value, source)
        with own_work:
            return self._take(value, source)

    def note_segments(self, call: int) -> None:
        """Remember the checkpointed segments around a call, which may run again."""
        if segments_around():  # mostly there are none
            self.segments.note(call)

    def _take(self, value: Any, source: Any) -> Any:
        if repeated and id(self) in repeated:
            call = next(repeated[id(self)])
            for edit in self.edits:
                value = edit(value, call)
            return value
        task, changes = graph_task(), bool(self.edits or self.aliases)
        again = task != -1 and self.recomputing
        if changes and task not in (-1, self.made_in) and self.segments.is_older():
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
                self.note_segments(call)
        for edit in self.edits:
            value = edit(value, call)
        return self._seen(value, call, source, again)

    @kept_out
    def _seen(self, value: Any, call: int, source: Any, again: bool) -> Any:
        """Show a value to those who only look, unless they have seen it before, and to those who alias it."""
        if not again:
            self.look(value, call)
        for alias in self.aliases:
            value = alias(value, call, source, again)
        return value

    def look(self, value: Any, call: int) -> None:
        """Show a value to those who only look."""
        for look in self.looks:
            look(value, call)


def forget_passed(taps: Iterable[tuple[Any, Tap]]) -> None:
    """Let taps, each with its module, forget that anything has passed; their calls are counted on."""
    # All by one call: a training step that is measured has hundreds of them.
    for _, tap in taps:
        tap.ran, tap._segments = 0, None


class OutputTap(Tap):
    """A forward hook."""

    _only_looks = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        scope = self.scope
        if (scope is None or (scope.runs_eagerly and in_trace()) or scope not in active.get()) and self.is_foreign():
            return None
        if not listeners and not repeated and graph_task() == -1 and not dispatch_modes():
            # What take does then, without the calls: this runs once for every captured layer.
            call = next(self.calls)
            self.ran = call + 1
            if self._only_looks:
                self.look(output, call)
                return None
            self.note_segments(call)
            value = output
            for edit in self.edits:
                value = edit(value, call)
            self.look(value, call)
            for alias in self.aliases:
                value = alias(value, call, args, False)
        else:
            value = self.take(output, args)
        return None if value is output else value

    def attach(self, undo: Undo, module: nn.Module) -> None:
        self._only_looks = not self.edits and not self.aliases
        put_after(undo, module, self)


class RecordTap(OutputTap):
    """A forward hook that keeps what passes, before any others look at it. Most hooks of a session are of this kind."""

    _only_looks = True  # as long as nobody else edits or wants gradients

    def __init__(
        self, label: str, scope: Scope | None, keep: Keep, rows: Rows, order: Iterator[int], made_in: int
    ) -> None:
        self.label = label
        self.scope = scope
        self.calls = count()
        self.made_in = made_in
        self.keep = keep
        self.rows = rows
        self.order = order
        self.edits = self.looks = self.aliases = ()
        self._does_more = False
        self.ran = self.elsewhere = self.recomputed = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        # What an OutputTap does, on one level, where a value is but kept and looked at in the session's own context.
        scope = self.scope
        if (
            scope is None
            or (scope.runs_eagerly and in_trace())
            or scope not in active.get()
            or self._does_more
            or listeners
            or repeated
            or torch_task() != -1
            or dispatch_modes()
        ):
            return super().__call__(module, args, output)
        call = next(self.calls)
        self.ran = call + 1
        made_here = getrefcount(output) <= held_by_call  # on a line of its own, for arguments are references too
        self.rows.append((call, next(self.order), self.keep.kept(output, made_here)))
        for look in self.looks:
            look(output, call)
        return None

    def look(self, value: Any, call: int) -> None:
        self.rows.append((call, next(self.order), self.keep.kept(value)))
        for look in self.looks:
            look(value, call)

    def attach(self, undo: Undo, module: nn.Module) -> None:
        if self.edits or self.aliases:
            self._only_looks, self._does_more = False, True
        put_after(undo, module, self)


class OperationTap(Tap):
    """What passes an operation, and is kept before any others look at it if it is recorded."""

    keep: Keep | None = None
    rows: Rows
    order: Iterator[int]

    def record(self, keep: Keep, rows: Rows, order: Iterator[int]) -> None:
        """Keep what passes."""
        self.keep, self.rows, self.order = keep, rows, order

    @property
    def only_records(self) -> bool:
        """Whether there is nothing to do with the value that passes but to keep it."""
        return not (
            self.keep is None
            or self.edits
            or self.looks
            or self.aliases
            or repeated
            or torch_task() != -1
            or dispatch_modes()
        )

    def put(self, value: Any, made_here: bool) -> None:
        """What ``take`` comes to where it ``only_records``; ``made_here`` is for ``Keep.kept``."""
        assert self.keep is not None
        self.ran = (call := next(self.calls)) + 1
        self.rows.append((call, next(self.order), self.keep.kept(value, made_here)))

    def look(self, value: Any, call: int, made_here: bool = False) -> None:
        if self.keep is not None:
            self.rows.append((call, next(self.order), self.keep.kept(value, made_here)))
        for look in self.looks:
            look(value, call)


class CustomTap(OutputTap):
    """A forward hook whose passing value is what a function in PyTorch's own style makes of the call."""

    def __init__(self, label: str, scope: Scope | None, function: Callable[[nn.Module, Any, Any], Any]) -> None:
        super().__init__(label, scope)
        self.function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.is_foreign() or id(self) in repeated:
            return
        with own_work, out_of_checkpoints():
            value = self.function(module, args, output)
        if value is not None:
            self.take(value)


class InputTap(Tap):
    """A forward pre-hook. One positional argument passes as itself, anything else as ``Inputs``."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs is None:  # removed by a hook that ran just before
            return None
        scope = self.scope
        if (scope is None or (scope.runs_eagerly and in_trace()) or scope not in active.get()) and self.is_foreign():
            return None
        passing = args[0] if len(args) == 1 and not kwargs else as_value(args, kwargs)
        if not self.edits and not listeners and not repeated and torch_task() == -1 and not dispatch_modes():
            # What take does then, without the calls: the model is entered this way, and what has gradients to be seen.
            call = next(self.calls)
            self.ran = call + 1
            value = passing
            if self.aliases:
                self.note_segments(call)
            for look in self.looks:
                look(value, call)
            for alias in self.aliases:
                value = alias(value, call, (), False)
            return None if value is passing else as_arguments(value)
        value = self.take(passing)
        return None if value is passing else as_arguments(value)

    def attach(self, undo: Undo, module: nn.Module) -> None:
        put_before(undo, module, self)


def as_value(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What passes a module's entrance, given how it is called."""
    return args[0] if len(args) == 1 and not kwargs else Inputs(args, kwargs)


def as_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How to call a module with what passes its entrance."""
    return (value.args, value.kwargs) if isinstance(value, Inputs) else ((value,), {})

"""The eyes of the guard: what is made, in the order in which it is made, so that the first bad value is the producer's.

Operations are seen by a listener, what no listener sees (custom autograd functions, extensions) by the output of its
module, gradients by a hook on each step of the backward pass.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._core.functional import Listener
from torchhook._core.scope import Scope
from torchhook._guard.backward import BackwardWatcher
from torchhook._guard.checks import copied
from torchhook._guard.events import Event, Location
from torchhook._guard.judge import Judge
from torchhook._guard.operations import (
    FILLS,
    MOVES,
    UNINITIALIZED,
    Named,
    arguments,
    is_view,
    named,
    overwritten,
    results,
)
from torchhook._guard.pending import Pending
from torchhook._guard.runs import repeating
from torchhook._guard.uninitialized import Uninitialized, without_nan
from torchhook._torch import graph_task, kept_out
from torchhook._values.memory import origin, storage


class Watcher(Listener):
    """Hears of every module and operation that runs, and has what it makes checked."""

    def __init__(
        self,
        scope: Scope,
        judge: Judge,
        pending: Pending,
        backward: BackwardWatcher,
        excluded: set[tuple[int, str | None]],
        first_run: int = 0,
    ) -> None:
        super().__init__(scope)
        self._judge = judge
        self._pending = pending
        self._backward = backward
        self._excluded = excluded
        """Modules by id, each with an operation or as a whole."""
        self._run = first_run - 1
        self.operations: Counter[tuple[int, str]] = Counter()
        """Calls so far, by the id of the module and the name of the operation."""
        self.modules: Counter[int] = Counter()
        """Calls so far that have ended, by the id of the module."""
        self._inputs: dict[int, Named] = {}
        self._overwritten: dict[int, Tensor] = {}
        """What the operation that runs writes to, as it was before."""
        self._uninitialized = Uninitialized()
        self._repeats = bool(repeating)
        self._last_checked: weakref.ref[Tensor] | None = None

    # -- modules ------------------------------------------------------------------------------

    def enter(self, module: nn.Module) -> None:
        if repeating and not self._repeats:
            return  # another guard's repetition of what was seen here before
        super().enter(module)
        # Checkpointing calls modules inside a backward pass: that belongs to the run it computes again.
        if self.depth == 1 and self.current is module and not _is_recomputing():
            self._run += 1
            self._judge.forget_run()
            self._uninitialized.clear()
            self._backward.begin_run(self._run)

    def module_called(self, module: nn.Module, value: Any, call: int) -> None:
        """A module is called; the outermost one's arguments are the model's own inputs."""
        inputs = self._inputs[id(module)] = named(value, "input")
        tensors = [tensor for _, tensor in inputs]
        if self.depth > 1:
            self._pending.note_crossing(inputs, None)
            # What the caller did to them without being seen (a custom function) is behind them in the graph now.
            self._backward.follow(tensors, self._location(self._running[-2], None, None))
            return
        self._pending.called_with(tensors)
        for name, tensor in inputs:
            self._judge.judge_input(self._location(module, None, call), name, tensor)

    def module_returned(self, module: nn.Module, value: Any, call: int) -> None:
        """A module has run: check what no operation was seen to make."""
        inputs, outputs = self._inputs.pop(id(module), []), named(value, "output")
        self.modules[id(module)] += 1
        self._pending.note_crossing(outputs, module)
        # Most modules return what their last operation made, and that was checked. Uninitialized memory is not checked
        # as a whole: what was written to it was.
        last = None if self._last_checked is None else self._last_checked()
        unseen = [(name, t) for name, t in outputs if t is not last and t not in self._uninitialized]
        location = self._location(module, None, call)
        if unseen and not self._is_excluded(None, module):
            # Apart: a mask beside the features must not make the features look like a mask, nor the other way round.
            for learned in (True, False):
                self._check_unseen(location, inputs, [(name, t) for name, t in unseen if t.requires_grad is learned])
        # All of them: what a custom autograd function returns is the very tensor that an operation inside it made, but
        # the step back is the function's own. Steps that were claimed by operations are left to them.
        if not self._is_excluded(None, module):
            self._backward.follow([tensor for _, tensor in outputs], location)
        if self.depth == 0:
            # The caller of the model must not get a bad value before it is known to be one.
            self._pending.flush()
            self._backward.await_loss(outputs, location)

    def _check_unseen(self, location: Location, inputs: Named, outputs: Named) -> None:
        def event() -> Event:
            storages, origins = [storage(t) for _, t in outputs], [origin(t) for _, t in inputs]
            learned = outputs[0][1].requires_grad
            return Event(location, "forward", inputs, outputs, storages, origins, learned=learned)

        self._pending.check([tensor for _, tensor in outputs], event)

    # -- operations ---------------------------------------------------------------------------

    @kept_out
    def before(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # An in-place operation destroys the input that a finding has to show, so that is copied first. What is
        # recomputed was checked in its first run.
        self._overwritten = (
            {} if _is_recomputing() else {id(tensor): copied(tensor) for tensor in overwritten(name, args, kwargs)}
        )
        self._backward.begin_op()
        return args, kwargs

    @kept_out
    def after(self, name: str, module: nn.Module, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, self._overwritten = self._overwritten, {}
        outputs = results(output, args, wrote=bool(before))
        if not outputs:
            return output
        again, call = _is_recomputing(), self.operations[id(module), name]
        self.operations[id(module), name] += not again
        if name in UNINITIALIZED or name in MOVES or is_view(name, outputs, args, kwargs):
            if name in UNINITIALIZED:
                self._uninitialized.add(outputs[0])
            self._last_checked = weakref.ref(outputs[-1])
            return output
        if again:  # the values were checked the first time, but this graph is a new one
            self._backward.follow(outputs, self._location(module, name, None))
            return output
        if self._is_excluded(name):
            return output
        if name in FILLS or "out" in kwargs:
            for tensor in outputs:
                self._uninitialized.mark_filled(tensor)

        # A function, because it costs more than the check and is only needed where that fails.
        def event() -> Event:
            inputs, constants = arguments(args, kwargs)
            origins, storages = [origin(t) for _, t in inputs], [storage(t) for t in outputs]
            previous = [before.get(id(t)) if t in self._uninitialized else None for t in outputs]
            was = {key: without_nan(old) if any(old is p for p in previous) else old for key, old in before.items()}
            inputs = [(label, was.get(id(t), t)) for label, t in inputs]
            made = [("output", t) for t in outputs]
            location = self._location(module, name, call)
            return Event(location, "forward", inputs, made, storages, origins, constants, previous)

        self._pending.check(outputs, event)
        if self._backward.enabled and torch.is_grad_enabled():
            self._backward.follow(outputs, self._location(module, name, call))
        # Weak: the guard must not keep an activation that the model has dropped.
        self._last_checked = weakref.ref(outputs[-1])
        return output

    def tell_of_passes(self, tell: Callable[[int], None]) -> None:
        """Have ``tell`` called inside each backward pass."""
        self._backward.tell_of_pass = tell

    @property
    def runs(self) -> int:
        """How often the model ran, at least."""
        return self.modules.total()

    def settle(self, error: BaseException | None) -> None:
        """Nothing is left to be told: it was when it happened."""

    def close(self) -> None:
        super().close()
        self._pending.clear()
        self._judge.forget_run()
        self._uninitialized.clear()
        self._inputs.clear()

    # -- locations ----------------------------------------------------------------------------

    def _location(self, module: nn.Module, op: str | None, call: int | None) -> Location:
        # A module that has just returned is off the stack already, and still part of its own location.
        inside = op is not None or (self._running and self._running[-1] is module)
        modules = self._running if inside else [*self._running, module]
        return Location(self._judge.name(module), op, call, self._run, tuple(modules), graph_task())

    def _is_excluded(self, op: str | None, *more: nn.Module) -> bool:
        if not self._excluded:
            return False
        running = [id(module) for module in (*self._running, *more)]
        return (running[-1], op) in self._excluded or any((module, None) in self._excluded for module in running)


def _is_recomputing() -> bool:
    return graph_task() != -1

"""The eyes of the guard: what passes, in the order in which it is made, so that the first bad value is the producer's.

Operations are seen by a listener, what no listener sees (custom autograd functions, extensions) by the output of its
module, gradients by a hook on each step of the backward pass.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._core.functional import Listener
from torchhook._core.recompute import graph_task
from torchhook._core.scope import Scope
from torchhook._guard.backward import Follower
from torchhook._guard.checks import copied
from torchhook._guard.events import Passing, Place
from torchhook._guard.judge import Judge
from torchhook._guard.operations import BLANK, FILLS, Named, arguments, is_still, named, overwritten, results
from torchhook._guard.pending import Window
from torchhook._guard.uninitialized import Blank, without_nan
from torchhook._values.memory import origin, storage


class Watcher(Listener):
    """Hears of every module and operation that runs, and has what it makes checked."""

    def __init__(
        self, scope: Scope, judge: Judge, window: Window, follower: Follower, excluded: set[tuple[int, str | None]]
    ) -> None:
        super().__init__(scope)
        self._judge = judge
        self._window = window
        self._follower = follower
        self._excluded = excluded
        """Modules by id, each with an operation or as a whole."""
        self._run = -1
        self._calls: Counter[tuple[int, str]] = Counter()
        self._given: dict[int, Named] = {}
        self._overwritten: dict[int, Tensor] = {}
        """What the operation that runs writes to, as it was before."""
        self._blank = Blank()
        self._last_seen: weakref.ref[Tensor] | None = None

    # -- modules ------------------------------------------------------------------------------

    def enter(self, module: nn.Module) -> None:
        super().enter(module)
        if self.depth == 1 and self.current is module and not _is_recomputing():
            self._run += 1
            self._judge.forget_run()
            self._blank.clear()
            self._follower.begin_run(self._run)

    def given(self, module: nn.Module, value: Any, call: int) -> None:
        """A module is called; the outermost one's arguments are the model's own inputs."""
        given = self._given[id(module)] = named(value, "input")
        tensors = [tensor for _, tensor in given]
        if self.depth > 1:
            self._window.cross(given, None)
            self._follower.follow(tensors, self._place(self._running[-2], None, None))
            return
        self._window.called_with(tensors)
        for name, tensor in given:
            self._judge.input(self._place(module, None, call), name, tensor)

    def made(self, module: nn.Module, value: Any, call: int) -> None:
        """A module has run: check what no operation was seen to make."""
        inputs, outputs = self._given.pop(id(module), []), named(value, "output")
        self._window.cross(outputs, module)
        last = None if self._last_seen is None else self._last_seen()
        unseen = [(name, t) for name, t in outputs if t is not last and t not in self._blank]
        place = self._place(module, None, call)
        if unseen and not self._is_excluded(None, module):
            for learned in (True, False):
                self._check_unseen(place, inputs, [(name, t) for name, t in unseen if t.requires_grad is learned])
            self._follower.follow([tensor for _, tensor in unseen], place)
        if self.depth == 0:
            self._window.settle()
            self._follower.expect_loss(outputs, place)

    def _check_unseen(self, place: Place, inputs: Named, outputs: Named) -> None:
        def passing() -> Passing:
            storages, origins = [storage(t) for _, t in outputs], [origin(t) for _, t in inputs]
            learned = outputs[0][1].requires_grad
            return Passing(place, "forward", inputs, outputs, storages, origins, learned=learned)

        self._window.check([tensor for _, tensor in outputs], passing)

    # -- operations ---------------------------------------------------------------------------

    def before(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._overwritten = (
            {} if _is_recomputing() else {id(tensor): copied(tensor) for tensor in overwritten(name, args, kwargs)}
        )
        self._follower.begin_op()
        return args, kwargs

    def after(self, name: str, module: nn.Module, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, self._overwritten = self._overwritten, {}
        outputs = results(output, args, wrote=bool(before))
        if not outputs:
            return output
        again, call = _is_recomputing(), self._calls[id(module), name]
        self._calls[id(module), name] += not again
        if name in BLANK or is_still(name, outputs, args, kwargs):
            if name in BLANK:
                self._blank.add(outputs[0])
            self._last_seen = weakref.ref(outputs[-1])
            return output
        if again:  # the values were checked the first time, but this graph is a new one
            self._follower.follow(outputs, self._place(module, name, None))
            return output
        if self._is_excluded(name):
            return output
        if name in FILLS or "out" in kwargs:
            for tensor in outputs:
                self._blank.filled(tensor)

        def passing() -> Passing:
            inputs, constants = arguments(args, kwargs)
            origins, storages = [origin(t) for _, t in inputs], [storage(t) for t in outputs]
            over = [before.get(id(t)) if t in self._blank else None for t in outputs]
            was = {key: without_nan(old) if any(old is o for o in over) else old for key, old in before.items()}
            inputs = [(label, was.get(id(t), t)) for label, t in inputs]
            made = [("output", t) for t in outputs]
            place = self._place(module, name, call)
            return Passing(place, "forward", inputs, made, storages, origins, constants, over)

        self._window.check(outputs, passing)
        if self._follower.wanted and torch.is_grad_enabled():
            self._follower.follow(outputs, self._place(module, name, call))
        self._last_seen = weakref.ref(outputs[-1])
        return output

    def close(self) -> None:
        super().close()
        self._window.clear()
        self._judge.forget_run()
        self._blank.clear()
        self._given.clear()

    # -- places -------------------------------------------------------------------------------

    def _place(self, module: nn.Module, op: str | None, call: int | None) -> Place:
        inside = op is not None or (self._running and self._running[-1] is module)
        around = self._running if inside else [*self._running, module]
        return Place(self._judge.name(module), op, call, self._run, tuple(around), graph_task())

    def _is_excluded(self, op: str | None, *more: nn.Module) -> bool:
        if not self._excluded:
            return False
        around = [id(module) for module in (*self._running, *more)]
        return (around[-1], op) in self._excluded or any((module, None) in self._excluded for module in around)


def _is_recomputing() -> bool:
    return graph_task() != -1

"""The first step, always there: one look at what each module returns, and at nothing else.

No operation is listened to and no device is waited for until the outermost module returns. Then the flags are read, and
only if one of them is up is the run repeated under the thorough watcher.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchhook import _torch
from torchhook._core.functional import Listener
from torchhook._core.hooks import Attachable, after_call, before_call
from torchhook._core.index import Index
from torchhook._core.scope import Scope, active
from torchhook._core.taps import Tap, as_value, listening, own_work
from torchhook._guard.events import Location
from torchhook._guard.findings import Finding
from torchhook._guard.first_backward import FirstBackward
from torchhook._guard.flags import Bad, Flags
from torchhook._guard.known import Known
from torchhook._guard.operations import Named, named
from torchhook._guard.repetition import Repeated, Repetition
from torchhook._guard.reports import Reports
from torchhook._guard.runs import Memory, Run, repeating
from torchhook._guard.thorough import Scrutiny
from torchhook._torch import graph_task
from torchhook._values import tree
from torchhook._values.tree import Inputs


class Passed(NamedTuple):
    """Where a tensor passed: what a call of a module returned, or what the model was called with."""

    module: nn.Module
    call: int
    position: int
    name: str
    """Of an input; empty for what is returned."""

    def suspicion(self, what: str) -> tuple[int, int, str, str]:
        """The same in every run."""
        return id(self.module), self.position, self.name, what


class FirstPass(Listener):
    """Flags what modules return, and has a run looked into whose flags are up."""

    def __init__(self, scope: Scope, scrutiny: Scrutiny, reports: Reports) -> None:
        super().__init__(scope)
        index = scrutiny.index
        self.runs = 0
        self._scope = scope
        self._judge = scrutiny.judge
        self._reports = reports
        self._modules = list(scrutiny.modules())
        self._spared = scrutiny.spared
        self._exits: dict[int, _Exit] = {}
        self._flags: Flags[Passed] = Flags()
        self._memory = Memory(index.root, index.distinct.values(), self)
        self._known = Known()
        self._run: Run | None = None
        self._blind = False
        """Whether nothing can be read in this run: it is captured into a CUDA graph."""
        self._error: BaseException | None = None
        self._inputs: Named = []
        self._last: tuple[weakref.ref[Tensor], int] | None = None
        self.repetition = Repetition(scrutiny, self._memory, self._repeated, self, reports.raises)
        self.backward = FirstBackward(scope, scrutiny, self.repetition, reports)

    def boundaries(self, index: Index) -> Iterable[tuple[nn.Module, Attachable]]:
        enter = _Entrance(self, self._scope)
        for module in self._modules:
            self._exits[id(module)] = leave = _Exit(self, self._scope, id(module) in self._spared)
            yield module, enter
            yield module, leave

    # -- a module is called -------------------------------------------------------------------------

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called, in this guard's context and not by a recomputation."""
        running = self._running
        if running and module is running[0] and _torch.times_running(module) < 2:
            self._abandon()  # left by an interrupt, which hooks do not see
        running.append(module)
        if len(running) == 1 and not repeating:
            self._begin(module, Inputs(args, kwargs))

    def _begin(self, module: nn.Module, inputs: Inputs) -> None:
        self._last = None
        self._error = sys.exc_info()[1]
        self._blind = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self._blind:
            return
        with _quietly():
            calls = {key: leave.calls for key, leave in self._exits.items()}
            self._run = self._memory.run(self.runs, module, inputs, calls)
            self.backward.begin()
            self._inputs = named(as_value(*inputs), "input")
            for i, (name, tensor) in enumerate(self._inputs):
                self._flags.note(tensor, Passed(module, calls[id(module)], i, name))

    # -- a module returns ---------------------------------------------------------------------------

    def returned(self, module: nn.Module, output: Any, leave: _Exit) -> None:
        """A module returns, or is left by an exception, as this guard has seen it called."""
        running = self._running
        if not running or (running[-1] is not module and not any(module is other for other in running)):
            return
        while running.pop() is not module:
            pass  # left by an exception that the model caught
        call, leave.calls = leave.calls, leave.calls + 1
        if self._blind:
            return
        if not leave.spared and output is not None:
            if listening:
                with _quietly():
                    self._note(module, output, call)
            else:
                self._note(module, output, call)
        if not running and not repeating:
            self._end(output)

    def _note(self, module: nn.Module, output: Any, call: int) -> None:
        if isinstance(output, Tensor):
            if self._is_new(output):
                self._flags.note(output, Passed(module, call, 0, ""))
            return
        for i, tensor in enumerate(tree.tensors(output)):
            if self._is_new(tensor):
                self._flags.note(tensor, Passed(module, call, i, ""))

    def _is_new(self, tensor: Tensor) -> bool:
        """Whether a tensor was not looked at just before: most modules return what their last child returned."""
        if tensor.is_inference():  # nobody counts what is written to it
            return True
        last, version = self._last, _torch.version(tensor)
        if last is not None and last[0]() is tensor and last[1] == version:
            return False
        # Weak: the guard must not keep an activation that the model has dropped.
        self._last = weakref.ref(tensor), version
        return True

    # -- the outermost one has returned ---------------------------------------------------------------

    def _end(self, output: Any) -> None:
        run, self._run = self._run, None
        inputs, self._inputs = self._inputs, []
        error = sys.exc_info()[1]
        if run is None:
            return
        self.runs += 1
        with _quietly():
            bad = self._flags.read()
            self._memory.learn(run)
        if bad:
            self._reports.during(None if error is self._error else error, lambda: self._look_into(run, bad))
        if torch.is_grad_enabled() and output is not None:
            with _quietly():
                self.backward.follow(run, self._location(run.module, run), inputs, named(output, "output"))

    def _look_into(self, run: Run, bad: list[Bad[Passed]]) -> None:
        if any(one.where.name for one in bad) and self._judge_inputs(run, bad):
            return
        suspicions = [one.where.suspicion(one.what) for one in bad]
        if not self._known.is_due(suspicions):
            return
        findings = self._known.findings(suspicions)
        if findings is not None:
            self._judge.found_again(findings, run.number)
            return
        repeated = self.repetition.forward(run)
        if repeated.found:
            self._known.faults(suspicions, [finding for finding, _ in repeated.found])
            self._reports.tell(repeated.found)
        elif why := _differs(bad, repeated):
            self._judge.found_elsewhere(self._unrepeated(run, bad[0], why))
        else:
            self._known.innocent(suspicions)

    def _judge_inputs(self, run: Run, bad: list[Bad[Passed]]) -> bool:
        """Judge the inputs that are not finite; whether any of them is at fault."""
        location = self._location(run.module, run)
        for where, _ in bad:
            if where.name:
                given = run.given[where.position]
                given = given.copy if given.is_written and given.copy is not None else given.tensor
                self._judge.judge_input(location, where.name, given)
        return self._judge.is_faulty(run.number)

    def _unrepeated(self, run: Run, bad: Bad[Passed], why: str) -> Finding:
        where = bad.where
        site = Location(self._judge.name(where.module), None, where.call, run.number, ()).site()
        stack = self._judge.stack_of(site.path)
        return Finding("module", site, "forward", run.number, [], [], [], stack, held=bad.what, unrepeated=why)

    def _location(self, module: nn.Module, run: Run) -> Location:
        return Location(self._judge.name(module), None, run.calls[id(module)], run.number, (module,))

    # -- what ends otherwise ----------------------------------------------------------------------------

    def _abandon(self) -> None:
        """A run that never returned: what was flagged in it is told without repeating it."""
        self._running.clear()
        self._inputs = []
        run, self._run = self._run, None
        bad = self._flags.read() if run is not None else []
        found = [one for one in bad if not one.where.name]
        if run is not None and found and self._known.is_due([one.where.suspicion(one.what) for one in found]):
            self.runs += 1
            self._judge.found_elsewhere(self._unrepeated(run, found[0], "the pass was ended early"))

    @contextlib.contextmanager
    def _repeated(self, run: Run) -> Iterator[Flags[Passed]]:
        """Flag a repeated run apart, with the calls counted as they were."""
        running, flags, last, blind = self._running, self._flags, self._last, self._blind
        counts = {key: leave.calls for key, leave in self._exits.items()}
        self._running, self._flags, self._last, self._blind = [], Flags(), None, False
        for key, leave in self._exits.items():
            leave.calls = run.calls[key]
        try:
            yield self._flags
        finally:
            self._running, self._flags, self._last, self._blind = running, flags, last, blind
            for key, leave in self._exits.items():
                leave.calls = counts[key]

    def unwind(self, depth: int) -> None:
        del self._running[depth:]

    def close(self) -> None:
        self._running.clear()
        self._run, self._inputs = None, []
        self._flags.forget()
        self.backward.close()


def _differs(bad: list[Bad[Passed]], repeated: Repeated) -> str:
    """Why a repetition that found nothing does not show that there is nothing; empty if it does."""
    if repeated.why:
        return repeated.why
    again = {(one.where.module, one.where.call, one.where.position): one.what for one in repeated.bad}
    where = next(one.where for one in bad)
    if not where.name and (where.module, where.call, where.position) not in again:
        return "it was not there when the pass was repeated: something outside the model has moved on"
    return ""


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What is done here is no operation of the model."""
    with own_work(), _torch.unheard():
        yield


class _Entrance(Tap):
    """Before every module, first of all hooks: what it was called with, before anyone has changed it."""

    __slots__ = ("_pass",)

    def __init__(self, first_pass: FirstPass, scope: Scope) -> None:
        super().__init__("guard", scope)
        self._pass = first_pass

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is None or self.is_foreign() or graph_task() != -1 or _is_anothers(self._pass):
            return
        self._pass.called(module, args, kwargs)

    def attach(self, module: nn.Module) -> RemovableHandle:
        return before_call(module, self, with_kwargs=True, prepend=True)


class _Exit(Tap):
    """After a module, also when it raised."""

    __slots__ = ("_pass", "calls", "spared")

    def __init__(self, first_pass: FirstPass, scope: Scope, spared: bool) -> None:
        super().__init__("guard", scope)
        self._pass = first_pass
        self.spared = spared
        self.calls: int = 0  # type: ignore[assignment]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        scope = self.scope
        if scope not in active.get() or graph_task() != -1 or _is_anothers(self._pass):
            return
        self._pass.returned(module, output, self)

    def attach(self, module: nn.Module) -> RemovableHandle:
        return after_call(module, self, always_call=True)


def _is_anothers(mine: FirstPass) -> bool:
    return bool(repeating) and repeating[-1] is not mine

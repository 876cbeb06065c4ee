"""The first step, always there: one look at what each module returns, and at nothing else.

No operation is listened to and no device is waited for until the outermost module returns. Then the flags are read, and
only if one of them is up is the run repeated under the thorough watcher.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook import _torch
from torchhook._core.functional import Listener
from torchhook._core.hooks import AtEnd, Attachable, after_call_always, before_call_first
from torchhook._core.index import Index
from torchhook._core.scope import Scope, Stop, active, before_stop
from torchhook._core.taps import Tap, as_value, listeners, own_work
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
from torchhook._recording.address import MODEL, Site
from torchhook._torch import graph_task
from torchhook._torch.compiler import in_trace
from torchhook._torch.hooks import Undo
from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook.errors import GuardError, hint

Where = tuple["_Exit", int, int, str]
"""The module, its call, which of its tensors it was, and, where the model was called with it, its name. A bare tuple:
one is made for every tensor."""


def _suspicion(bad: Bad[Where]) -> Hashable:
    """What is the same in every run."""
    leave, _, position, name = bad.where
    return id(leave), position, name, bad.what


class _Failed(NamedTuple):
    """A run that ended with an error of its own after something bad was seen."""

    run: Run
    bad: list[Bad[Where]]
    error: BaseException


class FirstPass(Listener):
    """Flags what modules return, and has a run looked into whose flags are up."""

    def __init__(self, scope: Scope, scrutiny: Scrutiny, reports: Reports) -> None:
        super().__init__(scope)
        index = scrutiny.index
        self.runs = 0
        self.running: list[nn.Module] = []
        self._scope = scope
        self._judge = scrutiny.judge
        self._reports = reports
        self._modules = list(scrutiny.modules())
        self._spared = scrutiny.spared
        self._exits: dict[int, _Exit] = {}
        self.flags: Flags[Where] = Flags()
        self._memory = Memory(index.root, index.distinct.values(), self)
        self._known = Known()
        self._run: Run | None = None
        self.blind = False
        """Whether nothing can be read in this run: it is captured into a CUDA graph."""
        self._error: BaseException | None = None
        """What was being handled already when the model was called."""
        self._failed: _Failed | None = None
        self._inputs: Named = []
        self._last: weakref.ref[Tensor] | None = None
        self._last_version = 0
        self.repetition = Repetition(scrutiny, self._memory, self._repeated, self, reports.raises)
        self.backward = FirstBackward(scope, scrutiny, self.repetition, reports)

    def opened(self) -> None:
        super().opened()
        before_stop.append(self.stopped_at)

    def boundaries(self, index: Index) -> Iterable[tuple[nn.Module, Attachable]]:
        enter = _Entrance(self, self._scope)
        for module in self._modules:
            self._exits[id(module)] = leave = _Exit(self, self._scope, module, id(module) in self._spared)
            yield module, enter
            yield module, leave

    # -- a module is called -------------------------------------------------------------------------

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The outermost module is called, or called again inside of itself."""
        running = self.running
        if running and _torch.times_running(module) < 2:
            self._abandon()  # left by an interrupt, which hooks do not see
        running.append(module)
        if len(running) == 1 and not repeating:
            self._begin(module, Inputs(args, kwargs))

    def _begin(self, module: nn.Module, inputs: Inputs) -> None:
        self._settle_failed()
        self._last = None
        self._error = sys.exc_info()[1]
        self.blind = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self.blind:
            return
        with _quietly():
            calls = {key: leave.count for key, leave in self._exits.items()}
            self._run = self._memory.run(self.runs, module, inputs, calls)
            self.backward.begin()
            self._inputs = named(as_value(*inputs), "input")
            for i, (name, tensor) in enumerate(self._inputs):
                self.flags.note(tensor, (self._exits[id(module)], calls[id(module)], i, name))

    # -- a module returns ---------------------------------------------------------------------------

    def left(self, module: nn.Module) -> bool:
        """Forget a module that returns, with those inside of it that an exception has left; whether it was seen."""
        running = self.running
        if not any(module is other for other in running):
            return False
        while running.pop() is not module:
            pass
        return True

    def note(self, leave: _Exit, call: int, output: Any) -> None:
        """A module has returned something."""
        # What the model returns is looked at in any case: there are ways to write to a tensor that nobody counts.
        is_last = not self.running
        if isinstance(output, Tensor):
            if self.is_new(output) or is_last:
                self.flags.note(output, (leave, call, 0, ""))
            return
        for i, tensor in enumerate(tree.tensors(output)):
            if self.is_new(tensor) or is_last:
                self.flags.note(tensor, (leave, call, i, ""))

    def stopped_at(self, value: Any) -> None:
        """The pass is ended at a value, and no module that runs will return."""
        if self.running and not repeating and not _is_elsewhere(self._scope):
            leave = self._exits.get(id(self.running[-1]))
            if leave is not None and not (leave.spared or self.blind):
                with _quietly():
                    self.note(leave, leave.count, value)

    def is_new(self, tensor: Tensor) -> bool:
        """Whether a tensor was not looked at just before: most modules return what their last child returned."""
        try:
            last, version = self._last, _torch.version(tensor)
        except RuntimeError:  # of inference mode: nobody counts what is written to it
            return True
        if last is not None and last() is tensor and self._last_version == version:
            return False
        # Weak: the guard must not keep an activation that the model has dropped.
        self._last, self._last_version = weakref.ref(tensor), version
        return True

    # -- the outermost one has returned ---------------------------------------------------------------

    def end(self, output: Any) -> None:
        """The outermost module has returned, or was left by an exception."""
        run, self._run = self._run, None
        inputs, self._inputs = self._inputs, []
        error = sys.exc_info()[1]
        if run is None:
            return
        self.runs += 1
        with _quietly():
            bad = self.flags.read()
            self._memory.learn(run)
        if bad and error is not None and error is not self._error:
            # Torch goes through its hooks now, and would be upset by new ones; nor would it let another error out.
            self._failed = _Failed(run, bad, error)
            path = self._judge.name(bad[0].where[0].module) or MODEL
            hint(error, f"before this, the guard saw {bad[0].what} in what {path!r} was given or returned.")
        elif bad:
            self._look_into(run, bad)
        if torch.is_grad_enabled() and output is not None:
            with _quietly():
                self.backward.follow(run, self._location(run.module, run), inputs, named(output, "output"))

    def _look_into(self, run: Run, bad: list[Bad[Where]]) -> None:
        if any(one.where[3] for one in bad) and self._judge_inputs(run, bad):
            return
        suspicions = [_suspicion(one) for one in bad]
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

    def _judge_inputs(self, run: Run, bad: list[Bad[Where]]) -> bool:
        """Judge the inputs that are not finite; whether any of them is at fault."""
        location = self._location(run.module, run)
        for one in bad:
            _, _, position, name = one.where
            if name:
                self._judge.judge_input(location, name, run.given[position].as_given)
        return self._judge.is_faulty(run.number)

    def _unrepeated(self, run: Run, bad: Bad[Where], why: str) -> Finding:
        leave, call, _, _ = bad.where
        site = Site(self._judge.name(leave.module), None, call)
        stack = self._judge.stack_of(site.path)
        return Finding("module", site, "forward", run.number, [], [], [], stack, held=bad.what, unrepeated=why)

    def _location(self, module: nn.Module, run: Run) -> Location:
        return Location(self._judge.name(module), None, run.calls[id(module)], run.number, (module,))

    def settle(self, error: BaseException | None) -> None:
        """Tell of runs that did not return, now that their block has ended, with an ``error`` or without."""
        failed = self._failed
        if failed is not None and failed.error is error:
            self._failed = None
            try:
                self._look_into(failed.run, failed.bad)
            except GuardError as found:
                raise found from error
        self._settle_failed()
        if self.running and (error is None or isinstance(error, Stop)):
            self._abandon()

    def _settle_failed(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            self._reports.late(lambda: self._look_into(failed.run, failed.bad))

    # -- what ends otherwise ----------------------------------------------------------------------------

    def _abandon(self) -> None:
        """A run that never returned: what was flagged in it is told without repeating it."""
        self.running.clear()
        self._inputs = []
        run, self._run = self._run, None
        bad = self.flags.read() if run is not None else []
        found = [one for one in bad if not one.where[3]]
        if run is None:
            return
        self.runs += 1
        if found and self._known.is_due([_suspicion(one) for one in found]):
            self._judge.found_elsewhere(self._unrepeated(run, found[0], "the pass was ended early"))

    @contextlib.contextmanager
    def _repeated(self, run: Run) -> Iterator[Flags[Where]]:
        """Flag a repeated run apart, with the calls counted as they were."""
        running, flags, last, blind = self.running, self.flags, self._last, self.blind
        counts = {key: leave.count for key, leave in self._exits.items()}

        def restore() -> None:
            self.running, self.flags, self._last, self.blind = running, flags, last, blind
            for key, leave in self._exits.items():
                leave.count = counts[key]

        end = AtEnd(restore)
        try:
            self.running, self.flags, self._last, self.blind = [], Flags(), None, False
            for key, leave in self._exits.items():
                leave.count = run.calls[key]
            yield self.flags
        finally:
            end()

    def unwind(self, depth: int) -> None:
        del self.running[depth:]

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            before_stop.remove(self.stopped_at)
        self.running.clear()
        self._run, self._failed, self._inputs = None, None, []
        self.flags.forget()
        self.backward.close()
        # What knows each other is freed by the collector only, and the model with it.
        self._exits.clear()
        self.repetition.close()
        self._memory.close()


def _differs(bad: list[Bad[Where]], repeated: Repeated) -> str:
    """Why a repetition that found nothing does not show that there is nothing; empty if it does."""
    if repeated.why:
        return repeated.why
    first = next((one.where for one in bad if not one.where[3]), None)
    if first is not None and first not in {one.where for one in repeated.bad}:
        return "it was not there when the pass was repeated: something outside the model has moved on"
    return ""


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What is done here is no operation of the model."""
    with own_work, _torch.unheard(), _torch.out_of_checkpoints():
        yield


def _is_elsewhere(scope: Any) -> bool:
    """Whether this call is none of the guard's context, or of the compiler at work in another thread."""
    return (scope.runs_eagerly and in_trace()) or scope not in active.get()


class _Entrance(Tap):
    """Before every module, first of all hooks: what it was called with, before anyone has changed it."""

    def __init__(self, first_pass: FirstPass, scope: Scope) -> None:
        super().__init__("guard", scope)
        self._pass = first_pass

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        first, scope = self._pass, self.scope
        if kwargs is None or graph_task() != -1 or (_is_elsewhere(scope) and self.is_foreign()):
            return
        if repeating and repeating[-1] is not first:
            return
        running = first.running
        if running and module is not running[0]:
            running.append(module)
        else:
            first.called(module, args, kwargs)

    def attach(self, undo: Undo, module: nn.Module) -> None:
        before_call_first(undo, module, self)


class _Exit(Tap):
    """After a module, also when it raised."""

    def __init__(self, first_pass: FirstPass, scope: Scope, module: nn.Module, spared: bool) -> None:
        super().__init__("guard", scope)
        self._pass = first_pass
        self.module = module
        self.spared = spared
        self.count = 0
        """How often the module has returned."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        first = self._pass
        if _is_elsewhere(self.scope) or (repeating and repeating[-1] is not first):
            return
        running = first.running
        if running and running[-1] is module:
            running.pop()
        elif not first.left(module):
            return
        call, self.count = self.count, self.count + 1
        if not (self.spared or first.blind or output is None):
            if listeners or _torch.dispatch_modes():
                with _quietly():
                    first.note(self, call, output)
            else:
                first.note(self, call, output)
        if not running and not repeating:
            with _torch.out_of_checkpoints():  # also when a run is repeated
                first.end(output)

    def attach(self, undo: Undo, module: nn.Module) -> None:
        after_call_always(undo, module, self, first=False)

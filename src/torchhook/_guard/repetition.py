"""The second step: repeat a run under the thorough watcher, to find what made a value bad.

With the same inputs, random numbers, buffers and attributes; for a bad gradient also the backward pass, with the
gradients that came back to the outputs. Afterwards all is as it was, and other sessions have edited the repeated run as
the first one and recorded nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook._core import calling, scope, taps
from torchhook._core.hooks import AtEnd, after_graph_task
from torchhook._core.wiring import opened
from torchhook._guard.findings import Finding
from torchhook._guard.flags import Bad, Flags
from torchhook._guard.judge import Judge, Report
from torchhook._guard.operations import Named, named
from torchhook._guard.reports import Warn
from torchhook._guard.runs import CannotRepeat, Memory, Run, repeating
from torchhook._guard.thorough import Scrutiny, thorough_session
from torchhook._guard.watcher import Watcher
from torchhook._recording.address import Site
from torchhook._torch import sharded
from torchhook.errors import later_warning


def _undo(judge: Judge, report: Report, owners: list[object], repeated: dict[int, Iterator[int]]) -> None:
    """What a repetition has changed outside the model, as it was before; an interrupt may call this twice."""
    judge.report = report
    repeating[:] = owners
    taps.repeated.clear()
    taps.repeated.update(repeated)


Quiet = Callable[[Run], contextlib.AbstractContextManager[Flags[Any]]]
"""Has the first pass flag a repeated run apart, and do nothing about it."""


class Repeated(NamedTuple):
    """What came of a repetition."""

    found: list[tuple[Finding, Warn]]
    why: str
    """Why it could not be made, or not to the end; empty where it was."""
    bad: list[Bad[Any]]
    """What the first pass would have flagged in it."""


class Repetition:
    """Repeats runs."""

    def __init__(self, scrutiny: Scrutiny, memory: Memory, quiet: Quiet, owner: object, first_only: bool) -> None:
        self._scrutiny = scrutiny
        self._memory = memory
        self._quiet = quiet
        self._owner = owner
        self._first_only = first_only
        """Whether the first finding ends it all, so that others must not be known."""

    def close(self) -> None:
        """Forget whose it was."""
        self._owner = self._quiet = None  # type: ignore[assignment]

    def forward(self, run: Run) -> Repeated:
        """Repeat the forward pass."""
        return self._repeat(run, {})

    def backward(self, run: Run, gradients: dict[int, Tensor]) -> Repeated:
        """Repeat the forward pass, and the backward pass with these gradients of its outputs, by their number."""
        return self._repeat(run, gradients)

    def _repeat(self, run: Run, gradients: dict[int, Tensor]) -> Repeated:
        judge, found, why = self._scrutiny.judge, list[tuple[Finding, Warn]](), ""
        flags: list[Bad[Any]] = []
        end = AtEnd(functools.partial(_undo, judge, judge.report, list(repeating), dict(taps.repeated)))
        try:
            judge.report = lambda finding: found.append((finding, later_warning()))
            repeating.append(self._owner)
            with after_graph_task():
                run.inside(lambda: self._again(run, gradients, flags))
        except CannotRepeat as reason:
            why = str(reason)
        except Exception as error:  # the model's own, on what it did not fail on before; or no memory for two runs
            why = f"repeating the pass raised {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        finally:
            end()
        if self._first_only:
            judge.withdraw(finding for finding, _ in found[1:])
            del found[1:]
        return Repeated(found, why, flags)

    def _again(self, run: Run, gradients: dict[int, Tensor], bad: list[Bad[Any]]) -> None:
        scrutiny, inputs = self._scrutiny, run.inputs()
        self._memory.check_parameters(run)
        known = set(map(id, scrutiny.judge.findings.values()))
        session, watcher = thorough_session(replace(scrutiny, backward=bool(gradients)), run.number)
        with contextlib.ExitStack() as stack:
            stack.enter_context(calling.undisturbed(scrutiny.index.root, only=self._memory.small))
            self._unrecorded(run, bool(gradients))
            flags = stack.enter_context(self._quiet(run))
            stack.callback(lambda: bad.extend(flags.read()))
            stack.callback(lambda: self._renumber(run, watcher, known))
            stack.enter_context(sharded.refused_collectives(CannotRepeat("it needs the other ranks")))
            stack.enter_context(run.modes())
            stack.enter_context(run.rewound(scrutiny.index.distinct.values()))
            stack.enter_context(session)
            output = run.module(*inputs.args, **inputs.kwargs)
            if gradients:
                _back(named(output, "output"), gradients)

    def _unrecorded(self, run: Run, backward: bool) -> None:
        """From here on, other sessions edit what passes as they did the first time, and look at nothing."""
        others = [some for some in list(opened.values()) if some.listener is not self._owner]
        if backward and any(some.edit_gradients() for some in others):
            raise CannotRepeat("another session changes gradients on their way")
        # In a context of its own, which ends with the run.
        scope.repetition.set(scope.Repetition(frozenset(some.scope for some in others)))
        seen = [tap for some in others for tap in some.all()]
        taps.repeated.update({id(tap): itertools.count(run.seen_by.get(id(tap), tap.ran)) for tap in seen})

    def _renumber(self, run: Run, watcher: Watcher, known: set[int]) -> None:
        """Calls are counted since the guard was opened, and operations of other runs were not: they are taken to have
        happened in each call of their module as often as in these."""
        index = self._scrutiny.index

        def counted(site: Site) -> Site:
            module = index.modules.get(site.path)
            if site.call is None or module is None:
                return site
            before, calls = run.calls.get(id(module), 0), max(watcher.modules[id(module)], 1)
            each = 1 if site.op is None else watcher.operations[id(module), site.op] // calls
            return site.but(call=site.first_call + before * each)

        for finding in self._scrutiny.judge.findings.values():
            if id(finding) not in known:
                finding.site = counted(finding.site)
                finding.used_by = None if finding.used_by is None else counted(finding.used_by)


def _back(outputs: Named, gradients: dict[int, Tensor]) -> None:
    fits = all(i < len(outputs) and outputs[i][1].shape == grad.shape for i, grad in gradients.items())
    tensors = [outputs[i][1] for i in gradients] if fits else []
    if not tensors or not all(tensor.requires_grad for tensor in tensors):
        raise CannotRepeat("the forward pass came out differently when it was repeated")
    torch.autograd.backward(tensors, list(gradients.values()))

"""The second step: repeat a run under the thorough watcher, to find what made a value bad.

With the same inputs, random numbers, buffers and attributes; for a bad gradient also the backward pass, with the gradients
that came back to the outputs. Afterwards all is as it was, and other sessions have edited the repeated run as the first
one and recorded nothing of it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook import _torch, _torch_sharded
from torchhook._core import calling, taps
from torchhook._core.session import open_taps
from torchhook._guard.findings import Finding
from torchhook._guard.flags import Bad, Flags
from torchhook._guard.operations import named
from torchhook._guard.runs import CannotRepeat, Memory, Run, repeating
from torchhook._guard.thorough import Scrutiny, thorough_session
from torchhook._guard.watcher import Watcher
from torchhook._recording.address import Site
from torchhook._values import tree
from torchhook.errors import UsersLine

Quiet = Callable[[Run], contextlib.AbstractContextManager[Flags[Any]]]
"""Has the first pass flag a repeated run apart, and do nothing about it."""


class Repeated(NamedTuple):
    """What came of a repetition."""

    found: list[tuple[Finding, UsersLine]]
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

    def forward(self, run: Run) -> Repeated:
        """Repeat the forward pass."""
        return self._repeat(run, {})

    def backward(self, run: Run, gradients: dict[int, Tensor]) -> Repeated:
        """Repeat the forward pass, and the backward pass with these gradients of its outputs, by their number."""
        return self._repeat(run, gradients)

    def _repeat(self, run: Run, gradients: dict[int, Tensor]) -> Repeated:
        judge, found, why = self._scrutiny.judge, list[tuple[Finding, UsersLine]](), ""
        flags: list[Bad[Any]] = []
        before, judge.report = judge.report, lambda finding: found.append((finding, UsersLine()))
        repeating.append(self._owner)
        try:
            with _torch.after_graph_task():
                run.inside(lambda: self._again(run, gradients, flags))
        except CannotRepeat as reason:
            why = str(reason)
        except Exception as error:  # the model's own, on what it did not fail on before; or no memory for two runs
            why = f"repeating the pass raised {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        finally:
            repeating.pop()
            judge.report = before
        if self._first_only:
            judge.withdraw(finding for finding, _ in found[1:])
            del found[1:]
        return Repeated(found, why, flags)

    def _again(self, run: Run, gradients: dict[int, Tensor], bad: list[Bad[Any]]) -> None:
        scrutiny, inputs = self._scrutiny, run.inputs()
        if gradients and run.parameters_written != self._memory.parameters_written():
            raise CannotRepeat("parameters were written to since the forward pass")
        known = set(map(id, scrutiny.judge.findings.values()))
        session, watcher = thorough_session(scrutiny._replace(backward=bool(gradients)), run.number)
        root = scrutiny.index.root
        with contextlib.ExitStack() as stack:
            stack.enter_context(calling.undisturbed(root, only=self._memory.small))
            stack.enter_context(_torch.silenced(root.parameters()))
            stack.enter_context(self._unrecorded(run, bool(gradients)))
            flags = stack.enter_context(self._quiet(run))
            stack.callback(lambda: bad.extend(flags.read()))
            stack.callback(lambda: self._renumber(run, watcher, known))
            stack.enter_context(_torch_sharded.refused_collectives(CannotRepeat("it needs the other ranks")))
            stack.enter_context(run.modes())
            stack.enter_context(session)
            run.rewind()
            output = run.module(*inputs.args, **inputs.kwargs)
            if gradients:
                self._back(named(output, "output"), gradients, inputs)

    def _back(self, outputs: list[tuple[str, Tensor]], gradients: dict[int, Tensor], inputs: Any) -> None:
        fits = all(i < len(outputs) and outputs[i][1].shape == grad.shape for i, grad in gradients.items())
        tensors = [outputs[i][1] for i in gradients] if fits else []
        if not all(tensor.requires_grad for tensor in tensors) or not tensors:
            raise CannotRepeat("the forward pass came out differently when it was repeated")
        if _torch_sharded.rank_store() is None:
            torch.autograd.backward(tensors, list(gradients.values()))
        else:
            # DDP reduces what is added to a parameter's gradient, and this is added to none.
            leaves = [p for p in (*self._scrutiny.index.root.parameters(), *tree.tensors(inputs)) if p.requires_grad]
            torch.autograd.grad(tensors, leaves, list(gradients.values()), allow_unused=True)

    @contextlib.contextmanager
    def _unrecorded(self, run: Run, backward: bool) -> Iterator[None]:
        """Other sessions edit what passes as they did the first time, and look at nothing."""
        others = [some for some in open_taps() if some.listener is not self._owner]
        if backward and any(some.edit_gradients() for some in others):
            raise CannotRepeat("another session changes gradients on their way")
        mine = [tap for some in others for tap in some.all() if id(tap) not in taps.repeated]
        try:
            taps.repeated.update({id(tap): itertools.count(run.seen_by.get(id(tap), tap.ran)) for tap in mine})
            yield
        finally:
            for tap in mine:
                taps.repeated.pop(id(tap), None)

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
            return site.but(call=site.call + before * each)

        for finding in self._scrutiny.judge.findings.values():
            if id(finding) not in known:
                finding.site = counted(finding.site)
                finding.used_by = None if finding.used_by is None else counted(finding.used_by)

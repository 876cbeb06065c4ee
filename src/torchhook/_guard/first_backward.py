"""The first step in the backward pass: the gradients of what the model returned, of its parameters and of its inputs.

Whatever goes wrong between them arrives at one of them, unless it is thrown away on the way. The flags are read once
the pass has ended, and only if one is up are the forward and the backward pass repeated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torchhook import _torch
from torchhook._core import hooks
from torchhook._core.scope import Scope
from torchhook._guard.events import Event, Location
from torchhook._guard.findings import Finding, Kind
from torchhook._guard.flags import Bad, Flags
from torchhook._guard.operations import Named
from torchhook._guard.reduced import Reduced
from torchhook._guard.repetition import Repetition
from torchhook._guard.reports import Reports
from torchhook._guard.runs import Run
from torchhook._guard.thorough import Scrutiny
from torchhook._torch import graph_task


class Arrival(NamedTuple):
    """A gradient that came in."""

    run: Run | None
    """Of an output: others belong to no one run."""
    location: Location
    name: str
    kind: Literal["output", "parameter", "input"]
    grad: Tensor | None
    """Of an output: another reference would make autograd copy the gradient of a parameter."""


class FirstBackward:
    """Flags gradients as they arrive, and has their backward pass looked into when it has ended."""

    def __init__(self, scope: Scope, scrutiny: Scrutiny, repetition: Repetition, reports: Reports) -> None:
        self._enabled = scrutiny.backward
        self._scope = scope
        self._scrutiny = scrutiny
        self._judge = scrutiny.judge
        self._repetition = repetition
        self._reports = reports
        self._reduced = Reduced(scope, scrutiny)
        self._flags: Flags[Arrival] = Flags()
        self._handles = hooks.TensorHandles()
        self._awaited: dict[int, weakref.ref[Tensor]] = {}
        self._runs: list[Run] = []
        """Those that the running backward pass has come to, in its order."""
        self._lacks = False
        """Whether some parameter had no shape yet when the run began."""
        self._last_run = -1
        self._task = -1

    # -- waiting for gradients ------------------------------------------------------------------------

    def begin(self) -> None:
        """A run begins: wait for the gradients of parameters, which may have been replaced since the last one."""
        if not self._enabled or not torch.is_grad_enabled():
            return
        self._lacks = False
        for path, module, parameter in self._scrutiny.parameters():
            lazy: bool = is_lazy(parameter)
            self._lacks |= lazy  # the run will make it
            if parameter.requires_grad and not lazy:
                location = Location(path, None, None, -1, (module,))
                self._await(parameter, Arrival(None, location, "gradient", "parameter", None))

    def follow(self, run: Run, location: Location, inputs: Named, outputs: Named) -> None:
        """A run has ended: wait for the gradients of what it was given and of what it returned."""
        self._last_run = run.number
        if not self._enabled:
            return
        if self._lacks:
            self.begin()
        for i, (name, tensor) in enumerate(outputs):
            if tensor.requires_grad:
                self._handles.on_gradient(tensor, _on_arrival(self, Arrival(run, location, name, "output", None), i))
        for name, tensor in inputs:
            if tensor.requires_grad:  # the model may have asked for that itself
                self._await(tensor, Arrival(None, location, name, "input", None))

    def _await(self, tensor: Tensor, arrival: Arrival) -> None:
        """Wait for the gradients of what several runs may use, once for all of them."""
        # By identity, with a reference that shows whether it is still the same one: an id is used again.
        ref = self._awaited.get(id(tensor))
        if ref is None or ref() is not tensor:
            self._awaited[id(tensor)] = weakref.ref(tensor)
            self._handles.on_gradient(tensor, _on_arrival(self, arrival, -1))

    def arrived(self, arrival: Arrival, position: int, grad: Tensor) -> None:
        """A gradient has come in."""
        if self._scope.closed:
            return
        run = arrival.run
        if self._task != graph_task():
            self._task = graph_task()
            hooks.after_backward(self._ended)
            self._reduced.await_end(self._last_run)
        if run is not None:
            if run not in self._runs:
                self._runs.append(run)
                run.gradients = {}
            run.gradients[position] = grad
            arrival = arrival._replace(grad=grad)
        self._flags.note(grad, arrival)

    # -- the pass has ended -----------------------------------------------------------------------------

    def _ended(self) -> None:
        runs, self._runs = self._runs, []
        bad = self._flags.read()
        self._task = -1
        try:
            if bad:
                self._reduced.own_fault()
            if bad and not self._scope.closed:
                self._look_into(bad[0], runs)
        finally:
            for run in runs:
                run.gradients = {}

    def _look_into(self, first: Bad[Arrival], runs: list[Run]) -> None:
        """Find who made a gradient bad: a run that got only finite ones, or someone outside."""
        arrival, why = first.where, ""
        for run in runs:
            if self._judge.is_faulty(run.number):
                return  # bad gradients are the consequence of what was found in its forward pass
            if run is arrival.run:
                break  # it came so to this one already
            repeated = self._repetition.backward(run, {i: grad.detach() for i, grad in run.gradients.items()})
            if repeated.found:
                self._reports.tell(repeated.found)
                return
            why = why or repeated.why
        if why:
            self._judge.found_elsewhere(self._unrepeated(first, why))
        else:
            self._blame_outside(arrival)

    def _blame_outside(self, arrival: Arrival) -> None:
        location, grad = arrival.location, arrival.grad
        if arrival.kind == "input":
            return  # what else is made of the model's inputs is none of its business
        if arrival.kind == "parameter":
            location = location._replace(run=self._last_run)
            if self._judge.is_faulty(self._last_run):
                return
            grad = self._scrutiny.index.root.get_parameter(location.path).grad
        came = [] if grad is None else [(arrival.name, grad)]
        kind: Kind = "loss" if arrival.kind == "output" else "outside"
        self._judge.judge_event(Event(location, "backward", came, came, task=graph_task(), blame=kind))

    def _unrepeated(self, first: Bad[Arrival], why: str) -> Finding:
        location = first.where.location
        site, stack = location.site("grad"), self._judge.stack_of(location.path)
        run = self._last_run if first.where.run is None else location.run
        return Finding("outside", site, "backward", run, [], [], [], stack, held=first.what, unrepeated=why)

    def close(self) -> None:
        self._handles.remove()
        self._flags.forget()
        self._runs.clear()


# Hooks hold the guard, an address and a run, which holds no tensor with a graph: the collector does not see through
# autograd's graph, so that a graph which holds itself is never freed (pytorch#25340).


def _on_arrival(backward: FirstBackward, arrival: Arrival, position: int) -> Callable[[Tensor], None]:
    def arrive(grad: Tensor) -> None:
        with _torch.unheard():
            backward.arrived(arrival, position, grad)

    return arrive

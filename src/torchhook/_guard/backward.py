"""Gradients: a hook on each step of the backward pass, which knows where in the forward pass it belongs.

Not ``torch.autograd.detect_anomaly``: it knows the line of Python but not the module, is blind to infinities and keeps
a stack trace for every operation. Nor module backward hooks, which fail before in-place layers (pytorch#61519).
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchhook._core import hooks, scope
from torchhook._guard.events import Event, Location
from torchhook._guard.findings import Kind
from torchhook._guard.operations import VIEW_NODES, Named, named
from torchhook._guard.pending import Pending
from torchhook._torch import current_node, graph_task, next_sequence_number, sequence_number, unheard
from torchhook._values.elements import UNREADABLE

# Autograd numbers its steps in the order in which they are made, for each thread: that tells the steps of this run from
# older ones, and those of this operation from those of its inputs.
_ACCUMULATES = 1 << 62  # AccumulateGrad, which is the parameter's and not the run's, has the largest number there is

Gradients = tuple[Tensor | None, ...]


class BackwardWatcher:
    """Follows what the forward pass makes into the backward pass, and has every gradient checked."""

    def __init__(
        self,
        pending: Pending,
        scope: scope.Scope,
        handles: hooks.TensorHandles,
        parameters: Callable[[], Iterable[tuple[str, nn.Module, Tensor]]],
        enabled: bool,
    ) -> None:
        self.enabled = enabled
        self._pending = pending
        self._parameters = parameters
        """Those that are judged, as they are now: their path and their module come first."""
        self._scope = scope
        self._handles = handles
        self._known: set[int] = set()
        self._run = -1
        self._run_begins = self._op_begins = 0
        self._awaited: dict[int, weakref.ref[Tensor]] = {}
        self.tell_of_pass: Callable[[int], None] = lambda run: None
        """Is called inside a backward pass, with the number of the run."""

    def begin_run(self, run: int) -> None:
        self._run = run
        self._run_begins = next_sequence_number()
        self._known.clear()
        if self.enabled:
            self._await_parameters()

    def begin_op(self) -> None:
        self._op_begins = next_sequence_number()

    def follow(self, outputs: Iterable[Tensor], location: Location) -> None:
        """Hook the steps that belong to a location, and those of functions that nobody saw."""
        if not self.enabled:
            return
        todo = [tensor.grad_fn for tensor in outputs if tensor.requires_grad]
        while todo:
            node = todo.pop()
            if node is None:
                continue
            number = sequence_number(node)
            if number < self._run_begins or number in self._known or number >= _ACCUMULATES:
                continue
            self._known.add(number)
            todo.extend(following for following, _ in node.next_functions)
            name = node.name()
            # A view hands a gradient on as it is; naming it would point away from what made the gradient bad.
            if VIEW_NODES.fullmatch(name) is None:
                # A step older than the operation, which nobody claimed so far, was made by a function that no listener
                # sees. All that is known of it is autograd's name.
                unseen = location.op is None or number < self._op_begins
                here = location._replace(op=re.sub(r"Backward\d*$", "", name), call=None) if unseen else location
                self._handles.on_node(node, _on_step(self, here))

    def await_loss(self, outputs: Named, location: Location) -> None:
        """Wait for the gradients of what the model returns."""
        if not self.enabled:
            return
        for name, tensor in outputs:
            if tensor.requires_grad:
                self._handles.on_gradient(tensor, _on_arrival(self, location, name, "loss"))

    def _await_parameters(self) -> None:
        """Wait for the gradients of the parameters, which the loss may also reach without the model's run."""
        for path, module, parameter in self._parameters():
            # By identity, with a reference that shows whether it is still the same one: an id is used again.
            ref = self._awaited.get(id(parameter))
            if (ref is None or ref() is not parameter) and parameter.requires_grad and not is_lazy(parameter):
                self._awaited[id(parameter)] = weakref.ref(parameter)
                location = Location(path, None, None, -1, (module,))
                with unheard():  # setting a hook is no operation of the model
                    self._handles.on_gradient(parameter, _on_arrival(self, location, "gradient", "outside"))

    def step_done(self, location: Location, outgoing: Gradients, incoming: Gradients) -> None:
        """One step of the backward pass was made."""
        # A graph may outlive the guard, and a backward pass may run on another thread while it closes.
        if self._scope.closed:
            return

        def event() -> Event:
            node, task = current_node(), graph_task()
            name = None if node is None else node.name()
            came, made = _numbered(incoming), _numbered(outgoing)
            return Event(location, "backward", came, made, saved=_saved(node), node=name, task=task)

        self._pending.check([grad for grad in outgoing if grad is not None], event)

    def gradient_arrived(self, location: Location, name: str, kind: Kind, grad: Tensor) -> None:
        """The gradient of something that the model returned, or of a parameter, came in."""
        if not self._scope.closed:
            # The hook on a parameter stays for all runs; it is the last one whose gradient this is.
            location = location._replace(run=self._run) if location.run == -1 else location
            self.tell_of_pass(location.run)
            came = [(name, grad)]
            self._pending.check([grad], lambda: Event(location, "backward", came, came, task=graph_task(), blame=kind))


# Hooks hold the watcher and an address, never a tensor or a node: the collector does not see through autograd's graph,
# so that a graph which holds itself is never freed (pytorch#25340).


def _on_step(watcher: BackwardWatcher, location: Location) -> Callable[[Gradients, Gradients], None]:
    return lambda outgoing, incoming: watcher.step_done(location, outgoing, incoming)


def _on_arrival(watcher: BackwardWatcher, location: Location, name: str, kind: Kind) -> Callable[[Tensor], None]:
    return lambda grad: watcher.gradient_arrived(location, name, kind, grad)


def _numbered(gradients: Gradients) -> Named:
    return [(str(i), grad) for i, grad in enumerate(gradients) if grad is not None]


def _saved(node: Any) -> Named:
    """What a step of the backward pass kept from the forward pass."""
    found: Named = []
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            with contextlib.suppress(*UNREADABLE):  # freed already, or overwritten since
                found += named(getattr(node, name), name.removeprefix("_saved_"))
    return found

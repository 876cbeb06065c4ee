"""Gradients: a hook on each step of the backward pass, which knows the place in the forward pass it belongs to."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchhook._core import hooks, scope
from torchhook._core.recompute import graph_task
from torchhook._guard.events import Passing, Place
from torchhook._guard.findings import Kind
from torchhook._guard.operations import STILL_NODES, Named, named
from torchhook._guard.pending import Window
from torchhook._values.elements import UNREADABLE

_next_number: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
_ACCUMULATES = 1 << 62  # AccumulateGrad, which is the parameter's and not the run's, has the largest number there is

Gradients = tuple[Tensor | None, ...]


class Follower:
    """Follows what passes into the backward pass. Autograd numbers its steps in the order in which they are made."""

    def __init__(
        self,
        window: Window,
        scope: scope.Scope,
        handles: hooks.TensorHandles,
        parameters: Callable[[], Iterable[tuple[str, nn.Module, nn.Parameter]]],
        wanted: bool,
    ) -> None:
        self.wanted = wanted
        self._window = window
        self._parameters = parameters
        """Those that are judged, as they are now: their path and their module come first."""
        self._scope = scope
        self._handles = handles
        self._known: set[int] = set()
        self._run = -1
        self._run_begins = self._op_begins = 0
        self._awaited: dict[int, weakref.ref[nn.Parameter]] = {}

    def begin_run(self, run: int) -> None:
        self._run = run
        self._run_begins = _next_number()
        self._known.clear()
        if self.wanted:
            self._expect_gradients()

    def begin_op(self) -> None:
        self._op_begins = _next_number()

    def follow(self, outputs: Iterable[Tensor], place: Place) -> None:
        """Hook the steps that belong to a place, and those of functions that nobody saw."""
        if not self.wanted:
            return
        todo = [tensor.grad_fn for tensor in outputs if tensor.requires_grad]
        while todo:
            node = todo.pop()
            if node is None:
                continue
            number = node._sequence_nr()
            if number < self._run_begins or number in self._known or number >= _ACCUMULATES:
                continue
            self._known.add(number)
            todo.extend(following for following, _ in node.next_functions)
            name = node.name()
            if STILL_NODES.fullmatch(name) is None:
                unseen = place.op is None or number < self._op_begins
                here = place._replace(op=re.sub(r"Backward\d*$", "", name), call=None) if unseen else place
                self._handles.add(hooks.on_node(node, _on_step(self, here)))

    def expect_loss(self, outputs: Named, place: Place) -> None:
        """Wait for the gradients of what the model returns."""
        if not self.wanted:
            return
        for name, tensor in outputs:
            if tensor.requires_grad:
                self._handles.add(hooks.on_gradient(tensor, _on_arrival(self, place, name, "loss")))

    def _expect_gradients(self) -> None:
        """Wait for the gradients of the parameters, which the loss may also reach without the model's run."""
        for path, module, parameter in self._parameters():
            ref = self._awaited.get(id(parameter))
            if (ref is None or ref() is not parameter) and parameter.requires_grad and not is_lazy(parameter):
                self._awaited[id(parameter)] = weakref.ref(parameter)
                place = Place(path, None, None, -1, (module,))
                self._handles.add(hooks.on_gradient(parameter, _on_arrival(self, place, "gradient", "outside")))

    def step(self, place: Place, outgoing: Gradients, incoming: Gradients) -> None:
        """One step of the backward pass was made."""
        if self._scope.closed:
            return

        def passing() -> Passing:
            node, task = torch._C._current_autograd_node(), graph_task()
            name = None if node is None else node.name()
            came, made = _numbered(incoming), _numbered(outgoing)
            return Passing(place, "backward", came, made, saved=_saved(node), node=name, task=task)

        self._window.check([grad for grad in outgoing if grad is not None], passing)

    def arrived(self, place: Place, name: str, kind: Kind, grad: Tensor) -> None:
        """The gradient of something that the model returned, or of a parameter, came in."""
        if not self._scope.closed:
            place = place._replace(run=self._run) if place.run == -1 else place
            came = [(name, grad)]
            self._window.check([grad], lambda: Passing(place, "backward", came, came, task=graph_task(), arrives=kind))


# Hooks hold the follower and an address, never a tensor or a node: a graph that holds itself is never freed.


def _on_step(follower: Follower, place: Place) -> Callable[[Gradients, Gradients], None]:
    return lambda outgoing, incoming: follower.step(place, outgoing, incoming)


def _on_arrival(follower: Follower, place: Place, name: str, kind: Kind) -> Callable[[Tensor], None]:
    return lambda grad: follower.arrived(place, name, kind, grad)


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

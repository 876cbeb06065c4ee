"""Gradients of what passes a tap, by tensor hooks that are set in the forward pass.

Module backward hooks are not used: they fail before in-place layers (pytorch#61519), and ``retain_grad`` gives the
gradient after the in-place operation. A tensor hook gives the right one for every layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torchhook import tree
from torchhook.hooks import Scope, Tap, TensorHandles, after_backward, on_gradient
from torchhook.keep import Keep
from torchhook.recompute import graph_task

TensorHook = Callable[[Tensor], Tensor | None]


class GradTap(Tap):
    """The gradients that arrive for what passes one place.

    They come on autograd's own threads, so they belong to the tensor and not to a context. What hooks hold are
    addresses and placeholders, never tensors of the graph: a graph with a hook that holds the graph is never freed.
    """

    __slots__ = ("_arrivals", "_handles", "_lent", "_session", "source", "without_grad")

    def __init__(self, label: str, session: Scope, handles: TensorHandles, source: Tap | None = None) -> None:
        super().__init__(label)
        self.source = source
        """The tap that the value passes in the forward pass."""
        self.without_grad: set[int] = set()
        """Forward calls whose value needed no gradient."""
        self._session = session
        self._handles = handles
        self._arrivals: dict[int, tuple[int, dict[int, Tensor]]] = {}
        self._lent: list[tuple[weakref.ref[Tensor], int, list[bool]]] = []

    @property
    def recomputing(self) -> bool:
        return False

    def watch(self, value: Any, call: int, source: Any = (), again: bool = False) -> Any:
        """Wait for the gradient of a passing value, and return the value to go on with.

        It is an alias where the tensor itself has a life outside this place: a module may return its own input, or a
        parameter, whose gradient is more than what flows through here.
        """
        if again:
            # Where the first run built a graph, backward goes through that one; a reentrant checkpoint runs first
            # without gradients, and its recomputation is what counts.
            if call not in self.without_grad:
                return value
            self.without_grad.discard(call)
        inputs = set(map(id, tree.tensors(source)))

        def lend(leaf: Tensor, hook: TensorHook) -> Tensor:
            if not leaf.is_leaf and id(leaf) not in inputs:
                self._handles.add(on_gradient(leaf, hook))
                return leaf
            return self._lend(leaf, hook, None)

        return self._watch(value, call, lend)

    def split(self, value: Any, call: int) -> Any:
        """Wait for the gradient that flows into a module's inputs through this module alone."""

        def lend(leaf: Tensor, hook: TensorHook) -> Tensor:
            overwritten: list[bool] = []
            alias = self._lend(leaf, hook, overwritten)
            if alias is not leaf:
                self._lent.append((weakref.ref(alias), alias._version, overwritten))
            return alias

        return self._watch(value, call, lend)

    def settle(self, output: Any, call: int) -> None:
        """After the module ran: one that works in place takes the alias of its input off the graph."""
        still = []
        for lent, version, overwritten in self._lent:
            alias = lent()
            if alias is not None and alias._version != version:
                overwritten.append(True)
            elif alias is not None:
                still.append((lent, version, overwritten))
        self._lent = still

    def follow(self, parameter: Tensor) -> RemovableHandle:
        """Take the gradient of a parameter, whenever one is computed."""
        return on_gradient(parameter, lambda grad: self._arrived(grad, next(self.calls)))

    # -- setting hooks ------------------------------------------------------------------------------

    def _watch(self, value: Any, call: int, lend: Callable[[Tensor, TensorHook], Tensor]) -> Any:
        if isinstance(value, Tensor):
            if not _differentiable(value):
                self.without_grad.add(call)
                return value
            return lend(value, lambda grad: self._arrived(grad, call))
        found = [(address, leaf) for address, leaf in tree.leaves(value) if _differentiable(leaf)]
        if not found:
            self.without_grad.add(call)
            return value
        # Stands for the value where gradients have not arrived: zeros that take no memory.
        empty = tree.map_tensors(_placeholder, value)
        for address, leaf in found:
            new = lend(leaf, self._leaf_hook(empty, address, call))
            if new is not leaf:
                value = _replaced(value, address, new)
        return value

    def _lend(self, tensor: Tensor, hook: TensorHook, overwritten: list[bool] | None) -> Tensor:
        """An alias of ``tensor`` whose gradient goes to ``hook``.

        An in-place operation takes an alias off the graph (pytorch#61519). Its gradient is then found at the tensor
        itself: if ``overwritten`` says so, or, without one, if none came to the alias.
        """
        if tensor.layout != torch.strided or tensor.is_nested:
            self._handles.add(on_gradient(tensor, hook))
            return tensor
        alias = tensor.view_as(tensor)
        came = -1

        def at_alias(grad: Tensor) -> Tensor | None:
            nonlocal came
            came = graph_task()
            return hook(grad)

        def at_tensor(grad: Tensor) -> Tensor | None:
            return hook(grad) if came != graph_task() and (overwritten is None or overwritten) else None

        self._handles.add(on_gradient(alias, at_alias))
        if not tensor.is_leaf:  # autograd forbids to write to an alias of a leaf
            self._handles.add(on_gradient(tensor, at_tensor))
        return alias

    # -- arrivals -----------------------------------------------------------------------------------

    def _arrived(self, grad: Tensor, call: int) -> Tensor | None:
        if self._session.closed:
            return None
        value: Any = grad
        for edit in self.edits:
            value = edit(value, call)
        self._look(value, call)
        return None if value is grad else value

    def _leaf_hook(self, empty: Any, address: str, call: int) -> TensorHook:
        place = id(tree.get(empty, address))

        def leaf_arrived(grad: Tensor) -> Tensor | None:
            if self._session.closed:
                return None
            # The other gradients may not be there yet: an edit sees zeros in their place.
            whole = tree.map_tensors(lambda t: grad if id(t) == place else t, empty)
            for edit in self.edits:
                whole = edit(whole, call)
            new = tree.get(whole, address)
            if not self.keeps:
                self.ran += 1
            else:
                task = graph_task()
                if self._arrivals.get(call, (None,))[0] != task:
                    self._arrivals[call] = (task, {})
                    after_backward(lambda: self._all_arrived(empty, call))
                self._arrivals[call][1][place] = _still.value(new)
            return None if new is grad else new

        return leaf_arrived

    def _all_arrived(self, empty: Any, call: int) -> None:
        _, arrived = self._arrivals.pop(call)
        if not self._session.closed:
            self._look(tree.map_tensors(lambda t: arrived.get(id(t)), empty), call)

    def _look(self, value: Any, call: int) -> None:
        self.ran += 1
        for keep in self.keeps:
            keep(value, call)


_still = Keep("live")


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and (torch.is_grad_enabled() or not leaf.is_leaf)


def _replaced(value: Any, address: str, new: Tensor) -> Any:
    return tree.put(value, address, lambda _: new)


def _placeholder(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

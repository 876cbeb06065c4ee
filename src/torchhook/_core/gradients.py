"""Gradients of what passes a site, by tensor hooks that are set in the forward pass.

Module backward hooks are not used: they fail before in-place layers (pytorch#61519), and ``retain_grad`` gives the
gradient after the in-place operation. A tensor hook gives the right one for every layer.

A gradient site has a ``GradTap``, where gradients arrive, and an object that is wired to both taps of its module::

                    input tap ──▶ module ──▶ output tap
    :grad            entering                 leaving     the value leaves: from here on, what flows back to it
    :grad_input      entering                 leaving     the value enters: what flows back to it through the module
    :grad_total                               leaving     all that flows back to it, from inside the module too

``listening`` knows how the gradient of one tensor from one moment on is told apart from the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from torchhook import _torch
from torchhook._core.hooks import TensorHandles, after_backward
from torchhook._core.keep import Keep
from torchhook._core.listening import Alias, TensorHook, counts_versions, is_unused, listen, root
from torchhook._core.scope import Scope
from torchhook._core.taps import Tap
from torchhook._torch import graph_task, version
from torchhook._values import tree

_DEEP = 1000


Take = Callable[[Tensor, TensorHook], Tensor]
"""Has a hook told of a tensor's gradient, and returns the tensor to go on with."""


class Aliases:
    """The aliases of a session that are in use: they are settled when the model has run, and at the latest when the
    session closes."""

    def __init__(self) -> None:
        self._open: list[Alias] = []

    def add(self, alias: Alias) -> None:
        self._open.append(alias)

    def settle(self) -> None:
        open_, self._open = self._open, []
        for alias in open_:
            alias.settle()

    def settle_after(self, output: Any, call: int, source: Any, again: bool) -> Any:
        """The last thing that is done with the output of the model."""
        self.settle()
        return output


class GradTap(Tap):
    """Where the gradients of a site arrive.

    They come on autograd's own threads, so they belong to the tensor and not to a context. What hooks hold are
    addresses and placeholders, never tensors of the graph: a graph with a hook that holds the graph is never freed.
    """

    __slots__ = ("_arrivals", "_session", "_without_grad")

    def __init__(self, label: str, session: Scope) -> None:
        super().__init__(label)
        self._without_grad: dict[int, set[str]] = {}
        self._session = session
        self._arrivals: dict[int, tuple[int, dict[int, Tensor]]] = {}

    @property
    def recomputing(self) -> bool:
        return False

    @property
    def lacked_gradient(self) -> bool:
        """Whether a value passed that needed no gradient."""
        return bool(self._without_grad)

    def arrived_at_parameter(self, grad: Tensor) -> Tensor | None:
        """Take the gradient of a parameter: each is a call of its own."""
        return self._arrived(grad, next(self.calls))

    def wait_for(self, value: Any, call: int, again: bool, take: Take, apart: Take | None = None) -> Any:
        """Have ``take`` listen to every tensor of a passing value, and return the value to go on with.

        A tensor that is found at several addresses is taken by ``apart`` at each of them, where there is such a way:
        what becomes of one is not what becomes of the other.

        Where the first run built a graph, backward goes through that one; a reentrant checkpoint runs first without
        gradients, and its recomputation is what counts, tensor by tensor.
        """
        lacking = self._without_grad.pop(call, set()) if again else None
        if isinstance(value, Tensor):
            if not _differentiable(value):
                self._without_grad[call] = {""}
            elif lacking is None or lacking:
                return take(value, lambda grad: self._arrived(grad, call))
            return value
        leaves = [(address, leaf) for address, leaf in tree.leaves(value) if isinstance(leaf, Tensor)]
        found = [(a, t) for a, t in leaves if _differentiable(t) and (lacking is None or a in lacking)]
        without = {address for address, leaf in leaves if not _differentiable(leaf)}
        if without or not leaves:
            self._without_grad[call] = without
        return self._wait_for_several(value, call, found, take, apart)

    def _wait_for_several(
        self, value: Any, call: int, found: list[tuple[str, Tensor]], take: Take, apart: Take | None
    ) -> Any:
        if not found:
            return value
        # Stands for the value where gradients have not arrived: zeros that take no memory.
        empty = tree.map_tensors(_placeholder, value)
        alike: dict[int, tuple[Tensor, list[str]]] = {}
        for address, leaf in found:
            alike.setdefault(id(leaf), (leaf, []))[1].append(address)
        for leaf, addresses in alike.values():
            one_by_one = apart is not None and len(addresses) > 1 and _can_alias(leaf)
            for group in [[address] for address in addresses] if one_by_one else [addresses]:
                way = apart if apart is not None and one_by_one else take
                new = way(leaf, self._leaf_hook(empty, group, call))
                if new is not leaf:
                    for address in group:
                        value = _replaced(value, address, new)
        return value

    # -- arrivals -----------------------------------------------------------------------------------

    def _arrived(self, grad: Tensor, call: int) -> Tensor | None:
        if self._session.closed:
            return None
        value: Any = grad
        for edit in self.edits:
            value = edit(value, call)
        self._look(value, call)
        return None if value is grad else value

    def _leaf_hook(self, empty: Any, addresses: list[str], call: int) -> TensorHook:
        """For a tensor that is found at some addresses of a value."""
        standing = {id(tree.get(empty, address)) for address in addresses}

        def leaf_arrived(grad: Tensor) -> Tensor | None:
            if self._session.closed:
                return None
            # The other gradients may not be there yet: an edit sees zeros in their place.
            whole = tree.map_tensors(lambda t: grad if id(t) in standing else t, empty)
            for edit in self.edits:
                whole = edit(whole, call)
            new = tree.get(whole, addresses[0])
            if not self.looks:
                self.ran += 1
            else:
                task = graph_task()
                if self._arrivals.get(call, (None,))[0] != task:
                    self._arrivals[call] = (task, {})
                    after_backward(lambda: self._all_arrived(empty, call))
                self._arrivals[call][1].update(dict.fromkeys(standing, _still.value(new)))
            return None if new is grad else new

        return leaf_arrived

    def _all_arrived(self, empty: Any, call: int) -> None:
        _, arrived = self._arrivals.pop(call)
        if not self._session.closed:
            self._look(tree.map_tensors(lambda t: arrived.get(id(t)), empty), call)

    def _look(self, value: Any, call: int) -> None:
        self.ran += 1
        for look in self.looks:
            look(value, call)


_still = Keep("live")


class Wiring(Protocol):
    """What makes the gradients of a site arrive."""

    def wire(self, output_tap: Tap, input_tap: Tap) -> None: ...


class OutputGradient:
    """``:grad``: what flows back to a value from the moment it leaves its module."""

    def __init__(self, tap: GradTap, handles: TensorHandles, aliases: Aliases) -> None:
        self._tap, self._handles, self._aliases = tap, handles, aliases
        self._entered: dict[int, int] = {}

    def wire(self, output_tap: Tap, input_tap: Tap) -> None:
        input_tap.looks.append(self._entering)
        output_tap.aliases = [*output_tap.aliases, self._leaving]

    def _entering(self, inputs: Any, call: int) -> None:
        """The versions of the inputs tell afterwards what the module wrote to."""
        self._entered = {id(t): version(t) for t in tree.tensors(inputs) if counts_versions(t)}

    def _leaving(self, value: Any, call: int, source: Any, again: bool) -> Any:
        given = list(tree.tensors(source))
        lent = {key for key in map(_torch.storage_key, given) if key is not None}
        entered, self._entered = self._entered, {}

        def take(leaf: Tensor, hook: TensorHook) -> Tensor:
            wrote = id(leaf) in entered and version(leaf) != entered[id(leaf)]
            # What a module wrote in place may be read under the old name: only the tensor itself sees all of it.
            is_new = wrote or (_torch.storage_key(leaf) not in lent and not any(leaf is t for t in given))
            if not _can_alias(leaf) or (is_new and not leaf.is_leaf and (wrote or is_unused(leaf))):
                listen(leaf, hook, self._handles)
                return leaf
            return self._alias(leaf, hook)

        return self._tap.wait_for(value, call, again, take, apart=self._alias)

    def _alias(self, leaf: Tensor, hook: TensorHook) -> Tensor:
        alias = Alias(leaf, hook, self._handles)
        self._aliases.add(alias)
        assert alias.tensor is not None
        return alias.tensor


class TotalGradient:
    """``:grad_total``: all that flows back to a value, also from where its own module used it."""

    def __init__(self, tap: GradTap, handles: TensorHandles) -> None:
        self._tap, self._handles = tap, handles

    def wire(self, output_tap: Tap, input_tap: Tap) -> None:
        output_tap.aliases = [self._leaving, *output_tap.aliases]  # the tensor itself, and not an alias of it

    def _leaving(self, value: Any, call: int, source: Any, again: bool) -> Any:
        def take(leaf: Tensor, hook: TensorHook) -> Tensor:
            listen(leaf, hook, self._handles)
            return leaf

        return self._tap.wait_for(value, call, again, take)


class InputGradient:
    """``:grad_input``: what flows back to a module's inputs through this module alone."""

    def __init__(self, tap: GradTap, handles: TensorHandles, aliases: Aliases) -> None:
        self._tap, self._handles, self._aliases = tap, handles, aliases
        # For each running call of the module; those of calls that raised are forgotten at some point.
        self._running: deque[list[Alias]] = deque(maxlen=_DEEP)

    def wire(self, output_tap: Tap, input_tap: Tap) -> None:
        input_tap.aliases = [*input_tap.aliases, self._entering]
        output_tap.looks.append(self._leaving)

    def _entering(self, value: Any, call: int, source: Any, again: bool) -> Any:
        made: list[Alias] = []
        self._running.append(made)

        def take(leaf: Tensor, hook: TensorHook) -> Tensor:
            if not _can_alias(leaf):
                listen(leaf, hook, self._handles)
                return leaf
            alias = Alias(leaf, hook, self._handles)
            made.append(alias)
            assert alias.tensor is not None
            return alias.tensor

        return self._tap.wait_for(value, call, again, take)

    def _leaving(self, output: Any, call: int) -> None:
        """A write after this counts only if the module passes its input on: to whoever writes then."""
        passed = _roots(tree.tensors(output))
        for alias in self._running.pop() if self._running else ():
            if alias.tensor is not None and id(root(alias.tensor)) in passed and not alias.was_written():
                self._aliases.add(alias)
            else:
                alias.settle()


def _roots(tensors: Iterable[Tensor]) -> set[int]:
    return {id(root(tensor)) for tensor in tensors}


def _can_alias(leaf: Tensor) -> bool:
    return leaf.layout == torch.strided and not leaf.is_nested


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and (torch.is_grad_enabled() or not leaf.is_leaf)


def _replaced(value: Any, address: str, new: Tensor) -> Any:
    return tree.put(value, address, lambda _: new)


def _placeholder(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

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
from torchhook._core.listening import Alias, Entered, GradientListener, is_unused, listen, listen_directly, original
from torchhook._core.scope import Scope
from torchhook._core.taps import Tap
from torchhook._core.writes import TensorHook, root
from torchhook._torch import graph_task, kept_out, version
from torchhook._values import tree

_DEEP = 1000

Leaf = tuple[str, Tensor]
"""A tensor of a value, and its address there."""

Take = Callable[[Tensor, TensorHook], Tensor]
"""Has a hook told of a tensor's gradient, and returns the tensor to go on with."""


class Aliases:
    """The aliases of a session that are in use: they are settled when the model has run, and at the latest when the
    session closes."""

    def __init__(self) -> None:
        self.waiting: list[Alias] = []
        self._followed_in = -1

    def add(self, alias: Alias) -> None:
        self.waiting.append(alias)

    def followed_first(self, hook: TensorHook) -> TensorHook:
        """What comes late in the forward pass comes early in the backward pass: in time to find what was written to
        where the model itself was not called, but a part of it."""

        def follow(grad: Tensor) -> Tensor | None:
            self.follow_writes()
            return hook(grad)

        return follow

    def follow_writes(self) -> None:
        """Once in a backward pass: follow what was written to."""
        if self.waiting and self._followed_in != graph_task():
            self._followed_in = graph_task()
            for alias in self.waiting:
                alias.follow_write()

    def settle(self) -> None:
        waiting, self.waiting = self.waiting, []
        for alias in waiting:
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

    def forget(self, task: int) -> None:
        super().forget(task)
        self._without_grad, self._arrivals = {}, {}

    def listener(self, hook: TensorHook, port: str) -> GradientListener:
        return GradientListener(hook, f"{self.label}:{port}", self._session)

    def arrived_at_parameter(self, grad: Tensor | None) -> Tensor | None:
        """Take the gradient of a parameter: each is a call of its own."""
        return self.arrived(grad, next(self.calls))

    def wait_for(self, value: Any, call: int, again: bool, take: Take, apart: Take | None = None) -> Any:
        """Have ``take`` listen to every tensor of a passing value, and return the value to go on with.

        A tensor that is found at several addresses is taken by ``apart`` at each of them, where there is such a way:
        what becomes of one is not what becomes of the other.

        Where the first run built a graph, backward goes through that one; a reentrant checkpoint runs first without
        gradients, and its recomputation is what counts, tensor by tensor.
        """
        lacking = self._without_grad.pop(call, set()) if again else None
        # What passes may be on a graph, and what counts still be the recomputation.
        later = not torch.is_grad_enabled() and _torch.will_run_again()
        if isinstance(value, Tensor):
            if later or not _differentiable(value):
                self._without_grad[call] = {""}
            elif lacking is None or lacking:
                return take(value, lambda grad: self.arrived(grad, call))
            return value
        leaves = [(address, leaf) for address, leaf in tree.leaves(value) if isinstance(leaf, Tensor)]
        able = [] if later else [(address, leaf) for address, leaf in leaves if _differentiable(leaf)]
        without = {address for address, _ in leaves} - {address for address, _ in able}
        if without or not leaves:
            self._without_grad[call] = without
        found = [(address, leaf) for address, leaf in able if lacking is None or address in lacking]
        return self._wait_for_several(value, call, found, take, apart)

    def _wait_for_several(self, value: Any, call: int, found: list[Leaf], take: Take, apart: Take | None) -> Any:
        if not found:
            return value
        empty = _placeholders(value, found)
        for alike in _grouped(found, original):  # one and the same if no aliases were handed on
            one_by_one = apart is not None and len(alike) > 1 and all(_can_alias(leaf) for _, leaf in alike)
            for group in [[part] for part in alike] if one_by_one else _grouped(alike):
                way = apart if apart is not None and one_by_one else take
                addresses, leaf = [address for address, _ in group], group[0][1]
                new = way(leaf, self._leaf_hook(empty, addresses, call))
                if new is not leaf:
                    for address in addresses:
                        value = _replaced(value, address, new)
        return value

    # -- arrivals -----------------------------------------------------------------------------------

    def arrived(self, grad: Tensor | None, call: int) -> Tensor | None:
        """Take the gradient of what passed in a call."""
        if self._session.closed or grad is None:  # torch calls hooks where no gradient comes, too (pytorch#11751)
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

    @kept_out
    def _look(self, value: Any, call: int) -> None:
        self.ran += 1
        for look in self.looks:
            look(value, call)


def forget_arrived(taps: Iterable[tuple[GradTap, Any]]) -> None:
    """As ``taps.forget_passed``, for those where gradients arrive, each with the one that its value passes."""
    for tap, _ in taps:
        tap.ran = 0
        if tap._without_grad:
            tap._without_grad = {}


_still = Keep("live")


class Wiring(Protocol):
    """What makes the gradients of a site arrive."""

    def wire(self, output_tap: Tap, input_tap: Tap) -> None: ...


class OutputGradient:
    """``:grad``: what flows back to a value from the moment it leaves its module."""

    def __init__(self, tap: GradTap, handles: TensorHandles, aliases: Aliases) -> None:
        self.handles, self.aliases = handles, aliases
        self._tap = tap
        self._entered: Entered | None = None
        self._one: tuple[int, int, int] | None = None
        """Instead, of a single plain tensor: its id, that of what it is an alias of, and its version."""
        self.whose: GradientListener = tap.listener(_unheard, "grad")

    def wire(self, output_tap: Tap, input_tap: Tap) -> None:
        input_tap.aliases = [*input_tap.aliases, self.entering]
        output_tap.aliases = [*output_tap.aliases, self.leaving]

    def entering(self, inputs: Any, call: int, source: Any, again: bool) -> Any:
        """Note what a module is given."""
        if type(inputs) is Tensor and not inputs.is_inference():
            self._one = id(inputs), id(original(inputs)), version(inputs)
        else:
            self._one, self._entered = None, Entered(tree.tensors(inputs))
        return inputs

    def was_written(self, tensor: Tensor) -> None:
        """Note that a module has written to a single plain tensor that it was given."""
        self._one = id(tensor), id(original(tensor)), version(tensor) - 1

    def is_new(self, value: Tensor, source: Any) -> bool:
        """Whether it is a value of its own, or what the module wrote to, and was given nothing else: as nearly all."""
        one = self._one
        if one is None or type(source) is not tuple or len(source) != 1 or id(given := source[0]) != one[0]:
            return False
        if value is given:
            return version(value) != one[2]
        return _torch.storage_key(value) != _torch.storage_key(given)

    def leaving(self, value: Any, call: int, source: Any, again: bool) -> Any:
        """Listen to what a module returns, and return what to go on with."""
        plain = type(value) is Tensor and not again and torch.is_grad_enabled()
        # Nobody can have used it yet.
        if (
            plain
            and self.is_new(value, source)
            and listen_directly(value, self.whose, self._direct(call), self.handles)
        ):
            self._one = None
            return value
        one, self._one = self._one, None
        entered, self._entered = self._entered or Entered(()), None
        entered.add(tree.tensors(source), one)

        def take(leaf: Tensor, hook: TensorHook) -> Tensor:
            listener = self._listener(hook)
            # What a module wrote in place may be read under the old name: only the tensor itself sees all of it.
            is_new = not entered.is_among(leaf) or entered.was_written(leaf)
            if not _can_alias(leaf) or (is_new and not leaf.is_leaf and is_unused(leaf, listener)):
                listen(leaf, listener, self.handles)
                return leaf
            return self._alias(leaf, hook)

        return self._tap.wait_for(value, call, again, take, apart=self._alias)

    def _direct(self, call: int) -> Callable[[Tensor, Tensor], Tensor | None]:
        tap, aliases = self._tap, self.aliases

        def hook(grad: Tensor, arrived: Tensor) -> Tensor | None:
            aliases.follow_writes()
            return tap.arrived(grad, call)

        return hook

    def _listener(self, hook: TensorHook) -> GradientListener:
        return self._tap.listener(self.aliases.followed_first(hook), "grad")

    def _alias(self, leaf: Tensor, hook: TensorHook) -> Tensor:
        alias = Alias(leaf, self._listener(hook), self.handles)
        self.aliases.add(alias)
        assert alias.tensor is not None
        return alias.tensor


def _unheard(grad: Tensor) -> None:
    """Stands for the hook of a listener whose every call has one of its own."""


class TotalGradient:
    """``:grad_total``: all that flows back to a value, also from where its own module used it."""

    def __init__(self, tap: GradTap, handles: TensorHandles) -> None:
        self._tap, self._handles = tap, handles

    def wire(self, output_tap: Tap, input_tap: Tap) -> None:
        output_tap.aliases = [self._leaving, *output_tap.aliases]  # the tensor itself, and not an alias of it

    def _leaving(self, value: Any, call: int, source: Any, again: bool) -> Any:
        def take(leaf: Tensor, hook: TensorHook) -> Tensor:
            listen(leaf, self._tap.listener(hook, "grad_total"), self._handles, total=True)
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
        output_tap.add_look(self._leaving)

    def _entering(self, value: Any, call: int, source: Any, again: bool) -> Any:
        made: list[Alias] = []
        self._running.append(made)

        def take(leaf: Tensor, hook: TensorHook) -> Tensor:
            listener = self._tap.listener(self._aliases.followed_first(hook), "grad_input")
            if not _can_alias(leaf):
                listen(leaf, listener, self._handles)
                return leaf
            alias = Alias(leaf, listener, self._handles)
            made.append(alias)
            assert alias.tensor is not None
            return alias.tensor

        return self._tap.wait_for(value, call, again, take)

    def _leaving(self, output: Any, call: int) -> None:
        """A write after this counts only if the module passes its input on: to whoever writes then."""
        passed = {id(root(tensor)) for tensor in tree.tensors(output)}
        for alias in self._running.pop() if self._running else ():
            if alias.tensor is not None and id(root(alias.tensor)) in passed and not alias.follow_write():
                self._aliases.add(alias)
            else:
                alias.settle()


def _can_alias(leaf: Tensor) -> bool:
    return leaf.layout == torch.strided and not leaf.is_nested


def _differentiable(leaf: Any) -> bool:
    """Whether a gradient can arrive at a tensor."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return False
    try:
        if leaf.grad_fn is not None:
            return True
    except RuntimeError:  # a view that was written to in a way that autograd does not follow: it has given it up
        return False
    # A view that was made without gradients of what has one only says that it needs one.
    return torch.is_grad_enabled() and (root(leaf) is leaf or not root(leaf).requires_grad)


def _grouped(found: list[Leaf], name: Callable[[Tensor], Tensor] = lambda t: t) -> list[list[tuple[str, Tensor]]]:
    groups: dict[int, list[tuple[str, Tensor]]] = {}
    for address, leaf in found:
        groups.setdefault(id(name(leaf)), []).append((address, leaf))
    return list(groups.values())


def _placeholders(value: Any, found: list[Leaf]) -> Any:
    """What stands for a value where gradients have not arrived: zeros that take no memory, each for one address."""
    empty = tree.map_tensors(_placeholder, value)
    if len({id(tree.get(empty, address)) for address, _ in found}) < len(found):  # a container is there twice
        for address, leaf in found:
            empty = _replaced(empty, address, _placeholder(leaf))
    return empty


def _replaced(value: Any, address: str, new: Tensor) -> Any:
    return tree.put(value, address, lambda _: new)


def _placeholder(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

"""Gradients of what passes a tap, by tensor hooks that are set in the forward pass.

Module backward hooks are not used: they fail before in-place layers (pytorch#61519), and ``retain_grad`` gives the
gradient after the in-place operation. A tensor hook gives the right one for every layer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.hooks import RemovableHandle

from torchhook._core.hooks import TensorHandles, after_backward, on_gradient
from torchhook._core.keep import Keep
from torchhook._core.recompute import graph_task
from torchhook._core.scope import Scope
from torchhook._core.taps import Tap
from torchhook._values import tree

_DEEP = 1000
TensorHook = Callable[[Tensor], Tensor | None]


class GradTap(Tap):
    """The gradients that arrive for what passes one place.

    They come on autograd's own threads, so they belong to the tensor and not to a context. What hooks hold are
    addresses and placeholders, never tensors of the graph: a graph with a hook that holds the graph is never freed.
    """

    __slots__ = ("_arrivals", "_entered", "_handles", "_lent", "_session", "source", "without_grad")

    def __init__(self, label: str, session: Scope, handles: TensorHandles, source: Tap | None = None) -> None:
        super().__init__(label)
        self.source = source
        """The tap that the value passes in the forward pass."""
        self.without_grad: set[int] = set()
        """Forward calls whose value needed no gradient."""
        self._session = session
        self._handles = handles
        self._arrivals: dict[int, tuple[int, dict[int, Tensor]]] = {}
        self._entered: dict[int, int] = {}
        # For each running call of the module; those of calls that raised are forgotten at some point.
        self._lent: deque[list[tuple[weakref.ref[Tensor], int, list[bool]]]] = deque(maxlen=_DEEP)

    @property
    def recomputing(self) -> bool:
        return False

    def note(self, inputs: Any, call: int) -> None:
        """Before a module runs: the versions of its inputs, which tell afterwards what it wrote to."""
        self._entered = {id(tensor): tensor._version for tensor in tree.tensors(inputs) if _counts_versions(tensor)}

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
        entered, self._entered = self._entered, {}

        def lend(leaf: Tensor, hook: TensorHook) -> Tensor:
            written = id(leaf) in entered and leaf._version != entered[id(leaf)]
            if not leaf.is_leaf and (written or id(leaf) not in inputs):
                self._hear(leaf, hook)
                return leaf
            return self._lend(leaf, hook)

        return self._watch(value, call, lend)

    def split(self, value: Any, call: int) -> Any:
        """Wait for the gradient that flows into a module's inputs through this module alone."""

        lent: list[tuple[weakref.ref[Tensor], int, list[bool]]] = []
        self._lent.append(lent)

        def lend(leaf: Tensor, hook: TensorHook) -> Tensor:
            passes: list[bool] = []
            alias = self._lend(leaf, hook, passes)
            if alias is not leaf:
                lent.append((weakref.ref(_root(alias)), alias._version, passes))
            return alias

        return self._watch(value, call, lend)

    def settle(self, output: Any, call: int) -> None:
        """After the module ran: whether it wrote to the alias of its input, or passes it on to those who may."""
        passed = {id(_root(tensor)) for tensor in tree.tensors(output)}
        for lent, version, passes in self._lent.pop() if self._lent else ():
            root = lent()
            if root is not None and (root._version != version or id(root) in passed):
                passes.append(True)

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
        places: dict[int, tuple[Tensor, list[str]]] = {}
        for address, leaf in found:
            places.setdefault(id(leaf), (leaf, []))[1].append(address)
        for leaf, addresses in places.values():
            new = lend(leaf, self._leaf_hook(empty, addresses, call))
            if new is not leaf:
                for address in addresses:
                    value = _replaced(value, address, new)
        return value

    def _lend(self, tensor: Tensor, hook: TensorHook, passes: list[bool] | None = None) -> Tensor:
        """An alias of ``tensor`` whose gradient goes to ``hook``."""
        if tensor.layout != torch.strided or tensor.is_nested:
            self._handles.add(on_gradient(tensor, hook))
            return tensor
        with torch.enable_grad():  # it must stay on the graph, whoever runs the module
            alias = tensor.view_as(tensor)
        self._hear(alias, hook, passes)
        return alias

    def _hear(self, tensor: Tensor, hook: TensorHook, passes: list[bool] | None = None) -> None:
        """Take the gradient of a tensor.

        Writing to any view of its memory takes a view off the graph (pytorch#61519). The gradient is then found at the
        tensor that it is a view of; for the alias of an input, only if the module ``passes`` it on or wrote to it.
        """
        base = tensor._base
        if base is None or base.is_leaf or not base.requires_grad or not _counts_versions(tensor):
            self._handles.add(on_gradient(tensor, hook))
            return
        written, before, part = _witness(tensor), tensor._version, _Part(tensor, base)
        came = -1

        def at_tensor(grad: Tensor) -> Tensor | None:
            nonlocal came
            came = graph_task()
            return hook(grad)

        def at_base(grad: Tensor) -> Tensor | None:
            if came == graph_task() or written._version == before or (passes is not None and not passes):
                return None
            new = hook(part.of(grad))
            return None if new is None else part.put(grad, new)

        self._handles.add(on_gradient(tensor, at_tensor), on_gradient(base, at_base))

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
        places = {id(tree.get(empty, address)) for address in addresses}

        def leaf_arrived(grad: Tensor) -> Tensor | None:
            if self._session.closed:
                return None
            # The other gradients may not be there yet: an edit sees zeros in their place.
            whole = tree.map_tensors(lambda t: grad if id(t) in places else t, empty)
            for edit in self.edits:
                whole = edit(whole, call)
            new = tree.get(whole, addresses[0])
            if not self.keeps:
                self.ran += 1
            else:
                task = graph_task()
                if self._arrivals.get(call, (None,))[0] != task:
                    self._arrivals[call] = (task, {})
                    after_backward(lambda: self._all_arrived(empty, call))
                self._arrivals[call][1].update(dict.fromkeys(places, _still.value(new)))
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


def _root(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _counts_versions(tensor: Tensor) -> bool:
    """Plain tensors do: a wrapper has no memory of its own, and inference mode keeps no count."""
    return type(tensor) is Tensor and not tensor.is_inference() and not is_functorch_wrapped_tensor(tensor)


def _witness(tensor: Tensor) -> Tensor:
    """A tensor without memory that shares the version counter: it tells of writes and keeps nothing alive."""
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


class _Part:
    """Where a view lies in the tensor that it is a view of."""

    def __init__(self, view: Tensor, base: Tensor) -> None:
        self._base = tuple(base.size()), base.stride()
        self._view = tuple(view.size()), view.stride(), view.storage_offset() - base.storage_offset()

    def of(self, grad: Tensor) -> Tensor:
        """What belongs to the view of a gradient of the whole."""
        return grad if self._is_all else self._laid_out(grad).as_strided(*self._view)

    def put(self, grad: Tensor, new: Tensor) -> Tensor:
        if self._is_all:
            return new
        whole = self._laid_out(grad)
        whole.as_strided(*self._view).copy_(new)
        return whole

    @property
    def _is_all(self) -> bool:
        return self._view == (*self._base, 0)

    def _laid_out(self, grad: Tensor) -> Tensor:
        size, stride = self._base
        return torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device).copy_(grad)

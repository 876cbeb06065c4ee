"""The only place that registers hooks, on modules, tensors and steps of the backward pass, and takes them away."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from torchhook import _torch


def before_call(module: nn.Module, hook: Callable[..., Any], with_kwargs: bool = False) -> RemovableHandle:
    """Call ``hook(module, args)`` before the module runs; what it returns takes the place of the arguments."""
    return module.register_forward_pre_hook(hook, with_kwargs=with_kwargs)


def after_call(
    module: nn.Module, hook: Callable[..., Any], prepend: bool = False, always_call: bool = False
) -> RemovableHandle:
    """Call ``hook(module, args, output)`` after the module ran; what it returns takes the place of the output."""
    return module.register_forward_hook(hook, prepend=prepend, always_call=always_call)


def on_gradient(tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Call ``function`` with the tensor's gradient when it is computed; what it returns takes its place."""
    # After a write through another view, asking for the step of a view makes it anew and drops the hooks that were
    # there: asked for in the middle of registering one, that ends the process.
    _ = tensor.grad_fn
    return cast(RemovableHandle, tensor.register_hook(function))


def on_node(node: Node, function: Callable[[Any, Any], None]) -> RemovableHandle:
    """Call ``function(grad_inputs, grad_outputs)`` after a node of the autograd graph has run."""
    return node.register_hook(function)


def after_backward(function: Callable[[], None]) -> None:
    """From inside a gradient hook: call ``function`` once the backward pass that is running has ended."""
    _torch.after_backward(function)


class TensorHandles:
    """Hooks on tensors of passing graphs. They go with their graph, or here if the session ends first."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._prune_at = 256

    def on_gradient(self, tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> None:
        """Call ``function`` with the tensor's gradient; what it returns takes its place."""
        self._handles.append(on_gradient(tensor, function))  # on one line: what is set is known
        self._prune()

    def on_node(self, node: Node, function: Callable[[Any, Any], None]) -> None:
        """Call ``function(grad_inputs, grad_outputs)`` after a node of the autograd graph has run."""
        self._handles.append(on_node(node, function))
        self._prune()

    def _prune(self) -> None:
        if len(self._handles) >= self._prune_at:
            self._handles = [h for h in self._handles if h.hooks_dict_ref() is not None]
            self._prune_at = 2 * len(self._handles) + 256

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def surely(undo: Callable[[], object]) -> None:
    """Undo something to the end, though an interrupt may come between any two lines: ``undo`` may be called twice."""
    try:
        undo()
    finally:
        undo()


class AtEnd:
    """Undoes something when called, or else when dropped: an interrupt may come just before the call."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo: Callable[[], object] | None = undo

    def __call__(self) -> None:
        if self._undo is not None:
            surely(self._undo)
            self._undo = None

    __del__ = __call__


class Turn:
    """A lock that an interrupt cannot leave locked for good: one may come between the work and the release.

    What is done in turns here takes microseconds, so whoever waits longer waits for nobody.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=1.0):
            self._lock = threading.Lock()
            self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(RuntimeError):  # another lock by now, which is free
            self._lock.release()


class Attachable(Protocol):
    """What knows how to put itself on a module."""

    def attach(self, module: nn.Module) -> RemovableHandle: ...


class Attachment:
    """Hooks that go away together, whatever happens: an interrupt may come between any two lines, here too."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def attach(self, tap: Attachable, module: nn.Module) -> None:
        if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks: a site there never runs, and says so
            self._undo.append(tap.attach(module).remove)  # on one line: what is set is known

    def follow(self, parameter: Tensor, function: Callable[[Tensor], Tensor | None]) -> None:
        """Call ``function`` with the gradients of a parameter."""
        self._undo.append(on_gradient(parameter, function).remove)

    def defer(self, undo: Callable[[], None]) -> None:
        """Call ``undo``, which may be called twice, when the hooks go."""
        self._undo.append(undo)

    def remove(self) -> None:
        surely(self._remove)

    def _remove(self) -> None:
        failed: BaseException | None = None
        while self._undo:
            try:
                self._undo[-1]()
            except BaseException as error:  # an interrupt, say: finish first, then let it pass
                if failed is None:
                    failed = error
                    continue
            self._undo.pop()
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # an error that its own traceback knows keeps every frame alive


class _EagerStance:
    """Compiled code ignores hooks that came after compiling (pytorch#117758): run it eagerly meanwhile.

    The stance belongs to the process and sessions may overlap, so the first one in sets it and the last
    one out restores it.
    """

    def __init__(self) -> None:
        self._turn = Turn()
        self._holders: set[object] = set()
        self._stance: Any = None

    def hold(self, holder: object | None = None) -> Callable[[], None]:
        """Force eager until the returned function is called, or ``release`` with the same ``holder``."""
        holder = object() if holder is None else holder
        if _torch.compiler_is_loaded():
            with self._turn:
                self._holders.add(holder)
                self._settle()
        return lambda: self.release(holder)

    def release(self, holder: object) -> None:
        if holder in self._holders or self._stance is not None:
            with self._turn:
                self._holders.discard(holder)
                self._settle()

    def _settle(self) -> None:
        # Each line leaves what the next call can finish: an interrupt may come between them.
        if self._holders and self._stance is None:
            self._stance = torch.compiler.set_stance("force_eager")
        elif not self._holders and self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None


eager_stance = _EagerStance()

"""The only place that registers hooks, and takes them away again.

A ``Tap`` is the one hook of a module in one direction, or of one operation in it. It counts its calls and hands
each passing value to its edits, which may change it, and then to its keeps, which only look.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchhook import tree
from torchhook.keep import Keep
from torchhook.tree import Inputs

Edit = Callable[[Any, int], Any]
"""Takes a passing value and the index of the call, returns the value that the model goes on with."""

Look = Callable[[Any, int], None]
"""Takes a passing value and the index of the call."""


class Scope:
    """The identity of one open session."""

    __slots__ = ("closed", "stopped_at")

    def __init__(self) -> None:
        self.closed = False
        self.stopped_at: str | None = None


_active: contextvars.ContextVar[frozenset[Scope]] = contextvars.ContextVar("torchhook_active", default=frozenset())


def enter(scope: Scope) -> None:
    """From here on, calls made in this context (thread, asyncio task) belong to ``scope``."""
    _active.set(_active.get() | {scope})


def leave(scope: Scope) -> None:
    # Not ContextVar.reset: sessions may overlap, and close in another context than they opened in.
    _active.set(_active.get() - {scope})


class Stop(BaseException):
    """Ends a forward pass at the last needed site. Not an ``Exception``: models catch those."""

    def __init__(self, scope: Scope) -> None:
        super().__init__("a torchhook session with stop=True ended this forward pass")
        self.scope = scope


# Inside a backward pass, a forward call is a recomputation (activation checkpointing, reversible layers).
_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class Tap:
    """What passes one place: counted, edited, looked at."""

    __slots__ = ("_again", "calls", "edits", "elsewhere", "keeps", "label", "ran", "recomputed", "scope")

    def __init__(self, label: str, scope: Scope | None = None) -> None:
        self.label = label
        self.scope = scope
        """Calls from outside this scope are only counted; ``None`` takes calls from everywhere."""
        self.edits: list[Edit] = []
        self.keeps: list[Look] = []
        self.calls = count()
        self.ran = 0
        self.elsewhere = 0
        self.recomputed = 0
        self._again = (0, 0)

    # A copied or unpickled model must not write into the recording of the original, and must load
    # where torchhook is not installed: the copy of a tap is a do-nothing from the standard library.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def is_foreign(self) -> bool:
        """Whether this call was made in a context that the tap does not belong to."""
        if self.scope is None or self.scope in _active.get():
            return False
        self.elsewhere += 1
        return True

    def take(self, value: Any) -> Any:
        """Pass a value, and return the one to go on with."""
        if self.ran and _graph_task() != -1:
            return self._take_again(value)
        call = next(self.calls)
        self.ran = call + 1
        for edit in self.edits:
            value = edit(value, call)
        for keep in self.keeps:
            keep(value, call)
        return value

    @property
    def recomputing(self) -> bool:
        return self.ran > 0 and _graph_task() != -1

    def _take_again(self, value: Any) -> Any:
        """A recomputed call: edits must do the same again, keeps have seen it before."""
        # Backward goes through the calls in reverse, so the last one is recomputed first.
        after, times = self._again
        times = times + 1 if after == self.ran else 1
        self._again = (self.ran, times)
        self.recomputed += 1
        call = max(self.ran - times, 0)
        for edit in self.edits:
            value = edit(value, call)
        for keep in self.keeps:
            if isinstance(keep, GradTap):
                keep.look_again(value, call)
        return value


class OutputTap(Tap):
    """A forward hook."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.scope is not None and self.scope not in _active.get():
            self.elsewhere += 1
            return None
        if self.edits or (self.ran and _graph_task() != -1):
            value = self.take(output)
            return None if value is output else value
        # What take does when there is nothing but keeps, without the call: this runs once for every captured layer.
        call = next(self.calls)
        self.ran = call + 1
        for keep in self.keeps:
            keep(output, call)
        return None

    def attach(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(self)


class CustomTap(OutputTap):
    """A forward hook whose passing value is what a function in PyTorch's own style makes of the call."""

    __slots__ = ("function",)

    def __init__(self, label: str, scope: Scope | None, function: Callable[[nn.Module, Any, Any], Any]) -> None:
        super().__init__(label, scope)
        self.function = function

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        value = self.function(module, args, output)
        if value is not None:
            super().__call__(module, args, value)


class InputTap(Tap):
    """A forward pre-hook. One positional argument passes as itself, anything else as ``Inputs``."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_foreign():
            return None
        passing = as_value(args, kwargs)
        value = self.take(passing)
        return None if value is passing else as_arguments(value)

    def attach(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(self, with_kwargs=True)


class StaticTap(Tap):
    """A forward hook that the compiler can follow: it only puts clones into a list.

    The compiler drops a clone where nothing overwrites the value.
    """

    __slots__ = ("values",)

    def __init__(self, label: str, values: list[Any]) -> None:
        super().__init__(label)
        self.values = values

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.values.append(output.clone() if isinstance(output, Tensor) else tree.map_tensors(torch.clone, output))

    def attach(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(self)


class EnterTap(Tap):
    """Says when a module begins to run."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[nn.Module], None]) -> None:
        super().__init__("enter")
        self.function = function

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.function(module)

    def attach(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(self)


class LeaveTap(EnterTap):
    """Says when a module has run, also when it raised; before all other hooks, which then run outside of it."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self.function(module)

    def attach(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(self, prepend=True, always_call=True)


def as_value(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if len(args) == 1 and not kwargs else Inputs(args, kwargs)


def as_arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (value.args, value.kwargs) if isinstance(value, Inputs) else ((value,), {})


class GradTap(Tap):
    """The gradient of what passes another tap, by tensor hooks that are set there in the forward pass.

    Module backward hooks are not used: they fail before in-place layers (pytorch#61519). Gradients arrive on
    autograd's own threads, so they belong to the tensor and not to a context.

    The functions that hooks call hold addresses, never tensors: a graph that holds a hook that holds a tensor of
    the graph is never freed.
    """

    __slots__ = ("_arrivals", "_handles", "_lent", "_session", "without_grad")

    def __init__(self, label: str, session: Scope, handles: TensorHandles) -> None:
        super().__init__(label)
        self._session = session
        self._handles = handles
        self._arrivals: dict[int, tuple[int, Any]] = {}
        self._lent: dict[int, tuple[weakref.ref[Tensor], int, list[bool]]] = {}
        self.without_grad = 0
        """Forward calls whose value needed no gradient."""

    def __call__(self, value: Any, call: int) -> None:
        """Wait for the gradient of a passing value."""
        addresses = [address for address, leaf in tree.leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not addresses:
            self.without_grad += 1
        elif isinstance(value, Tensor):
            self._handles.add(value.register_hook(lambda grad: self._arrived(grad, call)))
        else:
            empty = tree.map_tensors(lambda _: _AWAITED, value)
            for address in addresses:
                self._handles.add(tree.get(value, address).register_hook(self._leaf_hook(empty, address, call)))

    def look_again(self, value: Any, call: int) -> None:
        # Where the first run built a graph, that is the one backward goes through; a reentrant checkpoint
        # runs first without gradients, and its recomputation is what counts.
        if self.without_grad:
            self.without_grad -= 1
            self(value, call)

    def follow(self, parameter: Tensor) -> RemovableHandle:
        """Take the gradient of a parameter, whenever one is computed."""
        return on_gradient(parameter, lambda grad: self._arrived(grad, next(self.calls)))

    def split(self, value: Any, call: int) -> Any:
        """Wait for the gradient that flows into a module's inputs through this module alone.

        The module is given aliases of its inputs, so that what reaches them by other ways stays apart.
        """
        aliases = tree.map_tensors(_alias, value)
        if isinstance(value, Tensor) and aliases is not value:
            overwritten: list[bool] = []
            self._lent[call] = (weakref.ref(value), value._version, overwritten)
            self._handles.add(value.register_hook(lambda grad: self._arrived(grad, call) if overwritten else None))
        self(aliases, call)
        return aliases

    def settle(self, output: Any, call: int) -> None:
        """After the module ran: one that worked in place took its alias off the graph, and the gradient of the
        input is all its own."""
        lent, version, overwritten = self._lent.pop(call, (None, 0, []))
        value = None if lent is None else lent()
        if value is not None and value._version != version:
            overwritten.append(True)

    def _arrived(self, grad: Tensor, call: int) -> Tensor | None:
        if self._session.closed:
            return None
        value: Any = grad
        for edit in self.edits:
            value = edit(value, call)
        self._look(value, call)
        return None if value is grad else value

    def _leaf_hook(self, empty: Any, address: str, call: int) -> Callable[[Tensor], Tensor | None]:
        def leaf_arrived(grad: Tensor) -> Tensor | None:
            if self._session.closed:
                return None
            # The other gradients may not be there yet: an edit sees the structure with this one in its place.
            whole = tree.put(empty, address, lambda _: grad)
            for edit in self.edits:
                whole = edit(whole, call)
            new = tree.get(whole, address)
            if self.keeps:
                task = _graph_task()
                if self._arrivals.get(call, (None, None))[0] != task:
                    self._arrivals[call] = (task, empty)
                    after_backward(lambda: self._all_arrived(call))
                kept = _still.value(new)
                self._arrivals[call] = (task, tree.put(self._arrivals[call][1], address, lambda _: kept))
            return None if new is grad else new

        return leaf_arrived

    def _all_arrived(self, call: int) -> None:
        _, value = self._arrivals.pop(call)
        if not self._session.closed:
            self._look(tree.map_tensors(lambda t: None if t is _AWAITED else t, value), call)

    def _look(self, value: Any, call: int) -> None:
        self.ran += 1
        for keep in self.keeps:
            keep(value, call)


# Stands for a gradient that has not arrived. A tensor, because a structure may change its shape without one.
_AWAITED = torch.empty(0)
_still = Keep("live")


def _alias(tensor: Tensor) -> Tensor:
    plain = tensor.requires_grad and tensor.layout == torch.strided and not tensor.is_nested
    return tensor.view_as(tensor) if plain and torch.is_grad_enabled() else tensor


def on_gradient(tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Call ``function`` with the tensor's gradient when it is computed; what it returns takes its place."""
    handle: RemovableHandle = tensor.register_hook(function)
    return handle


def after_backward(function: Callable[[], None]) -> None:
    """From inside a gradient hook: call ``function`` once the backward pass that is running has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


class TensorHandles:
    """Hooks on tensors of passing graphs. They go with their graph, or here if the session ends first."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._prune_at = 256

    def add(self, *handles: RemovableHandle) -> None:
        self._handles.extend(handles)
        if len(self._handles) >= self._prune_at:
            self._handles = [h for h in self._handles if h.hooks_dict_ref() is not None]
            self._prune_at = 2 * len(self._handles) + 256

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class Attachment:
    """Hooks that go away together, whatever happens."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def attach(self, tap: OutputTap | InputTap | StaticTap | EnterTap, module: nn.Module) -> None:
        self._undo.append(tap.attach(module).remove)

    def defer(self, undo: Callable[[], None]) -> None:
        """Call ``undo``, which may be called twice, when the hooks go."""
        self._undo.append(undo)

    def remove(self) -> None:
        try:
            self._remove()
        except BaseException:  # an interrupt while removing: finish first, then let it pass
            self._remove()
            raise

    def _remove(self) -> None:
        while self._undo:
            self._undo[-1]()
            self._undo.pop()


class _EagerStance:
    """Compiled code ignores hooks that came after compiling (pytorch#117758): run it eagerly meanwhile.

    The stance belongs to the process and sessions may overlap, so the first one in sets it and the last
    one out restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._stance: Any = None

    def hold(self) -> Callable[[], None]:
        """Force eager until the returned function is called."""
        if "torch._dynamo" not in sys.modules:  # then nothing was compiled, and importing it takes seconds
            return lambda: None
        with self._lock:
            if self._holders == 0:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._holders += 1
        held = [True]

        def release() -> None:
            with self._lock:
                if held and held.pop():
                    self._holders -= 1
                    if self._holders == 0:
                        self._stance.__exit__(None, None, None)
                        self._stance = None

        return release


eager_stance = _EagerStance()

"""The only place that registers hooks, on modules, tensors and steps of the backward pass, and takes them away."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from torchhook import _torch
from torchhook._core.index import is_script
from torchhook._core.scope import Scope, active
from torchhook._torch import compiler
from torchhook._torch.hooks import Undo, put_always, put_between, put_on_leaf, registered_anywhere
from torchhook._values.by_identity import ByIdentity
from torchhook.errors import CompiledWarning, SessionError, warn


def before_call_first(undo: Undo, module: nn.Module, hook: Callable[..., Any]) -> None:
    """Call ``hook(module, args, kwargs)`` before the module runs, and before all other hooks."""
    undo.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)


def after_call_always(undo: Undo, module: nn.Module, hook: Callable[..., Any], first: bool = True) -> None:
    """Call ``hook(module, args, output)`` when the module has run or raised, before all other hooks or after them."""
    put_always(undo, module, hook, first)


_of_graphs = [0]  # hooks of this library on tensors and steps of graphs, which say nothing of those of a model


def registered() -> int:
    """How many hooks were registered on modules and parameters, or by others: while it is the same, none is new."""
    return registered_anywhere() - _of_graphs[0]


def on_gradient(tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Call ``function`` with the tensor's gradient when it is computed; what it returns takes its place."""
    _of_graphs[0] += 1
    # After a write through another view, asking for the step of a view makes it anew and drops the hooks that were
    # there: asked for in the middle of registering one, that ends the process.
    _ = tensor.grad_fn
    return tensor.register_hook(function)  # type: ignore[no-any-return]


def on_accumulated(parameter: Tensor, function: Callable[[Tensor], None]) -> RemovableHandle:
    """Call ``function`` with a parameter when a gradient has been added to its ``.grad``: FSDP2 calls it too."""
    _of_graphs[0] += 1
    return cast(RemovableHandle, parameter.register_post_accumulate_grad_hook(function))


def on_node(node: Node, function: Callable[[Any, Any], None]) -> RemovableHandle:
    """Call ``function(grad_inputs, grad_outputs)`` after a node of the autograd graph has run."""
    _of_graphs[0] += 1
    return node.register_hook(function)


def before_node(node: Node, function: Callable[[Any], None]) -> RemovableHandle:
    """Call ``function(grad_outputs)`` before a node of the autograd graph runs, after the hooks of its tensors."""
    _of_graphs[0] += 1
    return node.register_prehook(function)


def before_optimizers(function: Callable[..., None]) -> RemovableHandle:
    """Call ``function(optimizer, args, kwargs)`` before any optimizer makes its step."""
    return register_optimizer_step_pre_hook(function)


def after_backward(function: Callable[[], None]) -> None:
    """From inside a gradient hook: call ``function`` once the backward pass that is running has ended."""
    _torch.after_backward(function)


@contextlib.contextmanager
def after_graph_task() -> Iterator[None]:
    """For what is called ``after_backward``: a pass that runs in this block is none inside the one that has ended."""
    task = _torch.graph_task()
    end = AtEnd(lambda: _torch.ended_tasks.discard(task))
    try:
        _torch.ended_tasks.add(task)
        yield
    finally:
        end()


class TensorHandles:
    """Hooks on tensors of passing graphs. They go with their graph, or here if the session ends first."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._prune_at = 256
        self.results: list[Any] = []
        """Those that were put on results of steps without a handle; they know where they are."""
        self.round: int = 0
        """How often all were taken away: a hook that was put on before has nothing more to say."""
        self.latest: Any = None
        """The newest of these."""

    def on_gradient(self, tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> None:
        """Call ``function`` with the tensor's gradient; what it returns takes its place."""
        self._handles.append(on_gradient(tensor, function))  # on one line: what is set is known
        if len(self._handles) >= self._prune_at:
            self._prune()

    def on_accumulated(self, parameter: Tensor, function: Callable[[Tensor], None]) -> None:
        """Call ``function`` with a parameter whenever its ``.grad`` has grown."""
        self._handles.append(on_accumulated(parameter, function))
        self._prune()

    def on_node(self, node: Node, function: Callable[[Any, Any], None]) -> None:
        """Call ``function(grad_inputs, grad_outputs)`` after a node of the autograd graph has run."""
        self._handles.append(on_node(node, function))
        self._prune()

    def before_optimizers(self, function: Callable[..., None]) -> None:
        """Call ``function(optimizer, args, kwargs)`` before any optimizer makes its step."""
        self._handles.append(before_optimizers(function))

    def _prune(self) -> None:
        if len(self._handles) >= self._prune_at:
            self._handles = [h for h in self._handles if h.hooks_dict_ref() is not None]
            self._prune_at = 2 * len(self._handles) + 256

    def prune_results(self) -> None:
        """Forget those whose graph is gone."""
        self.results[:] = [hook for hook in self.results if hook.where() is not None]

    def remove(self) -> None:
        self.round += 1
        self.latest = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for hook in self.results:
            if (hooks := hook.where()) is not None:
                hooks.pop(hook, None)
        self.results.clear()


def surely(undo: Callable[[], object]) -> None:
    """Undo something to the end, though an interrupt may come between any two lines: ``undo`` may be called twice."""
    try:
        undo()
    except BaseException:  # an interrupt, say: finish first, then let it pass
        undo()
        raise


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
        try:  # and no contextlib.suppress: this is done whenever a session opens
            self._lock.release()
        except RuntimeError:  # another lock by now, which is free
            return


class Attachable(Protocol):
    """What knows how to put itself on a module."""

    def attach(self, undo: Undo, module: nn.Module) -> None: ...


class Attachment:
    """Hooks that go away together, whatever happens: an interrupt may come between any two lines, here too."""

    __slots__ = ("undo",)

    def __init__(self) -> None:
        self.undo: Undo = []
        """What is done when they go, the last one first."""

    def attach(self, tap: Attachable, module: nn.Module) -> None:
        if not is_script(module):  # it takes no hooks: a site there never runs, and says so
            tap.attach(self.undo, module)

    def attach_all(self, taps: Iterable[tuple[nn.Module, Attachable]]) -> None:
        """As ``attach``, for each of the taps, without as many calls."""
        undo = self.undo
        for module, tap in taps:
            if not is_script(module):
                tap.attach(undo, module)

    def attach_between(self, before: Any, modules: Iterable[nn.Module], behind: Any) -> None:
        """Call ``before(module, args)`` when any of the modules begins to run, before hooks that come later, and
        ``behind(module, args, output)`` when it has run or raised, before all others."""
        put_between(self.undo, before, [module for module in modules if not is_script(module)], behind)

    def follow(self, parameter: Tensor, function: Callable[[Tensor], Tensor | None]) -> None:
        """Call ``function`` with the gradients of a parameter."""
        put_on_leaf(self.undo, parameter, function)

    def follow_accumulated(self, parameter: Tensor, function: Callable[[Tensor], None]) -> None:
        """Call ``function`` with a parameter whenever its ``.grad`` has grown."""
        self.undo.append(on_accumulated(parameter, function).remove)

    def defer(self, *undo: Callable[[], None]) -> None:
        """Call each of ``undo``, which may be called twice, when the hooks go; the last one first."""
        self.undo += undo

    def remove(self) -> None:
        try:
            self._remove()
        finally:  # as surely does
            if self.undo:
                self._remove()

    def _remove(self) -> None:
        failed: BaseException | None = None
        while self.undo:
            try:
                last = self.undo[-1]
                if type(last) is tuple:  # as nearly all: what take_away does, without the call
                    last[0].pop(last[1], None)
                else:
                    last()  # type: ignore[operator]
            except BaseException as error:  # an interrupt, say: finish first, then let it pass
                if failed is None:
                    failed = error
                    continue
            self.undo.pop()
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # an error that its own traceback knows keeps every frame alive


class _EagerStance:
    """Compiled code ignores hooks that came after compiling (pytorch#117758): run it eagerly meanwhile.

    In the contexts of the sessions that hold this; other threads keep the code that they have compiled, and compile
    nothing new until the last session is gone: it would have the hooks of that session in it for good.
    """

    def __init__(self) -> None:
        self._turn = Turn()
        self._holders: dict[object, Scope | None] = {}
        self._scopes: frozenset[Scope | None] = frozenset()
        self._restore: Callable[[], None] | None = None
        self.said = False
        self._looked_at: ByIdentity[bool] = ByIdentity()

    def say_once(self, model: nn.Module) -> None:
        """Say, once in a process, which way a compiled model goes: it is right, and slower than it was."""
        # The parts of a large model are looked at once, not at each opening.
        if self._looked_at.get(model) is not None:
            is_compiled = compiler.is_compiled(model)
        else:
            self._looked_at[model] = True
            is_compiled = any(map(compiler.is_compiled, model.modules()))
        if is_compiled:
            self.said = True
            warn(
                "this model is compiled, and runs eagerly while a session is open: compiled code ignores its hooks. "
                "For compiled speed, compile th.FeatureLayers(model, names, attach=True) instead. This is said once.",
                CompiledWarning,
            )

    def hold_for(self, attachment: Attachment, scope: Scope | None) -> None:
        """Force eager until the hooks of ``attachment`` go."""
        attachment.undo.append(functools.partial(self.release, attachment))
        self._hold(attachment, scope)

    def hold(self, holder: object | None = None, scope: Scope | None = None) -> Callable[[], None]:
        """Force eager until the returned function is called, or ``release`` with the same ``holder``.

        In the contexts that belong to ``scope``, or everywhere.
        """
        holder = object() if holder is None else holder
        if compiler.compiler_is_loaded():
            self._hold(holder, scope)
        return lambda: self.release(holder)

    def _hold(self, holder: object, scope: Scope | None) -> None:
        with self._turn:
            self._holders[holder] = scope
            self._settle()
        if scope is not None:
            scope.runs_eagerly = True
        # Nobody begins from here on; who has begun would find hooks in the model that were not there before.
        compiler.wait_for_compiling()

    def release(self, holder: object) -> None:
        if holder in self._holders or self._restore is not None:
            with self._turn:
                self._holders.pop(holder, None)
                self._settle()

    def _settle(self) -> None:
        # Each line leaves what the next call can finish: an interrupt may come between them.
        self._scopes = frozenset(self._holders.values())
        if self._holders and self._restore is None:
            self._restore = compiler.take_stance(self._here)
        elif not self._holders and self._restore is not None:
            self._restore()
            self._restore = None

    def _here(self) -> str | None:
        """What is done with compiled code in the running context; ``None`` for what the user wants."""
        scopes = self._scopes  # another thread may put another in its place
        if not scopes:
            return None
        # Autograd recomputes on threads of its own, which belong to no context.
        if None in scopes or not scopes.isdisjoint(active.get()) or _torch.graph_task() != -1:
            return "force_eager"
        return "eager_on_recompile"


eager_stance = _EagerStance()


def may_be_compiled(model: nn.Module) -> bool:
    """Whether a session that is about to open has to hold the compiler off; it is refused inside compiled code."""
    if not compiler.compiler_is_loaded() and not compiler.in_trace():  # as most of the time
        return False
    if compiler.in_compiled_code():  # as refuse_compiled_code, which is seldom called for
        refuse_compiled_code()
    if not eager_stance.said:
        eager_stance.say_once(model)
    return True


def refuse_compiled_code() -> None:
    """Say what cannot be done where the compiler follows the code: put hooks on, and take them away again."""
    if compiler.in_compiled_code():
        raise compiler.refused(
            SessionError,
            "a session cannot be opened inside compiled code, which ignores hooks that come and go. Open it around the "
            "call instead (the model then runs eagerly), or compile th.FeatureLayers(model, names, attach=True).",
        )

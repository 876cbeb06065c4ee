"""Hooks that stay on a model and are compiled or exported with it: plain Python that the compiler can follow.

A compiler follows a hook that changes a value and puts a clone into a list, and no contexts, weak references or
counters, which a session has. What belongs to a call is in a ``threading.local``: the one way to tell threads apart
that it follows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, get_overridable_functions

from torchhook import _torch, edits, transforms
from torchhook._core import actions, early_end, functional, hooks, scope, taps
from torchhook._core.heads import heads_at, known_heads
from torchhook._core.index import Index
from torchhook._core.lost_gradients import Units
from torchhook._core.scope import Scope, Stop, stop_pass
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._torch import compiler
from torchhook._torch.hooks import Undo, put_after, put_before
from torchhook._values import tree
from torchhook._values.heads import UNKNOWN, KnownHeads
from torchhook.errors import EditError, SelectorError, SessionError
from torchhook.transforms import Transform


class Wanted(NamedTuple):
    """One feature: the path that the user wrote, and where it is seen."""

    path: str
    target: Target

    @property
    def key(self) -> str:
        """All calls of a site are kept together."""
        return str(self.target.site.every_call)


class Kept(NamedTuple):
    """What one call of the wrapper left."""

    values: dict[str, list[Any]]
    edited: list[str]
    output: Any


class Attached:
    """Hooks that stay on a model, and what they keep while their wrapper runs; its plain calls keep nothing."""

    # The wrapper owns this object, and the hooks know only what belongs to a call: the wrapper can go while the model
    # stays.

    def __init__(
        self,
        wanted: list[Wanted],
        changes: list[tuple[Target, edits.Edit]],
        attachment: hooks.Attachment,
        index: Index,
        own: list[Transform | None],
        stop: bool = False,
    ) -> None:
        # Numbers: compiled code knows no sites.
        sites = [feature.target.site for feature in wanted]
        calls = [None if site.call is None else site.first_call for site in sites]
        self.features = [(feature.path, feature.key, call) for feature, call in zip(wanted, calls, strict=True)]
        self.edited = [str(target.site) for target, _ in changes]
        self._call = threading.local()
        self._call.state = None  # as after a call: where it is missing, the compiler would compile the second call anew
        self._scope = Scope() if stop else None
        units, ends = Units(index), early_end.refusal(index)
        # How many calls of each site make the features complete.
        self._needed: dict[str, int] = {}
        for feature in wanted:
            self._needed[feature.key] = max(self._needed.get(feature.key, 0), 1 + feature.target.site.first_call)
        made: dict[tuple[int, str | None, str], tuple[nn.Module, _StaticTap]] = {}
        for target, change in changes:
            self._tap(made, target).changes.append(edits.placed(change, target.site, heads_at(index, target)))
        known: dict[int, Transform | None] = {}
        for feature, transform in zip(wanted, own, strict=True):
            tap = self._tap(made, feature.target)
            if known.setdefault(id(tap), transform) is not transform:
                raise SelectorError(
                    f"{feature.path!r}: with attach=True all calls of a site have one transform, since compiled code "
                    "counts none. Give them the same one, or leave out attach=True."
                )
            check = units.checked(feature.target.site) if units else None
            placed = transforms.placed(transform, _told(index, feature.target, transform))
            tap.keep(self._needed, placed, self._scope, check, ends)
        for module, tap in made.values():
            if tap.op is None:
                attachment.attach(tap, module)
        operations = [(module, tap) for module, tap in made.values() if tap.op is not None]
        self._mode = _Operations(self._call, operations) if operations else None
        for module in _inside(module for module, _ in operations):
            attachment.attach(_Enter(self._call, id(module)), module)
            attachment.attach(_Leave(self._call, id(module)), module)

    def _tap(self, made: dict[Any, tuple[nn.Module, _StaticTap]], target: Target) -> _StaticTap:
        _, op, _, port = target.site.parts
        kind = _StaticTap if op is not None else _InputTap if port == "input" else _OutputTap
        key = id(target.module), op, port
        if key not in made:
            made[key] = target.module, kind(target.site.every_call, self._call)
        return made[key][1]

    def __reduce__(self) -> Any:  # what copies its wrapper makes another
        return object, ()

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kept:
        """The model's output, and all that each layer gave meanwhile, in this thread."""
        call, values, edited, running = self._call, {key: [] for key in self._needed}, [], []  # type: ignore[var-annotated]
        before, output = getattr(call, "state", None), None
        # The compiler leaves out by itself what no feature needs.
        ends = self._scope is not None and not torch.compiler.is_compiling()
        depths = functional.depths() if ends else {}
        repetition = None if torch.compiler.is_compiling() else scope.repetition.get()
        call.state = (values, edited, running, torch.is_grad_enabled(), repetition)
        try:
            if self._mode is None:
                output = model(*args, **kwargs)
            else:
                with self._mode:
                    output = model(*args, **kwargs)
        except Stop as stop:
            if stop.scope is not self._scope:
                raise
            functional.unwind(depths)
            early_end.settle(Index(model), stop, values.values)
        finally:
            call.state = before
        return Kept(values, edited, output)


def _inside(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules and all that they hold: while one of those runs, an operation is its own."""
    return list({id(inner): inner for module in modules for inner in module.modules()}.values())


def _told(index: Index, target: Target, transform: Transform | None) -> Callable[[], KnownHeads]:
    """What is known of the heads, found before the compiler is at work, which would follow the search."""
    known = known_heads(index, target) if transforms.asks_where(transform) else UNKNOWN
    return lambda: known


class _StaticTap(taps.Tap):
    """What passes a site while the wrapper runs: edited, and a clone of it kept."""

    def __init__(self, site: Site, call: Any) -> None:
        super().__init__(str(site))
        self.site, self.key, self.op, self.port = site, str(site), site.op, site.port
        self.call = call
        self.changes: list[edits.Edit] = []
        self.needed: dict[str, int] | None = None
        self.transform: Transform | None = None
        self.scope_to_end: Scope | None = None
        self.check: Transform | None = None
        self.before_end: Callable[[], None] | None = None

    def keep(
        self,
        needed: dict[str, int],
        transform: Transform | None,
        scope: Scope | None,
        check: Transform | None,
        before_end: Callable[[], None],
    ) -> None:
        """Keep what passes; with a scope, end the forward pass once all that is needed was seen."""
        self.needed, self.transform, self.scope_to_end = needed, transform, scope
        self.check, self.before_end = check, before_end

    def pass_on(self, value: Any) -> Any:
        state = getattr(self.call, "state", None)
        if state is None:  # a call of the model alone: nobody would ever take the values away again
            return self._edited(value) if self._is_repeated() else value
        values, edited, running, learning, repetition = state
        if not torch.compiler.is_compiling() and scope.repetition.get() is not repetition:
            return self._edited(value)  # a call that began before: it is the wrapper's no more
        running.append(None)  # what is done here is nobody's operation
        if self.changes:
            if not torch.compiler.is_compiling():
                self._expect_repetition(learning)
            value = self._edited(value)
            edited.append(self.key)
        if self.needed is not None:
            if torch.compiler.is_compiling():
                # The compiler drops a clone where nothing overwrites the value.
                values[self.key].append(self._kept(value))
            else:
                if learning:
                    actions.refuse_off_graph(self.site)
                with _torch.out_of_checkpoints():
                    values[self.key].append(self._kept(value if self.check is None else self.check(value)))
            ends = self.scope_to_end is not None and not torch.compiler.is_compiling()
            if ends and all(len(values[key]) >= times for key, times in self.needed.items()):
                if self.before_end is not None:
                    self.before_end()
                returned = value if self.op is None and self.port == "output" else None
                stop_pass(self.scope_to_end, returned)  # type: ignore[arg-type]
        running.pop()
        return value

    def _kept(self, value: Any) -> Any:
        return _cloned(value if self.transform is None else self.transform(value))

    def _edited(self, value: Any) -> Any:
        if not compiler.in_trace():
            return self._changed(value)
        try:
            return self._changed(value)
        except EditError as error:
            raise compiler.refused(EditError, error.args[0]) from None

    def _changed(self, value: Any) -> Any:
        for change in self.changes:
            new = change(value, self.site)
            if new is not None:
                if not edits.changes_call(change):
                    edits.check(value, new, self.site)
                value = new
        return value

    # Activation checkpointing runs a part of a call again in the backward pass, and has to get the same values.

    def _expect_repetition(self, learning: bool) -> None:
        self.segments.note(0)
        if learning and self.op is not None and self.segments.noted:
            raise SessionError(
                f"{self.site.shown!r} is edited in a checkpointed part of the model, which runs again in the backward "
                "pass, when operations are not heard. Edit the output of a layer, or use th.edit(…) around both passes."
            )

    def _is_repeated(self) -> bool:
        if not self.changes or torch.compiler.is_compiling() or _torch.graph_task() == -1:
            return False
        if self.segments.is_known():
            self.segments.call_again(1)  # which notes the segments inside
            return True
        return False

    def attach(self, undo: Undo, module: nn.Module) -> None:
        raise NotImplementedError("operations are heard by a mode, and have no hook")


def _cloned(value: Any) -> Any:
    """A value with copies of its tensors; written out for what models mostly return, which old compilers follow."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _cloned(part) for key, part in value.items()}
    if type(value) is list:
        return [_cloned(part) for part in value]
    if type(value) is tuple:
        return tuple([_cloned(part) for part in value])
    if isinstance(value, tree.Inputs):
        return tree.Inputs(_cloned(value.args), _cloned(value.kwargs))
    return tree.map_tensors(torch.clone, value)


class _OutputTap(_StaticTap):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        value = self.pass_on(output)
        return value if self.changes else None

    def attach(self, undo: Undo, module: nn.Module) -> None:
        put_after(undo, module, self)


class _InputTap(_StaticTap):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = self.pass_on(taps.as_value(args, kwargs))
        return taps.as_arguments(value) if self.changes else None

    def attach(self, undo: Undo, module: nn.Module) -> None:
        put_before(undo, module, self)


# -- operations -----------------------------------------------------------------------------------------


class _Enter(taps.Tap):
    """Notes that a module runs: an operation belongs to the innermost one."""

    def __init__(self, call: Any, module: int) -> None:
        super().__init__("enter")
        self.call, self.module = call, module

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        state = getattr(self.call, "state", None)
        if state is not None:
            state[2].append(self.module)

    def attach(self, undo: Undo, module: nn.Module) -> None:
        put_before(undo, module, self)


class _Leave(_Enter):
    """Notes that it has run, also when it raised; first of all hooks, so that the others run outside of it."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        state = getattr(self.call, "state", None)
        if state is not None:
            while state[2] and state[2].pop() != self.module:
                pass  # left by an exception that the model caught

    def attach(self, undo: Undo, module: nn.Module) -> None:
        hooks.after_call_always(undo, module, self)


class _Operation(NamedTuple):
    module: int
    name: str
    functions: tuple[Any, ...]
    inputs: _StaticTap | None
    outputs: _StaticTap | None


class _Operations(TorchFunctionMode):
    """Hears the operations of the modules that were asked for, while the wrapper runs."""

    def __init__(self, call: Any, wanted: list[tuple[nn.Module, _StaticTap]]) -> None:
        super().__init__()
        self.call = call
        known = [function for functions in get_overridable_functions().values() for function in functions]
        self.operations: list[_Operation] = []
        for module, name in dict.fromkeys((id(module), tap.op) for module, tap in wanted):
            ports = {tap.port: tap for owner, tap in wanted if (id(owner), tap.op) == (module, name)}
            functions = tuple(function for function in known if functional.op_name(function) == name)
            functions += _operators(str(name))
            self.operations.append(_Operation(module, str(name), functions, ports.get("input"), ports.get("output")))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        state = getattr(self.call, "state", None)
        if state is not None and state[2]:
            for operation in self.operations:
                if operation.module == state[2][-1] and _is_called(func, operation):
                    return _passed(func, operation, args, kwargs)
        return func(*args, **kwargs)


# The words of Python's operators, where they are not the name of the operation.
_WORDS = {
    "div": "truediv",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_not": "invert",
}


def _operators(name: str) -> tuple[Any, ...]:
    """The methods behind Python's operators: the compiler hears ``y += x`` as one, and eager torch as ``add_``."""
    bare = name.removesuffix("_")
    words = [bare, _WORDS.get(bare, bare)]
    methods = [f"__{prefix}{word}__" for word in words for prefix in (("i",) if name != bare else ("", "r"))]
    return tuple(getattr(Tensor, method) for method in methods if hasattr(Tensor, method))


def _is_called(function: Any, operation: _Operation) -> bool:
    if not compiler.in_trace():
        return functional.op_name(function) == operation.name
    # The compiler can compare functions, and not read their names.
    return any(function is known for known in operation.functions)


def _passed(function: Any, operation: _Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if operation.inputs is not None:
        args, kwargs = taps.as_arguments(operation.inputs.pass_on(taps.as_value(args, kwargs)))
    output = function(*args, **kwargs)
    if operation.outputs is None:
        return output
    value = operation.outputs.pass_on(output)
    written = kwargs.get("out", args[0] if args else None)
    if value is not output and output is written and isinstance(output, Tensor):
        # The model may go on with the tensor that was written to, and not with what the operation returns.
        return output.copy_(value)
    return value

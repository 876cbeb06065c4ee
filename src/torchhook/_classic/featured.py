"""A model together with layers whose values are wanted: by a session for each call, or by hooks that stay."""

from __future__ import annotations

import inspect
import os
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torchhook import edits
from torchhook._classic.attached import Attached, Kept, Wanted
from torchhook._classic.exporting import plain, to_onnx
from torchhook._classic.facade import Facade
from torchhook._core import calling, hooks, never_ran, per_site, taps
from torchhook._core.index import Index, unwrapped
from torchhook._core.keep import Keep
from torchhook._core.per_site import Transforms
from torchhook._core.scope import Scope
from torchhook._core.select import resolve
from torchhook._core.session import Session
from torchhook._core.targets import Target
from torchhook._recording.address import Calls, parse
from torchhook._torch import compiler, cuda_graphs
from torchhook._torch.hooks import remove_copied
from torchhook._values import tree
from torchhook._words import plural
from torchhook.errors import AmbiguousCallError, ArgumentError, NeverRanError, SelectorError, SessionError
from torchhook.transforms import Transform

Named = list[tuple[str, Any]]


class _Forward:
    """``forward`` with the arguments of the model's own, whose names ``torch.export`` knows dynamic shapes by."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, wrapper: Featured | None, kind: type[Featured] | None = None) -> Any:
        if wrapper is None:
            return self.function
        # The compiler does not follow the making of a method, and has no use for names.
        return wrapper._call_model if compiler.in_trace() else types.MethodType(wrapper._signed, wrapper)


class Featured(Facade):
    """A model together with layers whose values are wanted."""

    def __init__(
        self,
        model: nn.Module,
        paths: Iterable[str],
        *,
        attach: bool = False,
        transform: Transforms = None,
        edit: Mapping[Any, Any] | None = None,
        caches: bool = True,
        stop: bool = False,
    ) -> None:
        super().__init__(model)
        self.paths: list[str] = [paths] if isinstance(paths, str) else list(paths)
        if edit is not None and not isinstance(edit, Mapping):
            raise ArgumentError(f"edit must be a dict of selectors and edits, found {type(edit).__name__}.")
        self.transform: Transforms
        self.edit: dict[Any, Any]
        self.caches: bool
        self.stop: bool
        self.transform, self.edit, self.caches, self.stop = transform, dict(edit or {}), caches, stop
        if stop and not self.paths:
            raise ArgumentError("stop=True ends the forward pass at the last layer: name at least one.")
        index = Index(self.model)
        targets, changes = self._targets(index), self._changes(index)  # a wrong path is said now, not at the first call
        self._transforms(index, targets)
        self._attached = self._attach(targets, changes) if attach else None
        self._signed = _signed(model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and return what the class says."""
        return self._result(*self._run(args, kwargs))

    _call_model = forward
    if compiler.follows_descriptors:
        forward = _Forward(forward)  # type: ignore[assignment]

    def _result(self, named: Named, output: Any) -> Any:
        """What a call returns, of the features and the model's output."""
        raise NotImplementedError

    # -- copies ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # The compiled call is the original's, and a function with a signature of its own cannot be pickled.
        return {name: value for name, value in self.__dict__.items() if name not in ("_signed", compiler.COMPILED_CALL)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._signed = _signed(self.model)
        if self._attached is not None:  # a copy: the hooks of the original are not its own
            remove_copied(self.model)
            index = Index(self.model)
            self._attached = self._attach(self._targets(index), self._changes(index))

    # -- where ----------------------------------------------------------------------------------------

    def _targets(self, index: Index) -> list[Wanted]:
        # Looked up at each call: a layer may have been replaced since the wrapper was made.
        chosen = [(path, resolve(index, path)) for path in self.paths]
        return [Wanted(str(t.site) if len(found) > 1 else path, t) for path, found in chosen for t in found]

    def _transforms(self, index: Index, wanted: list[Wanted]) -> list[Transform | None]:
        return per_site.by_target(self.transform, index, [feature.target for feature in wanted])

    def _changes(self, index: Index) -> list[tuple[Target, edits.Edit]]:
        adapted = [(selector, edits.adapt(change)) for selector, change in self.edit.items()]
        return [(target, change) for selector, change in adapted for target in resolve(index, selector)]

    def _attach(self, wanted: list[Wanted], changes: list[tuple[Target, edits.Edit]]) -> Attached:
        for name, target in [*wanted, *((target.site.shown, target) for target, _ in changes)]:
            if target.tensor is not None or target.site.port not in ("output", "input"):
                raise SelectorError(
                    f"{name!r}: attach=True takes what layers and operations take and return ('layer4', 'fc:input', "
                    "'block/relu'); gradients and parameters need attach=False."
                )
            if target.site.counts_back or isinstance(target.site.call, Calls):
                raise SelectorError(
                    f"{name!r}: with attach=True a feature is one call, counted from the first: "
                    f"'{target.site.every_call.but(call=1).shown}'."
                )
            if target.site.leaf or (target.site.op or "").endswith(")"):
                raise SelectorError(
                    f"{name!r} is {target.site.place.shown!r}: attach=True takes whole values, and counts nothing. "
                    "Leave it out, or take the layer itself."
                )
        index = Index(self.model)
        own = self._transforms(index, wanted)
        # By their own addresses: of one place there is one hook, whatever names it has.
        wanted = [Wanted(name, target._replace(site=target.site.place)) for name, target in wanted]
        changes = [(target._replace(site=target.site.place), change) for target, change in changes]
        for target, _ in changes:
            if target.site.call is not None:
                raise SelectorError(
                    f"{target.site.shown!r}: with attach=True every call is edited, since compiled code counts none. "
                    f"Edit '{target.site.every_call}', or leave out attach=True."
                )
        attachment = hooks.Attachment()
        weakref.finalize(self, attachment.remove)
        return Attached(wanted, changes, attachment, index, own, self.stop)

    # -- running --------------------------------------------------------------------------------------

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Named, Any]:
        named, output = self._in_session(args, kwargs) if self._attached is None else self._as_attached(args, kwargs)
        if not self.caches or compiler.is_exporting():
            return [(path, plain(value, self.caches)) for path, value in named], plain(output, self.caches)
        return named, output

    def _in_session(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Named, Any]:
        if compiler.in_compiled_code():
            raise compiler.refused(SessionError, _NOT_COMPILED)
        index, output = Index(self.model), None
        wanted, changes = self._targets(index), self._changes(index)
        session = Session(self.model, index=index)
        for target, change in changes:
            session.edit(target, change)
        # By site: a path that was asked for twice is recorded once. Live, because features are there to be trained on.
        sites = {feature.target.site: feature.target for feature in wanted}
        own = per_site.by_target(self.transform, index, targets := list(sites.values()))
        session.record(targets, Keep("live", transform=per_site.chosen(targets, own)))
        if self.stop:
            session.stop_when_seen(list(sites.values()))
        with session as recording:
            output = self.model(*args, **kwargs)
        if changes and torch.is_grad_enabled() and (sites_again := session.edited_in_segments):
            raise SessionError(
                f"{sites_again[0].shown!r} is edited in a checkpointed part of the model, which runs again in the "
                "backward pass, when the hooks of this call are gone. Use attach=True, or th.edit around both passes."
            )
        for path, target in [*wanted, *((target.site.shown, target) for target, _ in changes)]:
            if target.site in recording.missing:
                raise _never_ran(path, target, recording.missing[target.site])
        return [(path, _only(recording.all(target.site), path)) for path, target in wanted], output

    def _as_attached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Named, Any]:
        assert self._attached is not None
        kept = self._attached.run(self.model, args, kwargs)
        named = []
        # Raised here and not in a hook: the model has run to its end, as it would have without hooks.
        for path, key, call in self._attached.features:
            values = kept.values[key]
            if len(values) > 1 and call is None:
                raise compiler.refused(AmbiguousCallError, _ambiguous(path, len(values)))
            if len(values) <= (call or 0):
                raise self._silent(path, kept)
            named.append((path, values[call or 0]))
        for key in self._attached.edited:
            if key not in kept.edited:
                raise self._silent(key, kept)
        return named, kept.output

    def _silent(self, path: str, kept: Kept) -> Exception:
        """The error of a layer that never ran, in the words of a session."""
        if compiler.in_trace():
            why = f"{_UNSEEN}{compiler.hook_guards()}."
            return compiler.refused(NeverRanError, f"{path!r} was selected and never ran{why}")
        index = Index(self.model)
        targets = {str(target.site): (target.site.shown, target) for target, _ in self._changes(index)}
        targets |= {feature.path: feature for feature in self._targets(index)}
        shown, target = targets[path]
        if any(compiler.is_compiled(module) for module in self.model.modules()):
            return _never_ran(shown, target, _COMPILED_BEFORE)
        ran = {key: len(values) for key, values in kept.values.items()}
        if target.site.call is not None and ran.get(str(target.site.every_call)):
            times = ran[str(target.site.every_call)]
            return _never_ran(shown, target, f"it ran {times} {plural(times, 'time')}.")
        # What a session would have counted, so that both ways of hooking give the same cause.
        known = {id(index.modules[""]): taps.Tap("")}
        known[id(index.modules[""])].ran = 1
        for name, other in targets.values():
            tap = known.setdefault(id(other.module), taps.Tap(name))
            tap.ran += ran.get(str(other.site.every_call), 0)
        tap = taps.Tap(path)
        return _never_ran(shown, target, never_ran.cause(target, tap, tap, index, known, Scope(), None))

    # -- compiling and exporting ------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in place, as ``nn.Module.compile`` does, and copy what is returned out of CUDA graphs."""
        # The next call would write over it; torch.compile(wrapper) has no place to do that.
        if self._attached is None:
            raise SessionError(_NOT_COMPILED)
        graphs = cuda_graphs.are_asked_for(kwargs)
        copying = cuda_graphs.copying_out(kwargs) if graphs else None
        super().compile(*args, **(copying or kwargs))
        if graphs and copying is None:
            compiler.after_compiled_call(self, _copied_out)

    def to_onnx(
        self,
        inputs: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        dynamic_shapes: Any = None,
        **options: Any,
    ) -> Any:
        """Export to ONNX, called with ``inputs``; its outputs have the names of the sites, and ``output``."""
        return to_onnx(
            self,
            inspect.signature(types.MethodType(self._signed, self)),
            [path for path, _ in self._targets(Index(self.model))],
            *calling.arguments(inputs),
            path,
            dynamic_shapes,
            options,
        )


_NOT_COMPILED = (
    "this wrapper puts its hooks on for each call and takes them away again, which compiled code cannot follow. Make "
    "it with attach=True, as in torch.compile(th.FeatureLayers(model, names, attach=True)): then it is compiled whole."
)
_COMPILED_BEFORE = (
    "the model was compiled and called before the hooks were there, and compiled code ignores later ones "
    "(pytorch#117758). Wrap the model first, then compile: torch.compile(th.FeatureLayers(model, names, attach=True))."
)

_UNSEEN = (
    ". Call the wrapper uncompiled: it says why, or it runs there. Then something in the model breaks the graph, and "
    "the rest runs code that was compiled for another model of its class, without these hooks: compile with "
    "fullgraph=True, which names the break"
)


def _signed(model: nn.Module) -> Callable[..., Any]:
    """``forward`` with the arguments of a model's own."""
    known = Featured._call_model
    function = types.FunctionType(known.__code__, known.__globals__, "forward", closure=known.__closure__)
    try:
        signature = inspect.signature(unwrapped(model).forward)
    except (TypeError, ValueError):  # a builtin
        return function
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    rest = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    function.__signature__ = inspect.Signature([this, *rest])  # type: ignore[attr-defined]
    return function


def _copied_out(value: Any) -> Any:
    return tree.map_tensors(cuda_graphs.copied_out, value)


def _never_ran(path: str, target: Target, why: str) -> NeverRanError:
    held = [repr(f"{target.site.path}.{name}") for name in target.module._modules if target.tensor is None][:2]
    one_by_one = f" Or the model calls what it holds one by one: choose {' or '.join(held)}." if held else ""
    return NeverRanError(f"{path!r} was selected and never ran: {why}{one_by_one}")


def _only(values: list[Any], path: str) -> Any:
    if len(values) > 1:
        one = parse(path).but(call=0)  # the port comes behind the call
        raise AmbiguousCallError(f"{path!r} ran {len(values)} times. Say which call: '{one}' is the first.")
    return values[0]


def _ambiguous(path: str, times: int) -> str:
    return f"{path!r} ran {times} times. Say which call: '{path}#0' is the first."

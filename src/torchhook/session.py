"""The live scope: attach one hook per module and direction, hand each passing value to its edits and keeps, and take
every hook away again, whatever happens. Everything that looks into a model is a thin user of ``Session``.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal

from torch import nn

from torchhook import edits, hooks, silence, tree
from torchhook.errors import NeverRanWarning, SelectorError, SessionError
from torchhook.hooks import (
    Attachment,
    CustomTap,
    Edit,
    GradTap,
    InputTap,
    Look,
    OutputTap,
    Scope,
    Stop,
    Tap,
    TensorHandles,
)
from torchhook.keep import Keep
from torchhook.ops import Listener
from torchhook.records import Recording
from torchhook.select import Index, Target, live_tensor
from torchhook.sites import Site

Threads = Literal["own", "all"]


class Session:
    """Edits and keeps on sites of a model, for as long as it is open.

    Build it with ``edit``, ``look`` and ``record``, then use it once: as a context manager, or with ``open`` and
    ``close``. A session that is dropped while open takes its hooks with it.
    """

    def __init__(
        self, model: nn.Module, *, index: Index | None = None, threads: Threads = "own", warn: bool = True
    ) -> None:
        if threads not in ("own", "all"):
            raise ValueError(f"threads={threads!r}: use 'own' (the context that opens the session) or 'all'.")
        self.index = Index(model) if index is None else index
        self.recording = Recording(type(self.index.modules[""]).__name__)
        self.scope = Scope()
        self._tap_scope = self.scope if threads == "own" else None
        self._warn = warn
        self._targets: dict[Target, Tap] = {}
        self._taps: dict[tuple[nn.Module, type[Tap]], InputTap | OutputTap] = {}
        self._grad_taps: dict[Site, GradTap] = {}
        self._parameters: list[tuple[Target, GradTap]] = []
        self._listener: Listener | None = None
        self._handles = TensorHandles()
        self._root = self._tap(InputTap, self.index.modules[""], "")
        self._removal: weakref.finalize[[], Session] | None = None

    # -- building -----------------------------------------------------------------------------

    def edit(self, target: Target, edit: Any) -> None:
        """Change every value that passes ``target``, after the edits that are there already."""
        site = target.site
        if target.tensor is not None and site.port != "grad":
            raise SelectorError(
                f"{str(site)!r} is a parameter or buffer: only its gradient can be edited, as '{site.path}:grad'. "
                "To change the value, edit what the module makes of it, or assign it."
            )
        self._tap_of(target).edits.append(_only(site, _editor(site, edits.adapt(edit))))

    def look(self, target: Target, look: Look) -> None:
        """Hand every value that passes ``target`` to ``look``, after all edits."""
        self._tap_of(target).keeps.append(_only_look(target.site, look))

    def record(
        self, targets: Iterable[Target], keep: Keep, max_records: int | None = None, before_edits: bool = False
    ) -> None:
        """Keep every value that passes the targets in ``self.recording``."""
        for target in targets:
            for name in self.index.names.get(target.module, ()):
                if target.tensor is None:
                    self.recording.add_alias(name, target.site.path)
            recorder = keep.recorder(self.recording.open_store(target.site, max_records).put, self.recording.order)
            if before_edits:
                tap = self._tap_of(target)
                tap.edits.insert(0, _looked_at_first(tap, _only_look(target.site, recorder)))
            else:
                self.look(target, recorder)
        self.recording.wait_with(keep.wait)
        self._root.keeps.insert(0, _outliving(self.index, keep))

    def record_custom(
        self, target: Target, function: Callable[[nn.Module, Any, Any], Any], keep: Keep, max_records: int | None = None
    ) -> None:
        """Keep what ``function(module, args, output)`` makes of each call; ``None`` is not kept."""
        tap = CustomTap(target.site.path, self._tap_scope, function)
        tap.keeps.append(keep.recorder(self.recording.open_store(target.site, max_records).put, self.recording.order))
        self._taps[target.module, CustomTap] = tap
        self._targets[target] = tap

    def stop_when_seen(self, targets: Iterable[Target]) -> None:
        """End the forward pass once every one of ``targets`` has been seen."""
        waiting = set(targets)
        for target in list(waiting):
            if target.site.port in ("grad", "grad_input"):
                raise SessionError(
                    f"stop=True ends the forward pass, and {str(target.site)!r} needs the backward pass."
                )
            self.look(target, _stopper(self.scope, waiting, target))

    def listen(self) -> Listener:
        """See the functional operations inside the modules."""
        if self._listener is None:
            if self._tap_scope is None:
                raise SessionError(
                    "operations are seen in one thread only, the session's own: leave out threads='all'."
                )
            self._listener = Listener(self.scope)
        return self._listener

    # -- taps -----------------------------------------------------------------------------------

    def _tap_of(self, target: Target) -> Tap:
        tap = self._targets.get(target)
        if tap is None:
            tap = self._targets[target] = self._make_tap(target)
        return tap

    def _make_tap(self, target: Target) -> Tap:
        site = target.site
        if target.tensor is not None:
            return self._tensor_tap(target)
        passing = self._passing_tap(target)
        if site.port in ("output", "input"):
            return passing
        tap = self._grad_taps.get(site.every_call)
        if tap is None:
            tap = self._grad_taps[site.every_call] = GradTap(site.path, self.scope, self._handles)
            if site.port == "grad":
                passing.keeps.append(tap)
            else:
                passing.edits.append(tap.split)
                self._passing_tap(target._replace(site=site._replace(port="output"))).keeps.append(tap.settle)
        return tap

    def _passing_tap(self, target: Target) -> Tap:
        """The tap that the value passes in the forward pass."""
        inward = target.site.port in ("input", "grad_input")
        if target.site.op is None:
            return self._tap(InputTap if inward else OutputTap, target.module, target.site.path)
        listener = self.listen()
        taps = listener.inputs if inward else listener.outputs
        return taps.setdefault((target.module, target.site.op), Tap(target.site.path))

    def _tensor_tap(self, target: Target) -> Tap:
        """The tap of a parameter or buffer: its value when its module runs, or its gradient."""
        if target.site.port == "output":
            tap = Tap(target.site.path)
            self._tap(InputTap, target.module, target.site.path).keeps.append(
                lambda value, call: _pass_tensor(tap, target)
            )
            return tap
        if target.site.port != "grad" or not live_tensor(target).requires_grad:
            why = "has no inputs" if target.site.port != "grad" else "does not require a gradient"
            raise SelectorError(f"{str(target.site)!r}: {target.site.path!r} is a parameter or buffer that {why}.")
        grad_tap = GradTap(target.site.path, self.scope, self._handles)
        self._parameters.append((target, grad_tap))
        return grad_tap

    def _tap(self, kind: type[InputTap] | type[OutputTap], module: nn.Module, path: str) -> InputTap | OutputTap:
        tap = self._taps.get((module, kind))
        if tap is None:
            tap = self._taps[module, kind] = kind(path, self._tap_scope)
        return tap

    # -- living -------------------------------------------------------------------------------

    def open(self) -> Session:
        """Attach the hooks."""
        if self._removal is not None:
            raise SessionError("a session opens once. Make a new one: they are cheap, and may nest and overlap.")
        attachment = Attachment()
        self._removal = weakref.finalize(self, attachment.remove)
        try:
            attachment.defer(hooks.eager_stance.hold())
            attachment.defer(self._handles.remove)
            if self._listener is not None:
                attachment.defer(self._listener.close)
                enter, leave = self._listener.boundaries()
                for module in self.index.names:
                    attachment.attach(enter, module)
                    attachment.attach(leave, module)
            for (module, _), tap in self._taps.items():
                attachment.attach(tap, module)
            for target, grad_tap in self._parameters:
                attachment.defer(grad_tap.follow(live_tensor(target)).remove)
        except BaseException:
            self._removal()
            raise
        hooks.enter(self.scope)
        return self

    def close(self) -> None:
        """Take the hooks away and warn about sites that never ran. Closing twice does nothing."""
        self._close(None, stacklevel=3)

    remove = close
    """As PyTorch's own hook handles call it."""

    def __enter__(self) -> Recording:
        return self.open().recording

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        stopped = isinstance(error, Stop) and error.scope is self.scope
        self._close(None if stopped else error, stacklevel=3)
        return stopped

    def _close(self, error: BaseException | None, stacklevel: int) -> None:
        if self._removal is None or not self._removal.alive:
            return
        self.scope.closed = True
        try:
            self._removal()
        finally:
            hooks.leave(self.scope)
        self.recording.finish()
        self._report(error)
        missing = self.recording.missing
        if missing and error is None and self._warn:
            lines = [f"  {address or '(model)'!r}: {why}" for address, why in list(missing.items())[:10]]
            more = [f"  … and {len(missing) - 10} more: see rec.missing"] if len(missing) > 10 else []
            what = "1 selected site" if len(missing) == 1 else f"{len(missing)} selected sites"
            warnings.warn("\n".join([f"{what} never ran:", *lines, *more]), NeverRanWarning, stacklevel=stacklevel)

    def _report(self, error: BaseException | None) -> None:
        """Note in the recording what never ran and why, and what ran out of this session's sight."""
        taps = {module: tap for (module, _), tap in self._taps.items()}
        for target, tap in self._targets.items():
            address = str(target.site)
            if tap.elsewhere:
                self.recording.elsewhere[address] = tap.elsewhere
            if tap.recomputed:
                self.recording.recomputed[address] = tap.recomputed
            if tap.ran > (target.site.call or 0):
                continue
            if error is not None:
                why = f"the block ended early with {type(error).__name__}."
            else:
                why = silence.cause(target, tap, self.index, taps, self.scope, self._listener)
            self.recording.missing[address] = why


# What taps call are closures over what they need and nothing else: a hook that held on to the session would keep it,
# and with it the hooks, alive for as long as the model.


def _only(site: Site, edit: Edit) -> Edit:
    return edit if site.call is None else lambda value, call: edit(value, call) if call == site.call else value


def _only_look(site: Site, look: Look) -> Look:
    return look if site.call is None else lambda value, call: look(value, call) if call == site.call else None


def _looked_at_first(tap: Tap, look: Look) -> Edit:
    def pass_on(value: Any, call: int) -> Any:
        if not tap.recomputing:
            look(value, call)
        return value

    return pass_on


def _editor(site: Site, edit: edits.Edit) -> Edit:
    def change(value: Any, call: int) -> Any:
        here = site._replace(call=call)
        new = edit(value, here)
        if new is None or new is value:
            return value
        edits.check(value, new, here)
        return new

    return change


def _stopper(scope: Scope, waiting: set[Target], target: Target) -> Look:
    def stop(value: Any, call: int) -> None:
        waiting.discard(target)
        if not waiting:
            scope.stopped_at = str(target.site)
            raise Stop(scope)

    return stop


def _pass_tensor(tap: Tap, target: Target) -> None:
    tap.take(live_tensor(target))


def _outliving(index: Index, keep: Keep) -> Look:
    """Tell ``keep`` which tensors outlive the forward pass: what the model owns, and what it is called with."""
    keep.owns(
        tensor
        for module in index.names
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    )
    return lambda value, call: keep.called_with(tree.tensors(value))

"""The live scope: attach one hook per module and direction, hand each passing value to its actions, and take
every hook away again, whatever happens. Everything that looks into a model is a thin user of ``Session``.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal

from torch import nn

from torchhook import hooks, silence, tree
from torchhook.errors import NeverRanWarning, SessionError
from torchhook.hooks import Action, Attachment, CustomTap, InputTap, OutputTap, Scope, Stop, Tap
from torchhook.keep import Keep
from torchhook.records import MemoryStore, Recording
from torchhook.select import Index, Target

Threads = Literal["own", "all"]


class Session:
    """Actions on sites of a model, for as long as it is open.

    Build it with ``on`` and ``record``, then use it once: as a context manager, or with ``open`` and ``close``.
    A session that is dropped while open takes its hooks with it.
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
        self._root = self._tap(InputTap, self.index.modules[""], "")
        self._removal: weakref.finalize[[], Session] | None = None

    # -- building -----------------------------------------------------------------------------

    def on(self, target: Target, action: Action) -> None:
        """Hand every value that passes ``target`` to ``action``, after the actions that are there already."""
        tap = self._tap_of(target)
        self._targets[target] = tap
        tap.actions.append(action if target.site.call is None else _only(target.site.call, action))

    def record(self, targets: Iterable[Target], keep: Keep, max_records: int | None = None) -> None:
        """Keep every value that passes the targets in ``self.recording``."""
        for target in targets:
            for name in self.index.names[target.module]:
                self.recording.add_alias(name, target.site.path)
            self.on(target, _recorder(self.recording, self.recording.open_store(target.site, max_records), keep))
        self.recording.wait_with(keep.wait)
        self._root.actions.insert(0, _outliving(self.index, keep))

    def record_custom(
        self, target: Target, function: Callable[[nn.Module, Any, Any], Any], keep: Keep, max_records: int | None = None
    ) -> None:
        """Keep what ``function(module, args, output)`` makes of each call; ``None`` is not kept."""
        tap = CustomTap(target.site.path, self._tap_scope, function)
        tap.actions.append(_recorder(self.recording, self.recording.open_store(target.site, max_records), keep))
        self._taps[target.module, CustomTap] = tap
        self._targets[target] = tap

    def stop_when_seen(self, targets: Iterable[Target]) -> None:
        """End the forward pass once every one of ``targets`` has been seen."""
        waiting = set(targets)
        for target in list(waiting):
            self.on(target, _stopper(self.scope, waiting, target))

    def _tap_of(self, target: Target) -> Tap:
        kind = InputTap if target.site.port == "input" else OutputTap
        return self._tap(kind, target.module, target.site.path)

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
            for (module, _), tap in self._taps.items():
                attachment.attach(tap, module)
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
        try:
            self._removal()
        finally:
            hooks.leave(self.scope)
        self.recording.wait()
        self._report(error)
        missing = self.recording.missing
        if missing and error is None and self._warn:
            lines = [f"  {address or '(model)'!r}: {why}" for address, why in list(missing.items())[:10]]
            more = [f"  … and {len(missing) - 10} more: see rec.missing"] if len(missing) > 10 else []
            what = "1 selected site" if len(missing) == 1 else f"{len(missing)} selected sites"
            warnings.warn("\n".join([f"{what} never ran:", *lines, *more]), NeverRanWarning, stacklevel=stacklevel)
        self._taps.clear()
        self._targets.clear()

    def _report(self, error: BaseException | None) -> None:
        """Note in the recording what never ran and why, and what ran out of this session's sight."""
        taps = {module: tap for (module, _), tap in self._taps.items()}
        for target, tap in self._targets.items():
            address = str(target.site)
            if tap.elsewhere:
                self.recording.elsewhere[address] = tap.elsewhere
            if tap.ran > (target.site.call or 0):
                continue
            if error is not None:
                why = f"the block ended early with {type(error).__name__}."
            else:
                why = silence.cause(target, tap, self.index, taps, self.scope)
            self.recording.missing[address] = why


# Actions are closures over what they need and nothing else: a hook that held on to the session would keep it,
# and with it the hooks, alive for as long as the model.


def _only(wanted: int, action: Action) -> Action:
    return lambda value, call: action(value, call) if call == wanted else value


def _recorder(recording: Recording, store: MemoryStore, keep: Keep) -> Action:
    put, order, kept = store.put, recording.order, keep.value

    def record(value: Any, call: int) -> Any:
        put((call, next(order), kept(value)))
        return value

    return record


def _stopper(scope: Scope, waiting: set[Target], target: Target) -> Action:
    def stop(value: Any, call: int) -> Any:
        waiting.discard(target)
        if not waiting:
            scope.stopped_at = str(target.site)
            raise Stop(scope)
        return value

    return stop


def _outliving(index: Index, keep: Keep) -> Action:
    """Tell ``keep`` which tensors outlive the forward pass: what the model owns, and what it is called with."""
    owned = [
        tensor
        for module in index.names
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    keep.outlive(owned)

    def note(value: Any, call: int) -> Any:
        keep.outlive(owned, tree.tensors(value))
        return value

    return note

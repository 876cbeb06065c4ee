"""The live scope: attach one hook per module and direction, hand each passing value to its edits and keeps, and take
every hook away again, whatever happens. Everything that looks into a model is a thin user of ``Session``.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal

from torch import nn
from torch.nn.parameter import is_lazy

from torchhook import edits
from torchhook._core import functional, hooks, never_ran
from torchhook._core.functional import Listener
from torchhook._core.gradients import GradTap
from torchhook._core.hooks import Attachment, TensorHandles
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.scope import Scope, Stop
from torchhook._core.select import Target, live_tensor
from torchhook._core.taps import CustomTap, Edit, InputTap, Look, OutputTap, Tap
from torchhook._recording.address import Site
from torchhook._recording.records import Recording
from torchhook._values import tree
from torchhook.errors import NeverRanWarning, SelectorError, SessionError

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
        self.handles = TensorHandles()
        """Hooks on tensors, which go when the session closes."""
        self._tap_scope = self.scope if threads == "own" else None
        self._warn = warn
        self._targets: dict[Site, tuple[Target, Tap]] = {}
        self._taps: dict[tuple[int, type[Tap]], tuple[nn.Module, InputTap | OutputTap]] = {}
        self._seen: set[Site] = set()
        self._stops = False
        self._depths: dict[int, int] = {}
        self._grad_taps: dict[Site, GradTap] = {}
        self._parameters: list[tuple[Target, GradTap]] = []
        self._listener: Listener | None = None
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
        self._tap_of(target).edits.append(self._only_edit(site, _editor(site, edits.adapt(edit))))

    def look(self, target: Target, look: Look) -> None:
        """Hand every value that passes ``target`` to ``look``, after all edits."""
        self._tap_of(target).keeps.append(self._only_look(target.site, look))

    def record(
        self, targets: Iterable[Target], keep: Keep, max_records: int | None = None, before_edits: bool = False
    ) -> None:
        """Keep every value that passes the targets in ``self.recording``."""
        targets = list(targets)
        whole = {target.site for target in targets if target.site.call is None}
        for target in targets:
            if target.site.call is not None and target.site.every_call in whole:
                continue  # "relu" holds "relu#1" already
            for name in self._other_names(target):
                self.recording.add_alias(name, target.site.path)
            recorder = keep.recorder(self.recording.open_store(target.site, max_records).put, self.recording.order)
            if before_edits:
                tap = self._tap_of(target)
                tap.edits.insert(0, _looked_at_first(tap, self._only_look(target.site, recorder)))
            else:
                self.look(target, recorder)
        self.recording.wait_with(keep.wait)
        self._root.keeps.insert(0, _outliving(self.index, keep))

    def _other_names(self, target: Target) -> list[str]:
        if target.tensor is None:
            return self.index.names(target.module)
        tensor = live_tensor(target)
        return [path for path, (module, name) in self.index.tensors.items() if getattr(module, name) is tensor]

    def record_custom(
        self, target: Target, function: Callable[[nn.Module, Any, Any], Any], keep: Keep, max_records: int | None = None
    ) -> None:
        """Keep what ``function(module, args, output)`` makes of each call; ``None`` is not kept."""
        tap = CustomTap(target.site.path, self._tap_scope, function)
        tap.keeps.append(keep.recorder(self.recording.open_store(target.site, max_records).put, self.recording.order))
        self._taps[id(target.module), CustomTap] = (target.module, tap)
        self._targets[target.site] = (target, tap)

    def stop_when_seen(self, targets: Iterable[Target]) -> None:
        """End the forward pass once every one of ``targets`` has been seen."""
        if self._tap_scope is None:
            raise SessionError("stop=True ends the session's own calls only: leave out threads='all'.")
        self._stops = True
        targets = list(targets)
        waiting = {target.site for target in targets}
        for target in targets:
            if target.site.port in ("grad", "grad_input"):
                raise SessionError(
                    f"stop=True ends the forward pass, and {str(target.site)!r} needs the backward pass."
                )
            self.look(target, _stopper(self.scope, waiting, target.site))

    def listen(self, listener: Listener | None = None) -> Listener:
        """See the functional operations inside the modules, with a listener of one's own or the session's."""
        if self._listener is None or listener is not None:
            if self._tap_scope is None:
                raise SessionError(
                    "operations are seen in one thread only, the session's own: leave out threads='all'."
                )
            self._listener = Listener(self.scope) if listener is None else listener
        return self._listener

    # -- taps -----------------------------------------------------------------------------------

    def _tap_of(self, target: Target) -> Tap:
        if target.site not in self._targets:
            self._targets[target.site] = (target, self._make_tap(target))
        return self._targets[target.site][1]

    def _make_tap(self, target: Target) -> Tap:
        site = target.site
        if target.tensor is not None:
            return self._tensor_tap(target)
        passing = self._passing_tap(target)
        if site.port in ("output", "input"):
            return passing
        tap = self._grad_taps.get(site.every_call)
        if tap is None:
            tap = self._grad_taps[site.every_call] = GradTap(site.path, self.scope, self.handles, passing)
            other = "input" if site.port == "grad" else "output"
            opposite = self._passing_tap(target._replace(site=site.but(port=other)))
            if site.port == "grad":
                passing.grad = tap
                opposite.keeps.append(tap.note)
            else:
                passing.edits.append(tap.split)
                opposite.keeps.append(tap.settle)
        return tap

    def _only_edit(self, site: Site, edit: Edit) -> Edit:
        if site.call is None:
            return edit
        seen = self._seen

        def edit_one(value: Any, call: int) -> Any:
            if call != site.call:
                return value
            seen.add(site)
            return edit(value, call)

        return edit_one

    def _only_look(self, site: Site, look: Look) -> Look:
        if site.call is None:
            return look
        seen = self._seen

        def look_at_one(value: Any, call: int) -> None:
            if call == site.call:
                seen.add(site)
                look(value, call)

        return look_at_one

    def _passing_tap(self, target: Target) -> Tap:
        """The tap that the value passes in the forward pass."""
        inward = target.site.port in ("input", "grad_input")
        if target.site.op is None:
            return self._tap(InputTap if inward else OutputTap, target.module, target.site.path)
        listener = self.listen()
        taps = listener.inputs if inward else listener.outputs
        return taps.setdefault((id(target.module), target.site.op), Tap(target.site.path))

    def _tensor_tap(self, target: Target) -> Tap:
        """The tap of a parameter or buffer: its value when its module runs, or its gradient."""
        if target.site.port == "output":
            tap = Tap(target.site.path)
            self._tap(InputTap, target.module, target.site.path).keeps.append(
                lambda value, call: _pass_tensor(tap, target)
            )
            return tap
        if target.site.port != "grad":
            raise SelectorError(f"{str(target.site)!r}: {target.site.path!r} is a parameter or buffer, without inputs.")
        if target.tensor not in target.module._parameters:
            raise SelectorError(f"{str(target.site)!r}: {target.site.path!r} is a buffer, which has no gradient.")
        if is_lazy(live_tensor(target)):
            raise SelectorError(
                f"{str(target.site)!r}: the parameter has no shape yet. Run the model once, then capture."
            )
        grad_tap = GradTap(target.site.path, self.scope, self.handles)
        if live_tensor(target).requires_grad:
            self._parameters.append((target, grad_tap))
        return grad_tap

    def _tap(self, kind: type[InputTap] | type[OutputTap], module: nn.Module, path: str) -> InputTap | OutputTap:
        known = self._taps.get((id(module), kind))
        if known is None:
            known = self._taps[id(module), kind] = (module, kind(path, self._tap_scope))
        return known[1]

    # -- living -------------------------------------------------------------------------------

    @property
    def sites(self) -> list[Site]:
        """The sites that are edited, looked at or recorded."""
        return list(self._targets)

    def open(self, running: bool = False) -> Session:
        """Attach the hooks, until ``close``.

        ``running`` says that this happens in a hook before the model's own call, which is then seen from here on.
        """
        if self._stops:
            raise SessionError("stop=True ends the block that it is used in: use the session as a context manager.")
        if running:
            # PyTorch goes through the hooks that were there when the call began.
            root = self.index.modules[""]
            self._taps.pop((id(root), InputTap))
            self._open()
            if self._listener is not None:
                self._listener.enter(root)
            return self
        return self._open()

    def _open(self) -> Session:
        if self._removal is not None:
            raise SessionError("a session opens once. Make a new one: they are cheap, and may nest and overlap.")
        attachment = Attachment()
        self._removal = weakref.finalize(self, attachment.remove)
        try:
            attachment.defer(hooks.eager_stance.hold())
            attachment.defer(self.handles.remove)
            attachment.defer(self.scope.leave)
            if self._listener is not None:
                attachment.defer(self._listener.close)
                enter, leave = self._listener.boundaries()
                for module in self.index.distinct.values():
                    attachment.attach(enter, module)
                    attachment.attach(leave, module)
            for module, tap in self._taps.values():
                attachment.attach(tap, module)
            for target, grad_tap in self._parameters:
                attachment.defer(grad_tap.follow(live_tensor(target)).remove)
        except BaseException:
            self._removal()
            raise
        self._depths = functional.depths()
        if self._tap_scope is not None:
            self.scope.enter()
        return self

    def close(self) -> None:
        """Take the hooks away and warn about sites that never ran. Closing twice does nothing."""
        self._close(None)

    remove = close
    """As PyTorch's own hook handles call it."""

    def __enter__(self) -> Recording:
        return self._open().recording

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        stopped = isinstance(error, Stop) and error.scope is self.scope
        if error is not None:
            functional.unwind(self._depths)
        self._close(None if stopped else error)
        return stopped

    def _close(self, error: BaseException | None) -> None:
        if self._removal is None or not self._removal.alive:
            return
        self.scope.closed = True
        self._removal()
        self.recording.finish()
        self._report(error)
        missing = self.recording.missing
        if missing and error is None and self._warn:
            lines = [f"  {address or '(model)'!r}: {why}" for address, why in list(missing.items())[:10]]
            more = [f"  … and {len(missing) - 10} more: see rec.missing"] if len(missing) > 10 else []
            what = "1 selected site" if len(missing) == 1 else f"{len(missing)} selected sites"
            warnings.warn("\n".join([f"{what} never ran:", *lines, *more]), NeverRanWarning, stacklevel=_callers())

    def _report(self, error: BaseException | None) -> None:
        """Note in the recording what never ran and why, and what ran out of this session's sight."""
        taps = {module_id: tap for (module_id, _), (_, tap) in self._taps.items()}
        for site, (target, tap) in self._targets.items():
            address = str(site)
            source = tap.source if isinstance(tap, GradTap) and tap.source is not None else tap
            if tap.elsewhere:
                self.recording.elsewhere[address] = tap.elsewhere
            if source.recomputed:
                self.recording.recomputed[address] = source.recomputed
            if site in self._seen if site.call is not None else tap.ran:
                continue
            if isinstance(error, Stop):
                why = "another session's stop=True ended the block."
            elif error is not None:
                why = f"the block ended early with {type(error).__name__}."
            else:
                why = never_ran.cause(target, tap, self.index, taps, self.scope, self._listener)
            self.recording.missing[address] = why


def _callers() -> int:
    """The stack level, for a warning, of the first frame that is not this library's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "torchhook":
        level, frame = level + 1, frame.f_back
    return level


# What taps call are closures over what they need and nothing else: a hook that held on to the session would keep it,
# and with it the hooks, alive for as long as the model.


def _looked_at_first(tap: Tap, look: Look) -> Edit:
    def pass_on(value: Any, call: int) -> Any:
        if not tap.recomputing:
            look(value, call)
        return value

    return pass_on


def _editor(site: Site, edit: edits.Edit) -> Edit:
    def change(value: Any, call: int) -> Any:
        here = site.but(call=call)
        new = edit(value, here)
        if new is None or new is value:
            return value
        edits.check(value, new, here)
        return new

    return change


def _stopper(scope: Scope, waiting: set[Site], site: Site) -> Look:
    def stop(value: Any, call: int) -> None:
        waiting.discard(site)
        if not waiting:
            scope.stopped_at = str(site)
            raise Stop(scope)

    return stop


def _pass_tensor(tap: Tap, target: Target) -> None:
    tap.take(live_tensor(target))


def _outliving(index: Index, keep: Keep) -> Look:
    """Tell ``keep`` which tensors outlive the forward pass: what the model owns, and what it is called with."""
    keep.owns(
        tensor
        for module in index.distinct.values()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    )
    return lambda value, call: keep.called_with(tree.tensors(value))

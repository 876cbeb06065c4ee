"""The live scope: attach one hook per module and direction, hand each passing value to its edits and looks, and take
every hook away again, whatever happens. Everything that looks into a model is a thin user of ``Session``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal, NoReturn

from torch import Tensor, nn

from torchhook import edits
from torchhook._core import functional, hooks, never_ran
from torchhook._core.functional import Listener
from torchhook._core.hooks import Attachment
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.lost_gradients import Units, early_end
from torchhook._core.parameters import ParameterGradients
from torchhook._core.ranks import Together
from torchhook._core.scope import Scope, Stop
from torchhook._core.select import Target, other_names
from torchhook._core.sharding import Homes
from torchhook._core.taps import CustomTap, Edit, Look, Tap
from torchhook._core.wiring import Taps
from torchhook._recording.address import MODEL, Site, shown
from torchhook._recording.records import Recording
from torchhook._values import tree
from torchhook.errors import NeverRanWarning, RecomputeWarning, SelectorError, SessionError, hint, never_opened, warn

Threads = Literal["own", "all"]

_opened: dict[int, weakref.ref[Session]] = {}


def _closed(session: int) -> None:
    _opened.pop(session, None)


def open_taps() -> list[Taps]:
    """The taps of every open session, in any thread."""
    found = [opened() for opened in list(_opened.values())] if _opened else []
    return [session._taps for session in found if session is not None]


class Session:
    """Edits and looks on sites of a model, for as long as it is open.

    Build it with ``edit``, ``look`` and ``record``, then use it once: as a context manager, or with ``open`` and
    ``close``. Until then it does nothing. A session that is dropped while open takes its hooks with it.
    """

    def __init__(
        self, model: nn.Module, *, index: Index | None = None, threads: Threads = "own", warn: bool = True
    ) -> None:
        hooks.refuse_compiled_code()
        if threads not in ("own", "all"):
            raise ValueError(f"threads={threads!r}: use 'own' (the context that opens the session) or 'all'.")
        self.index = Index(model) if index is None else index
        self.recording = Recording(type(self.index.root).__name__)
        self.scope = Scope()
        self._own_threads_only = threads == "own"
        self._warn = warn
        self._given_as = ""
        self.gathers: Together | None = None
        """With the other ranks, where the gradients of parameters are wanted whole."""
        self.reduced = False
        """Whether the gradients of parameters are wanted as the optimizer will see them, over all ranks."""
        self._keeps: list[Keep] = []
        self._seen: set[Site] = set()
        self._followed: dict[Site, Tensor] = {}
        self._stops = False
        self._depths: dict[int, int] = {}
        self._taps = Taps(self.index, self.scope, self.scope if self._own_threads_only else None)
        self.handles = self._taps.handles
        """Hooks on tensors, which go when the session closes."""
        self._removal: weakref.finalize[[], Session] | None = None
        self._attachment: Attachment | None = None

    # -- building -----------------------------------------------------------------------------

    def edit(self, target: Target, edit: Any) -> None:
        """Change every value that passes ``target``, after the edits that are there already."""
        site = target.site
        if target.tensor is not None and site.port != "grad":
            raise SelectorError(
                f"{site.shown!r} is a parameter or buffer: only its gradient can be edited, as '{site.path}:grad'. "
                "To change the value, edit what the module makes of it, or assign it."
            )
        self._taps.of(target).edits.append(self._only_edit(site, _editor(site, edits.adapt(edit))))

    def look(self, target: Target, look: Look) -> None:
        """Hand every value that passes ``target`` to ``look``, after all edits."""
        self._taps.of(target).looks.append(self._only_look(target.site, look))

    def record(
        self, targets: Iterable[Target], keep: Keep, max_records: int | None = None, before_edits: bool = False
    ) -> None:
        """Keep every value that passes the targets in ``self.recording``."""
        targets = list(targets)
        units = Units(self.index) if keep.mode in ("live", "reference") else None
        whole = {target.site for target in targets if target.site.call is None}
        for target in targets:
            if target.site.call is not None and target.site.every_call in whole:
                continue  # "relu" holds "relu#1" already
            recorder = keep.recorder(self.recording.open_store(target.site, max_records).put, self.recording.order)
            if units:
                recorder = _checked(units.checked(target.site), recorder)
            if before_edits:
                tap = self._taps.of(target)
                tap.edits.insert(0, _looked_at_first(tap, self._only_look(target.site, recorder)))
            else:
                self.look(target, recorder)
        self.recording.other_names = other_names(self.index, targets, self.recording.other_names)
        self.recording.wait_with(keep.wait)
        self._keeps.append(keep)
        self._taps.root.looks.insert(0, lambda value, call: keep.called_with(tree.tensors(value)))

    def record_custom(
        self, target: Target, function: Callable[[nn.Module, Any, Any], Any], keep: Keep, max_records: int | None = None
    ) -> None:
        """Keep what ``function(module, args, output)`` makes of each call; ``None`` is not kept."""
        tap = CustomTap(target.site.path, self.scope if self._own_threads_only else None, function)
        tap.looks.append(keep.recorder(self.recording.open_store(target.site, max_records).put, self.recording.order))
        self._taps.custom(target, tap)

    def stop_when_seen(self, targets: Iterable[Target]) -> None:
        """End the forward pass once every one of ``targets`` has been seen."""
        if not self._own_threads_only:
            raise SessionError("stop=True ends the session's own calls only: leave out threads='all'.")
        self._stops = True
        targets = list(targets)
        waiting, check = {target.site for target in targets}, early_end(self.index)
        for target in targets:
            if target.site.port.startswith("grad"):
                raise SessionError(
                    f"stop=True ends the forward pass, and {target.site.shown!r} needs the backward pass."
                )
            self.look(target, _stopper(self.scope, waiting, target.site, self._keeps, check))

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` of every functional operation inside the modules."""
        self._taps.listen(listener)

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

    # -- living -------------------------------------------------------------------------------

    @property
    def sites(self) -> list[Site]:
        """The sites that are edited, looked at or recorded."""
        return list(self._taps.targets)

    @property
    def edited_in_segments(self) -> list[Site]:
        """The sites that were edited inside checkpointed segments, which run again in the backward pass."""
        return [site for site, (_, tap) in self._taps.targets.items() if tap.edits and tap.segments.noted]

    def handed_out(self, what: str) -> Session:
        """From here on it is the user's: if it is dropped without ever being opened, that is said."""
        self._given_as = what
        return self

    def open(self, running: bool = False) -> Session:
        """Attach the hooks, until ``close``.

        ``running`` says that this happens in a hook before the model's own call, which is then seen from here on.
        """
        self._given_as = ""
        if self._stops:
            raise SessionError("stop=True ends the block that it is used in: use the session as a context manager.")
        if running:
            self._taps.forget_root_input()
        self._open()
        if running and self._taps.listener is not None:
            self._taps.listener.enter_running(self.index.root)
        return self

    def _open(self) -> Session:
        if self._removal is not None:
            raise SessionError("a session opens once. Make a new one: they are cheap, and may nest and overlap.")
        self._given_as = ""  # one that is refused was not forgotten
        hooks.refuse_compiled_code()
        hooks.eager_stance.say_once(self.index.given)
        self._taps.complete()
        attachment, taps = Attachment(), self._taps
        # The finalizer must not know the session: it would keep it, and with it the hooks, alive.
        self._removal, self._attachment = weakref.finalize(self, attachment.remove), attachment
        try:
            for keep in self._keeps:
                attachment.defer(keep.release)
                keep.owned_by(self.index.owned)
            attachment.defer(functools.partial(_closed, id(self)))
            _opened[id(self)] = weakref.ref(self)
            attachment.defer(functools.partial(hooks.eager_stance.release, attachment))
            hooks.eager_stance.hold(attachment, self.scope if self._own_threads_only else None)
            attachment.defer(taps.handles.remove)
            attachment.defer(taps.aliases.settle)
            attachment.defer(self.scope.leave)
            if self.gathers is not None:
                attachment.defer(self.gathers.close)
                self.gathers.open()
            if taps.listener is not None:
                attachment.defer(taps.listener.close)
                for module, boundary in taps.listener.boundaries(self.index):
                    attachment.attach(boundary, module)
            for module, tap in taps:
                attachment.attach(tap, module)
            if taps.parameters:
                gradients = ParameterGradients(Homes(self.index), self.gathers, self.reduced)
                for target, grad_tap in taps.parameters:
                    self._followed[target.site] = gradients.follow(target, grad_tap, attachment)
            self._depths = functional.depths()
            if self._own_threads_only:
                self.scope.enter()
        except BaseException:
            attachment.remove()
            raise
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
        try:
            if error is not None:
                functional.unwind(self._depths)
                self._explain(error)
        finally:
            self._close(None if stopped else error)
        return stopped

    def __del__(self) -> None:
        if getattr(self, "_given_as", "") and self._removal is None and not sys.is_finalizing():
            never_opened(self._given_as)

    def _close(self, error: BaseException | None) -> None:
        if self._removal is None or not self._removal.alive:
            return
        self.scope.closed = True
        # The finalizer stays armed until all is gone: should an interrupt come between, it does the rest.
        if self._attachment is not None:
            self._attachment.remove()
        self._removal.detach()
        self.recording.finish()
        self._report(error)
        if error is None and self._warn and (lost := self._taps.edits_to_come()):
            warn(
                f"{', '.join(map(repr, lost[:4]))}: edited in a checkpointed part of the model, and the backward pass, "
                "which computes that part again, has not come. Without this session it is computed unedited, and its "
                "gradients are wrong: call backward() inside the block.",
                RecomputeWarning,
            )
        missing, replaced = self.recording.missing, self.recording.replaced
        if error is None and self._warn and (only := [a for a in replaced if a not in missing]):
            lines = [f"  {shown(address)!r}: {replaced[address]}" for address in only[:10]]
            warn("\n".join(["replaced while the session was open:", *lines]), NeverRanWarning)
        if missing and error is None and self._warn:
            lines = [f"  {address or MODEL!r}: {why}" for address, why in list(missing.items())[:10]]
            more = [f"  … and {len(missing) - 10} more: see rec.missing"] if len(missing) > 10 else []
            what = "1 selected site" if len(missing) == 1 else f"{len(missing)} selected sites"
            warn("\n".join([f"{what} never ran:", *lines, *more]), NeverRanWarning)

    def _explain(self, error: BaseException) -> None:
        """A loss on a value that is off the graph: torch does not know who took it off."""
        detached = any(keep.mode in ("copy", "clone") for keep in self._keeps)
        if detached and isinstance(error, RuntimeError) and "does not require grad" in str(error):
            hint(error, "values are recorded without their graph; th.capture(…, keep='live') keeps them on it.")

    def _report(self, error: BaseException | None) -> None:
        """Note in the recording what never ran and why, and what ran out of this session's sight."""
        by_module = self._taps.by_module()
        for site, (target, tap) in self._taps.targets.items():
            passing = self._taps.passing(site, tap)
            address, replaced = str(site), never_ran.replaced(target, self.index, self._followed)
            if tap.elsewhere:
                self.recording.elsewhere[address] = tap.elsewhere
            if passing.recomputed:
                self.recording.recomputed[address] = passing.recomputed
            if replaced:
                # Its hooks are on what was there when the session opened; the new one has none.
                self.recording.replaced[address] = f"{replaced}: its calls and gradients were not seen"
            if site in self._seen if site.call is not None else tap.ran:
                continue
            if isinstance(error, Stop):
                why = "another session's stop=True ended the block."
            elif replaced:
                why = f"{replaced}, since the session opened. Replace it first, then open the session."
            elif error is not None:
                why = f"the block ended early with {type(error).__name__}."
            else:
                why = never_ran.cause(target, tap, passing, self.index, by_module, self.scope, self._taps.listener)
            self.recording.missing[address] = why

    # -- not a recording ------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> NoReturn:
        raise SessionError(self._not_a_recording(f"[{key!r}]"))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(Recording, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise SessionError(self._not_a_recording(f".{name}"))

    def _not_a_recording(self, asked: str) -> str:
        if self._removal is None:
            return (
                f"this session was never opened, so there is no recording to read rec{asked} from. Write "
                "'with th.capture(…) as rec:' and call the model inside the block, or open() it first."
            )
        return (
            f"this is the session; its recording is session.recording{asked}, or rec of 'with th.capture(…) as rec:'."
        )


# What taps call are closures over what they need and nothing else: a hook that held on to the session would keep it,
# and with it the hooks, alive for as long as the model.


def _checked(check: Callable[[Any], Any] | None, look: Look) -> Look:
    return look if check is None else lambda value, call: look(check(value), call)


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


def _stopper(scope: Scope, waiting: set[Site], site: Site, keeps: list[Keep], check: Callable[[], None]) -> Look:
    def stop(value: Any, call: int) -> None:
        waiting.discard(site)
        if not waiting:
            if any(keep.mode in ("live", "reference") for keep in keeps):
                check()
            scope.stopped_at = str(site)
            raise Stop(scope)

    return stop

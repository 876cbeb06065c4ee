"""The live scope: attach one hook per module and direction, hand each passing value to its edits and looks, and take
every hook away again, whatever happens. Everything that looks into a model is a thin user of ``Session``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal

from torch import Tensor, nn

from torchhook import edits
from torchhook._core import actions, calling, early_end, exit_report, functional, hooks, never_ran, select, steps
from torchhook._core.functional import Listener
from torchhook._core.hooks import Attachment, TensorHandles
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.lost_gradients import Units
from torchhook._core.openable import remember
from torchhook._core.parameters import ParameterGradients
from torchhook._core.ranks import Together
from torchhook._core.recorders import Recorders
from torchhook._core.scope import UNSEEN, Scope, Stop, Stopped, active
from torchhook._core.sharding import Homes
from torchhook._core.shown import Shown
from torchhook._core.taps import CustomTap, Look, listeners
from torchhook._core.targets import Outputs, Target
from torchhook._core.wiring import Taps, opened
from torchhook._recording.address import Site
from torchhook._recording.records import Recording
from torchhook._torch import graph_task
from torchhook.errors import SelectorError, SessionError, never_opened

Threads = Literal["own", "all"]
_NOTHING: Mapping[Any, Any] = {}


class Session(Shown):
    """Edits and looks on sites of a model, for as long as it is open.

    Build it with ``edit``, ``look`` and ``record``, then use it: as a context manager, or with ``open`` and ``close``.
    Until then it does nothing. One that was built by ``prepare`` may be used again and again, with a recording of its
    own each time; any other one once. A session that is dropped while open takes its hooks with it.
    """

    # What most sessions never need is the class's, until it is asked for: one may be made for each call of a model.
    takes_all = False  # since nobody has named a site
    reports = True
    """Whether it notes in its recording what never ran, and why."""
    gathers: Together | None = None
    """With the other ranks, where the gradients of parameters are wanted whole."""
    reduced = False
    """Whether the gradients of parameters are wanted as the optimizer will see them, over all ranks."""
    unopened: str = ""
    _recipe: Callable[[Session], None] | None = None
    _counts_steps = False  # who only looks, as a guard does, asks for none
    _depths: Mapping[int, int] = {}
    _wait_again: Callable[[], object] = frozenset
    """Called before each pass, to wait for all the sites again that it ends at."""

    def __init__(
        self, model: nn.Module, *, index: Index | None = None, threads: Threads = "own", warn: bool = True
    ) -> None:
        hooks.refuse_compiled_code()
        if threads not in ("own", "all"):
            raise ValueError(f"threads={threads!r}: use 'own' (the context that opens the session) or 'all'.")
        self.index: Index = Index(model) if index is None else index
        self._own_threads_only = threads == "own"
        self._warn = warn
        self._recorders: Recorders | None = None
        self._stops = False
        self._begin()

    def _begin(self) -> None:
        """What belongs to one opening; the rest is the same in all of them."""
        self.recording: Recording = Recording(self.index.model_name)
        self.scope: Scope = Scope()
        self._taps: Taps = Taps(self.index, self.scope, self.scope if self._own_threads_only else None)
        self._keeps: tuple[Keep, ...] = ()
        self._leaves: tuple[tuple[Tensor, Callable[[Tensor], Tensor | None]], ...] = ()
        self._to_come: tuple[tuple[Site, actions.ToCome], ...] = ()
        self._seen: set[Site] = set()
        self._followed: Mapping[Site, Tensor] = _NOTHING
        self._attachment: Attachment | None = None
        self._closed = False

    @property
    def handles(self) -> TensorHandles:
        """Hooks on tensors, which go when the session closes."""
        return self._taps.handles

    # -- building -----------------------------------------------------------------------------

    def prepare(self, recipe: Callable[[Session], None]) -> None:
        """Build the session by ``recipe``, now and each time that it is opened again."""
        self._recipe = recipe
        recipe(self)

    def edit(self, target: Target, edit: Any) -> None:
        """Change every value that passes ``target``, after the edits that are there already."""
        site = target.site
        if target.tensor is not None and site.port != "grad":
            raise SelectorError(
                f"{site.shown!r} is a parameter or buffer: only its gradient can be edited, as '{site.path}:grad'. "
                "To change the value, edit what the module makes of it, or assign it."
            )
        select.refuse_counting_back(site, "an edit")
        given = edits.adapt(edit)
        self._counts_steps = self._counts_steps or not edits.is_same_in_every_step(given)
        change, to_come = actions.placed(given, target, self._taps.heads_at(target), self._own_threads_only)
        if to_come is not None:
            self._to_come = (*self._to_come, (site, to_come))
        self._taps.of(target).add_edit(actions.only_edit(site, actions.editor(site, change), self._seen))

    def look(self, target: Target, look: Look) -> None:
        """Hand every value that passes ``target`` to ``look``, after all edits."""
        select.refuse_counting_back(target.site, "whoever looks")
        look = actions.only_look(target.site, actions.of_leaf(target.site, look), self._seen)
        self._taps.of(target).add_look(look)

    def follow(self, parameter: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
        """Call ``hook`` with the gradients of a parameter as autograd hands them over; it is no site."""
        self._leaves = (*self._leaves, (parameter, hook))

    def record(
        self, targets: Iterable[Target], keep: Keep, max_records: int | None = None, before_edits: bool = False
    ) -> None:
        """Keep every value that passes the targets in ``self.recording``."""
        recording, taps = self.recording, self._taps
        if type(targets) is Outputs and keep.only_copies and taps.is_new and not before_edits:
            self._recorders = Recorders(self.index, targets, keep, max_records)
            self._keeps = self._recorders.begin(recording, taps)
            return
        chosen = list(targets)
        units = Units(self.index) if keep.mode in ("live", "reference") else None
        task, padding = graph_task(), taps.call_padding(keep)
        fast = keep.only_copies and not before_edits
        for target, others, calls in select.by_site(chosen):
            site = target.site
            rows = recording.opened(site, max_records, calls)
            own = keep.placed(site, taps.heads_at(target, at_once=True)) if keep.asks_where else keep
            if fast and taps.record(target, own, rows, recording.order, task):
                continue
            tap, recorder = taps.of(target), actions.on_graph(site, own, own.recorder(rows.append, recording.order))
            recorder = actions.checked(units.checked(site) if units else None, recorder)
            recorder = actions.of_leaf(site, actions.knowing_padding(padding, site.path, recorder))
            recorder = actions.only_keep(calls, recorder, self._seen)
            for other in others:
                taps.of(other)
            if before_edits:
                tap.add_edit(actions.looked_at_first(tap, recorder), first=True)
            else:
                tap.add_look(recorder)
        names, layouts = recording.other_names, recording.find_layouts
        later = select.found_later(self.index, [target.site for target in chosen], names, layouts)
        recording.other_names, recording.find_layouts = later
        recording.wait_with(keep.wait)
        self._keeps = (*self._keeps, keep)
        self._taps.root.add_look(actions.inputs_kept_from(keep), first=True)

    def record_custom(
        self, target: Target, function: Callable[[nn.Module, Any, Any], Any], keep: Keep, max_records: int | None = None
    ) -> None:
        """Keep what ``function(module, args, output)`` makes of each call; ``None`` is not kept."""
        tap = CustomTap(target.site.path, self.scope if self._own_threads_only else None, function)
        tap.add_look(keep.recorder(self.recording.opened(target.site, max_records).append, self.recording.order))
        self._taps.custom(target, tap)

    def stop_when_seen(self, targets: Sequence[Target]) -> None:
        """End the forward pass once every one of ``targets`` has been seen."""
        if not self._own_threads_only:
            raise SessionError("stop=True ends the session's own calls only: leave out threads='all'.")
        self._stops = True
        sites, check = frozenset([target.site for target in targets]), early_end.refusal(self.index)
        waiting = set(sites)
        self._wait_again = partial(waiting.update, sites)
        recorders, shared = self._taps.recorders, self._recorders
        # As they are recorded: nothing else is at those taps.
        if recorders is not None and shared is not None and shared.outputs is targets:
            for site, tap in zip(shared.outputs.sites, recorders, strict=True):
                tap.looks = (actions.stopper(self.scope, waiting, site, self._keeps, check),)
            return
        for target in targets:
            if target.site.port.startswith("grad"):
                raise SessionError(
                    f"stop=True ends the forward pass, and {target.site.shown!r} needs the backward pass."
                )
            select.refuse_open_end(target.site)
            self.look(target, actions.stopper(self.scope, waiting, target.site, self._keeps, check))

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` of every functional operation inside the modules."""
        self._taps.listen(listener)

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
        self.unopened = what
        remember(self)
        return self

    def open(self, running: bool = False) -> Session:
        """Attach the hooks, until ``close``.

        ``running`` says that this happens in a hook before the model's own call, which is then seen from here on.
        """
        if self._stops:
            self.unopened = ""  # it was not forgotten
            raise SessionError(
                "stop=True ends the block that it is used in: use the session as a context manager, or call the model "
                "by session.run(x), which ends that pass alone."
            )
        if not running:
            return self._open()
        self._taps.forget_root_input()
        self._open()
        if self._taps.listener is not None:
            self._taps.listener.enter_running(self.index.root)
        return self

    def _open(self) -> Session:
        if self._attachment is not None:
            self._begin_again()
        elif self._leaves or self._taps.recorders is None:
            self._recorders = None
        self.unopened = ""  # one that is refused was not forgotten
        may_be_compiled, own = hooks.may_be_compiled(self.index.given), self.scope if self._own_threads_only else None
        recorders, attachment = self._recorders, Attachment()
        self._attachment = attachment
        self._closed = False
        try:
            if may_be_compiled:
                hooks.eager_stance.hold_for(attachment, own)
            attach = self._attach if recorders is None else recorders.attach
            attach(attachment, self.recording, self._taps, own)
            self._depths = functional.depths() if listeners else _NOTHING
            if own is not None:
                own.enter()
            elif UNSEEN in active.get():
                for _, tap in self._taps:
                    tap.made_unseen = True
        except BaseException:
            attachment.remove()
            self._closed = True
            raise
        return self

    def _attach(self, attachment: Attachment, recording: Recording, taps: Taps, own: Scope | None) -> None:
        taps.complete()
        attachment.defer(*[keep.release for keep in self._keeps], taps.let_go, self.scope.leave)
        for keep in self._keeps:
            keep.owned_by(self.index.owned, self.index.plain_ids)
        opened[id(taps)] = taps
        if self.gathers is not None:
            attachment.defer(self.gathers.close)
            self.gathers.open()
        if taps.listener is not None:
            attachment.defer(taps.listener.close)
            taps.listener.opened()
            taps.listener.attach(attachment, self.index)
        counts = own is not None and (self._counts_steps or recording.has_sites)
        counted = steps.around(taps, recording, own, attachment, self._counts_steps) if counts and own else taps
        attachment.attach_all((*counted, *taps.leaving))
        if taps.parameters:
            gradients = ParameterGradients(Homes(self.index), self.gathers, self.reduced)
            self._followed = {target.site: gradients.follow(target, tap, attachment) for target, tap in taps.parameters}
        for parameter, hook in self._leaves:
            attachment.follow(parameter, hook)

    def _begin_again(self) -> None:
        """Make all that belongs to one opening anew."""
        if not self._closed:
            raise SessionError("this session is open already. Close it first, or make another: they may overlap.")
        if self._recipe is None:
            raise SessionError("a session of this kind opens once. Make a new one: they are cheap.")
        self._begin()
        if self._recorders is None:
            self._recipe(self)
            self._recorders = None  # as before: it does more than record
        else:
            self._keeps = self._recorders.begin(self.recording, self._taps)
            if self._stops:
                self.stop_when_seen(self._recorders.outputs)

    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, Recording]:
        """Call the model and return its output and the recording; ``stop=True`` ends this pass and nothing else.

        The session is open for this call. If it is open already, what passes is added to the recording that it has.
        """
        if self._attachment is not None and not self._closed:
            return self._pass(args, kwargs), self.recording
        try:
            with self as recording:
                output = self._pass(args, kwargs)
        finally:
            self.close()  # should an interrupt come while the block is being left
        return output, recording

    def _pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        depths = functional.depths()
        self._wait_again()
        try:
            return calling.called(self.index.given, args, kwargs)
        except Stop as stop:
            if stop.scope is not self.scope:
                raise
            functional.unwind(depths)
            early_end.settle(self.index, stop, self.recording.values)
            self.recording.stopped = f"stop=True ended each forward pass at {self.scope.stopped_at!r}"
            return Stopped(str(self.scope.stopped_at))

    def begin_anew(self) -> None:
        """Make a closed session ready to be opened again just as it is built, with nothing left of what has passed.

        For those who open one at every step and only look: nothing is built again, and there is one scope for all.
        """
        self._attachment, self._closed, self.scope.closed = None, False, False
        self.recording = Recording(self.index.model_name)
        self._seen.clear()
        self._followed = _NOTHING
        self._taps.forget()

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
        stop = error if isinstance(error, Stop) and error.scope is self.scope else None
        try:
            if error is not None:
                functional.unwind(self._depths)
                never_ran.explain(error, self._keeps)
            if stop is not None:
                early_end.settle(self.index, stop, self.recording.values)
                self.recording.stopped = (
                    f"stop=True left the block at {self.scope.stopped_at!r}: calls of the model after this one did not "
                    "run. session.run(x) ends each pass alone"
                )
        finally:
            self._close(None if stop is not None else error)
        return stop is not None

    def __del__(self) -> None:
        if self._is_shutting_down():
            return
        # Dropped while open, or left so by an interrupt: hooks do not keep their session.
        if (attachment := getattr(self, "_attachment", None)) is not None and not self._closed:
            attachment.remove()
        elif getattr(self, "unopened", ""):
            never_opened(self.unopened)

    _is_shutting_down = staticmethod(sys.is_finalizing)  # here, for the names of a module may be gone by then

    def _close(self, error: BaseException | None) -> None:
        if self._attachment is None or self._closed:
            return
        self.scope.closed = True
        self._attachment.remove()
        self._closed = True  # last: whom an interrupt keeps from it may close again
        is_as_it_was = not self._followed and self.index.is_as_it_was()
        recorders = self._recorders if is_as_it_was and error is None and self.reports else None
        if recorders is not None and recorders.has_told(self.recording, self._taps, self._warn):
            return
        if self.reports and not (is_as_it_was and self._taps.all_ran()):
            self._report(error, is_as_it_was)
        for site, to_come in self._to_come if self.reports else ():
            never_ran.note_steps(self.recording, site, to_come(), error, self.scope)
        if error is None and self._warn and (self._taps.recorders is None or self.recording.missing):
            never_ran.tell_of_edits(self._taps.edits_to_come())
            never_ran.tell(self.recording, self.index if self.takes_all else None)

    def _report(self, error: BaseException | None, is_as_it_was: bool) -> None:
        """Note in the recording what never ran and why. Who selects sites on suspicion has another way to say it."""
        exit_report.note(
            self.recording, self._taps, self.index, self.scope, error, is_as_it_was, self._followed, self._seen
        )

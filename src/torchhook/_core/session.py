"""The live scope: attach one hook per module and direction, hand each passing value to its edits and looks, and take
every hook away again, whatever happens. Everything that looks into a model is a thin user of ``Session``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from threading import get_ident
from types import TracebackType
from typing import Any

from torchhook._core import calling, early_end, exit_report, functional, hooks, never_ran, steps
from torchhook._core.building import NOTHING, Building
from torchhook._core.building import Threads as Threads
from torchhook._core.hooks import Attachment
from torchhook._core.openable import remember
from torchhook._core.parameters import ParameterGradients
from torchhook._core.scope import UNSEEN, Scope, Stop, Stopped, active
from torchhook._core.sharding import Homes
from torchhook._core.taps import listeners
from torchhook._core.wiring import Taps, opened
from torchhook._recording.records import Recording
from torchhook.errors import SessionError, never_opened


class Session(Building):
    """Edits and looks on sites of a model, for as long as it is open.

    What ``th.capture``, ``th.edit`` and ``th.attention`` return. Use it as a context manager, with ``open`` and
    ``close``, or by ``run``; until then it does nothing. It may be opened again and again, with a recording of its own
    each time. A session that is dropped while open takes its hooks with it.

    Inside of the library one is also built by hand, with ``edit``, ``look`` and ``record``; that one opens once.
    """

    # What most sessions never need is the class's, until it is asked for: one may be made for each call of a model.
    takes_all = False  # since nobody has named a site
    reports = True
    """Whether it notes in its recording what never ran, and why."""
    unopened: str = ""
    _depths: Mapping[int, int] = NOTHING

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
        self.unopened = ""  # one that is refused was not forgotten
        may_be_compiled, here = hooks.may_be_compiled(self.index.given), get_ident()
        if self._opener.setdefault(None, here) != here or (self._attachment is not None and not self._closed):
            raise SessionError("this session is open already. Close it first, or make another: they may overlap.")
        attachment = Attachment()
        try:
            self._make_ready()
            self._attachment, self._closed = attachment, False
            if self._leaves or self._taps.recorders is None:
                self._recorders = None  # it does more than record
            own, recorders = self.scope if self._own_threads_only else None, self._recorders
            if may_be_compiled:
                hooks.eager_stance.hold_for(attachment, own)
            attach = self._attach if recorders is None else recorders.attach
            attach(attachment, self.recording, self._taps, own)
            self._depths = functional.depths() if listeners else NOTHING
            if own is not None:
                own.enter()
            elif UNSEEN in active.get():
                for _, tap in self._taps:
                    tap.made_unseen = True
        except BaseException:
            attachment.remove()
            self._attachment, self._closed = attachment, True
            self._opener.clear()
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

    def run(self, *args: Any, **kwargs: Any) -> tuple[Any, Recording]:
        """Call the model and return its output and the recording; ``stop=True`` ends this pass and nothing else.

        The session is open for this call. If it is open already, what passes is added to the recording that it has.
        """
        if self.is_open:
            if self._own_threads_only and self.scope not in active.get():
                raise SessionError(
                    "this session is open in another thread or task, and sees the calls of that one only. Make one for "
                    "each: they may overlap."
                )
            return self._pass(args, kwargs), self.recording
        try:
            with self as recording:
                output = self._pass(args, kwargs)
        finally:
            if self._opener.get(None) == get_ident():  # an interrupt came while the block was being left
                self.close()
        return output, recording

    def _pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        depths = functional.depths()
        self._wait_again()
        scope = self.scope
        stops = scope.stops
        try:
            output = calling.called(self.index.given, args, kwargs)
        except Stop as stop:
            if stop.scope is not scope:
                raise
            functional.unwind(depths)
            early_end.settle(self.index, stop, self.recording.values)
        else:
            # A model that catches whatever is raised returns something all the same, which is not its output.
            if scope.stops == stops:
                return output
        scope.stops = stops
        self.recording.stopped = f"stop=True ended each forward pass at {scope.stopped_at!r}"
        return Stopped(str(scope.stopped_at))

    def begin_anew(self) -> None:
        """Make a closed session ready to be opened again just as it is built, with nothing left of what has passed.

        For those who open one at every step and only look: nothing is built again, and there is one scope for all.
        """
        self._attachment, self._closed, self.scope.closed = None, False, False
        self.recording: Recording = Recording(self.index.model_name)
        self._seen.clear()
        self._followed = NOTHING
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
        try:
            is_as_it_was = not self._followed and self.index.is_as_it_was()
            recorders = self._recorders if is_as_it_was and error is None and self.reports else None
            if recorders is None or not recorders.has_told(self.recording, self._taps, self._warn):
                self._tell(error, is_as_it_was)
        finally:  # not before: whoever opens it next begins another recording
            self._opener.clear()

    def _tell(self, error: BaseException | None, is_as_it_was: bool) -> None:
        """Note in the recording what there is to say of the sites, and say it."""
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

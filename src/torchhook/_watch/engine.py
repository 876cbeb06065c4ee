"""The engine that opens a session for each measured step.

The session is built once and opened for each measured step, and for none between: hooks that only asked whether a step
is due would cost every step.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torchhook._core.hooks import registered
from torchhook._core.observing import go_on
from torchhook._core.scope import active
from torchhook._core.session import Session
from torchhook._core.sharding import Home
from torchhook._core.taps import Look
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._watch.alarms import Alarms, AlarmState
from torchhook._watch.joining import Joiner
from torchhook._watch.ledger import Key, Ledger, Room
from torchhook._watch.looks import Looks
from torchhook._watch.shared import Shared
from torchhook._watch.sinks import Sink
from torchhook._watch.snapshot import Snapshot
from torchhook._watch.step import Step
from torchhook._watch.units import Units
from torchhook._watch.watched import Watched
from torchhook._watch.weights import Weights


class Built(NamedTuple):
    """What steps are measured with, for as long as the same parameters are trained."""

    trained: dict[str, Home]
    looks: Looks
    session: Session
    sites: frozenset[str]
    compared: dict[str, int]
    can_go_on: bool


class Ended(NamedTuple):
    """A step that is over, and whose numbers may still be on their way."""

    step: Step
    norms: dict[str, Key]
    updates: dict[str, Key]
    compared: dict[str, int]
    by_hand: bool


class Engine:
    """Counts steps, measures those that are due, and hands out what was found."""

    # Both the model's hook and the user's handle hold this. It must not hold the handle, or one that was dropped would
    # stay for as long as the model.

    def __init__(
        self,
        watched: Watched,
        every: int,
        sinks: list[Sink],
        limits: Alarms | None,
        start: int,
        loss_scale: float | Callable[[], float],
        history: int,
    ) -> None:
        self.watched = watched
        self.every = every
        self.next: int = start
        self.started = start
        self.history: deque[Snapshot] = deque(maxlen=history)
        self.alarms: AlarmState | None = None if limits is None else AlarmState(limits)
        self.paused = False
        self.unmeasured: int = 0
        """How many calls were no steps, since they trained nothing."""
        self._has_trained = False
        self.step: Step | None = None
        self.seen: set[str] = set()
        self.missing: dict[str, str] = {}
        self.shared: Shared = Shared(f"watched {every} {start} {zlib.crc32(' '.join(watched.parameters).encode())}")
        self._limits = limits
        self._sinks = sinks
        self._loss_scale = loss_scale
        self._session: Session | None = None
        self._weights = Weights("update_ratio" in watched.wanted)
        self._norms: dict[str, Key] = {}
        self._ended: Ended | None = None
        self._built: Built | None = None
        self._registered = -1
        self._room: Room = {}
        self._joiner = Joiner()
        self._wanted = watched.wanted

    def called(self, trains: bool) -> None:
        """A call of the model begins: a step, unless it is one that ``trains`` nothing among others that do."""
        if self.paused:
            return
        if self._has_trained and not trains:
            self.unmeasured += 1
            # Else what runs now would be taken for more calls of the running step.
            self.finish(by_hand=False, now=False)
            return
        self._has_trained |= trains
        self.advance()

    def advance(self) -> None:
        """One step ends and the next begins."""
        if self.paused:
            return
        self._settle_if_there()
        by_hand, is_due = not self.watched.by_call, self.next % self.every == 0
        goes_on = self.step is not None and is_due and self._can_go_on()
        if goes_on:
            self._go_on(by_hand)
        elif self.step is not None:  # it lasts until here, so that it holds the optimizer's step
            self.finish(by_hand, now=False)
        number = self.next
        self.next += 1
        if is_due:
            self.begin(number, goes_on)

    @property
    def waiting(self) -> int | None:
        """The number of the step that was begun by hand, and in which nothing has run yet."""
        return None if self.step is None or self.step.ran or self.watched.by_call else self.step.number

    def begin(self, number: int, goes_on: bool = False) -> None:
        """Measure from here on, by the hooks of the step before where it ``goes_on`` with them."""
        watched = self.watched
        try:
            # Asked now: a scaler changes its factor after the optimizer's step, and the gradients will hold this one.
            scale = self._loss_scale() if callable(self._loss_scale) else self._loss_scale
            built = self._built if goes_on else self._build(watched.trained())
            assert built is not None
            step = built.looks.begin(Ledger(self._room, self._joiner))
            step.number, step.loss_scale = number, float(scale)
            self._norms = self._weights.begin(built.trained, step.ledger, step.weights_lie)
        except BaseException:
            self.abandon()
            raise
        if not goes_on:
            # What no step has seen yet may be asked for at the end; there is nothing to say of the others.
            built.session.reports = not built.sites <= self.seen
            built.session.open(running=watched.by_call)
            self._registered = registered()
        self.step, self._session = step, built.session

    def _can_go_on(self) -> bool:
        """Whether the hooks of the running step can be those of the next: it comes at once, and they are the last.

        Whoever came later, an edit say, would not be seen by those that stay.
        """
        built, session, watched = self._built, self._session, self.watched
        if built is None or session is None or session.reports or not built.can_go_on:
            return False
        if registered() != self._registered or watched.trained() is not built.trained:
            return False
        return watched.threads == "all" or session.scope in active.get()

    def _go_on(self, by_hand: bool) -> None:
        """As ``finish``, with the hooks left where they are."""
        try:
            assert self._session is not None
            assert self._built is not None
            step, self.step = self.step, None
            self._built.looks.end()
            go_on(self._session)
            self._tell(step, by_hand, now=False)
        except BaseException:  # it reads from the device, writes to files and warns
            self.abandon()
            raise

    def _build(self, trained: dict[str, Home]) -> Built:
        """What a step is measured with, not open yet: what there is, if nothing has changed since it was built."""
        watched, built = self.watched, self._built
        if built is not None and built.trained is trained and watched.can_begin_anew:
            built.session.begin_anew()
            return built
        looks = Looks(watched.measure, Units(watched.index))
        session = Session(watched.index.modules[""], index=watched.index, threads=watched.threads, warn=False)
        watched.attach(session, looks, self._limits, trained)
        # A step may have several calls of the model.
        session.look(Target(Site(""), watched.index.modules[""]), _ending(looks.units))
        sites = frozenset(str(target.site) for target in watched.in_step)
        self._built = Built(trained, looks, session, sites, watched.compared(trained), watched.can_go_on)
        return self._built

    def hide(self) -> None:
        """What runs until ``show`` is no part of the running step."""
        if self._session is None:
            return
        if self.watched.threads == "all":
            self.abandon()  # it takes calls from wherever they come
        else:
            self._session.scope.leave()

    def show(self) -> None:
        if self._session is not None:
            self._session.scope.enter()

    def abandon(self) -> Step | None:
        """Take the hooks of the running step away."""
        # Before anything that may fail: no hook may write to a step that is over.
        step, self.step = self.step, None
        session, self._session = self._session, None
        if session is not None and self._built is not None:
            session.close()
            self._built.looks.end()
            if session.reports:
                # A layer may be skipped in one step and run in another: only what no step has seen is reported.
                self.missing = session.recording.missing
                self.seen.update(self._built.sites.difference(self.missing))
        return step

    def close(self, finished: bool) -> None:
        """No more steps: end the running one, or forget it."""
        self.shared.together.leave()
        if finished:
            self.finish()
        self.abandon()
        self._built = None
        self.settle()
        self.shared.together.close()
        self._weights.clear()  # copies as large as the model, while the user may keep the handle for its history

    def finish(self, by_hand: bool = True, now: bool = True) -> None:
        """End the running step, if it is a measured one, and tell what was found; not ``now``, where that would wait.

        ``by_hand`` says that it does not end with the next call of the model.
        """
        # The hooks go first: what follows reads from the device, writes to files and warns, and each of it may raise.
        self._tell(self.abandon(), by_hand, now)

    def _tell(self, step: Step | None, by_hand: bool, now: bool) -> None:
        self.settle()
        if step is None or not step.ran:
            return
        updates = self._weights.end(step.ledger)
        step.ledger.send()
        compared = {} if self._built is None else self._built.compared
        self._ended = Ended(step, self._norms, updates, compared, by_hand)
        # Nobody waits for a device while there is a next step to give it: the numbers come over meanwhile. Other ranks
        # wait, though, where they have parts of what was measured.
        if now or step.is_shared or not step.ledger.is_far:
            self.settle()

    def _settle_if_there(self) -> None:
        # When a step begins, the device has the most to do: all of the backward pass before it. When the model has run,
        # it is idle soon, for the host takes longer than the device to run a model that is measured.
        if self._ended is not None and self._ended.step.ledger.is_there():
            self.settle()

    def settle(self) -> None:
        """Tell what was found in the step that has ended, if that was not done yet."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        step, known = ended.step, 0 if self.alarms is None else len(self.alarms.raised)
        sites, live = step.finish(self._wanted, ended.norms, ended.updates, self.shared, ended.by_hand)
        if self.alarms is not None:
            self.alarms.check(step.number, sites, ended.compared, live, ended.norms)
        self.history.append(Snapshot(step.number, sites))
        for sink in self._sinks:
            sink(step.number, sites)
        if self.alarms is not None:
            self.alarms.warn_since(known)


def _ending(units: Units) -> Look:
    def look(value: Any, call: int) -> None:
        units.begin()

    return look

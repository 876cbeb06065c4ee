"""Steps of a generation: which calls of a model belong to one, and where their tokens are in the sequence.

``generate`` calls the model once for the prompt and once for each new token. Its own calls are known by Python's stack,
on which it stands; those of a loop that somebody wrote, by the cache that goes from one to the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from types import FrameType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from torchhook._core.generators import generators
from torchhook._core.given_tokens import GenerateFrame, Given, generate_frame, kept, length, made_by, weak
from torchhook._core.hooks import Attachable, Attachment, after_call_always
from torchhook._core.scope import Scope, active, was_seen
from torchhook._core.taps import Tap
from torchhook._core.wiring import Taps
from torchhook._recording.records import Recording
from torchhook._recording.steps import Pass, enter, leave
from torchhook._torch import graph_task, times_running, torch_task
from torchhook._torch.compiler import in_trace
from torchhook._torch.hooks import Undo, put_before


@dataclasses.dataclass(slots=True)
class _Trail:
    """Where the calls with one cache have come to."""

    before: Pass | None = None
    """The last of them."""
    cache: ref[Any] | None = None
    called_from: tuple[int, bool] | None = None
    """The id of the frame of ``generate``, and whether that was for the prompt."""
    frame: FrameType | None = None
    """Of a generation without a cache, which nothing else tells from the next: it would hold one for too long."""
    counts: bool = True
    """Whether the cache held as many tokens after the last call as it was given."""
    empty: bool = False
    """Whether it held none: it is handed in, and the model makes no use of it."""

    @property
    def alive(self) -> Any:
        """Its cache, while somebody holds it."""
        return None if self.cache is None else self.cache()


class Steps:
    """Counts the calls of a session's model, and tells its recording."""

    def __init__(self, recording: Recording, scope: Scope, is_asked: bool) -> None:
        """``is_asked`` says that others may ask, while a call is under way, which step it is."""
        self._is_asked = is_asked
        self._passes, self._order = recording.passes, recording.order
        self._recording = ref(recording)  # it asks this before it is read, and must go when it is dropped
        self.scope = scope
        self._running: tuple[nn.Module, Pass] | None = None
        self._trail = _Trail()
        self._others: list[_Trail] = []
        """Those of other caches that are still alive: two texts may be written by turns, as in guided decoding."""
        self._sequences = 0
        self._trim_at = 1024
        self._open_end: tuple[Any, Pass] | None = None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module that generates is called."""
        scope = self.scope
        if scope not in active.get() or (torch_task() != -1 and graph_task() != -1):
            return
        if scope.runs_eagerly and in_trace():
            return
        # Asked for by the stack: a pass that was stopped has told nobody of its end.
        if self._running is not None and self._running[0] is not module and times_running(self._running[0]):
            return
        if self._open_end is not None:
            self.settle()
            self._open_end = None
        trail, given, here = self._trail, Given.of(args, kwargs), generate_frame(module)
        now = Pass(next(self._order), position=given.position, tokens=given.tokens)
        now.rows = given.rows
        now.kept = kept(kwargs)
        if here is None and given.cache is None and trail.cache is None and given.position is None:
            # As most calls are: nothing is generated. What _follow and _by_cache come to then, without the calls.
            now.set_position(0)
            self._sequences = now.sequence = self._sequences + 1
            trail.before, trail.called_from, trail.frame = now, None, None
        else:
            self._go_on(now, given, here)
        # One that generated nothing yet may be the beginning of what its cache goes on with.
        others = self._others
        self._passes.add(now, keep=bool(others) and any(other.before is self._passes.latest for other in others))
        if len(self._passes) > self._trim_at:
            if (recording := self._recording()) is not None:
                recording.trim_passes()
            self._trim_at = 2 * len(self._passes) + 1024
        self._running = module, now
        if self._is_asked:
            enter(now)

    def _go_on(self, now: Pass, given: Given, here: GenerateFrame | None) -> None:
        """Find the place of a call among those before it."""
        if self._trail.cache is not None:
            self._follow(given.cache)
        at = frame = None
        if here is None:
            self._by_cache(now, given)
        else:
            self._by_frame(now, given, here)
            at, frame = (id(here.frame), here.prefill), None if given.cache is not None else here.frame
        self._trail = _Trail(now, weak(given.cache), at, frame, self._trail.counts, self._trail.empty)
        if given.tokens != 1 and now.step is not None and self._trail.cache is not None:
            self._open_end = given.cache, now

    def end(self, module: nn.Module, output: Any) -> None:
        """It has run, or raised."""
        running = self._running
        # A call of another context may end while one of this is under way: it did not begin here.
        if running is None or running[0] is not module or self.scope not in active.get():
            return
        now, trail = running[1], self._trail
        # The first call of a loop makes the cache that the next one is given.
        cache = None if trail.cache is None else trail.cache()
        if cache is None and (cache := made_by(output)) is not None:
            trail.cache = weak(cache)
        if cache is None:
            trail.cache, trail.counts, trail.empty = None, True, False
        else:
            held = length(cache)
            trail.counts = held is None or isinstance(held, Tensor) or held == _counted(now)
            trail.empty = type(held) is int and held == 0
        now.last = next(self._order)
        self._running = None
        if self._is_asked:
            leave(now)

    def _follow(self, cache: Any) -> None:
        """Go on where the calls with this cache were, if others came between."""
        if self._trail.alive is None or self._trail.alive is cache:
            return
        known = next((other for other in self._others if cache is not None and other.alive is cache), None)
        self._others = [other for other in self._others if other is not known and other.alive is not None]
        self._others.append(self._trail)
        if known is not None:
            self._trail = known

    def _by_frame(self, now: Pass, given: Given, here: GenerateFrame) -> None:
        """A call that ``generate`` makes."""
        before, now.beams = self._trail.before, here.beams
        if before is not None and before.step is not None and self._goes_on(given, here):
            now.step, now.sequence = before.step + (not here.prefill), before.sequence
        else:
            same = self._has_cache(given.cache) and before is not None
            now.step, now.sequence = 0, before.sequence if same and before is not None else self._new_sequence()
            before = before if same else None
        now.set_position(self._where(given, before, here.prefill))
        without = given.cache is None or self._trail.empty
        if before is not None and now.step and without and not here.prefill and (given.tokens or 0) > 1:
            now.begins = _begins(before, given.tokens or 0)

    def _where(self, given: Given, before: Pass | None, prefill: bool) -> Any:
        """Where the first token of a call is; ``None`` where that cannot be told."""
        # Counted only where it has to be, and a position not asked whether it is 0: both would wait for a GPU.
        longer = self._trail.empty and before is not None and (given.tokens or 0) > (_counted(before) or 0)
        if longer or (given.cache is None and given.position is None):
            # All of them each time, or one after the other to a model that holds its state itself.
            counted = _counted(before)
            if counted is None or (given.tokens or 0) >= counted:
                return None if counted is None else 0
            # Of several after the prompt, some may have been given before: XLNet takes the last ones once more.
            return counted if prefill or given.tokens == 1 else None
        is_told = given.position is not None and (
            before is None or self._trail.counts or isinstance(given.position, Tensor)
        )
        return given.position if is_told else _counted(before)

    def _goes_on(self, given: Given, here: GenerateFrame) -> bool:
        """Whether a call of ``generate`` is one more of those before; a frame may have the place of an older one."""
        trail = self._trail
        if trail.frame is not None:
            return trail.frame is here.frame
        if trail.called_from is None or trail.called_from[0] != id(here.frame) or given.cache is None:
            return False
        if here.prefill and not trail.called_from[1]:
            return False
        return trail.cache is None or trail.alive is given.cache or weak(given.cache) is None

    def _by_cache(self, now: Pass, given: Given) -> None:
        """A call in a loop of somebody's own: the cache shows where it stands."""
        if given.cache is None and given.position is None:
            now.set_position(0)
            now.sequence = self._new_sequence()
            return
        before, same = self._trail.before, self._has_cache(given.cache)
        # A cache may be given that does not count what it holds, or only the last of it.
        is_told = given.position is not None and (self._trail.counts or not same)
        position = int(given.position) if is_told else None
        now.set_position(position)
        # By its length alone only where the one before is not there to be asked.
        other = self._trail.alive is not None and weak(given.cache) is not None
        follows = not other and position is not None and position > 0 and _counted(before) == position
        if before is None or position == 0 or not (same or follows):
            now.step, now.sequence = 0, self._new_sequence()
            return
        before.step = before.step or 0  # the first call has no cache yet, and was not known to begin anything
        now.step, now.sequence = before.step + 1, before.sequence
        if position is None:
            now.set_position(_counted(before))

    def _has_cache(self, cache: Any) -> bool:
        return cache is not None and self._trail.alive is cache

    def _new_sequence(self) -> int:
        self._sequences += 1
        return self._sequences

    def settle(self) -> None:
        """See which tokens of the latest call were taken back: assisted decoding tries several, and may reject some."""
        if self._open_end is None or not self._trail.counts:
            return
        cache, last = self._open_end
        left, start = length(cache), last.position
        if left is not None and start is not None and last.tokens is not None:
            # Of what a call was given, the first token is never taken back; an emptied cache says nothing.
            last.end = int(left) if start < int(left) < start + last.tokens else None

    def close(self) -> None:
        """Nothing more will run: let go of the cache."""
        self.settle()
        self._open_end, self._trail, self._others = None, _Trail(), []
        if self._running is not None:
            self._running[1].last = next(self._order)
            leave(self._running[1])
            self._running = None


def _counted(before: Pass | None) -> int | None:
    """Where the call after another begins."""
    if before is None:
        return 0
    return None if before.position is None or before.tokens is None else before.position + before.tokens


def _begins(before: Pass, tokens: int) -> list[int]:
    """Where the tokens of each step begin in a call after another that is given all of them; empty if nobody can tell.

    As many as before, or fewer, are a window that moves on, or another text: then some of them are not where they were.
    """
    known = [0] if before.step == 0 and before.begins is None else before.begins or []
    if before.tokens is None or tokens <= before.tokens or len(known) != (before.step or 0) + 1:
        return []
    known.append(before.tokens)  # one list for all calls of a generation
    return known


class _Enter(Tap):
    def __init__(self, steps: Steps) -> None:
        super().__init__("step")
        self.steps = steps

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if not was_seen(self.steps.scope):
            self.steps.begin(module, args, kwargs or {})

    def attach(self, undo: Undo, module: nn.Module) -> None:
        put_before(undo, module, self)


class _Leave(_Enter):
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if not was_seen(self.steps.scope):
            self.steps.end(module, output)

    def attach(self, undo: Undo, module: nn.Module) -> None:
        after_call_always(undo, module, self, first=False)


Attached = tuple[nn.Module, Attachable]
"""A module, and what goes on it."""


def around(
    taps: Taps, recording: Recording, scope: Scope, attachment: Attachment, is_asked: bool
) -> Iterable[Attached]:
    """The taps of a session; where its model may generate, between those that say where a step begins and ends."""
    modules = generators(taps.index)
    if not modules:
        return taps
    begin, end = counted(modules, recording, scope, attachment, is_asked)
    return [*begin, *taps, *end]


def counted(
    modules: list[nn.Module], recording: Recording, scope: Scope, attachment: Attachment, is_asked: bool = False
) -> tuple[list[Attached], list[Attached]]:
    """What says where a step of ``modules`` begins, and where it ends: the taps of a session go between the two.

    ``is_asked``: as of ``Steps``.
    """
    steps = Steps(recording, scope, is_asked)
    attachment.defer(steps.close)
    recording.wait_with(steps.settle)
    begin, end = _Enter(steps), _Leave(steps)
    return [(module, begin) for module in modules], [(module, end) for module in modules]

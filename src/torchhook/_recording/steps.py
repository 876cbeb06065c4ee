"""Which call of the model a value belongs to while it generates: its step, and where its tokens are in the sequence.

A recording has one ``Pass`` for each such call. Values find theirs by their place in the order of the session, so that
keeping one costs nothing more.
"""

from __future__ import annotations

import contextlib
import contextvars
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any


class Pass:
    """One call of a model that generates: which step it is, and which tokens of the sequence it was given."""

    __slots__ = (
        "_position",
        "beams",
        "begins",
        "end",
        "first",
        "kept",
        "last",
        "rows",
        "sequence",
        "step",
        "tokens",
        "whole",
    )

    def __init__(
        self, first: int, *, step: int | None = None, position: Any = None, tokens: int | None = None, sequence: int = 0
    ) -> None:
        self.first: int = first
        self.last: int = -1
        """Its place in the order of the session: what was kept from here to there passed in it."""
        self.step: int | None = step
        """0 for the prefill, all chunks of it; 1 for the first token after it. ``None`` if nothing is generated."""
        self._position = position
        self.tokens: int | None = tokens
        """How many tokens the model was given."""
        self.rows: int | None = None
        """How many rows they were in; ``None`` in files of older versions."""
        self.kept: int | None = None
        """For how many of them, the last ones, it was asked for logits, if it was."""
        self.end: int | None = None
        """Where in the sequence those end that were not taken back, if some were when all was over."""
        self.sequence: int = sequence
        """Which sequence its tokens belong to: those of one are joined."""
        self.beams: bool = False
        """Whether rows may have changed places before it."""
        self.begins: list[int] | None = None
        """Of a call that is given the tokens of the steps before once more, as without a cache: where in it those of
        each step begin. It may go on with steps to come, and is empty where nobody can tell; ``None`` if all are new.
        """
        self.whole: Pass | None = None
        """Of one that stands for a step among those of a call (``by_step``): the call."""

    @property
    def position(self) -> int | None:
        """The index of its first token in the sequence, padding included."""
        if self._position is not None and type(self._position) is not int:
            self._position = int(self._position)  # only here: a GPU would be waited for
        return self._position

    def set_position(self, position: Any) -> None:
        """Say where its first token is; a tensor is read when somebody asks."""
        self._position = position

    def by_step(self) -> Iterator[Pass]:
        """For a call that is given the tokens of earlier steps once more: what each step is with a cache.

        >>> call = Pass(0, step=2, position=0, tokens=7)
        >>> call.begins = [0, 5, 6]
        >>> [(one.step, one.position, one.tokens) for one in call.by_step()]
        [(0, 0, 5), (1, 5, 1), (2, 6, 1)]
        """
        begins = (self.begins or [])[: (self.step or 0) + 1]
        for step, (start, stop) in enumerate(pairwise([*begins, self.tokens or 0])):
            one = Pass(self.first, step=step, position=start, tokens=stop - start, sequence=self.sequence)
            one.whole, one.rows, one.beams = self, self.rows, self.beams
            yield one

    def plain(self) -> list[Any]:
        """What a file holds of it."""
        more = [self.kept, self.rows] if self.rows is not None else [] if self.kept is None else [self.kept]
        return [self.step, self.position, self.tokens, self.end, self.sequence, self.beams, *more]

    @classmethod
    def of_plain(cls, first: int, plain: Sequence[Any]) -> Pass:
        """The other way round."""
        step, position, tokens, end, sequence, beams, *more = plain
        made = cls(first, step=step, position=position, tokens=tokens, sequence=sequence)
        made.end, made.beams, made.last = end, beams, first
        made.kept, made.rows = (*more, None, None)[:2]
        return made


_running: contextvars.ContextVar[Pass | None] = contextvars.ContextVar("torchhook_running", default=None)


def current() -> Pass | None:
    """The call of a generating model that is under way in this context; ``None`` where nothing is generated.

    >>> current() is None
    True
    """
    here = _running.get()
    return None if here is None or here.step is None or here.last >= 0 else here


def enter(begun: Pass) -> None:
    """From here on, ``begun`` is the current one."""
    _running.set(begun)


def leave(ended: Pass) -> None:
    """It is over; if another has taken its place meanwhile, that one stays."""
    if _running.get() is ended:
        _running.set(None)


@contextlib.contextmanager
def standing_in(one: Pass) -> Iterator[None]:
    """Inside of the block, the current call is this step of it alone (``Pass.by_step``)."""
    before = _running.set(one)
    try:
        yield
    finally:
        _running.reset(before)


class Passes:
    """The calls of a generating model, in their order."""

    def __init__(self) -> None:
        self._all: list[Pass] = []

    def __len__(self) -> int:
        return len(self._all)

    def __bool__(self) -> bool:
        """Whether anything was generated."""
        return any(one.step is not None for one in self._all)

    def __iter__(self) -> Iterator[Pass]:
        return iter(self._all)

    def add(self, begun: Pass, *, keep: bool = False) -> None:
        """Note a call; one before it that generated nothing is forgotten, unless it may turn out to have done so."""
        if self._all and self._all[-1].step is None and not keep:
            self._all[-1] = begun
        else:
            self._all.append(begun)

    @property
    def latest(self) -> Pass | None:
        return self._all[-1] if self._all else None

    def of(self, order: int) -> Pass | None:
        """The one in which a value was kept."""
        found = bisect_right(self._all, order, key=lambda one: one.first) - 1
        if found < 0:
            return None
        one = self._all[found]
        return one if one.step is not None and (one.last < 0 or order <= one.last) else None

    def forget_before(self, order: float) -> None:
        """Nothing that was kept earlier is left; the latest pass may still have something to come."""
        self._all = [one for one in self._all if one is self._all[-1] or one.last >= order]

    def plain(self, of: Sequence[Pass | None]) -> dict[str, Any]:
        """For a file: the passes that its records were in, and which one each of them was in."""
        used = list(dict.fromkeys(one for one in of if one is not None))
        numbers = {one: number for number, one in enumerate(used)}
        return {
            "passes": [one.plain() for one in used],
            "runs": [[None if one is None else numbers[one], len(list(run))] for one, run in groupby(of)],
        }

    def read(self, passes: Sequence[Sequence[Any]], runs: Iterable[tuple[int | None, int]]) -> None:
        """The other way round: the passes, and which one each of the records was in, which are counted from 0."""
        begun, first = dict[int, Pass](), 0
        for number, length in runs:
            if number is not None:
                made = begun.setdefault(number, Pass.of_plain(first, passes[number]))
                made.last = first + length - 1
            first += length
        self._all = list(begun.values())

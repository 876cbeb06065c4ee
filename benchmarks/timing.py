"""Side-by-side timing: every contestant in every round, in a new order each time, and the median of the rounds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

Run = Callable[[], object]


class Held(NamedTuple):
    """A contestant that stays open: opened before each of its turns, on the model that the others run too.

    Two models of one kind take their host differently long, by some hundredths, though they are made alike.
    """

    opens: Callable[[], AbstractContextManager[object]]
    run: Run
    before: int = 1
    """Its first calls, which do not count: more than one where a tool does more in them than later."""


Contestants = Mapping[str, Run | Held]


class Ratio(NamedTuple):
    """What one contestant takes, in units of the one it is compared with in the same round."""

    median: float
    low: float
    """A quarter of the rounds is below this, and a quarter above ``high``."""
    high: float
    seconds: float
    """The median of one call."""


def measure(
    contestants: Contestants,
    rounds: int = 30,
    repeat: int = 10,
    *,
    wait: Run = lambda: None,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
    patience: float = 10,
) -> list[dict[str, float]]:
    """Seconds for one call of each contestant, for each round; those without a turn in a round are not in it.

    The first is in every round. Those much slower come when the others are done: a device that has stood still for a
    second computes the next pass at another speed.

    Args:
        contestants: what is compared, by name; each has a turn before anything counts.
        rounds: how often each has its turn; those ``patience`` times slower than the fastest have a fifth of them.
        repeat: calls in each turn.
        wait: called before and after each turn; on a GPU, its synchronization.
        seconds: stop after about so long, once each has had three turns; those much slower take theirs besides.
        clock: ``time.process_time`` where everything is computed in this process and others disturb it.
    """
    # Who is open has its first calls behind it when its time begins, and the others beside it have as many.
    warm = max((run.before for run in contestants.values() if isinstance(run, Held)), default=0)
    first = {name: min(_turn(run, 1, wait, clock) for _ in range(2)) for name, run in contestants.items()}
    unit, *others = contestants
    slow = [name for name in others if first[name] > patience * min(first.values())]
    quick = [unit, *(name for name in others if name not in slow)]
    for name in quick if repeat > 1 else ():  # several calls in a row may need more memory than one
        _turn(contestants[name], repeat, wait, clock)
    found: list[dict[str, float]] = []
    shuffle = random.Random(0)
    end = time.perf_counter() + (seconds or float("inf"))
    for names, turns in ((quick, rounds), ([unit, *slow], max(3, rounds // 5) if slow else 0)):
        for number in range(turns):
            shuffle.shuffle(names)
            found.append({n: _turn(contestants[n], 1 if n in slow else repeat, wait, clock, warm) for n in names})
            if number >= 2 and time.perf_counter() > end:
                break
    return found


def ratios(contestants: Contestants, rounds: int = 30, repeat: int = 10, **options: Any) -> dict[str, Ratio]:
    """Each in units of the first, round by round: a machine that gets slower meanwhile does so for both.

    ``options`` are those of ``measure``.
    """
    found = measure(contestants, rounds, repeat, **options)
    unit = next(iter(contestants))
    answer = {}
    for name in contestants:
        here = [times for times in found if name in times and unit in times]
        parts = [times[name] / times[unit] for times in here]
        low, middle, high = statistics.quantiles(parts, n=4, method="inclusive")
        answer[name] = Ratio(middle, low, high, statistics.median(times[name] for times in here))
    return answer


def compare(contestants: Contestants, rounds: int = 30, repeat: int = 10, **options: Any) -> dict[str, float]:
    """Median seconds for one call of each contestant; ``options`` are those of ``measure``."""
    found = measure(contestants, rounds, repeat, **options)
    return {name: statistics.median(times[name] for times in found if name in times) for name in contestants}


def line(costs: Mapping[int, float]) -> tuple[float, float]:
    """What one more costs, and what none would: the line through the costs at some sizes, by least squares."""
    found = statistics.linear_regression(list(costs), list(costs.values()))
    return found.slope, found.intercept


def _turn(way: Run | Held, repeat: int, wait: Run, clock: Callable[[], float], warm: int = 0) -> float:
    opens, run = (way.opens, way.run) if isinstance(way, Held) else (nullcontext, way)
    with opens():
        for _ in range(warm):
            run()
        wait()
        started = clock()
        for _ in range(repeat):
            run()
        wait()
        return (clock() - started) / repeat

"""Side-by-side timing: every contestant in every round, in a new order each time, and the median of the rounds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

Run = Callable[[], object]


def measure(
    contestants: Mapping[str, Run],
    rounds: int = 30,
    repeat: int = 10,
    *,
    wait: Run = lambda: None,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds for one call of each contestant, one number for each round it took part in.

    Args:
        contestants: what is compared, by name; each is called once or twice before anything is timed.
        rounds: how often each has its turn; those ten times slower than the fastest have it every fifth time only.
        repeat: calls in each turn.
        wait: called before and after each turn; on a GPU, its synchronization.
        seconds: stop after about so long, once each has had three turns.
        clock: ``time.process_time`` where everything is computed in this process and others disturb it.
    """
    first = {name: min(_turn(run, 1, wait, clock) for _ in range(2)) for name, run in contestants.items()}
    slow = {name for name, took in first.items() if took > 10 * min(first.values())}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    shuffle = random.Random(0)
    end = time.perf_counter() + (seconds or float("inf"))
    for number in range(rounds):
        shuffle.shuffle(names)
        for name in names:
            if name not in slow or number % 5 == 0 or len(times[name]) < 3:
                times[name].append(_turn(contestants[name], 1 if name in slow else repeat, wait, clock))
        if number >= 2 and time.perf_counter() > end:
            break
    return times


def compare(
    contestants: Mapping[str, Run],
    rounds: int = 30,
    repeat: int = 10,
    *,
    wait: Run = lambda: None,
    seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds for one call of each contestant; the arguments are those of ``measure``."""
    found = measure(contestants, rounds, repeat, wait=wait, seconds=seconds, clock=clock)
    return {name: statistics.median(times) for name, times in found.items()}


def line(costs: Mapping[int, float]) -> tuple[float, float]:
    """What one more costs, and what none would: the line through the costs at some sizes, by least squares."""
    found = statistics.linear_regression(list(costs), list(costs.values()))
    return found.slope, found.intercept


def _turn(run: Run, repeat: int, wait: Run, clock: Callable[[], float]) -> float:
    wait()
    started = clock()
    for _ in range(repeat):
        run()
    wait()
    return (clock() - started) / repeat

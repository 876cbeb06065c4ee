"""Side-by-side timing: every contestant in every round, in a new order each time, and the median of the rounds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable


def compare(contestants: dict[str, Callable[[], object]], rounds: int = 30, repeat: int = 10) -> dict[str, float]:
    """Median seconds for one call of each contestant."""
    for run in contestants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    shuffle = random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(names)
        for name in names:
            run = contestants[name]
            started = time.perf_counter()
            for _ in range(repeat):
                run()
            times[name].append((time.perf_counter() - started) / repeat)
    return {name: statistics.median(measured) for name, measured in times.items()}

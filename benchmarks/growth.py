"""How the cost grows with the number of sites, of calls and of sessions: a line through it, beside bare hooks.

    python benchmarks/growth.py [--json results.json]

What one more costs is compared with what one more bare cloning hook costs, in the same run and in processor time. The
memory that is left after a session, or after a thousand, is a number of bytes for each.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from bare import Newest
from models import chain
from results import Report, Row
from timing import compare, line
from torch import nn

import torchhook as th

SITES = [1, 10, 25, 50, 75, 100]


def slopes(
    cost: Callable[[int], dict[str, Callable[[], object]]], sizes: list[int], seconds: float
) -> dict[str, float]:
    """What one more costs, for each of the ways."""
    # All sizes of all ways in one race: drift would tilt the lines.
    runs = {(way, size): run for size in sizes for way, run in cost(size).items()}
    named = {f"{way} {size}": run for (way, size), run in runs.items()}
    times = compare(named, rounds=1000, repeat=2, seconds=seconds, clock=time.process_time)
    ways = list(dict.fromkeys(way for way, _ in runs))
    return {way: line({size: times[f"{way} {size}"] for size in sizes})[0] for way in ways}


def with_sites(seconds: float) -> Iterator[tuple[Row, str]]:
    """Sites of 100 small layers: opened for each call, held, and as gradients."""
    work = chain()
    (x,) = work.args

    def copies(count: int) -> tuple[nn.Module, list[str]]:
        model = chain().model
        return model, [str(n) for n in range(count)]

    def per_call(count: int) -> dict[str, Callable[[], object]]:
        model, names = copies(count)

        def bare() -> None:
            hooks = Newest(model, names)
            model(x)
            hooks.remove()

        def ours() -> None:
            with th.capture(model, names):
                model(x)

        return {"bare": bare, "ours": ours}

    stack = ExitStack()

    def held(count: int) -> dict[str, Callable[[], object]]:
        (bare, names), (ours, _) = copies(count), copies(count)
        Newest(bare, names)
        stack.enter_context(th.capture(ours, names, max_records=1))
        return {"bare": lambda: bare(x), "ours": lambda: ours(x)}

    with torch.no_grad(), stack:
        for title, cost in {"opened for each call": per_call, "held": held}.items():
            found = slopes(cost, SITES, seconds)
            ratio = found["ours"] / found["bare"]
            text = f"one more site, {title}: {found['ours'] * 1e6:.2f} µs, a bare hook {found['bare'] * 1e6:.2f} µs"
            yield Row("What one more site costs, one more bare cloning hook = 1", title, ratio), text


def with_calls(seconds: float) -> Iterator[tuple[Row, str]]:
    """Calls in one session that keeps them all: the last costs what the first did."""
    work = chain()
    (x,) = work.args
    sizes = [50, 100, 200, 400]

    def cost(count: int) -> dict[str, Callable[[], object]]:
        def ours() -> None:
            with th.capture(work.model, "50"):
                for _ in range(count):
                    work.model(x)

        def plain() -> None:
            for _ in range(count):
                work.model(x)

        return {"ours": ours, "plain": plain}

    with torch.no_grad():
        found = slopes(cost, sizes, seconds)
        race = compare(cost(400), rounds=20, repeat=1, seconds=seconds / 2, clock=time.process_time)
    text = f"one more call with one site: {found['ours'] * 1e6:.0f} µs, plain {found['plain'] * 1e6:.0f} µs"
    title = "What one more call costs in a session that keeps all of them, a plain call = 1"
    yield Row(title, "by the line from 50 to 400", found["ours"] / found["plain"]), text
    yield Row(title, "the mean of 400", race["ours"] / race["plain"]), ""


def with_sessions(seconds: float) -> Iterator[tuple[Row | None, str]]:
    """Sessions that are open at once on the same layer, and what a thousand leave behind."""
    work = chain()
    (x,) = work.args
    sizes = [1, 4, 8, 16]
    stack = ExitStack()

    def cost(count: int) -> dict[str, Callable[[], object]]:
        bare, ours = chain().model, chain().model
        for _ in range(count):
            Newest(bare, ["50"])
            stack.enter_context(th.capture(ours, "50", max_records=1))
        return {"bare": lambda: bare(x), "ours": lambda: ours(x)}

    with torch.no_grad(), stack:
        found = slopes(cost, sizes, seconds)
    title = "What one more open session costs a call, one more bare cloning hook = 1"
    text = f"one more open session: {found['ours'] * 1e6:.2f} µs a call, a bare hook {found['bare'] * 1e6:.2f} µs"
    yield Row(title, "one site, 1 to 16 sessions", found["ours"] / found["bare"]), text
    left = left_behind(work.model, x)
    text = f"a session that is over leaves {left:.1f} bytes behind, by the line through 0 to 1,000 of them"
    yield None, text  # bytes are no ratio


def left_behind(model: nn.Module, x: torch.Tensor) -> float:
    """Bytes of Python's memory that each session leaves, by a line: what is made once is no part of it."""

    def sessions(count: int) -> None:
        for _ in range(count):
            with th.capture(model, "50"):
                model(x)

    with torch.no_grad():
        sessions(100)
        tracemalloc.start()
        held = {}
        for done in range(0, 1001, 250):
            sessions(250 if done else 0)
            gc.collect()
            held[done] = float(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    return line(held)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each line, about")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    report = Report("Growth, on a CPU", options.json)
    for part in (with_sites, with_calls, with_sessions):
        for row, text in part(options.seconds):
            if row is not None:
                report.add(row)
            if text:
                report.fact(text)
    report.close()


if __name__ == "__main__":
    main()

"""What must hold on a CPU: the cost of opening a session, beside bare hooks that are put on and taken off."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bare import Newest, clone, judged
from models import Work, chain, large
from results import Row
from timing import ratios
from torch import Tensor, nn

import torchhook as th

Run = Callable[[], object]


def limits(seconds: float) -> Iterator[Row]:
    """The rows, each with what it must reach; longer than the others, because they decide."""
    with torch.no_grad():
        yield from per_call(4 * seconds)
        yield from opening(4 * seconds)
        yield from held(4 * seconds)


def bare_per_call(model: nn.Module, names: list[str], x: Tensor) -> Run:
    def run() -> None:
        bare = Newest(model, names)
        model(x)
        bare.remove()

    return run


def ours_per_call(model: nn.Module, selectors: Any, x: Tensor) -> Run:
    def run() -> None:
        with th.capture(model, selectors):
            model(x)

    return run


def prepared(model: nn.Module, names: list[str], run: Run) -> Run | str:
    """One session, opened for each call; or why that cannot be."""
    session = th.capture(model, names)

    def reopened() -> None:
        with session:
            run()

    try:
        reopened()
        reopened()
    except th.errors.SessionError as error:
        return str(error).split(". ")[0]
    return reopened


def per_call(seconds: float) -> Iterator[Row]:
    """100 small layers: all of them, a session for each call."""
    work = chain()
    model, (x,) = work.model, work.args
    names = work.all
    wrong = judged(model, names, th.capture(model, names), lambda: model(x))
    runs: dict[str, Run] = {
        "bare hooks, clone, put on and taken off": bare_per_call(model, names, x),
        "plain model": lambda: model(x),
        "session per call": ours_per_call(model, names, x),
        "session per call, by glob": ours_per_call(model, "**", x),
    }
    again = prepared(model, names, lambda: model(x))
    if not isinstance(again, str):
        runs["prepared session, reopened"] = again
    title = "100 small layers, all kept, opened for each call"
    goals: dict[str, tuple[float | None, float | None]] = {
        "session per call": (1.15, None),
        "prepared session, reopened": (2, None),
    }
    rows = measured(title, runs, seconds, goals, wrong)
    yield from rows
    if isinstance(again, str):
        yield Row(title, "prepared session, reopened", None, note=again)


def opening(seconds: float) -> Iterator[Row]:
    """One named layer, opened and closed, in models of 100 and of 10,000 modules.

    Where nothing runs in between, a session finds that out and says it at each end: that is part of the cost. Where the
    layer runs, it is called alone, beside a bare hook that clones.
    """
    for title, runs_too in {
        "One named layer, opened and closed": False,
        "One named layer, opened, called alone, closed": True,
    }.items():
        yield from opened_and_closed(title, runs_too, seconds)


def opened_and_closed(title: str, runs_too: bool, seconds: float) -> Iterator[Row]:
    runs: dict[str, Run] = {}
    notes: dict[str, str] = {}
    for size in (100, 10_000):
        work = large(size)
        between = layer(work) if runs_too else None
        session = functools.partial(th.capture, work.model, work.one)
        runs[f"get_submodule, hook, remove, {size:,} modules"] = bare_hook(work, between)
        runs[f"th.capture, {size:,} modules"] = opened(session, between)
        again = reopened(session(), between)
        if isinstance(again, str):
            notes[f"prepared, reopened, {size:,} modules"] = again
        else:
            runs[f"prepared, reopened, {size:,} modules"] = again
    goals: dict[str, tuple[float | None, float | None]] = {
        "th.capture, 100 modules": (5, None),
        "th.capture, 10,000 modules": (5, None),
        "prepared, reopened, 100 modules": (2, None),
        "prepared, reopened, 10,000 modules": (2, None),
    }
    rows = list(measured(title, runs, seconds, goals, None, repeat=20))
    yield from rows
    for way, note in notes.items():
        yield Row(title, way, None, *goals[way], note=note)
    found = {row.way: row.ratio for row in rows}
    growth = (found["th.capture, 10,000 modules"] or 0) / (found["th.capture, 100 modules"] or 1)
    yield Row(title, "th.capture: 10,000 modules against 100", growth, 1.2)


def bare_hook(work: Work, between: Run | None) -> Run:
    model, name = work.model, work.one

    def run() -> None:
        kept: list[Tensor] = []
        handle = model.get_submodule(name).register_forward_hook(lambda m, args, output: kept.append(clone(output)))
        if between is not None:
            between()
        handle.remove()

    return run


def layer(work: Work) -> Run:
    module, (x,) = work.model.get_submodule(work.one), work.args
    return lambda: module(x)


def opened(session: Callable[[], Any], between: Run | None) -> Run:
    def run() -> None:
        live = session().open()
        if between is not None:
            between()
        live.close()

    return run


def reopened(session: Any, between: Run | None) -> Run | str:
    run = opened(lambda: session, between)
    try:
        run()
        run()
    except th.errors.SessionError as error:
        return str(error).split(". ")[0]
    return run


def held(seconds: float) -> Iterator[Row]:
    """100 small layers, all of them, in one open session."""
    work = chain()
    names, (x,) = work.all, work.args
    bare, ours = copy.deepcopy(work.model), copy.deepcopy(work.model)
    Newest(bare, names)
    with th.capture(ours, names, max_records=1):
        runs: dict[str, Run] = {
            "bare hooks, clone": lambda: bare(x),
            "plain model": lambda: work.model(x),
            "session held": lambda: ours(x),
        }
        yield from measured("100 small layers, all kept, held", runs, seconds, {"session held": (1.1, None)}, None)


def measured(
    title: str,
    runs: dict[str, Run],
    seconds: float,
    goals: dict[str, tuple[float | None, float | None]],
    wrong: tuple[int, int] | None,
    repeat: int = 5,
) -> Iterator[Row]:
    """Rows in units of the first, in turns."""
    found = ratios(runs, rounds=1000, repeat=repeat, seconds=seconds, clock=time.process_time)
    for way, ratio in found.items():
        counts = wrong if wrong is not None and "session" in way else (None, None)
        goal = goals.get(way, (None, None))
        yield Row(title, way, ratio.median, *goal, *counts, low=ratio.low, high=ratio.high)

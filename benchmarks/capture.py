"""What getting at values costs, beside bare hooks and the peers, and how many of the values are wrong.

    python benchmarks/capture.py [--json results.json] [--only "torchhook" "nnsight"] [--seconds 0.7]

Each way runs in a process of its own, because some change the whole of torch, and takes turns there with the plain
model: a ratio is to the plain forward pass (or forward and backward) in the same process, in processor time. Values are
judged by bare hooks with ``.detach().clone()`` on an untouched copy. Peers take part where they are installed
(``peers.txt``). What must hold is measured in five processes, and the median of the five counts: where things lie in
memory differs from one to the next, and with it such small figures.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from bare import leaves, same
from limits import limits
from models import WORKS, Work, resnet18
from results import Report, Row
from timing import ratios
from ways import WAYS, Found, NotOffered, bare_gradients, bare_per_call, lens_work, loss, own_copy

PATIENCE = 90  # seconds for one mode of one way on one model
PROCESSES = 5  # for what must hold

PEAK = "Peak memory of one call, all layers of ResNet-18 kept; their bytes = 1"


class TooSlow(Exception):
    """One mode of one way took longer than anybody would wait."""


def judge(found: Found, true: Found) -> tuple[int, int, int]:
    """Values that are wrong, values that came, and values that did not come.

    A way that gives one value for a layer that ran twice may give either: the other is missing, not wrong.
    """
    wrong = came = missing = 0
    for name, calls in true.items():
        values = found.get(name) or []
        came += len(values)
        missing += max(len(calls) - len(values), 0)
        for place, value in enumerate(values):
            candidates = [calls[place]] if len(values) == len(calls) else calls
            wrong += not any(same(value, candidate, 1e-5) for candidate in candidates)
    return wrong, came, missing


def cell(way: str, mode: str, work: Work, how_many: str, seconds: float) -> Row | None:
    """One way in one mode on one model and number of sites; nothing where it does not apply."""
    make = WAYS[way].get(mode)
    if make is None:
        return None
    names = work.sites(how_many)
    gradients = mode == "gradients"
    with torch.set_grad_enabled(gradients):
        truth = (bare_gradients if gradients else bare_per_call)(own_copy(work), names)()
        column = f"{how_many}, {mode}"
        try:
            run = make(own_copy(work), names)
            wrong, came, missing = judge(run(), truth)
        except NotOffered:
            return None
        plain = own_copy(work)
        plainly: Callable[[], Any] = lambda: plain.model(*plain.args)  # noqa: E731
        if gradients:
            plainly = lambda: loss(plain.model(*plain.args)).backward()  # noqa: E731
        runs = {"plain": plainly, "way": run}
        ratio = ratios(runs, rounds=200, repeat=1, seconds=seconds, clock=time.process_time)["way"]
    note = f"{missing} missing" if missing else ""
    between = {"low": ratio.low, "high": ratio.high}
    return Row(work.name, way, ratio.median, wrong=wrong, values=came, column=column, note=note, **between)


def cells(way: str, seconds: float, models: list[str]) -> Iterator[Row]:
    """Everything of one way; what fails is a row with its own message."""
    for name in models:
        try:
            work = lens_work() if way == "TransformerLens" and name == "gpt2" else WORKS[name]()
        except Exception as error:
            yield Row(name, way, None, note=message(error))
            continue
        for mode in ("per call", "held", "gradients"):
            for how_many in ("one", "few", "all"):
                # The gradient of ten thousand layers asks nothing that that of a hundred does not.
                if name == "large" and (mode == "gradients" or how_many == "few"):
                    continue
                row = patiently(functools.partial(cell, way, mode, work, how_many, seconds))
                if isinstance(row, str):
                    row = Row(work.name, way, None, note=row, column=f"{how_many}, {mode}")
                if row is not None:
                    yield row
    yield from peak(way)


def patiently(run: Callable[[], Row | None]) -> Row | str | None:
    """What it gives, or the message of its error, shortened."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"took more than {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, ring)
    # Not ITIMER_PROF: while that runs, Linux updates the clock of processor time at its ticks only, every 4 ms.
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        try:
            return run()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Exception as error:
        return message(error)
    finally:
        signal.signal(signal.SIGALRM, before)


def message(error: Exception) -> str:
    # The last line of long ones says what was wrong; peers put a traceback of their own before it.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    return f"{type(error).__name__}: {text}"[:160]


def peak(way: str) -> Iterator[Row]:
    """How far memory rises in one call, in units of the bytes of all values that were asked for."""
    steady_memory()
    modes = WAYS[way]
    make = modes.get("per call") or modes.get("held")
    work = resnet18()._replace(args=(torch.randn(8, 3, 224, 224),))
    assert make is not None
    try:
        with torch.no_grad():
            names = work.all
            run = make(work, names)
            low = rise(lambda: work.model(*work.args))
            found: list[Any] = []
            high = rise(lambda: found.append(run()))
            truth = bare_per_call(own_copy(work), names)()
            nbytes = sum(leaf.nbytes for calls in truth.values() for call in calls for leaf in leaves(call))
            # Values that share memory with what overwrote them take less of it.
            wrong, came, missing = judge(found[0], truth)
    except NotOffered:
        return
    except Exception as error:
        yield Row(PEAK, way, None, note=message(error))
        return
    if way == next(iter(WAYS)):
        yield Row(PEAK, "plain model", low / nbytes)
    yield Row(PEAK, way, high / nbytes, wrong=wrong, values=came, note=f"{missing} missing" if missing else "")


def steady_memory() -> None:
    """Have the allocator give back what is freed: else a peak hides in memory that was free and not given back."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 64 << 10)  # M_MMAP_THRESHOLD
        libc.malloc_trim(0)


def rise(run: Callable[[], object]) -> int:
    """Bytes by which the memory of this process rises at most while it runs, the second time."""
    run()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def child(way: str, options: argparse.Namespace) -> None:
    """Run one way, or what must hold, and write the rows where the parent asked for them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = limits(options.seconds) if way == "limits" else cells(way, options.seconds, options.models)
    with open(options.child, "w") as file:
        for row in rows:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            file.flush()


def together(runs: list[list[Row]]) -> list[Row]:
    """The rows of several processes as one: the median of their ratios and quartiles, and all that was wrong."""
    by_name: dict[tuple[str, str], list[Row]] = {}
    for row in (row for rows in runs for row in rows):
        by_name.setdefault((row.work, row.way), []).append(row)
    return [_middle(rows) for rows in by_name.values()]


def _middle(rows: list[Row]) -> Row:
    def median(name: str) -> float | None:
        found = [getattr(row, name) for row in rows if getattr(row, name) is not None]
        return statistics.median(found) if found else None

    wrong = [row.wrong for row in rows if row.wrong is not None]
    between = {name: median(name) for name in ("ratio", "low", "high")}
    return dataclasses.replace(rows[0], **between, wrong=max(wrong, default=None))


def in_own_process(way: str, options: argparse.Namespace) -> list[Row]:
    """A row for each line that came, and one that says how the process ended if it ended badly."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        words = ["--child", str(path), "--way", way, "--seconds", str(options.seconds), "--models", *options.models]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, __file__, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        rows.append(Row("not measured", way, None, note=last[:160]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument(
        "--only", nargs="+", choices=["limits", *WAYS], metavar="WAY", help=", ".join(["limits", *WAYS])
    )
    parser.add_argument("--models", nargs="*", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--seconds", type=float, default=0.7, help="for each number, about")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="for what must hold: their median counts")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.way, options)
        return
    report = Report("Getting at values, on a CPU", options.json)
    for way in options.only or ["limits", *WAYS]:
        runs = [in_own_process(way, options) for _ in range(options.processes if way == "limits" else 1)]
        report.add(*together(runs) if way == "limits" else runs[0])
    report.close()


if __name__ == "__main__":
    main()

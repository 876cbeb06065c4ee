"""Where statistics go: a TensorBoard writer, a W&B run, a CSV file, a function; known by what they can do."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchhook._values.histograms import Histogram

Sites = Mapping[str, Mapping[str, Any]]
Sink = Callable[[int, Sites], None]

_SAMPLES = 1000


def sinks(log: Any, columns: Sequence[str]) -> list[Sink]:
    """One sink for each destination that ``log`` names."""
    # Known by what they can do and not by their class: importing TensorBoard or W&B only to ask takes seconds, and
    # neither has to be installed.
    if log is None:
        return []
    if isinstance(log, (list, tuple)):
        return [sink for one in log for sink in sinks(one, columns)]
    if isinstance(log, (str, os.PathLike)):
        return [_csv(Path(log), [name for name in columns if name != "histogram"])]
    if hasattr(log, "add_scalar"):
        return [_tensorboard(log)]
    if callable(log):
        return [lambda step, sites: log(step, flat(sites))]
    if callable(getattr(log, "log", None)):
        return [_wandb(log)]
    raise TypeError(
        f"log={log!r} ({type(log).__name__}): expected a TensorBoard SummaryWriter (add_scalar), a W&B run (log), "
        "the path of a CSV file, a function (step, values), or a list of these."
    )


def flat(sites: Sites) -> dict[str, Any]:
    """One level: ``"layer1.0.conv1/mean"`` and so on."""
    return {f"{site or '(model)'}/{name}": value for site, values in sites.items() for name, value in values.items()}


def _tensorboard(writer: Any) -> Sink:
    def write(step: int, sites: Sites) -> None:
        for tag, value in flat(sites).items():
            if not isinstance(value, Histogram):
                writer.add_scalar(tag, value, step)
            elif hasattr(writer, "add_histogram_raw"):
                writer.add_histogram_raw(tag, *_raw(value), global_step=step)
            else:
                writer.add_histogram(tag, _samples(value), step)

    return write


def _centers(histogram: Histogram) -> list[float]:
    return [(a + b) / 2 for a, b in zip(histogram.edges, histogram.edges[1:], strict=False)]


# The values themselves never left the device, so that sums are those of the centers of the bins.
def _raw(histogram: Histogram) -> tuple[float, float, int, float, float, list[float], list[int]]:
    pairs = list(zip(_centers(histogram), histogram.counts, strict=True))
    total = sum(c * n for c, n in pairs)
    squares = sum(c * c * n for c, n in pairs)
    return (
        histogram.edges[0],
        histogram.edges[-1],
        sum(histogram.counts),
        total,
        squares,
        histogram.edges[1:],
        histogram.counts,
    )


def _samples(histogram: Histogram) -> Any:
    """A few values that are spread as the histogram is, for writers that count for themselves."""
    import numpy as np

    total = max(sum(histogram.counts), 1)
    times = [round(n * min(1.0, _SAMPLES / total)) for n in histogram.counts]
    return np.repeat(_centers(histogram), times)


def _wandb(run: Any) -> Sink:
    def write(step: int, sites: Sites) -> None:
        # Who has a run has imported wandb; the library does not need it.
        kind = getattr(sys.modules.get("wandb"), "Histogram", None)
        values = flat(sites)
        for tag, value in values.items():
            if isinstance(value, Histogram) and kind is not None:
                values[tag] = kind(np_histogram=(value.counts, value.edges))
        run.log(values, step=step)

    return write


def _csv(path: Path, columns: list[str]) -> Sink:
    header = ["run", "step", "site", *columns]
    # Looked at now: that a file does not fit is no news for the end of the first step of a long training.
    if path.exists() and path.stat().st_size:
        with path.open(newline="") as file:
            found = next(csv.reader(file), [])
        if found != header:
            raise ValueError(
                f"{str(path)!r} has other columns: expected {','.join(header)}, found {','.join(found)}. "
                "Give another path, or the statistics that the file was begun with."
            )
    run: int | None = None

    def write(step: int, sites: Sites) -> None:
        nonlocal run
        # Opened for each step and closed again: whatever kills the run, the steps before are on disk.
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as raw:
            size = raw.seek(0, os.SEEK_END)
            if size:
                raw.seek(-1, os.SEEK_END)
                if raw.read(1) != b"\n":  # a run that was killed while writing
                    raw.write(b"\r\n")
        if run is None:  # now, and not before: until it writes, another may begin one
            run = _next_run(path, len(header))
        with path.open("a", newline="") as file:
            rows = csv.writer(file)
            if not size:
                rows.writerow(header)
            rows.writerows([run, step, s, *(values.get(name, "") for name in columns)] for s, values in sites.items())

    return write


def _next_run(path: Path, columns: int) -> int:
    """One more than the runs of a file: their steps may have the same numbers, and must not be taken for one run's."""
    with path.open(newline="") as file:
        whole = [row[0] for row in csv.reader(file) if len(row) == columns]  # others were torn
    return max((int(run) + 1 for run in whole if run.isdecimal()), default=0)

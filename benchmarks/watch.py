"""What watching every layer of a ResNet-18 training step costs, as a ratio to the plain step in the same run.

    python benchmarks/watch.py [--rounds 12] [--json results.json]

The kinds of step take turns, one step each, and medians are compared: that of each place in a round of ten, and then
the mean over the ten places, one of which is a measured one with ``every=10``. On a machine that does other things too,
the ratio of processor times is the steadier one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn

import tests.conftest  # noqa: F401  torchvision beside a CPU torch
from torchhook._recording.tables import Table
from torchhook._watch.api import Watch, watch
from torchhook._watch.statistics import DEFAULT

LIMITS = {"every=10": 1.15, "every=1": 1.6}


def trainer(device: str, batch: int, size: int) -> tuple[nn.Module, Callable[[], None]]:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(weights=None, num_classes=100).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.arange(batch, device=device) % 100
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()

    return model, step


def timed(step: Callable[[], None], device: str) -> tuple[float, float]:
    """Seconds by the clock, and of this process's processors."""
    wall, busy = time.perf_counter(), time.process_time()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - busy


def typical(times: list[float]) -> float:
    """The mean cost of a step: the median of each place in a round of ten, then the mean over the places."""
    return statistics.mean(statistics.median(times[place::10]) for place in range(10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="each round has 10 steps of every kind")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--all", action="store_true", help="also with histograms, and without gradients and parameters")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    kinds: dict[str, Callable[[nn.Module], Watch | None]] = {
        "plain": lambda model: None,
        "every=10": lambda model: watch(model, every=10).open(),
        "every=1": lambda model: watch(model, every=1).open(),
    }
    if options.all:
        kinds |= {
            "every=1, values only": lambda model: watch(model, gradients=False, parameters=False).open(),
            "every=1, histograms": lambda model: watch(model, statistics=(*DEFAULT, "histogram")).open(),
        }
    trainers = {kind: trainer(options.device, options.batch, options.size) for kind in kinds}
    watchers = {kind: make(trainers[kind][0]) for kind, make in kinds.items()}
    walls: dict[str, list[float]] = {kind: [] for kind in kinds}
    busies: dict[str, list[float]] = {kind: [] for kind in kinds}
    order = list(kinds)
    for number in range(10 * (options.rounds + 1)):
        order = [*order[1:], order[0]]
        for kind in order:
            wall, busy = timed(trainers[kind][1], options.device)
            if number >= 10:  # the first round warms up
                walls[kind].append(wall)
                busies[kind].append(busy)
    for watcher in watchers.values():
        if watcher is not None:
            watcher.close()

    results = []
    for kind in kinds:
        wall, busy = typical(walls[kind]), typical(busies[kind])
        results.append(
            {
                "kind": kind,
                "milliseconds": 1e3 * wall,
                "ratio": wall / typical(walls["plain"]),
                "processor_ratio": busy / typical(busies["plain"]),
                "limit": LIMITS.get(kind),
            }
        )
    rows = [
        [
            str(r["kind"]),
            f"{r['milliseconds']:.1f}",
            f"{r['ratio']:.3f}",
            f"{r['processor_ratio']:.3f}",
            "" if r["limit"] is None else f"{r['limit']:.2f}",
        ]
        for r in results
    ]
    title = (
        f"ResNet-18 training step, every layer watched: {options.batch} x 3 x {options.size} x {options.size}, "
        f"{options.device}, {options.threads} threads, {options.rounds} rounds of 10 steps, medians"
    )
    columns = ["", ">ms per step", ">ratio", ">processor time", ">limit"]
    print(Table(title, columns, rows))
    if options.json is not None:
        options.json.write_text(json.dumps({"title": title, "results": results}, indent=1))
    over = [r["kind"] for r in results if r["limit"] is not None and r["ratio"] > r["limit"]]
    sys.exit(f"over the limit: {', '.join(map(str, over))}" if over else 0)


if __name__ == "__main__":
    main()

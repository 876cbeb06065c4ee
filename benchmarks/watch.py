"""What watching every layer of a training step costs, as a ratio to the plain step in the same run.

    python benchmarks/watch.py [--device cuda] [--rounds 12] [--json results.json]

A ResNet-50 at batch 64 on a GPU, a ResNet-18 at batch 16 on a CPU; SGD with momentum; beside it, hooks on all modules,
outputs and parameters that do nothing. The kinds of step take turns, one step each, and medians are compared: that of
each place in a round of ten, and then the mean over the ten places, one of which is a measured one with ``every=10``.
On a GPU every step is waited for, and then ten steps in a row are, as in a training that reads its loss now and then.
On a machine that does other things too, the ratio of processor times is the steadier one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn

with contextlib.suppress(ImportError):  # pytest may be missing where torchvision needs no help
    import tests.conftest  # noqa: F401  torchvision beside a CPU torch
from torchhook._recording.tables import Table
from torchhook._watch.api import watch
from torchhook._watch.statistics import DEFAULT

LIMITS = {"cpu": {"every=10": 1.15, "every=1": 1.6}, "cuda": {"every=10": 1.05, "every=1": 1.4}}
SIZES = {"cpu": ("resnet18", 16, 64, 10), "cuda": ("resnet50", 64, 224, 4)}
Step = Callable[[], None]


def trainer(name: str, device: str, batch: int, size: int) -> tuple[nn.Module, Step]:
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(weights=None, num_classes=100).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.arange(batch, device=device) % 100
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()

    return model, step


class BareHooks:
    """Hooks on every module, the gradient of its output and every parameter, which do nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._handles: list[Any] = [m.register_forward_hook(self._look) for m in model.modules()]
        self._handles += [p.register_hook(self._look_at_gradient) for p in model.parameters()]

    def _look(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(self._look_at_gradient)

    def _look_at_gradient(self, gradient: torch.Tensor) -> None:
        pass

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def kinds(everything: bool) -> dict[str, Callable[[nn.Module], Any]]:
    found: dict[str, Callable[[nn.Module], Any]] = {
        "plain": lambda model: None,
        "bare hooks": BareHooks,
        "every=10": lambda model: watch(model, every=10).open(),
        "every=1": lambda model: watch(model, every=1).open(),
    }
    if everything:
        found |= {
            "every=1, values only": lambda model: watch(model, gradients=False, parameters=False).open(),
            "every=1, histograms": lambda model: watch(model, statistics=(*DEFAULT, "histogram")).open(),
        }
    return found


class Times(NamedTuple):
    """Seconds for one step of one kind: by the clock, of this process's processors, and in a row of ten."""

    walls: list[float]
    busies: list[float]
    rows: list[float]


def timed(step: Step, device: str, times: int = 1) -> tuple[float, float]:
    """Seconds for one of ``times`` steps in a row, by the clock and of this process's processors."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    wall, busy = time.perf_counter(), time.process_time()
    for _ in range(times):
        step()
    wait()
    return (time.perf_counter() - wall) / times, (time.process_time() - busy) / times


def measured(steps: dict[str, Step], device: str, rounds: int) -> dict[str, Times]:
    found = {kind: Times([], [], []) for kind in steps}
    order = list(steps)
    for number in range(10 * (rounds + 1)):
        order = [*order[1:], order[0]]
        for kind in order:
            wall, busy = timed(steps[kind], device)
            if number >= 10:  # the first round warms up
                found[kind].walls.append(wall)
                found[kind].busies.append(busy)
    for _ in range(rounds if device == "cuda" else 0):
        order = [*order[1:], order[0]]
        for kind in order:
            found[kind].rows.append(timed(steps[kind], device, times=10)[0])
    return found


def typical(times: list[float]) -> float:
    """The mean cost of a step: the median of each place in a round of ten, then the mean over the places."""
    return statistics.mean(statistics.median(times[place::10]) for place in range(10))


def results(found: dict[str, Times], limits: dict[str, float]) -> list[dict[str, Any]]:
    plain = found["plain"]
    return [
        {
            "kind": kind,
            "milliseconds": 1e3 * typical(times.walls),
            "ratio": typical(times.walls) / typical(plain.walls),
            "ratio_in_a_row": statistics.median(times.rows) / statistics.median(plain.rows) if times.rows else None,
            "processor_ratio": typical(times.busies) / typical(plain.busies),
            "limit": limits.get(kind),
        }
        for kind, times in found.items()
    ]


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    names = {
        "milliseconds": ">ms per step",
        "ratio": ">ratio",
        "ratio_in_a_row": ">in a row",
        "processor_ratio": ">processor time",
        "limit": ">limit",
    }
    cells = [[r["kind"], *("" if r[name] is None else f"{r[name]:.3f}" for name in names)] for r in rows]
    return Table(title, ["", *names.values()], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, help="each round has 10 steps of every kind")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--all", action="store_true", help="also with histograms, and without gradients and parameters")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, batch, size, rounds = SIZES[options.device]
    batch, size, rounds = options.batch or batch, options.size or size, options.rounds or rounds

    makers = kinds(options.all)
    trainers = {kind: trainer(model, options.device, batch, size) for kind in makers}
    hooks = {kind: make(trainers[kind][0]) for kind, make in makers.items()}
    found = measured({kind: step for kind, (_, step) in trainers.items()}, options.device, rounds)
    for hook in hooks.values():
        if hook is not None:
            hook.close()

    rows = results(found, LIMITS[options.device])
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"cpu, {options.threads} threads"
    title = f"{model} training step, every layer watched: {batch} x 3 x {size} x {size}, {where}, {rounds} rounds of 10"
    print(table(title, rows))
    if options.json is not None:
        options.json.write_text(json.dumps({"title": title, "torch": torch.__version__, "results": rows}, indent=1))
    over = [r["kind"] for r in rows if r["limit"] is not None and r["ratio"] > r["limit"]]
    sys.exit(f"over the limit: {', '.join(over)}" if over else 0)


if __name__ == "__main__":
    main()

"""A ``KeyboardInterrupt`` at any line of the library, and what is left of it afterwards: nothing.

``points(scenario)`` lists every line of the library that a scenario executes, at its first and at its last execution;
``interrupted(scenario, point)`` runs it again and interrupts it there. ``python -m tests.interrupts`` goes through all.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import random
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchhook as th
from tests.oracle import stance
from torchhook import edits

LIBRARY = str(Path(th.__file__).parent)


class Point(NamedTuple):
    """One execution of one line."""

    file: str
    line: int
    execution: int

    def __str__(self) -> str:
        return f"{self.file.removeprefix(LIBRARY + '/')}:{self.line} execution {self.execution}"


class Net(nn.Module):
    """Enough for every tool, and quick."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True)
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.relu(self.bn(self.conv(x))).mean((2, 3)))


Scenario = Callable[[nn.Module, Tensor], Any]


def capture(model: nn.Module, x: Tensor) -> None:
    with th.capture(model, "conv", "relu:input", "fc.weight") as rec:
        model(x)
    rec["conv"]


def by_hand(model: nn.Module, x: Tensor) -> None:
    session = th.capture(model, "conv").open()
    try:
        model(x)
    finally:
        session.close()


def edit(model: nn.Module, x: Tensor) -> None:
    with th.edit(model, {"conv": edits.scale(2.0), "fc:input": [edits.zero(), edits.add(1.0)]}):
        model(x)


def gradients(model: nn.Module, x: Tensor) -> None:
    with th.capture(model, "conv:grad", "relu:grad_input", "fc:grad_total", "fc.weight:grad"):
        model(x).sum().backward()


def operations(model: nn.Module, x: Tensor) -> None:
    with th.capture(model, "/mean", "conv/conv2d:input"):
        model(x)


def guard(model: nn.Module, x: Tensor) -> None:
    with th.guard(model):
        model(x).sum().backward()


def guard_finds(model: nn.Module, x: Tensor) -> None:
    with contextlib.suppress(th.errors.GuardError), th.guard(model):
        model(x / 0)


def watch(model: nn.Module, x: Tensor) -> None:
    with th.watch(model, alarms=False) as w:
        for _ in range(2):
            model(x).sum().backward()
    w.table()


def stop(model: nn.Module, x: Tensor) -> None:
    th.run(model, x, capture="conv", stop=True)


def extract(model: nn.Module, x: Tensor) -> None:
    with tempfile.TemporaryDirectory() as folder:
        th.extract(model, x, "bn", folder, progress=False)


def layers(model: nn.Module, x: Tensor) -> None:
    th.layers(model, inputs=x)


def ops(model: nn.Module, x: Tensor) -> None:
    th.ops(model, x)


def cam(model: nn.Module, x: Tensor) -> None:
    th.cam(model, x)


def sweep(model: nn.Module, x: Tensor) -> None:
    th.sweep(model, x, x + 1, lambda output: output.sum(), sites="conv")


def diff(model: nn.Module, x: Tensor) -> None:
    th.diff(model, model, x)


def clip(model: nn.Module, x: Tensor) -> None:
    with th.clip_gradients(model, 1.0):
        model(x).sum().backward()


def feature_layers(model: nn.Module, x: Tensor) -> None:
    th.FeatureLayers(model, ["conv", "fc"])(x)


def hook_manager(model: nn.Module, x: Tensor) -> None:
    with th.HookManager(model) as manager:
        manager.add("conv")
        model(x)


_TOOLS = (capture, by_hand, edit, gradients, operations, guard, guard_finds, watch, clip, stop, extract)
_QUESTIONS = (layers, ops, cam, sweep, diff, feature_layers, hook_manager)
SCENARIOS: dict[str, Scenario] = {f.__name__: f for f in (*_TOOLS, *_QUESTIONS)}


def state(model: nn.Module) -> list[Any]:
    """What must be as before: hooks, modes, flags of the model; modes of the process."""
    found: list[Any] = []
    for name, module in model.named_modules():
        hooks = {k: len(v) for k, v in vars(module).items() if "hooks" in k and isinstance(v, dict) and v}
        found.append((name, module.training, hooks, sorted(vars(module))))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        hooks = len(tensor._backward_hooks or {}) + len(getattr(tensor, "_post_accumulate_grad_hooks", None) or {})
        found.append((name, tensor.requires_grad, hooks, tensor.device))
    found.append(torch._C._len_torch_function_stack())
    found.append(stance())
    found.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.compiler.is_compiling()))
    from torchhook._core.scope import active

    found.append(len(active.get()))
    return found


def fresh() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Net().train()
    model.bn.eval()  # modes differ between modules, as in fine-tuning
    return model, torch.randn(2, 1, 4, 4)


@contextlib.contextmanager
def traced(on_line: Callable[[str, int], None]) -> Iterator[None]:
    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            on_line(frame.f_code.co_filename, frame.f_lineno)
        return local

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(LIBRARY) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


@functools.cache
def _inlined(file: str) -> frozenset[int]:
    """Lines of comprehensions that Python runs in the frame around them, as from 3.12 on.

    What a trace function raises there goes past the ends of the blocks around; what a signal raises does not.
    """
    if sys.version_info < (3, 12):
        return frozenset()
    found = (
        n
        for n in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(n, (ast.ListComp, ast.SetComp, ast.DictComp))
    )
    return frozenset(line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))


def points(scenario: Scenario) -> list[Point]:
    """Every line of the library that is executed in this thread, at its first and its last execution."""
    seen: Counter[tuple[str, int]] = Counter()
    for _ in range(2):  # imports and caches are filled the first time
        seen.clear()
        model, x = fresh()
        with traced(lambda file, line: seen.update([(file, line)])):
            scenario(model, x)
    places = [(place, times) for place, times in seen.items() if place[1] not in _inlined(place[0])]
    return [Point(*place, execution) for place, times in places for execution in sorted({1, times})]


def interrupted(scenario: Scenario, point: Point) -> str | None:
    """Interrupt a scenario at a point: what is left of it, or ``None``."""
    model, x = fresh()
    before = state(model)
    left = [point.execution]

    def on_line(file: str, line: int) -> None:
        if (file, line) == point[:2]:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

    reached = False
    with warnings.catch_warnings(), silent():
        warnings.simplefilter("ignore")
        try:
            with traced(on_line):
                scenario(model, x)
        except KeyboardInterrupt:
            reached = True
    if not reached and left[0] > 0:
        return None  # another way was taken this time
    try:
        after = state(model)
        torch.ones(2).add(1).sum().item()
        if after != before:
            return f"left: {[(a, b) for a, b in zip(before, after, strict=True) if a != b][:3]}"
        model(x).sum().backward()
    except Exception as error:
        return f"afterwards: {type(error).__name__}: {error}"
    return None


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """An interrupt in a finalizer cannot be raised: Python reports it, and goes on."""
    before, sys.unraisablehook = sys.unraisablehook, lambda *_: None
    try:
        yield
    finally:
        sys.unraisablehook = before


def hunt(names: list[str], sample: int | None, seed: int = 0) -> dict[str, list[str]]:
    """What every scenario leaves behind, by its name."""
    found: dict[str, list[str]] = {}
    for name in names:
        every = points(SCENARIOS[name])
        chosen = every if sample is None else random.Random(seed).sample(every, min(sample, len(every)))
        bad = [f"{p}: {why}" for p in chosen if (why := interrupted(SCENARIOS[name], p))]
        found[name] = bad
        print(f"{name}: {len(chosen)} of {len(every)} points, {len(bad)} left something behind", flush=True)
        for line in bad[:20]:
            print(f"  {line}", flush=True)
        # What is stuck must not be blamed on the next one.
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        gc.collect()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--sample", type=int, default=None)
    options = parser.parse_args()
    threading.settrace(None)  # type: ignore[arg-type]
    failed = hunt(options.names, options.sample)
    sys.exit(any(failed.values()))

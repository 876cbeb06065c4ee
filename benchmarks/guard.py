"""What guarding a model costs, as a ratio to the plain pass in the same run.

    python benchmarks/guard.py [--rounds 15] [--json results.json]

Forward, and forward with backward. ``bare flags`` is the least that anyone could write by hand: a forward hook on every
module that adds ``isfinite().all()`` of its output to one flag on the device, which is read at the end. The contestants
take turns, and medians are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from timing import compare
from torch import Tensor, nn

import tests.conftest  # noqa: F401  torchvision beside a CPU torch
from torchhook._guard.api import guard
from torchhook._recording.tables import Table

MUST = {"forward": 1.8}
AIM = {"forward": 1.3}


class Work(NamedTuple):
    model: nn.Module
    inputs: dict[str, Tensor]
    training: bool


def resnet18(device: str, training: bool) -> Work:
    from torchvision.models import resnet18 as build

    torch.manual_seed(0)
    model, x = build(weights=None).to(device), torch.randn(8, 3, 128, 128, device=device)
    return Work(model.train(training), {"x": x}, training)


def gpt2(device: str, training: bool, size: str, batch: int, tokens: int) -> Work:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"small": (768, 12, 12), "medium": (1024, 24, 16)}[size]
    width, layers, heads = shape
    torch.manual_seed(0)
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=heads)
    model = GPT2LMHeadModel(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    ids = torch.randint(0, config.vocab_size, (batch, tokens), device=device)
    return Work(model.train(training), {"input_ids": ids, "labels": ids} if training else {"input_ids": ids}, training)


def step(work: Work) -> Callable[[], None]:
    """One pass, to its end: what is asked for is there when it returns."""

    def run() -> None:
        with torch.set_grad_enabled(work.training):
            output = work.model(**work.inputs)
            if work.training:
                loss = output.loss if hasattr(output, "loss") else output.square().mean()
                loss.backward()
                work.model.zero_grad()
        if next(iter(work.inputs.values())).is_cuda:
            torch.cuda.synchronize()

    return run


@contextlib.contextmanager
def bare_flags(model: nn.Module) -> Iterator[None]:
    """A flag that every module's output is multiplied into, and one read at the end of the model's call."""
    flags: dict[str, Tensor] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            good = output.detach().isfinite().all()
            flags["all"] = flags["all"] & good if "all" in flags else good

    def read(module: nn.Module, args: Any, output: Any) -> None:
        if not flags.pop("all"):
            raise FloatingPointError

    handles = [module.register_forward_hook(note) for module in model.modules()]
    handles.append(model.register_forward_hook(read))
    yield
    for handle in handles:
        handle.remove()


GUARDS: dict[str, Callable[[nn.Module], contextlib.AbstractContextManager[Any]]] = {
    "plain": lambda model: contextlib.nullcontext(),
    "guard": lambda model: guard(model),
    "thorough": lambda model: guard(model, thorough=True),
    "bare flags": bare_flags,
}


def measured(build: Callable[[], Work], rounds: int) -> dict[str, float]:
    """Median seconds of each, on models of their own that stay guarded: opening is not what is measured."""
    with contextlib.ExitStack() as stack:
        steps = {}
        for name, open_ in GUARDS.items():
            work = build()
            stack.enter_context(open_(work.model))
            steps[name] = step(work)
            steps[name]()  # the first run of a guard copies buffers and inputs
            steps[name]()
        return compare(steps, rounds=rounds, repeat=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="a part of a row's name")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: dict[str, Callable[[], Work]] = {
        "CPU, ResNet-18 8x3x128x128, forward": lambda: resnet18("cpu", False),
        "CPU, ResNet-18 8x3x128x128, forward+backward": lambda: resnet18("cpu", True),
        "CPU, GPT-2 small 1x64, forward": lambda: gpt2("cpu", False, "small", 1, 64),
    }
    if torch.cuda.is_available():
        rows |= {
            "CUDA, ResNet-18 8x3x128x128, forward+backward": lambda: resnet18("cuda", True),
            "CUDA, GPT-2 medium bf16 8x512, forward": lambda: gpt2("cuda", False, "medium", 8, 512),
            "CUDA, GPT-2 medium bf16 8x512, forward+backward": lambda: gpt2("cuda", True, "medium", 8, 512),
            "CUDA, GPT-2 medium bf16 1x1, forward": lambda: gpt2("cuda", False, "medium", 1, 1),
        }
    results: list[dict[str, Any]] = []
    for name, build in rows.items():
        if options.only in name:
            times = measured(build, options.rounds)
            ratios = {kind: seconds / times["plain"] for kind, seconds in times.items() if kind != "plain"}
            results.append({"work": name, "milliseconds": 1e3 * times["plain"], **ratios})
    kinds = [kind for kind in GUARDS if kind != "plain"]
    table = [[r["work"], f"{r['milliseconds']:.1f}", *(f"{r[kind]:.2f}" for kind in kinds)] for r in results]
    title = f"Guarding, ratio to the plain pass: {options.threads} threads, torch {torch.__version__}, medians"
    print(Table(title, ["", ">ms plain", *(f">{kind}" for kind in kinds)], table))
    answer = {"title": title, "results": results, "must_reach": MUST, "aim": AIM}
    if options.json is not None:
        options.json.write_text(json.dumps(answer, indent=1))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()

"""A stream of tokens beside the forward passes alone, over the same loader.

    python benchmarks/stream.py [--rounds 5] [--device cuda] [--size small] [--threads 1] [--json out.json]

Each takes its turn over the same rows, in one process; the ratio is what counts: the tokens of a second that a stream
gives, in units of those that the model alone computes. The model stops after the last site, for all of them; ``whole``
is the model without that.

On the host, one thread computes and its own time is taken. With more, the time on the clock is: what a process takes of
its cores has in it what threads spend on waiting for each other, and where others want the same cores that is most of
it, in each operation anew. And memory is kept for the next layer: else chance decides, for each of the contestants,
whether the system has to find a hundred thousand pages again in a run, half as long as it takes, or none.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import import_transformers
from results import Report, Row
from timing import ratios
from torch.utils.data import DataLoader, TensorDataset

import torchhook as th

SIZES = {
    "tiny": {"n_embd": 128, "n_layer": 4, "n_head": 4},
    "mini": {"n_embd": 384, "n_layer": 6, "n_head": 6},
    "small": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
}


def gpt2(size: str, device: str) -> Any:
    transformers = import_transformers()
    torch.manual_seed(0)
    return transformers.GPT2Model(transformers.GPT2Config(**SIZES[size])).eval().to(device)


class Stop(BaseException):
    pass


def alone(model: Any, loader: Any, device: str, stop_at: Any = None) -> Callable[[], None]:
    """The forward passes and nothing else, by hand."""

    def stop(*_: Any) -> None:
        raise Stop

    def run() -> None:
        handle = None if stop_at is None else stop_at.register_forward_hook(stop)
        with torch.no_grad():
            for (ids,) in loader:
                with contextlib.suppress(Stop):
                    model(ids.to(device, non_blocking=True))
        if handle is not None:
            handle.remove()

    return run


def streamed(model: Any, loader: Any, sites: list[str], **options: Any) -> Callable[[], None]:
    def run() -> None:
        for _ in th.stream(model, loader, sites, **options):
            pass

    return run


def keep_memory() -> None:
    """Have the C library keep what is given back, where it is told as glibc is."""
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, TypeError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, 1 << 30)
        library.mallopt(mmap_threshold, 32 << 20)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", default="", choices=["", *SIZES])
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    cuda = chosen.device.startswith("cuda")
    if not cuda:
        torch.set_num_threads(chosen.threads)
        keep_memory()
    size, rows = chosen.size or ("medium" if cuda else "tiny"), chosen.rows or (2048 if cuda else 128)
    model = gpt2(size, chosen.device)
    ids = torch.randint(0, 50257, (rows, chosen.tokens))
    loader: Any = DataLoader(TensorDataset(ids), batch_size=32, pin_memory=cuda)
    last = len(model.h) - 1
    options = {"buffer": max(4096, rows * chosen.tokens // 4), "batch": 1024}
    contestants = {
        "forward, to the last site": alone(model, loader, chosen.device, model.h[last]),
        "forward, whole": alone(model, loader, chosen.device),
        "stream, one site": streamed(model, loader, [f"h.{last}"], **options),
        "stream, four sites": streamed(model, loader, [f"h.{i}" for i in range(last - 3, last + 1)], **options),
        "stream, one site, to the host": streamed(model, loader, [f"h.{last}"], device="cpu", **options),
    }
    wait = torch.cuda.synchronize if cuda else lambda: None
    # On the host everything is computed in this thread, whose own time others do not disturb.
    clock = time.process_time if not cuda and chosen.threads == 1 else time.perf_counter
    found = ratios(contestants, chosen.rounds, 1, wait=wait, clock=clock)
    report = Report("Streams", chosen.json)
    for name, one in found.items():
        must = 0.9 if name.startswith("stream") else None
        report.add(
            Row(
                f"GPT-2 {size} on {chosen.device}",
                name,
                1 / one.median,
                must=must,
                more_is_better=True,
                low=1 / one.high,
                high=1 / one.low,
                note=f"{rows * chosen.tokens / one.seconds:,.0f} tokens/s",
            )
        )


if __name__ == "__main__":
    main()

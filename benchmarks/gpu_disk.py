"""Features to disk on a GPU, beside what bounds it: the slower of the stopped forward passes and a raw write."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bare import leaves, same
from gpu_models import Sizes
from results import Row
from torch import Tensor, nn

import torchhook as th

FOLDER = os.environ.get("TORCHHOOK_BENCH_FOLDER", tempfile.gettempdir())


class Stop(BaseException):
    """Ends a forward pass by hand."""


def stopped(model: nn.Module, site: str, rows: Tensor, batch: int, device: str, take: Callable[[Tensor], None]) -> None:
    """The forward passes alone, each ended by hand at the site."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        take(leaves(output)[0])
        raise Stop

    handle = model.get_submodule(site).register_forward_hook(hook)
    try:
        with torch.no_grad():
            for low in range(0, len(rows), batch):
                with contextlib.suppress(Stop):
                    model(rows[low : low + batch].to(device, non_blocking=True))
    finally:
        handle.remove()


def raw_write(nbytes: int) -> Callable[[Path], None]:
    block = memoryview(os.urandom(min(32 << 20, nbytes)))

    def write(out: Path) -> None:
        with open(out / "raw", "wb", buffering=0) as file:
            left = nbytes
            while left:
                left -= file.write(block[: min(left, len(block))])
            os.fsync(file.fileno())

    return write


def wrong_rows(features: Any, model: nn.Module, site: str, rows: Tensor, batch: int, device: str) -> tuple[int, int]:
    """Rows on disk that differ from what a bare hook sees when the batches run again."""
    column, low, wrong = features[site], 0, 0

    def check(output: Tensor) -> None:
        nonlocal low, wrong
        stored = torch.as_tensor(column[low : low + len(output)]).to(device)
        if not same(stored, output):
            wrong += sum(not same(a, b) for a, b in zip(stored, output, strict=True))
        low += len(output)

    stopped(model, site, rows, batch, device, check)
    return wrong + abs(len(rows) - low) + abs(len(column) - len(rows)), len(rows)


def to_disk(
    work: str,
    model: nn.Module,
    site: str,
    rows: Tensor,
    batch: int,
    sizes: Sizes,
    turns: int,
    goals: tuple[float, float],
) -> list[Row]:
    """The rows of the table for one site: each turn has all three, and its own bound."""
    widths: list[int] = []
    stopped(model, site, rows[:batch], batch, sizes.device, lambda output: widths.append(output.nbytes // len(output)))
    nbytes, wrong = widths[0] * len(rows), (len(rows), len(rows))
    write = raw_write(nbytes)

    def extract(out: Path) -> Any:
        return th.extract(model, rows, site, out / "store", batch_size=batch, run_on=sizes.device, progress=False)

    ways: dict[str, Callable[[Path], object]] = {
        "stopped forward passes": lambda out: stopped(model, site, rows, batch, sizes.device, lambda output: None),
        "raw write": write,
        "th.extract": extract,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):  # the first turn warms up
        for way, run in ways.items():
            out = Path(tempfile.mkdtemp(dir=FOLDER))
            _synchronize(sizes)
            start = time.perf_counter()
            result = run(out)
            _synchronize(sizes)
            if turn:
                seconds[way].append(time.perf_counter() - start)
            elif way == "th.extract":
                wrong = wrong_rows(result, model, site, rows, batch, sizes.device)
            del result
            shutil.rmtree(out)
            # What is left to write would be written in the next one's time.
            os.sync()
    bounds = [max(two) for two in zip(seconds["stopped forward passes"], seconds["raw write"], strict=True)]
    ratios = {w: median(b / t for b, t in zip(bounds, found, strict=True)) for w, found in seconds.items()}
    note = f"{nbytes / 1e9:.2f} GB"
    must, aim = goals
    # The bound is 1, and more is better: a way that takes twice as long has 0.5.
    return [
        *(Row(work, way, ratios[way], more_is_better=True) for way in list(ways)[:2]),
        Row(work, "th.extract", ratios["th.extract"], must, aim, *wrong, note=note, more_is_better=True),
    ]


def _synchronize(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.cuda.synchronize()

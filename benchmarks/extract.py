"""Features of a data set to disk and back, beside what bounds it and what people do by hand.

    python benchmarks/extract.py [--rounds 3] [--json out.json] [--only requests "tensors in memory"]
    python benchmarks/extract.py --only gpu --large

Everything of one table runs in turns in one process, on the same rows; the ratios are what counts, not the seconds.
The bound of extraction is the slower of two: the forward passes alone, over the same loader and with the same early
stop, and a raw sequential write of the same bytes, synced.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import extract_gpu
import numpy as np
import request_counts
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torchhook._extract.api import extract
from torchhook._features.api import Features, open_features
from torchhook._recording.tables import Table
from torchhook.demo import efficientnet_lite0

SHARD = 32 << 20


class Net(nn.Module):
    """A stem, ``depth`` stages and a head that is never needed."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 4, stride=4), nn.ReLU(inplace=True))
        stage = [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True)]
        self.stages = nn.Sequential(*(nn.Sequential(*stage) for _ in range(depth)))
        self.head = nn.Linear(width * 64, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).flatten(1))


class Wide(nn.Module):
    """Costs nothing and makes large rows: only the disk counts."""

    def __init__(self, times: int = 16) -> None:
        super().__init__()
        self.times, self.stem, self.head = times, nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x.flatten(1).repeat(1, self.times)))


def steady_memory() -> None:
    """Let the allocator keep what is freed: else it goes back to the system at some point of each run, or does not."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(option, 1 << 30)


class Stop(BaseException):
    pass


def over(model: nn.Module, layer: str, loader: DataLoader[Any], take: Callable[[Tensor], None]) -> None:
    """A bare hook, and an early stop by hand."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        take(output)
        raise Stop

    handle = model.get_submodule(layer).register_forward_hook(hook)
    with torch.no_grad():
        for x, _ in loader:
            with contextlib.suppress(Stop):
                model(x)
    handle.remove()


def forward_only(model: nn.Module, layer: str, loader: DataLoader[Any], out: Path) -> None:
    over(model, layer, loader, lambda output: None)


def raw_write(nbytes: int) -> Callable[..., None]:
    block = memoryview(np.random.default_rng(0).bytes(min(SHARD, nbytes)))

    def write(model: nn.Module, layer: str, loader: DataLoader[Any], out: Path) -> None:
        with open(out / "raw", "wb", buffering=0) as file:
            left = nbytes
            while left:
                left -= file.write(block[: min(left, len(block))])
            os.fsync(file.fileno())

    return write


def in_memory(model: nn.Module, layer: str, loader: DataLoader[Any], out: Path) -> None:
    """thingsvision's way: everything in memory, then one file."""
    parts: list[Any] = []
    over(model, layer, loader, lambda output: parts.append(output.cpu().numpy().copy()))
    np.save(out / "all.npy", np.concatenate(parts))


def save_each(model: nn.Module, layer: str, loader: DataLoader[Any], out: Path) -> None:
    """A file per batch."""
    names = iter(range(1_000_000))
    over(model, layer, loader, lambda output: torch.save(output.cpu(), out / f"{next(names)}.pt"))


def extracted(model: nn.Module, layer: str, loader: DataLoader[Any], out: Path) -> None:
    extract(model, loader, layer, out / "store", shard_bytes=SHARD, progress=False)


def throughput(
    name: str,
    model: nn.Module,
    layer: str,
    rows: int,
    rounds: int,
    *,
    size: int = 32,
    threads: int = 1,
    rest: float = 0,
) -> tuple[Table, dict[str, float]]:
    torch.set_num_threads(threads)
    data = TensorDataset(torch.rand(rows, 3, size, size), torch.zeros(rows, dtype=torch.long))
    loader: DataLoader[Any] = DataLoader(data, batch_size=32)
    width = []
    over(model, layer, DataLoader(data, batch_size=1, sampler=[0]), lambda output: width.append(output.nbytes))
    ways: dict[str, Callable[..., None]] = {
        "forward only": forward_only,
        "raw write": raw_write(rows * width[0]),
        "th.extract": extracted,
        "collect, np.save": in_memory,
        "torch.save per batch": save_each,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):  # the first turn warms up
        for way, run in ways.items():
            out = Path(tempfile.mkdtemp(dir=FOLDER))
            time.sleep(rest)
            start = time.perf_counter()
            run(model, layer, loader, out)
            if turn:
                seconds[way].append(time.perf_counter() - start)
            shutil.rmtree(out)
            os.sync()
    # Against the bound of the same turn: how fast the disk is depends on what was written just before.
    bounds = [max(two) for two in zip(seconds["forward only"], seconds["raw write"], strict=True)]
    ratios = {w: median(b / t for b, t in zip(bounds, found, strict=True)) for w, found in seconds.items()}
    lines = []
    for way, found in seconds.items():
        t = median(found)
        lines.append([way, f"{rows / t:,.0f}", f"{rows * width[0] / t / 1e6:,.0f}", f"{ratios[way]:.2f}"])
    title = f"{name}: {rows:,} rows of {width[0] / 1024:.1f} KiB"
    return Table(title, ["way", ">rows/s", ">MB/s", ">of the bound"], lines), ratios


def tensors(rounds: int) -> tuple[Table, dict[str, float]]:
    """Rows that lie in memory, against a plain loop over slices of them that keeps its features in memory."""
    torch.set_num_threads(1)
    model, x = Net(64, 6).eval(), torch.rand(6_000, 3, 32, 32)
    data = TensorDataset(x, torch.zeros(len(x), dtype=torch.long))
    kept: list[Tensor] = []

    def plain(out: Path) -> None:
        kept.clear()
        loader: Any = ((x[low : low + 32], None) for low in range(0, len(x), 32))
        over(model, "stages.5", loader, lambda output: kept.append(output.clone()))

    def ours(given: Any) -> Callable[[Path], None]:
        return lambda out: (extract(model, given, "stages.5", out, batch_size=32, progress=False), None)[1]

    ways: dict[str, Callable[[Path], None]] = {
        "plain loop, nothing stored": plain,
        "th.extract, a tensor": ours(x),
        "th.extract, a TensorDataset": ours(data),
        "th.extract, its DataLoader": ours(DataLoader(data, batch_size=32)),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):  # the first turn warms up
        for way, run in ways.items():
            out = Path(tempfile.mkdtemp(dir=FOLDER))
            took = timed(lambda run=run, out=out: run(out / "store"))  # type: ignore[misc]
            if turn:
                seconds[way].append(took)
            shutil.rmtree(out)
            os.sync()
    first = seconds["plain loop, nothing stored"]
    ratios = {way: median(a / b for a, b in zip(first, found, strict=True)) for way, found in seconds.items()}
    lines = [[way, f"{len(x) / median(found):,.0f}", f"{ratios[way]:.2f}"] for way, found in seconds.items()]
    return Table(
        "Tensors in memory, a small model on one core", ["way", ">rows/s", ">of the plain loop"], lines
    ), ratios


_PEAK = """
import sys, tempfile, torch
sys.path.insert(0, {here!r})
from extract import Net, SHARD
from torchhook._extract.api import extract
torch.set_num_threads(1)
class Rows(torch.utils.data.Dataset):
    def __len__(self): return {rows}
    def __getitem__(self, i): return torch.full((3, 32, 32), i / 1e5)
with tempfile.TemporaryDirectory(dir={folder!r}) as out:
    extract(Net(64, 1), Rows(), "stages.0", out, batch_size=50, shard_bytes=SHARD // 4, progress=False)
# Not ru_maxrss: a child inherits that of its parent.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_memory() -> tuple[Table, dict[str, float]]:
    found = {}
    for rows in (5_000, 50_000):
        code = _PEAK.format(here=str(Path(__file__).parent), rows=rows, folder=FOLDER)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        found[rows] = int(done.stdout) * 1024
    ratio = found[50_000] / found[5_000]
    lines = [[f"{rows:,}", f"{nbytes / 1e6:,.0f}", f"{nbytes / found[5_000]:.2f}"] for rows, nbytes in found.items()]
    return Table("Peak memory of a process", [">rows", ">MB", ">ratio"], lines), {
        "peak with 50,000 rows / with 5,000": ratio
    }


def in_turns(rounds: int, *runs: Callable[[], float]) -> list[float]:
    """The median seconds of each, in turns."""
    found = [[run() for run in runs] for _ in range(rounds)]
    return [median(times) for times in zip(*found, strict=True)]


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def make_store(rows: int, width: int, folder: Path) -> tuple[Features, Tensor]:
    x = torch.randn(rows, width)
    data = TensorDataset(x, torch.arange(rows))
    extract(nn.Sequential(nn.Identity()), data, "0", folder, batch_size=256, shard_bytes=SHARD // 4, progress=False)
    return open_features(folder), x


def reading(rounds: int) -> tuple[Table, dict[str, float]]:
    torch.set_num_threads(1)
    lines, ratios = [], {}
    for width in (384, 2048):
        folder = Path(tempfile.mkdtemp(dir=FOLDER))
        features, x = make_store(20_000, width, folder / "store")
        np.save(folder / "all.npy", x.numpy())
        mapped = np.load(folder / "all.npy", mmap_mode="r")
        values = features["0"]
        chosen = torch.randperm(len(x))[:5_000].tolist()

        def ours(values: Any = values, chosen: list[int] = chosen) -> None:
            for row in chosen:
                values[row]

        def numpy(mapped: Any = mapped, chosen: list[int] = chosen) -> None:
            for row in chosen:
                np.array(mapped[row])

        a, b = in_turns(rounds * 3, lambda f=ours: timed(f), lambda f=numpy: timed(f))  # type: ignore[misc]
        lines.append(
            [f"random row of {width} floats, µs", f"{a / 5e3 * 1e6:.1f}", f"{b / 5e3 * 1e6:.1f}", f"{a / b:.2f}"]
        )
        ratios[f"a random row of {width} floats, time / that of numpy's memmap"] = a / b

        def epoch(data: Any) -> Callable[[], float]:
            # Starting the workers is the same for all, and would hide the difference.
            loader = DataLoader(data, batch_size=256, shuffle=True, num_workers=2, persistent_workers=True)
            sum(1 for _ in loader)
            return lambda: timed(lambda: sum(x.shape[0] for x, _ in loader) and None)

        def whole(data: Any) -> Callable[[], float]:
            loader = data.loader(256, shuffle=True, workers=2, persistent_workers=True)
            sum(1 for _ in loader)
            return lambda: timed(lambda: sum(x.shape[0] for x, _ in loader) and None)

        store, memory, fast = in_turns(
            rounds * 2 + 1,
            epoch(features.dataset("0")),
            epoch(TensorDataset(x, torch.arange(len(x)))),
            whole(features.dataset("0")),
        )
        for name, t in (("DataLoader", store), ("dataset.loader", fast)):
            line = [f"shuffled epoch, {width} floats, {name}, rows/s", *(f"{len(x) / s:,.0f}" for s in (t, memory))]
            lines.append([*line, f"{memory / t:.2f}"])
            ratios[
                f"a shuffled epoch of rows of {width} floats by {name}, rows a second / those of a tensor in memory"
            ] = memory / t
        shutil.rmtree(folder)
    columns = ["reading", ">store", ">numpy memmap / tensor in memory", ">ratio"]
    return Table("Reading", columns, lines), ratios


FOLDER = os.environ.get("TORCHHOOK_BENCH_FOLDER", tempfile.gettempdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--large", action="store_true", help="on a GPU, a decoder of 6.6 billion parameters, too")
    parser.add_argument("--only", nargs="*", help="some of the tables, by name: 'requests', 'tensors in memory', ...")
    given = parser.parse_args()
    steady_memory()
    cores, rounds = os.cpu_count() or 1, given.rounds
    small = Net(64, 6).eval()
    found: dict[str, dict[str, float]] = {}
    tables: dict[str, Callable[[], tuple[Table, dict[str, float]]]] = {
        "real model": lambda: throughput(
            "EfficientNet-Lite0 on all cores",
            efficientnet_lite0(),
            "_blocks.15",
            1_024,
            rounds,
            size=128,
            threads=cores,
        ),
        "small model": lambda: throughput("A small model on one core", small, "stages.5", 6_000, rounds),
        "small model, all cores": lambda: throughput(
            "A small model on all cores", small, "stages.5", 12_000, rounds, threads=cores
        ),
        # A virtual machine gives freed memory back to its host; a write is faster before it has done so than after.
        "disk, from rest": lambda: throughput(
            "Bound by the disk, from rest", Wide().eval(), "stem", 8_000, rounds, rest=3
        ),
        "disk": lambda: throughput("Bound by the disk, one after the other", Wide().eval(), "stem", 8_000, rounds),
        "tensors in memory": lambda: tensors(rounds),
        "requests": request_counts.table,
        "memory": peak_memory,
        "reading": lambda: reading(rounds),
    }
    if torch.cuda.is_available():
        tables["gpu"] = lambda: extract_gpu.table(rounds, FOLDER, given.large)
    for name, run in tables.items():
        if given.only and name not in given.only:
            continue
        table, ratios = run()
        found[table.title] = ratios
        print(table, flush=True)
        print()
        if given.json:  # after each: they take minutes, and a later one may fail
            given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

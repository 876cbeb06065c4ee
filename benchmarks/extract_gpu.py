"""Extraction on a CUDA device against its bound, the slower of two that are measured in the same turn: the forward pass
over the same rows with the same early stop, and a raw write of the same bytes, as direct as extraction's own.

It is the table ``gpu`` of ``benchmarks/extract.py``; beside each ratio stands where the time went.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._extract import identity, job, task, writer
from torchhook._extract.api import extract
from torchhook._features import direct_io, shards, store
from torchhook._recording.tables import Table

CHUNK = 64 << 20
FILES = 3


class LlamaBlock(nn.Module):
    """As Llama's, without positions."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = (p.view(n, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, c))
        y = self.norm_2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """6.6 billion random parameters by default."""

    def __init__(self, width: int = 4096, inner: int = 11_008, heads: int = 32, depth: int = 32) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32_000, width), nn.RMSNorm(width)
        self.blocks = nn.ModuleList(LlamaBlock(width, inner, heads) for _ in range(depth))
        self.head = nn.Linear(width, 32_000, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def llama(device: str, **sizes: int) -> nn.Module:
    """Filled where it lies: to draw so many numbers on the host takes a minute."""
    with torch.device("meta"):
        model = Llama(**sizes)
    model = model.to(torch.bfloat16).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    return model.eval()


class Stop(BaseException):
    pass


def forward_only(model: nn.Module, layer: str, x: Tensor, batch: int, device: str) -> None:
    """A bare hook that ends the pass; rows come from memory as extraction takes them, by way of a pinned copy."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        raise Stop

    handle = model.get_submodule(layer).register_forward_hook(hook)
    pin, ahead = device == "cuda", []
    with torch.no_grad():
        for rows in x.split(batch):
            if pin:
                rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows)
            with contextlib.suppress(Stop):
                model(rows.to(device, non_blocking=True))
            if pin:  # as many batches ahead as extraction: else every one takes pinned memory of its own
                ahead.append(torch.cuda.Event())
                ahead[-1].record()
                if len(ahead) > task.AHEAD:
                    ahead.pop(0).synchronize()
    handle.remove()
    if pin:
        torch.cuda.synchronize()


def raw_write(folder: Path, nbytes: int, files: int, room: Tensor) -> None:
    """One file, or several at once, around the page cache and synced."""

    def write(number: int) -> None:
        share = nbytes // files
        chunk = memoryview(room.numpy())
        handle = os.open(folder / f"raw{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        try:
            direct_io.write(handle, [chunk[: min(CHUNK, share - at)] for at in range(0, share, CHUNK)])
            os.fsync(handle)
        finally:
            os.close(handle)

    with ThreadPoolExecutor(files) as pool:
        list(pool.map(write, range(files)))


class Clock:
    """Seconds by step: those of the call itself, and those of its writers together."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def on(self, *steps: tuple[Any, str, str]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, step in steps:
                before = getattr(owner, name)
                setattr(owner, name, self._timed(before, step))
                stack.callback(setattr, owner, name, before)
            yield

    def _timed(self, function: Callable[..., Any], step: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                with self._lock:
                    self.seconds[step] += time.perf_counter() - start

        return timed


STEPS = (
    (job, "measure", "call: first batch"),
    (job.data_fingerprint, "of_data", "beside: fingerprint of the data"),
    (identity.Looked, "__init__", "call: the model's code, its sums begun"),
    (identity.Looked, "again", "first batch: the model's code, its sums read"),
    (identity.fingerprint, "of_tensors", "call: fingerprint of the model"),
    (job, "_run", "call: the run"),
    (job, "finish", "call: finish"),
    (writer.Writer, "take", "run: waits for a slab"),
    (writer.Writer, "close", "run: waits for the writers"),
    (task._Run, "_keep_pace", "run: waits for the device"),
    (task._Run, "_batch", "run: batches"),
    (writer.Writer, "_commit", "writers: all"),
    (writer, "check_values", "writers: looking for NaN"),
    (shards, "encode", "writers: checksum"),
    (store.shards.direct_io, "write", "writers: writing"),
    (os, "fsync", "writers: sync"),
)


def case(
    title: str, model: nn.Module, layer: str, x: Tensor, batch: int, rounds: int, folder: str, device: str = "cuda"
) -> tuple[list[list[str]], dict[str, Any]]:
    seen: list[int] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda m, a, out: seen.append(out.nbytes // len(out)))
    with torch.no_grad():
        model(x[:batch].to(device))
    handle.remove()
    nbytes = len(x) * seen[0]
    room = direct_io.empty((CHUNK,), torch.uint8).random_()
    clocks: list[Clock] = []

    def ours(out: Path) -> None:
        clocks.append(Clock())
        with clocks[-1].on(*STEPS):
            extract(model, x, layer, out / "store", batch_size=batch, progress=False)

    ways: dict[str, Callable[[Path], None]] = {
        "forward": lambda out: forward_only(model, layer, x, batch, device),
        "raw write": lambda out: raw_write(out, nbytes, 1, room),
        f"raw write, {FILES} files at once": lambda out: raw_write(out, nbytes, FILES, room),
        "th.extract": ours,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):  # the first turn warms up
        for way, run in ways.items():
            out = Path(tempfile.mkdtemp(dir=folder))
            start = time.perf_counter()
            run(out)
            if turn:
                seconds[way].append(time.perf_counter() - start)
            shutil.rmtree(out)
            os.sync()
    bounds = [max(two) for two in zip(seconds["forward"], seconds["raw write"], strict=True)]
    ratios = {way: median(b / t for b, t in zip(bounds, found, strict=True)) for way, found in seconds.items()}
    lines = [
        [title if way == "forward" else "", way, f"{median(t):.3f}", f"{nbytes / median(t) / 1e6:,.0f}", f"{ratio:.3f}"]
        for (way, t), ratio in zip(seconds.items(), ratios.values(), strict=True)
    ]
    steps = {step: round(median(clock.seconds[step] for clock in clocks[1:]), 4) for *_, step in STEPS}
    lines += [["", f"  {step}", f"{took:.3f}", "", ""] for step, took in steps.items() if took >= 0.001]
    found = {"bytes": nbytes, "seconds": {way: median(t) for way, t in seconds.items()}, "where": steps}
    return lines, {**found, "of the bound": ratios["th.extract"]}


def table(rounds: int, folder: str, large: bool) -> tuple[Table, dict[str, Any]]:
    from torchvision.models import resnet50

    lines: list[list[str]] = []
    found: dict[str, Any] = {}
    model, x = resnet50().cuda().eval(), torch.rand(4096, 3, 224, 224)
    for layer in ("avgpool", "layer4"):
        more, found[f"ResNet-50 {layer}"] = case(f"ResNet-50 {layer}", model, layer, x, 64, rounds, folder)
        lines += more
    del model, x
    torch.cuda.empty_cache()
    if large:
        name = "6.6 billion, block 16"
        ids = torch.randint(0, 32_000, (256, 1024))
        more, found[name] = case(name, llama("cuda"), "blocks.16", ids, 8, max(1, rounds - 1), folder)
        lines += more
    title = f"Extraction on {torch.cuda.get_device_name()}, torch {torch.__version__}, to {folder}"
    return Table(title, ["work", "way", ">s", ">MB/s", ">of the bound"], lines), found

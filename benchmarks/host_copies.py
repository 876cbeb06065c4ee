"""Ways to bring values from a CUDA device to the host while a model runs: ``python benchmarks/host_copies.py``.

Bare hooks on the six stages of a ResNet-50 (large values: the bus is the bound) and on the 24 blocks of a decoder of
GPT-2 medium's size (small values: the host is), so that only the way of copying differs. Each is a ratio over the
plain forward pass of the same round; beside it, what one copy costs the host, and how fast the bus is for each kind of
memory. ``th.capture(device="cpu")`` stands at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import mmap
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

STAGES = ["relu", "maxpool", "layer1", "layer2", "layer3", "layer4"]
Copy = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """As GPT-2's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = (
            part.view(n, t, self.heads, c // self.heads).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, c))
        return x + self.down(self.act(self.up(self.ln_2(x))))


class Decoder(nn.Module):
    """Random weights; no library needed."""

    def __init__(self, width: int = 1024, heads: int = 16, depth: int = 24, words: int = 50_257) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# -- ways ---------------------------------------------------------------------------------------------


class Way:
    """One way to copy; ``end`` is called when the forward pass has been started."""

    def __init__(self) -> None:
        self.side = torch.cuda.Stream()

    def copy(self, source: Tensor) -> Tensor:
        raise NotImplementedError

    def end(self) -> None:
        """All copies are done."""
        self.side.synchronize()


class AsBefore(Way):
    """The way of before: ``wait_stream``, the stream's context, two new events for each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: deque[Any] = deque()

    def copy(self, source: Tensor) -> Tensor:
        source = torch._lazy_clone(source.detach())
        self.side.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self.side):
            into = torch.empty_like(source, device="cpu", pin_memory=True)
            into.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self.side)
        while self.pending and self.pending[0][0].query():
            self.pending.popleft()
        self.pending.append((done, source))
        return into

    def end(self) -> None:
        while self.pending:
            self.pending.popleft()[0].synchronize()


class Lean(Way):
    """Events that are used again, and the stream switched by hand; memory from torch's own cache of pinned blocks."""

    def __init__(self, lazy: bool = True, hold: bool = True, every: int = 1) -> None:
        super().__init__()
        self.lazy, self.hold, self.every = lazy, hold, every
        self.made = torch.cuda.Event()
        self.free: list[torch.cuda.Event] = []
        self.pending: deque[Any] = deque()
        self.batch: list[tuple[Tensor, Tensor]] = []

    def room(self, source: Tensor) -> Tensor:
        return torch.empty_like(source, device="cpu", pin_memory=True)

    def copy(self, source: Tensor) -> Tensor:
        if self.lazy:
            source = torch._lazy_clone(source.data)
        into = self.room(source)
        current = torch.cuda.current_stream(source.device)
        self.made.record(current)
        self.batch.append((into, source))
        if len(self.batch) >= self.every:
            self.start(current)
        return into

    def start(self, current: Any) -> None:
        self.side.wait_event(self.made)
        torch.cuda.set_stream(self.side)
        for into, source in self.batch:
            into.copy_(source, non_blocking=True)
            if not self.hold:
                source.record_stream(self.side)
        torch.cuda.set_stream(current)
        if self.hold:
            done = self.free.pop() if self.free else torch.cuda.Event()
            done.record(self.side)
            while self.pending and self.pending[0][0].query():
                self.free.append(self.pending.popleft()[0])
            self.pending.append((done, self.batch))
        self.batch = []

    def end(self) -> None:
        if self.batch:
            self.start(torch.cuda.current_stream())
        self.side.synchronize()
        self.free += [event for event, _ in self.pending]
        self.pending.clear()


class OwnPool(Lean):
    """The same with a pool of its own: a block comes back when the storage that shows it dies."""

    blocks: dict[int, list[Tensor]] = {}  # noqa: RUF012

    def room(self, source: Tensor) -> Tensor:
        found = self.blocks.setdefault(source.nbytes, [])
        block = found.pop() if found else torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=True)
        # A storage over the block's memory whose death is told.
        shown = torch.frombuffer(memoryview(block.numpy()), dtype=source.dtype).view(source.shape)
        weakref.finalize(shown.untyped_storage(), found.append, block)
        return shown


class OneSlab(Lean):
    """One block for a whole call, cut into values: they keep each other alive."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.slab, self.at = nbytes, torch.empty(0), 0

    def room(self, source: Tensor) -> Tensor:
        if not self.at:
            self.slab = torch.empty(self.nbytes // source.element_size(), dtype=source.dtype, pin_memory=True)
        room = self.slab.as_strided(source.shape, source.stride(), self.at)
        self.at += source.numel()
        return room

    def end(self) -> None:
        super().end()
        self.at = 0


class Fixed(Lean):
    """Memory that is there: no allocator at all. What is left is the price of starting a copy."""

    def __init__(self, memory: Callable[[Tensor], Tensor], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.memory, self.rooms, self.at = memory, [], 0

    def room(self, source: Tensor) -> Tensor:
        if self.at == len(self.rooms):
            self.rooms.append(self.memory(source))
        self.at += 1
        return self.rooms[self.at - 1]

    def end(self) -> None:
        super().end()
        self.at = 0


class TwoStreams(Lean):
    """Every other copy on another stream."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = [self.side, torch.cuda.Stream()]

    def start(self, current: Any) -> None:
        self.side = self.sides[0]
        self.sides.reverse()
        super().start(current)

    def end(self) -> None:
        super().end()
        torch.cuda.synchronize()


class Probe(Fixed):
    """Where the time of a small copy goes while a model runs: each step by itself, and some left out."""

    def __init__(self, steps: str, small: bool = False) -> None:
        super().__init__(pinned)
        self.steps, self.small = steps, small
        self.seconds: Counter[str] = Counter()

    def copy(self, source: Tensor) -> Tensor:
        clock, start = time.perf_counter, time.perf_counter()
        began = start
        if "l" in self.steps:
            source = torch._lazy_clone(source.data)
            start = self._took("lazy clone", start)
        if self.small:
            source = source.view(-1)[:64]
        into = self.room(source)
        start = clock()
        current = torch.cuda.current_stream(source.device)
        start = self._took("current_stream", start)
        if "e" in self.steps:
            self.made.record(current)
            start = self._took("record made", start)
            self.side.wait_event(self.made)
            start = self._took("side waits", start)
        if "s" in self.steps:
            torch.cuda.set_stream(self.side)
            start = self._took("set_stream", start)
        if "c" in self.steps:
            into.copy_(source, non_blocking=True)
            start = self._took("copy_", start)
        if "s" in self.steps:
            torch.cuda.set_stream(current)
            start = self._took("set_stream back", start)
        if "d" in self.steps:
            done = self.free.pop() if self.free else torch.cuda.Event()
            done.record(self.side)
            start = self._took("record done", start)
            while self.pending and self.pending[0][0].query():
                self.free.append(self.pending.popleft()[0])
            self._took("query", start)
            self.pending.append((done, source))
        self._took("all", began)
        return into

    def _took(self, step: str, start: float) -> float:
        now = time.perf_counter()
        self.seconds[step] += now - start
        return now


def probe(title: str, model: nn.Module, x: Tensor, names: list[str], rounds: int) -> dict[str, Any]:
    """Of each way: the ratio, when the call of the model returned, and the host's time for each step."""
    ways = {
        "the hook alone": Probe(""),
        "lazy clone": Probe("l"),
        "lazy clone, events": Probe("led"),
        "lazy clone, events, streams": Probe("lesd"),
        "all, 64 numbers of each": Probe("lescd", small=True),
        "all": Probe("lescd"),
        "the copy on the model's own stream": Probe("lcd"),
    }
    returned: dict[str, list[float]] = {name: [] for name in (*ways, "plain")}
    total: dict[str, list[float]] = {name: [] for name in returned}
    now: list[Copy | None] = [None]

    def look(m: nn.Module, a: Any, out: Tensor) -> None:
        if now[0] is not None:
            now[0](out)

    handles = [model.get_submodule(name).register_forward_hook(look) for name in names]
    for turn in range(rounds + 3):
        for name in returned:
            now[0] = ways[name].copy if name in ways else None
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(x)
            back = time.perf_counter() - start
            torch.cuda.synchronize()
            took = time.perf_counter() - start
            if name in ways:
                ways[name].end()
            if turn >= 3:
                returned[name].append(back)
                total[name].append(took)
            elif name in ways:
                ways[name].seconds.clear()
    for handle in handles:
        handle.remove()
    plain, found = median(total["plain"]), {}
    print(f"{title}, step by step: plain {plain * 1e3:.2f} ms, returns after {median(returned['plain']) * 1e3:.2f} ms")
    for name, way in ways.items():
        each = {step: took / rounds / len(names) * 1e6 for step, took in way.seconds.items()}
        found[name] = {
            "ratio": median(total[name]) / plain,
            "returned": median(returned[name]) / plain,
            "host us": each,
        }
        steps = ", ".join(f"{step} {took:.1f}" for step, took in each.items())
        print(f"  {name:<36}{found[name]['ratio']:6.3f}  returned {found[name]['returned']:6.3f}   µs: {steps}")
    return found


_maps: list[Any] = []


def huge_pages(like: Tensor) -> Tensor:
    """Pinned memory in pages of 2 MiB, where the system has them: fewer addresses for the bus to translate."""
    room = mmap.mmap(-1, like.nbytes + (2 << 20))
    with contextlib.suppress(OSError, AttributeError):
        room.madvise(mmap.MADV_HUGEPAGE)
    base = torch.frombuffer(room, dtype=torch.uint8)
    skip = -base.data_ptr() % (2 << 20)
    base = base[skip : skip + like.nbytes]
    base.zero_()
    code = int(torch.cuda.cudart().cudaHostRegister(base.data_ptr(), base.nbytes, 0))
    if code:
        raise RuntimeError(f"cudaHostRegister: {code}")
    _maps.append(room)
    return base.view(like.dtype).view(like.shape)


def pinned(like: Tensor) -> Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=True)


# -- timing -------------------------------------------------------------------------------------------


def wall(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def hooked(model: nn.Module, names: list[str], x: Tensor, way: Way) -> Callable[[], None]:
    """Hooks that stay, so that only the copies are measured."""
    modules = [model.get_submodule(name) for name in names]

    def run() -> None:
        kept: list[Tensor] = []
        handles = [module.register_forward_hook(lambda m, a, out: kept.append(way.copy(out))) for module in modules]
        model(x)
        way.end()
        for handle in handles:
            handle.remove()

    return run


def host_cost(way: Way, like: list[Tensor], rounds: int = 20) -> float:
    """Microseconds of the host for one copy; the device has nothing else to do."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        kept = [way.copy(source) for source in like]
        found.append((time.perf_counter() - start) / len(like))
        way.end()
        del kept
    return median(found) * 1e6


def bus(sizes: list[int], memory: Callable[[Tensor], Tensor], rounds: int = 10) -> float:
    """GB/s of the copies alone."""
    sources = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    rooms = [memory(source) for source in sources]

    def run() -> None:
        for room, source in zip(rooms, sources, strict=True):
            room.copy_(source, non_blocking=True)

    run()
    return sum(sizes) / median(wall(run) for _ in range(rounds)) / 1e9


def measure(title: str, model: nn.Module, x: Tensor, names: list[str], rounds: int) -> dict[str, Any]:
    values: list[Tensor] = []
    handles = [model.get_submodule(n).register_forward_hook(lambda m, a, out: values.append(out)) for n in names]
    model(x)
    for handle in handles:
        handle.remove()
    values = [value.clone() for value in values]
    total = sum(value.nbytes for value in values)
    ways: dict[str, Way] = {
        "as before": AsBefore(),
        "lean, torch's cache of pinned memory": Lean(),
        "lean, no lazy clone (not safe)": Lean(lazy=False),
        "lean, record_stream instead of holding (not safe)": Lean(hold=False),
        "lean, four copies started together": Lean(every=4),
        "lean, a pool of its own": OwnPool(),
        "lean, one slab for a call": OneSlab(total),
        "lean, memory that is there": Fixed(pinned),
        "lean, memory that is there, no lazy clone": Fixed(pinned, lazy=False),
        "lean, two streams": TwoStreams(),
    }
    try:
        huge_pages(values[0])
        ways["lean, memory that is there, huge pages"] = Fixed(huge_pages)
    except (RuntimeError, OSError, AttributeError) as error:
        print("huge pages:", error)
    runs: dict[str, Callable[[], object]] = {"plain": lambda: model(x)}
    runs |= {name: hooked(model, names, x, way) for name, way in ways.items()}
    fixed = [pinned(value) for value in values]

    def copies_alone() -> None:
        for room, value in zip(fixed, values, strict=True):
            room.copy_(value, non_blocking=True)

    runs["the copies alone"] = copies_alone
    runs |= ours(model, x, names)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 3):
        for name, run in runs.items():
            took = wall(run)
            if turn >= 3:
                times[name].append(took)
    plain = times["plain"]
    found: dict[str, Any] = {"plain ms": median(plain) * 1e3, "bytes": total}
    print(f"{title}: {len(values)} values, {total / 1e6:,.0f} MB, plain {median(plain) * 1e3:.2f} ms")
    for name, took in times.items():
        ratio = median(t / p for t, p in zip(took, plain, strict=True))
        cost = host_cost(ways[name], values) if name in ways else None
        found[name] = {"ratio": ratio, "host us": cost}
        print(f"  {name:<52}{ratio:6.3f}" + (f"   {cost:6.1f} µs of the host each" if cost else ""))
    return found


def ours(model: nn.Module, x: Tensor, names: list[str]) -> dict[str, Callable[[], object]]:
    """``th.capture``, opened for each call and held."""
    try:
        import torchhook as th
    except ImportError as error:
        print("torchhook:", error)
        return {}

    def each() -> None:
        with th.capture(model, names, device="cpu") as rec:
            model(x)
        rec[names[-1]]

    def on_device() -> None:
        with th.capture(model, names):
            model(x)

    return {"th.capture(device='cpu'), a session per call": each, "th.capture, on the device": on_device}


def decoder() -> tuple[nn.Module, Tensor, list[str]]:
    model = Decoder().to("cuda", torch.bfloat16).eval()
    return model, torch.randint(0, 50_257, (8, 512), device="cuda"), [f"blocks.{i}" for i in range(24)]


def resnet() -> tuple[nn.Module, Tensor, list[str]]:
    from torchvision.models import resnet50

    return resnet50().cuda().eval(), torch.randn(64, 3, 224, 224, device="cuda"), STAGES


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": sys.version}
    for name in ("xxhash", "safetensors", "transformers"):
        found[name] = importlib.util.find_spec(name) is not None
    with contextlib.suppress(OSError):
        found["huge pages"] = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--probe", action="store_true", help="only where the time of a copy goes")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {"machine": machine()}
    print(found["machine"])
    rates = {}
    for name, memory in (("pinned", pinned), ("huge pages, registered", huge_pages)):
        for megabytes in (8, 200):
            with contextlib.suppress(RuntimeError, OSError, AttributeError):
                rates[f"{name}, {megabytes} MB"] = bus([megabytes << 20] * max(2, 400 // megabytes), memory)
    found["bus GB/s"] = rates
    print(rates)
    with torch.no_grad():
        for name, make in (("ResNet-50, batch 64, six stages", resnet), ("GPT-2 medium's size, 8x512, bf16", decoder)):
            model, x, names = make()
            found[f"{name}, probed"] = probe(name, model, x, names, given.rounds)
            if not given.probe:
                found[name] = measure(name, model, x, names, given.rounds)
            del model
            torch.cuda.empty_cache()
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

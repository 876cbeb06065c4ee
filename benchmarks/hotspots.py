"""Where the time of a capture goes: by function, in Python calls for each site, and in instructions.

    python benchmarks/hotspots.py [--json results.json] [--instructions]

Four situations on 100 small layers, where nearly everything is overhead: a session for each call, a session that is
held, operations as sites, and one named layer opened and closed. Shares are of cProfile's own time, calls are counted
by ``sys.setprofile``, and instructions by callgrind (valgrind must be installed), which other programs cannot disturb.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
from bare import Newest, clone
from models import chain
from results import environment

import torchhook as th

Run = Callable[[], object]
STACK = ExitStack()


class Operations(torch.nn.Module):
    """100 functional operations: a layer each, so that they have a module to be named by."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def per_call() -> tuple[Run, Run]:
    work = chain()
    names, (x,) = work.all, work.args

    def bare() -> None:
        hooks = Newest(work.model, names)
        work.model(x)
        hooks.remove()

    def ours() -> None:
        with th.capture(work.model, names):
            work.model(x)

    return ours, bare


def held() -> tuple[Run, Run]:
    work, other = chain(), chain()
    names, (x,) = work.all, work.args
    STACK.enter_context(th.capture(work.model, names, max_records=1))
    Newest(other.model, names)
    return lambda: work.model(x), lambda: other.model(x)


def operations() -> tuple[Run, Run]:
    """Nothing by hand is as short; beside it stands the plain model."""
    model, x = Operations().eval(), torch.randn(4, 16)

    def ours() -> None:
        with th.capture(model, "layers.*/linear"):
            model(x)

    return ours, lambda: model(x)


def opened() -> tuple[Run, Run]:
    work = chain()
    layer, (x,) = work.model.get_submodule(work.one), work.args

    def ours() -> None:
        with th.capture(work.model, work.one):
            layer(x)

    def bare() -> None:
        kept: list[torch.Tensor] = []
        hook = work.model.get_submodule(work.one).register_forward_hook(lambda m, a, output: kept.append(clone(output)))
        layer(x)
        hook.remove()

    return ours, bare


SITUATIONS: dict[str, tuple[Callable[[], tuple[Run, Run]], int]] = {
    "a session for each call": (per_call, 100),
    "a held session": (held, 100),
    "operations as sites": (operations, 100),
    "one named layer, opened, called alone, closed": (opened, 1),
}


def shares(run: Run, times: int = 200) -> list[tuple[str, float]]:
    """The share of each function in the time that is not spent in calls of others, largest first."""
    profile = cProfile.Profile()
    for _ in range(20):
        run()
    profile.enable()
    for _ in range(times):
        run()
    profile.disable()
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = sum(own for _, _, own, *_ in stats.values())
    found: Counter[str] = Counter()
    for (path, _, name), (_, _, own, *_) in stats.items():
        found[_place(path, name)] += own / total
    return found.most_common(12)


def phases(rounds: int = 300) -> dict[str, dict[str, float]]:
    """Of a session for each call on 100 layers, and of bare hooks: what part is the opening, the call, the closing.

    In units of the plain model's call, so that the two can be compared.
    """
    work = chain()
    names, (x,) = work.all, work.args
    times: dict[str, dict[str, list[float]]] = {"torchhook": {}, "bare hooks": {}}
    plain: list[float] = []

    def lap(way: str, what: str, run: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = run()
        times[way].setdefault(what, []).append(time.process_time() - start)
        return result

    for _ in range(rounds):
        session = lap("torchhook", "choose the sites", lambda: th.capture(work.model, names))
        lap("torchhook", "put the hooks on", session.open)
        lap("torchhook", "the model runs", lambda: work.model(x))
        lap("torchhook", "take the hooks off", session.close)
        hooks = lap("bare hooks", "put the hooks on", lambda: Newest(work.model, names))
        lap("bare hooks", "the model runs", lambda: work.model(x))
        lap("bare hooks", "take the hooks off", hooks.remove)
        start = time.process_time()
        work.model(x)
        plain.append(time.process_time() - start)
    unit = median(plain)
    return {way: {what: median(found) / unit for what, found in parts.items()} for way, parts in times.items()}


def _place(path: str, name: str) -> str:
    parts = Path(path).parts
    if "torchhook" in parts:
        return "/".join(parts[len(parts) - parts[::-1].index("torchhook") :]) + f": {name}"
    return f"torch, Python: {name}" if path == "~" else f"{'/'.join(parts[-2:])}: {name}"


def calls(run: Run) -> int:
    """Python functions that are called in one run, those of C among them."""
    seen = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    for _ in range(3):
        run()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


def instructions(names: list[str]) -> dict[str, dict[str, float]]:
    """Instructions of one run of each situation, ours and beside, counted by callgrind in one process."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        words += [sys.executable, __file__, "--counted", *names]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(words, check=True, capture_output=True, env=environment)
        # The first dump is what was counted before the first run, the last what comes at the end.
        dumps = sorted(Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:]))
        totals = [_total(path) / COUNTED for path in dumps]
    found = iter(totals)
    return {name: {"instructions_ours": next(found), "instructions_beside": next(found)} for name in names}


COUNTED = 10


def _total(path: Path) -> int:
    lines = path.read_text().splitlines()
    return int(next(line for line in lines if line.startswith(("totals:", "summary:"))).split()[1])


def counted(names: list[str]) -> None:
    """Run under valgrind, which counts only between these switches: imports and warming up do not show."""

    def switch(*words: str) -> None:
        subprocess.run(["callgrind_control", *words, str(os.getpid())], check=True, capture_output=True)

    for name in names:
        for run in SITUATIONS[name][0]():
            for _ in range(3):
                run()
            switch("-i", "on")
            switch("-z")
            for _ in range(COUNTED):
                run()
            switch("-d")
            switch("-i", "off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(SITUATIONS), metavar="SITUATION")
    parser.add_argument("--instructions", action="store_true", help="by callgrind: minutes")
    parser.add_argument("--counted", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = options.only or list(SITUATIONS)
    if options.counted:
        with torch.no_grad():
            counted(options.counted)
        return
    numbers = instructions(names) if options.instructions else {}
    answer: dict[str, Any] = {"title": "Where the time goes", "environment": environment(), "situations": {}}
    with torch.no_grad(), STACK:
        for name in names:
            make, sites = SITUATIONS[name]
            ours, bare = make()
            found: dict[str, Any] = {
                "python_calls_per_site": round(calls(ours) / sites, 1),
                "python_calls_per_site_beside": round(calls(bare) / sites, 1),
                "shares": shares(ours),
            }
            found |= numbers.get(name, {})
            answer["situations"][name] = found
            show(name, found)
        answer["phases"] = phases()
        for way, parts in answer["phases"].items():
            print(f"\n{way}, 100 layers, the plain call = 1: " + ", ".join(f"{w} {t:.2f}" for w, t in parts.items()))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(answer, indent=1, ensure_ascii=False) + "\n")


def show(name: str, found: dict[str, Any]) -> None:
    ours, beside = found["python_calls_per_site"], found["python_calls_per_site_beside"]
    print(f"\n{name}: {ours} Python calls for each site, beside {beside}")
    if "instructions_ours" in found:
        ours, beside = found["instructions_ours"], found["instructions_beside"]
        print(f"  instructions: {ours:,.0f}, beside {beside:,.0f}: {ours / beside:.2f}")
    for place, share in found["shares"]:
        print(f"  {share:5.1%}  {place}")


if __name__ == "__main__":
    main()

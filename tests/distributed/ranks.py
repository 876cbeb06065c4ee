"""Runs functions on several gloo ranks, each a process on this machine, and collects what they return.

A scenario is a function of a module in this folder that takes nothing and returns something that pickles. Several share
one pair of processes, because starting them takes longer than most scenarios. What fails on one rank, or hangs on all,
is told with the stacks of every rank::

    python -m tests.distributed.ranks tests.distributed.fsdp2   # all scenarios of a module, without pytest
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

WORLD = 2
_ROOT = Path(__file__).parents[2]
_WAIT = 20  # seconds that a collective waits for the other rank
_LIMIT = 150  # seconds for all scenarios of a module


class RankError(AssertionError):
    """A scenario raised or hung on some rank."""


class Results:
    """What the scenarios of a module returned on each rank."""

    def __init__(self, by_rank: list[dict[str, Any]], log: str) -> None:
        self._by_rank, self.log = by_rank, log

    def __getitem__(self, scenario: str) -> list[Any]:
        """What a scenario returned, rank by rank."""
        failed = [
            f"rank {rank}: {found.get(scenario, ('', 'never ended'))[1]}"
            for rank, found in enumerate(self._by_rank)
            if found.get(scenario, ("failed",))[0] != "returned"
        ]
        if failed:
            raise RankError("\n".join([scenario, *failed, self.log]))
        return [found[scenario][1] for found in self._by_rank]


def each(kinds: Iterable[str], *functions: Callable[[str], Any]) -> dict[str, Callable[[], Any]]:
    """A scenario of each function for each kind, ``name_kind``: what one kind cannot do fails no test of another."""
    return {f"{f.__name__}_{kind}": functools.partial(f, kind) for f in functions for kind in kinds}


def scenarios(module: str) -> list[str]:
    """The names of a module's scenarios, in the order written."""
    return list(importlib.import_module(module).SCENARIOS)


def run(module: str, only: Sequence[str] | None = None, limit: float = _LIMIT) -> Results:
    """Run the scenarios of a module on all ranks."""
    names = scenarios(module) if only is None else list(only)
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        logs = [(Path(folder) / f"log{rank}").open("w+b") for rank in range(WORLD)]
        # Another interpreter, with another version of torch, may be tried against what this one expects.
        command = [os.environ.get("RANKS_PYTHON", sys.executable), "-m", "tests.distributed.ranks"]
        ranks = [
            subprocess.Popen(
                [*command, module, folder, str(rank), str(limit), *names], env=environment, stdout=log, stderr=log
            )
            for rank, log in enumerate(logs)
        ]
        try:
            for rank in ranks:
                rank.wait(limit + 10)  # each ends itself before, with its stacks in the log
        except subprocess.TimeoutExpired:
            pass
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        texts = []
        for number, log in enumerate(logs):
            log.seek(0)
            said = log.read().decode(errors="replace")[-6000:]
            texts.append(f"--- rank {number} (exit {ranks[number].returncode}) ---\n{said}")
            log.close()
        return Results([_read(Path(folder) / f"results{rank}") for rank in range(WORLD)], "\n".join(texts))


def _read(path: Path) -> dict[str, Any]:
    """All that a rank wrote before it ended, however it ended."""
    found: dict[str, Any] = {}
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    name, result = pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    break
                found[name] = result
    return found


# -- on a rank -----------------------------------------------------------------------------------------


def _main(module: str, folder: str, rank: int, limit: float, names: list[str]) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit, exit=True)
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", WORLD)
    functions = importlib.import_module(module).SCENARIOS
    groups = []
    with (Path(folder) / f"results{rank}").open("wb") as file:
        for turn, name in enumerate(names):
            # A group for each: what one scenario leaves waiting must not answer the next.
            distributed.init_process_group(
                "gloo",
                store=distributed.PrefixStore(str(turn), store),
                rank=rank,
                world_size=WORLD,
                timeout=timedelta(seconds=_WAIT),
            )
            # Never freed: torch 2.6 waits for the threads of a group that is, and they may be waiting for Python.
            groups.append(distributed.group.WORLD)
            torch.manual_seed(0)
            began = time.monotonic()
            try:
                result = "returned", functions[name]()
            except BaseException:
                result = "raised", traceback.format_exc()
            distributed.destroy_process_group()
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
            pickle.dump((name, result), file)
            file.flush()
            # By the store: it waits for a rank that is late, and knows nothing of collectives that were left open.
            store.add(f"done {turn}", 1)
            store.set(f"done {turn} {rank}", "yes")
            store.wait([f"done {turn} {other}" for other in range(WORLD)], timedelta(seconds=2 * _WAIT))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # frees no group either


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
    else:
        all_results = run(sys.argv[1])
        for scenario in scenarios(sys.argv[1]):
            print(scenario, str(all_results[scenario])[:1000])
        print(all_results.log)

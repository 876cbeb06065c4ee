"""Kill writers at random moments and at file-system calls, and look for a row that is lost, doubled or torn.

``python -m tests.extract.kills --count 500 --seed 0`` forks writers on one store after the other and kills each with
SIGKILL: at some time, or just before, in the middle of or after a call that changes a file. After every death it reads
what a reader could see, with the stock library; at the end of a store it compares every row with bare hooks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.extract import jobs
from torchhook._extract.api import extract
from torchhook._features.api import open_features, verify
from torchhook.errors import TorchHookError

ROWS, BATCH, SHARD = 320, 8, 16
CALLS = ("open", "mkdir", "writev", "fsync", "link", "replace", "unlink")
_PATIENCE = 300.0  # seconds for a writer that nobody kills


class Stream(torch.utils.data.IterableDataset):
    """The same rows, without a length: where they end is known at the end."""

    def __iter__(self):
        return iter(jobs.data(ROWS))


def write(out: Path, stream: bool) -> None:
    """One writer's work: the same call whoever was killed before."""
    torch.set_num_threads(1)
    source = torch.utils.data.DataLoader(Stream(), batch_size=BATCH) if stream else jobs.data(ROWS)
    extract(
        jobs.Net(), source, ["first", "second"], out, rows_per_shard=SHARD, batch_size=BATCH, progress=False,
        ids=[f"row {i}\n" for i in range(ROWS)],
    )  # fmt: skip


class Trap:
    """Counts the calls that change files, and kills its own process at one of them."""

    def __init__(self, at: int | None, how: str) -> None:
        self.at, self.how, self.seen = at, how, 0
        for name in CALLS:
            if hasattr(os, name):
                setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, call: Any) -> Any:
        def watched(*arguments: Any, **options: Any) -> Any:
            # Files that are only read change nothing.
            if name == "open" and not arguments[1] & os.O_CREAT:
                return call(*arguments, **options)
            self.seen += 1
            if self.seen != self.at:
                return call(*arguments, **options)
            if self.how == "half" and name == "writev":
                first = memoryview(arguments[1][0]).cast("B")
                os.write(arguments[0], first[: max(1, len(first) // 8192 * 4096)])
            elif self.how == "after":
                call(*arguments, **options)
            return os.kill(os.getpid(), signal.SIGKILL)

        return watched


def fork(out: Path, stream: bool, trap: tuple[int | None, str] | None = None, count: Path | None = None) -> int:
    """A writer in a process of its own."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        armed = Trap(*trap) if trap else None
        write(out, stream)
        if count is not None and armed is not None:
            count.write_text(str(armed.seen))
        code = 0
    finally:
        os._exit(code)


def wait(pid: int, seconds: float) -> int | None:
    """The exit code, negative for a signal; ``None`` if it is still at work after so long, and is then ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def truth() -> dict[str, torch.Tensor]:
    """Every row by bare hooks."""
    inputs, labels = jobs.data(ROWS).tensors
    return {**jobs.oracle(jobs.Net(), inputs.split(BATCH), "first", "second"), ":labels": labels}


def faults(out: Path, wanted: dict[str, torch.Tensor], complete: bool) -> list[str]:
    """What is wrong with a store, by the stock library and by its own reader."""
    found = []
    files = sorted((out / "shards").glob("s*.safetensors"))
    for file in files:
        first = int(file.stem[1:]) * SHARD
        try:
            tensors = load_file(file)
        except Exception as error:  # torn
            found.append(f"{file.name}: {type(error).__name__}: {error}")
            continue
        found += [
            f"{file.name}: {name} has other rows"
            for name, rows in wanted.items()
            if not torch.equal(tensors[name], rows[first : first + SHARD])
        ]
    if complete and len(files) != -(-ROWS // SHARD):
        found.append(f"{len(files)} shards")
    if (out / "store.json").exists():
        found += [str(problem) for problem in verify(out).problems if complete or problem.kind != "missing"]
    elif files:
        found.append("shards and no store.json")
    if complete and not found:
        try:
            features = open_features(out)
            whole = all(torch.equal(features[name][:], wanted[name]) for name in ("first", "second"))
            if not whole or features.ids[:] != [f"row {i}\n" for i in range(ROWS)] or len(features) != ROWS:
                found.append("the reader has other rows")
        except TorchHookError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


class Hunt:
    """Stores, one after the other, whose writers are killed until one of them comes to the end."""

    def __init__(self, root: Path, seed: int, writers: int) -> None:
        self.root, self.chance, self.writers = root, random.Random(seed), writers
        self.wanted = truth()
        self.tally: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.length: dict[bool, tuple[float, int]] = {}

    def measure(self, stream: bool) -> None:
        """How long an undisturbed writer takes, and how many calls it makes."""
        out, count = self.root / f"whole-{stream}", self.root / "count"
        start = time.monotonic()
        code = wait(fork(out, stream, (None, "before"), count), _PATIENCE)
        self.length[stream] = (time.monotonic() - start, int(count.read_text()) if code == 0 else 1)
        self._judge(out, code, "undisturbed")

    def store(self, number: int, left: int) -> None:
        """One store: kills, then one writer that is left alone."""
        stream, out = self.chance.random() < 0.3, self.root / f"store-{number}"
        for _ in range(min(left, self.chance.randint(1, 6))):
            pids = [self._prey(out, stream) for _ in range(1 if stream else self.chance.randint(1, self.writers))]
            for pid, (how, seconds) in pids:
                code = self._kill(pid, seconds)
                self.tally[how if code == -signal.SIGKILL else f"finished, or {code}"] += 1
                if code not in (0, -signal.SIGKILL):
                    self.wrong.append(f"{out.name} ({how}): a writer ended with {code}")
            self.wrong += [f"{out.name}, after a kill: {fault}" for fault in faults(out, self.wanted, False)]
        self._judge(out, wait(fork(out, stream), _PATIENCE), "at the end")
        if not self.wrong:
            shutil.rmtree(out)

    def _prey(self, out: Path, stream: bool) -> tuple[int, tuple[str, float]]:
        seconds, calls = self.length[stream]
        if self.chance.random() < 0.4:
            return fork(out, stream), ("at a time", self.chance.uniform(0, seconds))
        how = self.chance.choice(["before", "half", "after"])
        # Early ones more often: the later writers of a store have less to do.
        at = 1 + int(calls * self.chance.random() ** 2)
        return fork(out, stream, (at, how)), (f"{how} a call", _PATIENCE)

    def _kill(self, pid: int, seconds: float) -> int | None:
        if seconds == _PATIENCE:  # it does so itself
            return wait(pid, seconds)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return wait(pid, 10.0)

    def _judge(self, out: Path, code: int | None, when: str) -> None:
        if code != 0:
            self.wrong.append(f"{out.name}, {when}: a writer that nobody killed ended with {code}")
        self.wrong += [f"{out.name}, {when}: {fault}" for fault in faults(out, self.wanted, True)]

    @property
    def kills(self) -> int:
        return sum(number for how, number in self.tally.items() if "finished" not in how)


def hunt(count: int, seed: int, writers: int, root: Path) -> Hunt:
    """Kill so many writers."""
    torch.set_num_threads(1)  # before the first fork: a pool of threads does not live on in children
    found = Hunt(root, seed, writers)
    for stream in (False, True):
        found.measure(stream)
    number = 0
    while found.kills < count and not found.wrong:
        found.store(number, count - found.kills)
        number += 1
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--writers", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = hunt(given.count, given.seed, given.writers, Path(folder))
    print(json.dumps({"kills": result.kills, "wrong": len(result.wrong), "how": dict(result.tally)}))
    print(*result.wrong, sep="\n", end="" if not result.wrong else "\n")
    sys.exit(bool(result.wrong))

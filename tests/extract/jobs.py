"""Small models and data for the tests of extraction, and a program that is run to be killed.

``python tests/extract/jobs.py kills OUT --kills N --writers W --seed S`` forks writers on one store and kills them with
SIGKILL at random moments, until ``N`` of them died at work; then it lets one finish.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from pathlib import Path

import torch
from torch import nn

ROWS, BATCH, SHARD = 2048, 16, 32


class Clock:
    """Slows a model down. An object of any class is no setting: a slower model is the same model."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def wait(self) -> None:
        if self.seconds:
            time.sleep(self.seconds)


class Net(nn.Module):
    """Overwrites its own intermediate values, as real models do."""

    def __init__(self, seed: int = 0, pause: float = 0.0) -> None:
        super().__init__()
        self.clock = Clock(pause)
        self.first = nn.Linear(8, 16)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(16, 12)
        self.head = nn.Linear(12, 4)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.wait()
        return self.head(self.relu(self.second(self.relu(self.first(x)))))


def data(rows: int = ROWS) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(rows, 8, generator=generator), torch.arange(rows) % 7)


def oracle(model: nn.Module, batches, *names: str) -> dict[str, torch.Tensor]:
    """What bare hooks with ``.clone()`` see."""
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    handles = [
        model.get_submodule(name).register_forward_hook(lambda m, a, out, name=name: seen[name].append(out.clone()))
        for name in names
    ]
    training = model.training
    model.eval()
    with torch.no_grad():
        for batch in batches:
            model(batch)
    model.train(training)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(values) for name, values in seen.items()}


def store_bytes(out: Path) -> dict[str, bytes]:
    """Every committed shard as it is on the disk."""
    return {path.name: path.read_bytes() for path in sorted((Path(out) / "shards").glob("s*.safetensors"))}


def run(out: str, pause: float = 0.0, **options) -> None:
    from torchhook._extract.api import extract

    torch.set_num_threads(1)
    options = {"rows_per_shard": SHARD, "batch_size": BATCH, "progress": False, **options}
    extract(Net(pause=pause), data(), ["first", "second"], out, **options)


def _fork(out: str, pause: float) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run(out, pause)
            code = 0
        finally:
            os._exit(code)
    return pid


def kills(out: str, number: int, writers: int, seed: int) -> dict[str, int]:
    random_ = random.Random(seed)
    died = finished = failed = rounds = 0
    while died < number:
        rounds += 1
        alive = {_fork(out, 0.001) for _ in range(writers)}
        for pid in list(alive):
            time.sleep(random_.uniform(0.01, 0.15) if rounds > 1 else 0.03)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            died += os.WIFSIGNALED(status)
            finished += os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
            failed += os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0
        if finished:  # begin another store: every kill must meet a writer at work
            break
    return {"died": died, "finished": finished, "failed": failed, "shards": len(store_bytes(Path(out)))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["run", "kills"])
    parser.add_argument("out")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="local")
    given = parser.parse_args()
    from tests.extract import jobs  # not this module, whose classes are of __main__: a store is of the code by its name

    if given.what == "run":
        jobs.run(given.out, engine=given.engine, pause=0.0005)
    else:
        import torchhook  # noqa: F401  the forks must not wait for imports

        print(json.dumps(jobs.kills(given.out, given.kills, given.writers, given.seed)))

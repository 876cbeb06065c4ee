"""SIGKILL at random moments, then resume: every row exactly once, the bytes those of an uninterrupted run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.extract import jobs
from torchhook._features.api import open_features
from torchhook._features.verify import verify

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


def job(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/extract/jobs.py"), *arguments],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_store(out: Path, uninterrupted: Path) -> None:
    """Read by the stock library alone, against bare hooks."""
    assert jobs.store_bytes(out) == jobs.store_bytes(uninterrupted)
    inputs, labels = jobs.data().tensors
    truth = jobs.oracle(jobs.Net(), inputs.split(jobs.BATCH), "first", "second")
    shards = [load_file(path) for path in sorted((out / "shards").glob("s*.safetensors"))]
    for name, expected in truth.items():
        assert torch.equal(torch.cat([shard[name] for shard in shards]), expected)
    assert torch.equal(torch.cat([shard[":labels"] for shard in shards]), labels)


@pytest.mark.slow
@pytest.mark.parametrize(("writers", "seed"), [(1, 0), (2, 1)])
def test_killed_writers_lose_nothing_and_double_nothing(tmp_path, writers, seed):
    jobs.run(str(tmp_path / "whole"))
    died = attempt = 0
    while died < 20:
        out = tmp_path / f"killed{attempt}"
        told = json.loads(
            job("kills", str(out), "--kills", "20", "--writers", str(writers), "--seed", str(seed + attempt))
        )
        assert told["failed"] == 0
        died += told["died"]
        attempt += 1
        broken = [p for p in verify(out).problems if p.kind != "missing"] if (out / "store.json").exists() else []
        assert broken == []  # what a reader can see at any moment is whole
        jobs.run(str(out))
        check_store(out, tmp_path / "whole")
        assert len(open_features(out)) == jobs.ROWS


@pytest.mark.slow
def test_torchrun_ranks_write_the_same_bytes_as_one_process(tmp_path):
    jobs.run(str(tmp_path / "whole"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(ROOT / "tests/extract/jobs.py"), "run", str(tmp_path / "ranks"), "--engine", "torchrun"]
    done = subprocess.run([*command, *script], env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    check_store(tmp_path / "ranks", tmp_path / "whole")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_left_alone_does_the_shards_of_the_others_too(tmp_path, monkeypatch, rank):
    jobs.run(str(tmp_path / "whole"))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    jobs.run(str(tmp_path / "rank"), engine="torchrun")
    assert jobs.store_bytes(tmp_path / "rank") == jobs.store_bytes(tmp_path / "whole")

"""``torchhook extract``, stopped by Ctrl-C and written into a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Command
from torchhook._features.api import open_features

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture
def many(tmp_path: Path) -> Path:
    save_file({"x": torch.arange(640.0)[:, None].repeat(1, 4)}, tmp_path / "many.safetensors")
    return tmp_path / "many.safetensors"


@pytest.mark.slow
def test_an_interrupt_says_how_many_rows_are_kept_and_the_same_command_goes_on(tmp_path: Path, many: Path) -> None:
    out = tmp_path / "features"
    line = [sys.executable, "-m", "torchhook", "extract", "tests.cli.nets:Slow", "--data", str(many), "-s", "(model)"]
    line += ["--batch-size", "8", "--rows-per-shard", "16", "--out", str(out)]
    running = subprocess.Popen(line, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while len(list(out.glob("shards/s*"))) < 4 and time.monotonic() < until:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    kept = 16 * len(list(out.glob("shards/s*")))
    assert running.returncode == 130, err
    assert 64 <= kept < 640
    assert f"stopped: {kept} of 640 rows are kept in {out}; the same command goes on from there." in err
    assert "Traceback" not in err
    done = subprocess.run(line, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"{40 - kept // 16} to do" in done.stderr
    assert torch.equal(open_features(out)[""][:], torch.arange(640.0)[:, None].repeat(1, 4) * 2)
    for shown in (err, done.stderr):  # no bar, in a pipe
        assert "\r" not in shown
        assert "%|" not in shown


def test_rows_per_shard_is_an_option(torchhook: Command, tmp_path: Path, many: Path) -> None:
    out = tmp_path / "features"
    line = ("extract", "tests.cli.nets:small", "--data", tmp_path / "rows.safetensors", "-s", "3", "-o", out)
    save_file({"x": torch.rand(60, 3, 8, 8)}, tmp_path / "rows.safetensors")
    assert torchhook(*line, "--no-progress", "--batch-size", 10, "--rows-per-shard", 30).code == 0
    assert open_features(out).manifest.shards == 2
    refused = torchhook(*line, "--no-progress", "--rows-per-shard", 0)
    assert refused.code == 2
    assert "rows_per_shard=0: give a positive number" in refused.err

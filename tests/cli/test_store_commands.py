"""``torchhook extract``, stopped by Ctrl-C and written into a pipe."""

from __future__ import annotations

import functools
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
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # As at a terminal: a shell that runs the tests in the background has them, and what they start, ignore it.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(line, cwd=ROOT, env=ENV, preexec_fn=heard, **pipes)
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
    assert "--rows-per-shard 0: give a positive number" in refused.err


@pytest.mark.parametrize("other", [("--size", "16"), ("--mean", "0.5", "--std", "0.229,0.224,0.225")])
def test_another_preparation_of_images_is_refused_by_name(torchhook: Command, tmp_path: Path, other) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "photos").mkdir()
    for i in range(4):
        image.new("RGB", (20, 20), (40 * i, 100, 200)).save(tmp_path / "photos" / f"{i}.png")
    line = ("extract", "tests.cli.nets:small", "--data", tmp_path / "photos", "-s", "0", "-o", tmp_path / "f")
    assert torchhook(*line, "--no-progress", "--size", "8").code == 0
    assert torchhook(*line, "--no-progress", "--size", "8").code == 0
    refused = torchhook(*line, "--no-progress", *(other if other[0] == "--size" else ("--size", "8", *other)))
    assert refused.code == 2
    assert "data, preparation: the store has" in refused.err


def test_broken_images_are_left_out_up_to_a_limit_and_tried_again(torchhook: Command, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "photos").mkdir()
    for i in range(10):
        image.new("RGB", (8, 8), (20 * i, 100, 200)).save(tmp_path / "photos" / f"{i}.bmp")
    whole = (tmp_path / "photos" / "5.bmp").read_bytes()
    line = ("extract", "tests.cli.nets:small", "--data", tmp_path / "photos", "-s", "0", "-o", tmp_path / "f")
    (tmp_path / "photos" / "5.bmp").write_bytes(b"BM" + bytes(len(whole) - 2))
    line = (*line, "--no-progress", "--size", "8", "--skip-errors")
    refused = torchhook(*line, "--max-skipped", "0")
    assert refused.code == 2
    assert "--max-skipped 0" in refused.err
    assert "--retry-skipped" in refused.err
    assert torchhook(*line, "--max-skipped", "1").code == 0
    assert set(open_features(tmp_path / "f").skipped) == {5}
    (tmp_path / "photos" / "5.bmp").write_bytes(whole)
    refused = torchhook(*line)
    assert refused.code == 2
    assert "row 5 of the data has files of other names or contents" in refused.err
    assert "1 row was skipped: where only this one was repaired, --retry-skipped" in refused.err
    # With another transform, model or data beside it, that would not be enough.
    for other in (("--pool", "max"), ("--dtype", "float16"), ("-s", "1")):
        refused = torchhook(*line, *other)
        assert refused.code == 2
        assert "holds the features of another run" in refused.err
        assert "skipped" not in refused.err
    assert torchhook(*line, "--retry-skipped").code == 0
    for again in ((), ("--retry-skipped",)):
        assert torchhook(*line, *again).code == 0
    assert open_features(tmp_path / "f").skipped == {}
    assert open_features(tmp_path / "f").verify().ok
    (tmp_path / "photos" / "6.bmp").write_bytes(whole)
    assert torchhook(*line, "--retry-skipped").code == 2


def test_a_mismatch_names_no_option_that_is_not_there(torchhook: Command, tmp_path: Path, rows: Path) -> None:
    line = ("extract", "tests.cli.nets:small", "--data", rows, "-s", "3", "-o", tmp_path / "f", "--no-progress")
    assert torchhook(*line).code == 0
    refused = torchhook(*line, "--dtype", "float16")
    assert refused.code == 2
    assert "\n  columns: the store has 3 F32(8), this run 3 F16(8)" in refused.err
    assert "--columns" not in refused.err
    assert "--columns: 'colour' is none of" in torchhook("layers", "tests.cli.nets:small", "--columns", "colour").err

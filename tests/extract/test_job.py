"""A call of ``extract`` as a whole: where it writes, how rows are cut, and that nothing incomplete passes for whole."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.extract import jobs
from torchhook._extract import estimate, job
from torchhook._extract.api import extract
from torchhook._features.api import open_features
from torchhook.errors import IncompleteStoreError

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


def E(data, out, **options):
    options = {"batch_size": 8, "progress": False, **options}
    return extract(nn.Sequential(nn.Identity()), data, "0", out, **options)


class Rows(torch.utils.data.Dataset):
    """Rows that do something when they are read."""

    def __init__(self, act=lambda row: None, rows=X):
        self.rows, self.act = rows, act

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        self.act(row)
        return self.rows[row]


def when_there(path):
    """The path, when a writer in the background has come to it."""
    until = time.monotonic() + 10
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return path


# -- where ------------------------------------------------------------------------------------------


def test_a_relative_path_is_the_one_of_the_moment_of_the_call(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    features = E(Rows(lambda row: os.chdir(tmp_path / "b")), "out", rows_per_shard=16)
    assert Path(features.path) == tmp_path / "a" / "out"
    assert torch.equal(features["0"][:], X)
    assert not list((tmp_path / "b").iterdir())


# -- whole or an error --------------------------------------------------------------------------------


def test_a_shard_that_is_deleted_during_the_run_is_an_error_that_names_its_rows(tmp_path):
    def act(row):
        if row == 63:
            when_there(tmp_path / "shards" / "s000000001.safetensors").unlink()

    with pytest.raises(IncompleteStoreError, match=r"rows 16 to 31 .*1 of 4 shards.*deleted") as caught:
        E(Rows(act), tmp_path, rows_per_shard=16)
    assert "same call" in str(caught.value)
    assert torch.equal(E(Rows(), tmp_path, rows_per_shard=16)["0"][:], X)


def test_a_folder_that_is_moved_away_during_the_run_is_an_error(tmp_path):
    def act(row):
        if row == 63:
            when_there(tmp_path / "out" / "shards" / "s000000002.safetensors")
            time.sleep(0.1)  # its temporary file, too, must be gone
            os.rename(tmp_path / "out", tmp_path / "elsewhere")

    with pytest.raises(IncompleteStoreError, match="rows 0 to "):
        E(Rows(act), tmp_path / "out", rows_per_shard=16)


# -- how many rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "batch", "expected"), [(64, 8, 16), (100, 16, 16), (31, 8, 8), (8, 8, 8), (3, 8, 8)])
def test_there_are_at_least_four_shards_of_whole_batches_if_rows_allow(tmp_path, rows, batch, expected):
    features = E(torch.randn(rows, 8), tmp_path, batch_size=batch)
    assert features.manifest.rows_per_shard == expected


def test_each_rank_has_four_shards(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    features = E(torch.randn(10_000, 8), tmp_path, batch_size=32, engine="torchrun")
    assert features.manifest.rows_per_shard == 608
    assert features.manifest.shards == 17


def test_a_shard_is_not_more_than_half_a_minute_of_work(tmp_path, monkeypatch):
    monkeypatch.setattr(estimate, "SHARD_SECONDS", 0.1)
    features = extract(jobs.Net(pause=0.02), jobs.data(400), "first", tmp_path / "a", batch_size=8, progress=False)
    # Batches of 20 ms and a bit, of which at most five are 0.1 s: as a power of two, so that runs agree.
    assert features.manifest.rows_per_shard in (16, 32)
    whole = extract(jobs.Net(), jobs.data(400), "first", tmp_path / "b", batch_size=8, rows_per_shard=400)
    assert torch.equal(features["first"][:], whole["first"][:])


def test_the_time_of_the_first_batch_alone_does_not_decide(tmp_path, monkeypatch):
    class Cold(jobs.Net):
        warm = False

        def forward(self, x):
            self.clock.seconds, self.warm = 0.0 if self.warm else 0.5, True
            return super().forward(x)

    monkeypatch.setattr(estimate, "SHARD_SECONDS", 0.6)
    features = extract(Cold(), jobs.data(400), "first", tmp_path, batch_size=8, progress=False)
    assert features.manifest.rows_per_shard == 96  # a quarter, in whole batches


def test_what_the_call_says_comes_before_any_rule(tmp_path):
    assert E(X, tmp_path / "a", rows_per_shard=64).manifest.shards == 1
    assert E(X, tmp_path / "b", shard_bytes=1 << 20).manifest.shards == 1


def test_a_store_that_is_there_keeps_its_cut(tmp_path):
    E(X, tmp_path, rows_per_shard=24)
    assert E(X, tmp_path).manifest.rows_per_shard == 24


def test_of_two_that_start_together_the_first_to_write_decides_the_cut(tmp_path, monkeypatch):
    real, inside = job.execute, []

    def late(prepared):
        if not inside:  # another one comes between the preparation and the first file
            inside.append(1)
            E(X, tmp_path, rows_per_shard=40)
        return real(prepared)

    monkeypatch.setattr(job, "execute", late)
    features = E(X, tmp_path)
    assert features.manifest.rows_per_shard == 40
    assert torch.equal(features["0"][:], X)


# -- interrupted -----------------------------------------------------------------------------------------


def test_an_interrupt_keeps_what_is_committed_and_says_how_much(tmp_path):
    def act(row):
        if row == 51:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        E(Rows(act), tmp_path, rows_per_shard=16)
    assert any(
        "48 of 64 rows are kept" in note for note in getattr(caught.value, "__notes__", ["48 of 64 rows are kept"])
    )
    assert open_features(tmp_path, incomplete=True).missing == [3]
    read = []
    assert torch.equal(E(Rows(read.append), tmp_path, rows_per_shard=16)["0"][:], X)
    known = {round(i * 63 / 15) for i in range(16)}  # read to know the data again
    assert sorted(set(read) - set(range(8)) - known) == [row for row in range(48, 64) if row not in known]

"""A store knows which model, code, data and call it belongs to, and so does every shard in it."""

from __future__ import annotations

import functools
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.extract import jobs
from torchhook._extract.api import extract
from torchhook._features.api import Store, open_features
from torchhook._features.verify import verify
from torchhook.errors import BrokenShardError, ExtractError, StoreMismatchError

E = functools.partial(extract, progress=False, rows_per_shard=16, batch_size=8)
X = jobs.data(160).tensors[0]


def shard(out, number):
    return Path(out) / "shards" / f"s{number:09d}.safetensors"


def whole_of(out, model, site="second"):
    """The store holds one model's rows, by bare hooks."""
    truth = jobs.oracle(model, X.split(8), site)[site]
    return torch.equal(open_features(out)[site][:], truth)


# -- every shard ------------------------------------------------------------------------------------------


def test_every_shard_says_which_run_it_belongs_to(tmp_path):
    for name, model in {"a": jobs.Net(), "b": jobs.Net(seed=1), "c": jobs.Net()}.items():
        E(model, X, "second", tmp_path / name)
    plans = {
        name: {json.loads(path.read_bytes()[8:4096].decode())["__metadata__"]["plan"] for path in folder.iterdir()}
        for name, folder in ((name, tmp_path / name / "shards") for name in "abc")
    }
    assert [len(plan) for plan in plans.values()] == [1, 1, 1]
    assert plans["a"] == plans["c"] != plans["b"]


def test_a_manifest_that_was_deleted_does_not_make_shards_another_models(tmp_path):
    E(jobs.Net(), X, "second", tmp_path)
    shard(tmp_path, 3).unlink()
    (tmp_path / "store.json").unlink()
    for index in (True, False):
        with pytest.raises(StoreMismatchError, match=r"shards? .*0, 1, 2, 4.*another run.*model.*resume=False"):
            E(jobs.Net(seed=1), X, "second", tmp_path)
        if index:
            (tmp_path / "index.json").unlink(missing_ok=True)
        (tmp_path / "store.json").unlink(missing_ok=True)
    # Of the same model they are as good as before.
    E(jobs.Net(), X, "second", tmp_path)
    assert whole_of(tmp_path, jobs.Net())
    (tmp_path / "store.json").unlink()
    E(jobs.Net(seed=1), X, "second", tmp_path, resume=False)
    assert whole_of(tmp_path, jobs.Net(seed=1))
    assert verify(tmp_path).ok


def test_a_shard_of_another_store_is_found_on_open_on_reading_on_resume_and_by_verify(tmp_path):
    E(jobs.Net(), X, "second", tmp_path / "a")
    E(jobs.Net(seed=1), X, "second", tmp_path / "b")
    E(jobs.Net(), X.flip(0), "second", tmp_path / "data")
    for other in ("b", "data"):
        E(jobs.Net(), X, "second", tmp_path / "a", resume=False)
        opened = open_features(tmp_path / "a")
        shutil.copy(shard(tmp_path / other, 4), shard(tmp_path / "a", 4))
        assert [(p.shard, p.kind) for p in verify(tmp_path / "a").problems] == [(4, "foreign")]
        with pytest.raises(BrokenShardError, match=r"another run"):
            opened["second"][70]
        assert torch.equal(opened["second"][10], jobs.oracle(jobs.Net(), X.split(8), "second")["second"][10])
        (tmp_path / "a" / "index.json").unlink()
        with pytest.raises(BrokenShardError, match=r"s000000004.*another run"):
            open_features(tmp_path / "a")
        assert open_features(tmp_path / "a", incomplete=True).missing == [4]
        with pytest.raises(StoreMismatchError, match=r"4.*another run"):
            E(jobs.Net(), X, "second", tmp_path / "a")
        assert verify(tmp_path / "a").discard() == [4]
        E(jobs.Net(), X, "second", tmp_path / "a")
        assert whole_of(tmp_path / "a", jobs.Net())


class Gate(jobs.Net):
    """Waits before a given call, until it is told to go on."""

    def __init__(self, seed, at):
        super().__init__(seed)
        self.at, self.calls = at, 0
        self.reached, self.go = threading.Event(), threading.Event()

    def __deepcopy__(self, memo):
        return self

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            self.reached.set()
            assert self.go.wait(10)
        return super().forward(x)


def settled(out, shards):
    """Writers are threads of their own: wait until what was submitted is there."""
    for _ in range(1000):
        if len(jobs.store_bytes(out)) == shards:
            return
        time.sleep(0.01)
    raise AssertionError(f"{len(jobs.store_bytes(out))} shards, not {shards}")


@pytest.mark.parametrize("resume", [False, True])
def test_two_models_that_are_extracted_to_one_store_at_once_are_never_one_success(tmp_path, resume):
    """The first is held after some shards; the second replaces the store and runs; then the first goes on."""
    first, second = Gate(0, at=9), jobs.Net(1)
    outcome = {}

    def run():
        try:
            outcome["first"] = E(first, X, "second", tmp_path, resume=resume)
        except ExtractError as error:
            outcome["first"] = error

    thread = threading.Thread(target=run)
    thread.start()
    assert first.reached.wait(10), outcome
    settled(tmp_path, 4)
    E(second, X, "second", tmp_path, resume=False)
    first.go.set()
    thread.join()
    assert isinstance(outcome["first"], StoreMismatchError)
    assert "another run" in str(outcome["first"])
    assert whole_of(tmp_path, second)
    assert verify(tmp_path).ok


def test_a_run_that_comes_upon_the_shards_of_another_raises_too(tmp_path):
    """The other order: the one that replaced the store meets shards that the first went on to write."""
    first, second = Gate(0, at=9), Gate(1, at=3)
    outcome = {}

    def run(name, model):
        try:
            outcome[name] = E(model, X, "second", tmp_path, resume=False)
        except ExtractError as error:
            outcome[name] = error

    threads = [threading.Thread(target=run, args=(n, m)) for n, m in (("first", first), ("second", second))]
    threads[0].start()
    assert first.reached.wait(10), outcome
    settled(tmp_path, 4)
    threads[1].start()
    assert second.reached.wait(10), outcome
    settled(tmp_path, 1)
    first.go.set()
    threads[0].join()
    second.go.set()
    threads[1].join()
    assert isinstance(outcome["first"], StoreMismatchError)
    assert isinstance(outcome["second"], StoreMismatchError)
    assert {p.kind for p in verify(tmp_path).problems} >= {"foreign"}
    E(jobs.Net(1), X, "second", tmp_path, resume=False)
    assert whole_of(tmp_path, jobs.Net(1))


def test_a_store_of_the_first_format_is_read_and_not_gone_on_with(tmp_path):
    out = tmp_path / "old"
    shutil.copytree(Path(__file__).parents[1] / "features" / "format1", out)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with pytest.raises(
        StoreMismatchError, match=r"(?s)format 1.*can be read.*Extract to another path, or .*resume=False"
    ):
        E(nn.Sequential(nn.Identity()), torch.arange(18.0).reshape(6, 3), ["0", "0:input"], out)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    assert len(open_features(out)) == 6
    features = E(nn.Sequential(nn.Identity()), torch.ones(4, 3), "0", out, resume=False)
    assert torch.equal(features["0"][:], torch.ones(4, 3))


# -- stores that cannot be gone on with -------------------------------------------------------------------


def test_a_first_attempt_without_a_shard_does_not_lock_the_store(tmp_path):
    with pytest.raises(ExtractError, match="NaN"):
        E(jobs.Net(), X * float("nan"), "second", tmp_path)
    assert not jobs.store_bytes(tmp_path)
    E(jobs.Net(seed=2), X, "second", tmp_path)
    assert whole_of(tmp_path, jobs.Net(seed=2))


def test_a_run_that_was_killed_before_its_first_shard_does_not_lock_the_store_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "withdraw", lambda self, mine: None)  # as if nobody could, any more
    with pytest.raises(ExtractError, match="NaN"):
        E(jobs.Net(), X * float("nan"), "second", tmp_path)
    with pytest.raises(StoreMismatchError, match="resume=False"):  # it may still be at work
        E(jobs.Net(seed=2), X, "second", tmp_path)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    E(jobs.Net(seed=2), X, "second", tmp_path)
    assert whole_of(tmp_path, jobs.Net(seed=2))


@pytest.mark.parametrize("text", ["", "{", '{"format": "torchhook-features"', "\0\0\0"])
def test_a_corrupt_manifest_can_be_replaced(tmp_path, text):
    E(jobs.Net(), X, "second", tmp_path)
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(ExtractError, match=r"not the manifest.*resume=False"):
        E(jobs.Net(seed=1), X, "second", tmp_path)
    E(jobs.Net(seed=1), X, "second", tmp_path, resume=False)
    assert whole_of(tmp_path, jobs.Net(seed=1))
    assert verify(tmp_path).ok


def test_a_strangers_store_json_is_not_replaced(tmp_path):
    (tmp_path / "store.json").write_text('{"shop": "flowers"}')
    with pytest.raises(ExtractError, match="not the manifest"):
        E(jobs.Net(), X, "second", tmp_path, resume=False)
    assert (tmp_path / "store.json").read_text() == '{"shop": "flowers"}'

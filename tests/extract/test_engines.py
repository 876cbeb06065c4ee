"""Ranks share the work: every row once, whoever dies, and no rank says that all is well when it is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.extract import jobs
from torchhook._extract import claims, engines, job
from torchhook._extract.api import extract
from torchhook._features.api import open_features
from torchhook._features.storage import Folder
from torchhook._features.store import Store
from torchhook.errors import DataWarning, ExtractError, IncompleteStoreError

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}

# Each rank writes down which rows its model has seen: the first of the eight numbers of a row is the row's own.
_RANK = """
import os, sys, time, torch
from torch import nn
import torchhook as th
out, seen, pause, options = sys.argv[1], sys.argv[2], float(sys.argv[3]), eval(sys.argv[4])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Identity()
    def forward(self, x):
        with open(f"{seen}/{os.environ['RANK']}-{os.getpid()}", "a") as file:
            file.write("".join(f"{int(row)}\\n" for row in x[:, 0]))
        time.sleep(pause)
        return self.layer(x * 2)
rows = int(options.pop("rows"))
x = torch.arange(rows).float()[:, None].repeat(1, 8)
found = th.extract(Net(), x, "layer", out, engine="torchrun", progress=False, batch_size=32, **options)
assert torch.equal(found["layer"][:], x * 2)
sys.stdout.write(f"complete {len(found)}\\n")  # in one piece: ranks share the pipe
"""


def torchrun(tmp_path, ranks, pause=0.0, **options):
    script, seen = tmp_path / "rank.py", tmp_path / "seen"
    script.write_text(_RANK)
    seen.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*command, str(script), str(tmp_path / "out"), str(seen), str(pause), repr({"rows": 10_000, **options})],
        env={**ENV, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def rows_seen(tmp_path) -> Counter[int]:
    return Counter(int(row) for path in (tmp_path / "seen").iterdir() for row in path.read_text().split())


def files(tmp_path):
    return sorted(path.name for path in (tmp_path / "out").iterdir())


@pytest.mark.slow
def test_four_ranks_compute_each_row_once_and_all_of_them_end_with_the_whole(tmp_path):
    running = torchrun(tmp_path, 4, pause=0.002)
    out, err = running.communicate(timeout=200)
    assert running.returncode == 0, err
    assert out.count("complete 10000") == 4
    seen = rows_seen(tmp_path)
    assert len(seen) == 10_000
    # A rank that starts when something is stored computes the first stored batch again: is its model the same?
    again = [row for row, times in seen.items() if times > 1]
    assert len(again) <= 3 * 32
    assert len(list((tmp_path / "seen").iterdir())) == 4  # and each has done something
    assert open_features(tmp_path / "out").manifest.shards >= 16
    assert files(tmp_path) == ["index.json", "shards", "store.json"]


def as_rank(monkeypatch, rank, world):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))


def do(out, data=None, **options):
    options = {"batch_size": 16, "rows_per_shard": 32, "progress": False, "engine": "torchrun", **options}
    return extract(jobs.Net(), jobs.data(256) if data is None else data, "first", out, **options)


def test_what_a_living_process_has_claimed_is_waited_for_and_what_a_dead_one_has_is_done(tmp_path, monkeypatch):
    as_rank(monkeypatch, 0, 2)
    monkeypatch.setattr(engines, "_POLL_SECONDS", (0.02, 0.05))
    store = Store(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    left = claims.Claims(store.storage)
    left._me["pid"] = dead.pid
    assert left.take("0-1", ())
    living = claims.Claims(store.storage)
    with living:
        assert living.take("3-4", ())
        found = []
        thread = threading.Thread(target=lambda: found.append(do(tmp_path)))
        thread.start()
        until = time.monotonic() + 20
        while len(store.sizes()) < 7 and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.3)
        assert 3 not in store.sizes()
        assert len(store.sizes()) == 7
        assert not found
    thread.join(20)  # the claim was given back, and nobody had done what it was for
    assert len(found[0]) == 256
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "shards", "store.json"]


def test_a_claim_that_no_longer_changes_is_dead_whatever_machine_it_is_of(tmp_path, monkeypatch):
    storage = Store(tmp_path).storage
    other, me = claims.Claims(storage), claims.Claims(storage)
    other._me["host"] = "elsewhere"
    assert other.take("a", ())
    assert not me.take("a", storage.sizes(""))
    now = time.monotonic()
    monkeypatch.setattr(claims.time, "monotonic", lambda: now + claims.DEAD_SECONDS + 1)
    assert me.take("a", storage.sizes(""))
    assert not other.take("a", storage.sizes(""))
    me.release("a")
    assert storage.sizes("") == {}


def test_an_owner_that_works_keeps_its_claim(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(claims, "DEAD_SECONDS", 0.4)
    storage = Store(tmp_path).storage
    with claims.Claims(storage) as other:
        other._me["host"] = "elsewhere"
        assert other.take("a", ())
        me = claims.Claims(storage)
        until = time.monotonic() + 1.2
        while time.monotonic() < until:
            assert not me.take("a", storage.sizes(""))
            time.sleep(0.02)
    assert me.take("a", storage.sizes(""))


def test_of_many_who_find_a_dead_claim_one_takes_it(tmp_path):
    storage = Store(tmp_path).storage
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    dead = claims.Claims(storage)
    dead._me["pid"] = gone.pid
    assert dead.take("a", ())
    files, won = storage.sizes(""), []
    many = [claims.Claims(storage) for _ in range(8)]
    threads = [threading.Thread(target=lambda one=one: won.append(one.take("a", files))) for one in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(won) == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_its_rows_to_the_others(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    (tmp_path / "seen").mkdir()

    def start(rank):  # without torchrun, which would end the others too
        return subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "out"), str(tmp_path / "seen"), "0.02",
             repr({"rows": 3_000, "rows_per_shard": 64})],
            env={**ENV, "RANK": str(rank), "WORLD_SIZE": "2"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    first, second = start(0), start(1)
    until = time.monotonic() + 60
    while len(Store(tmp_path / "out").sizes()) < 4 and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(second.pid, signal.SIGKILL)
    second.communicate()
    out, _ = first.communicate(timeout=120)
    assert out == "complete 3000\n"
    assert max(rows_seen(tmp_path).values()) <= 2


def test_a_shard_that_vanishes_again_and_again_ends_in_an_error(tmp_path, monkeypatch):
    as_rank(monkeypatch, 0, 1)
    real = Store.commit

    def commit(self, shard, *rest):
        found = real(self, shard, *rest)
        if shard == 5:
            (tmp_path / "shards" / "s000000005.safetensors").unlink()
        return found

    monkeypatch.setattr(Store, "commit", commit)
    with pytest.raises(IncompleteStoreError, match="rows 160 to 191 are not there"):
        do(tmp_path)


def test_ranks_that_begin_again_where_nothing_is_delete_nothing_of_each_other(tmp_path, monkeypatch):
    as_rank(monkeypatch, 0, 2)
    real, inside = job.execute, []

    def late(prepared):
        if not inside:
            inside.append(1)
            do(tmp_path, resume=True)
            inside.append({path: path.stat().st_ino for path in tmp_path.glob("shards/*")})
        return real(prepared)

    monkeypatch.setattr(job, "execute", late)
    assert len(do(tmp_path, resume=False)) == 256
    assert {path: path.stat().st_ino for path in tmp_path.glob("shards/*")} == inside[1]


def test_a_rank_of_a_complete_store_writes_nothing(tmp_path, monkeypatch):
    do(tmp_path, engine="local")
    as_rank(monkeypatch, 0, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(Folder, "_written", None)
    assert len(do(tmp_path)) == 256


# -- streams -------------------------------------------------------------------------------------------


def stream(rows=256):
    return iter(jobs.data(rows).tensors[0].split(16))


def test_the_ranks_of_a_stream_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "ranks", lambda: (int(threading.current_thread().name), 2))
    found = {}

    def rank(number):
        found[number] = do(tmp_path, stream(), batch_size=None)

    threads = [threading.Thread(target=rank, args=(number,), name=str(number)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = jobs.oracle(jobs.Net(), jobs.data(256).tensors[0].split(16), "first")["first"]
    for number in range(2):
        assert torch.equal(found[number]["first"][:], expected)


def test_a_stream_whose_other_rank_never_comes_is_an_error_that_names_the_rows(tmp_path, monkeypatch):
    as_rank(monkeypatch, 0, 2)
    monkeypatch.setattr(claims, "DEAD_SECONDS", 0.3)
    with pytest.raises(IncompleteStoreError, match=r"rows 32 to 63 and others.*4 of 8 shards.*A rank was killed"):
        do(tmp_path, stream(), batch_size=None)


# -- the same store? -------------------------------------------------------------------------------------


def test_a_rank_that_does_not_see_the_first_ones_mark_does_nothing(tmp_path, monkeypatch):
    as_rank(monkeypatch, 1, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(engines, "MEET_SECONDS", 0.3)
    with pytest.raises(ExtractError, match=r"rank 1 of 2 does not see in .* what rank 0 writes there"):
        do(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_rank_that_comes_when_all_is_done_waits_for_nobody(tmp_path, monkeypatch):
    do(tmp_path, engine="local")
    as_rank(monkeypatch, 1, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert len(do(tmp_path)) == 256


def test_a_rank_that_waits_while_another_does_everything_waits_no_longer(tmp_path, monkeypatch):
    as_rank(monkeypatch, 1, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(engines, "MEET_SECONDS", 5)
    sleep = time.sleep

    def first_rank_is_quick(seconds):
        """It begins, does everything, and takes its mark away, all between two looks."""
        monkeypatch.setattr(engines.time, "sleep", sleep)
        with pytest.MonkeyPatch.context() as other:
            as_rank(other, 0, 2)
            do(tmp_path)

    monkeypatch.setattr(engines.time, "sleep", first_rank_is_quick)
    assert len(do(tmp_path)) == 256
    assert engines.time.sleep is sleep  # it has waited


def test_a_dry_run_of_a_rank_waits_for_nobody(tmp_path, monkeypatch):
    as_rank(monkeypatch, 1, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert do(tmp_path / "out", dry_run=True).todo == 8
    assert not (tmp_path / "out").exists()


# -- the engine that was forgotten -----------------------------------------------------------------------------------


def test_ranks_that_do_not_share_the_work_are_told_so_but_for_the_first(tmp_path, monkeypatch):
    as_rank(monkeypatch, 0, 3)
    do(tmp_path / "first", engine="local")  # often the one that is to do it, and the only one to call
    as_rank(monkeypatch, 2, 3)
    with pytest.warns(
        DataWarning, match=r"engine='local' in rank 2 of 3: every process .* all of the work.*'torchrun'"
    ):
        found = do(tmp_path / "other", engine="local")
    assert len(found) == 256
    assert do(tmp_path / "dry", engine="local", dry_run=True).todo == 8
    as_rank(monkeypatch, 0, 1)
    do(tmp_path / "alone", engine="local")
    monkeypatch.setenv("WORLD_SIZE", "")
    do(tmp_path / "unset", engine="local")

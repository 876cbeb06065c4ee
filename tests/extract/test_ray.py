"""A real Ray with two CPUs: the same shard task as everywhere, and actors that are killed at work."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.extract import jobs
from torchhook._extract.api import extract
from torchhook._extract.in_memory import InMemory
from torchhook._extract.ray import deal
from torchhook._extract.task import Task
from torchhook._features.verify import verify
from torchhook.errors import ExtractError

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
ROWS = 1024


@pytest.fixture(scope="module")
def cluster():
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}:{before or ''}"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


class Telling(torch.utils.data.Dataset):
    """Tells in which processes its rows are read."""

    def __init__(self, folder, bad=()):
        self.rows, self.folder, self.bad = jobs.data(ROWS), Path(folder), bad

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        (self.folder / str(os.getpid())).touch()
        time.sleep(0.001)
        if i in self.bad:
            raise KeyError(f"row {i} is broken")
        return self.rows[i]


def do(out, data, engine="local", **options):
    options = {"batch_size": 16, "rows_per_shard": 32, "progress": False, "engine": engine, **options}
    return extract(jobs.Net(), data, ["first", "second"], out, **options)


@pytest.mark.shows("Data: Ray actors")
def test_two_actors_survive_kills_and_write_every_row_once(cluster, tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    do(tmp_path / "whole", Telling(pids))
    killed: set[int] = set()
    over = threading.Event()

    def killer():
        while not over.is_set() and len(killed) < 3:
            for path in sorted(pids.iterdir()):
                pid = int(path.name)
                if pid not in killed | {os.getpid()} and jobs.store_bytes(tmp_path / "ray"):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
                    time.sleep(0.3)
                    break
            time.sleep(0.01)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        features = do(tmp_path / "ray", Telling(pids), "ray", engine_options={"actors": 2})
    finally:
        over.set()
        thread.join()
    assert len(killed) == 3
    assert len({int(p.name) for p in pids.iterdir()} - {os.getpid()}) >= 4  # two to begin with, and new ones
    assert jobs.store_bytes(tmp_path / "ray") == jobs.store_bytes(tmp_path / "whole")
    assert len(features) == ROWS
    assert verify(tmp_path / "ray").ok


def test_an_error_in_an_actor_is_the_users_own_and_the_run_resumes(cluster, tmp_path):
    with pytest.raises(KeyError, match="row 500 is broken"):
        do(tmp_path / "f", Telling(tmp_path, {500}), "ray", engine_options={"actors": 1})
    assert all(p.kind == "missing" for p in verify(tmp_path / "f").problems)
    do(tmp_path / "f", jobs.data(ROWS))
    do(tmp_path / "whole", Telling(tmp_path))
    assert jobs.store_bytes(tmp_path / "f") == jobs.store_bytes(tmp_path / "whole")


def test_actors_that_would_leave_no_slot_free_are_refused(cluster, tmp_path):
    with pytest.raises(ExtractError, match="2 actors of 1 CPUs do not leave one of the cluster's 2 CPUs free"):
        do(tmp_path / "f", jobs.data(ROWS), "ray", engine_options={"actors": 2, "num_cpus": 1})


def test_a_stream_cannot_be_dealt_out(cluster, tmp_path):
    with pytest.raises(ExtractError, match="whose rows have numbers"):
        do(tmp_path / "f", iter(jobs.data(64).tensors[0].split(16)), "ray", batch_size=None)


def test_a_relative_path_is_complete_wherever_the_workers_are(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features = do("f", jobs.data(ROWS), "ray", engine_options={"actors": 2})
    assert Path(features.path) == tmp_path / "f"
    do(tmp_path / "whole", jobs.data(ROWS))
    assert jobs.store_bytes(tmp_path / "f") == jobs.store_bytes(tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "f").iterdir()) == ["index.json", "shards", "store.json"]


def test_a_store_that_the_workers_do_not_see_is_an_error_before_any_work(cluster, tmp_path):
    pytest.importorskip("fsspec")
    pids = tmp_path / "pids"
    pids.mkdir()
    with pytest.raises(ExtractError, match="a machine of the Ray cluster, does not see in memory://"):
        do(f"memory://{tmp_path.name}", Telling(pids), "ray", engine_options={"actors": 2})
    assert [path.name for path in pids.iterdir()] == [str(os.getpid())]  # only the first batch, here


def test_of_data_in_memory_an_actor_gets_only_its_rows(cluster, tmp_path, monkeypatch):
    data = torch.utils.data.DataLoader(jobs.data(ROWS), batch_size=16, sampler=list(range(ROWS))[::-1])
    sent = []
    real = ray.put
    monkeypatch.setattr(ray, "put", lambda value, **options: sent.append(value) or real(value, **options))
    do(tmp_path / "f", data, "ray", engine_options={"actors": 2}, on_error="skip")
    monkeypatch.undo()
    do(tmp_path / "whole", data, on_error="skip")
    assert jobs.store_bytes(tmp_path / "f") == jobs.store_bytes(tmp_path / "whole")
    (task,) = [value for value in sent if isinstance(value, Task)]
    windows = [value for value in sent if isinstance(value, InMemory)]
    assert task.source.dataset is task.source.memory is None
    assert sum(len(window.parts[0]) for window in windows) == ROWS
    assert max(len(window.parts[0]) for window in windows) < ROWS / 4


def test_small_shards_are_dealt_out_together():
    todo = [*range(500), *range(600, 1000)]
    together = deal(todo, 4, 0.01)
    assert [shard for task in together for shard in task] == todo
    assert len(together) == 33
    assert len(deal(todo, 4, 60.0)) == 900
    assert len(deal(todo, 4, 8.0)) == 450
    assert deal([3], 1, 0.0) == [[3]]

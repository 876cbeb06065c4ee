"""Shards under the reader: how many are mapped at once, by how many threads, and how large they may be."""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchhook._features import columns, reading, shards
from torchhook._features.api import open_features
from torchhook._features.manifest import ColumnSpec, Manifest
from torchhook._features.storage import Folder
from torchhook._features.store import Store
from torchhook.errors import ExtractError

linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="maps are counted in /proc")


def manifest(names, rows, per_shard, shape=(2,), dtype=torch.float32):
    specs = tuple(ColumnSpec(name, dtype, shape) for name in names)
    return Manifest(specs, rows, per_shard, tuple(names), "Net", "None")


def make(path: Path, names, count: int, per_shard: int = 2) -> Path:
    """A store whose value at row i of column c is 1000 * c + i, written without syncing every file."""
    whole = manifest(names, count * per_shard, per_shard)
    store = Store(path)
    store.agree(whole)
    (path / shards.FOLDER).mkdir()
    for shard in range(count):
        rows = torch.arange(shard * per_shard, (shard + 1) * per_shard)[:, None].expand(-1, 2)
        tensors = {name: (1000.0 * c + rows) for c, name in enumerate(names)}
        about = {"shard": str(shard), "first_row": str(shard * per_shard), "rows": str(per_shard)}
        plan = getattr(whole, "plan", None)
        about |= {} if plan is None else {"plan": plan}
        (path / shards.name_of(shard)).write_bytes(b"".join(shards.encode(tensors, about)))
    return path


def maps(path: Path) -> int:
    """Maps of the files of a store in this process, by the system's own count."""
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


@linux
def test_a_store_has_so_many_maps_at_most_whatever_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_MAPS", 8)
    monkeypatch.setattr(columns, "_TOGETHER", 4)
    path = make(tmp_path / "f", ["a", "b", "c", "d", "e"], count=60)
    features = open_features(path, access="mmap")
    chance = random.Random(0)
    for c, name in enumerate(features):
        column = features[name]
        for row in chance.sample(range(120), 60):
            assert column[row].tolist() == [1000.0 * c + row] * 2
        rows = chance.sample(range(120), 100)
        assert column[rows][:, 0].tolist() == [1000.0 * c + row for row in rows]
        assert column[::7, 1].tolist() == [1000.0 * c + row for row in range(0, 120, 7)]
        assert features.statistics(name).mean[0] == 1000.0 * c + 59.5
        assert maps(path) <= 8
    for row in range(120):  # all columns of a shard share its map
        assert [features[name][row][0].item() for name in features] == [1000.0 * c + row for c in range(5)]
        assert maps(path) <= 8
    features.export(tmp_path / "npy")
    assert maps(path) <= 8


@linux
def test_the_shards_that_are_used_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_MAPS", 4)
    features = open_features(make(tmp_path / "f", ["a"], count=30), access="mmap")
    opened = []
    header = shards.header
    monkeypatch.setattr(shards, "header", lambda where, *rest: opened.append(where) or header(where, *rest))
    for shard in range(1, 30):
        features["a"][0], features["a"][2 * shard]
    assert opened.count(shards.name_of(0)) == 1
    assert len(opened) == 30


@linux
def test_a_data_set_of_the_hub_maps_every_shard_once(tmp_path):
    pytest.importorskip("datasets")
    path = make(tmp_path / "f", ["a", "b"], count=40)
    reading_most = open_features(path, access="mmap")
    data = reading_most.to_hf()
    assert maps(path) <= 40
    assert data[77]["b"] == [1077.0, 1077.0]


@linux
def test_a_data_set_of_the_hub_copies_where_shards_are_many(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr(reading, "MOST_MAPS", 8)
    monkeypatch.setattr("torchhook._features.export.MOST_MAPS", 8)
    path = make(tmp_path / "f", ["a", "b"], count=40)
    data = open_features(path, access="mmap").to_hf()
    assert maps(path) <= 9
    assert data[77]["b"] == [1077.0, 1077.0]


@linux
@pytest.mark.slow
def test_forty_columns_of_six_thousand_shards_can_be_read(tmp_path):
    names = [f"c{i}" for i in range(40)]
    path = make(tmp_path / "f", names, count=6000, per_shard=1)
    features = open_features(path, access="mmap")
    for c in (0, 1, 39):  # each whole, in an order in which the shard that comes next was just closed
        assert torch.equal(features[names[c]][:, 0], 1000.0 * c + torch.arange(6000.0))
        assert maps(path) <= reading.MOST_MAPS
    chance = random.Random(0)
    for c, name in enumerate(names):
        rows = chance.sample(range(6000), 100)
        assert features[name][rows][:, 0].tolist() == [1000.0 * c + row for row in rows]
        assert maps(path) <= reading.MOST_MAPS


def test_threads_may_read_one_store_together(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_MAPS", 3)
    features = open_features(make(tmp_path / "f", ["a", "b"], count=20), access="mmap")

    def some(seed):
        chance = random.Random(seed)
        for _ in range(400):
            row, c = chance.randrange(40), chance.randrange(2)
            assert features["ab"[c]][row].tolist() == [1000.0 * c + row] * 2
            assert features["ab"[c]][[row, 39 - row]][1, 0] == 1000.0 * c + 39 - row

    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change places often
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(some, range(4)))
    finally:
        sys.setswitchinterval(old)


def test_a_shard_of_another_shape_is_refused_when_it_is_read(tmp_path):
    path = make(tmp_path / "f", ["a", "b"], count=3)
    about = {"shard": "1", "first_row": "2", "rows": "2"}
    plan = getattr(Store(path).manifest(), "plan", None)
    about |= {} if plan is None else {"plan": plan}
    for tensors in (
        {"a": torch.zeros(2, 2)},
        {"a": torch.zeros(2, 2), "b": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 2), "b": torch.zeros(2, 2, dtype=torch.float64)},
        {"a": torch.zeros(2, 2), "b": torch.zeros(1, 2)},
        {"a": torch.zeros(2, 2), "b": torch.zeros(2, 2), "c": torch.zeros(1)},
    ):
        (path / shards.name_of(1)).write_bytes(b"".join(shards.encode(tensors, about)))
        features = open_features(path)
        with pytest.raises(ExtractError, match=r"s000000001\.safetensors"):
            features["a"][2]
        assert features["a"][0, 0] == 0


def huge(path: Path, nbytes: int) -> tuple[Path, Manifest]:
    """A store of one shard, one row to each MiB: a file with a hole, in which only the last row is written."""
    rows = nbytes >> 20
    whole = manifest(["a"], rows, rows, (1 << 20,), torch.uint8)
    Store(path).agree(whole)
    entries = {"a": {"dtype": "U8", "shape": [rows, 1 << 20], "data_offsets": [0, rows << 20]}}
    about = {"shard": "0", "first_row": "0", "rows": str(rows), "crc32": "00000000"}  # as the first format has it
    plan = getattr(whole, "plan", None)
    about |= {} if plan is None else {"plan": plan}
    text = json.dumps({"__metadata__": about, **entries}).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    file = path / shards.name_of(0)
    file.parent.mkdir(parents=True)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + (rows << 20))
        out.seek(-5, os.SEEK_END)
        out.write(b"hello")
    return path, whole


@linux
@pytest.mark.parametrize("access", ["mmap", "read"])
def test_shards_may_be_larger_than_two_gigabytes(tmp_path, access):
    path, _ = huge(tmp_path / "f", 5 << 30)
    column = open_features(path, access=access)["a"]
    assert column.shape == (5120, 1 << 20)
    assert bytes(column[5119][-5:].tolist()) == b"hello"
    assert bytes(column[-2:, -5:][1].tolist()) == b"hello"
    assert column[[0, 4100, 5119]].sum(1).tolist() == [0, 0, sum(b"hello")]


def test_a_read_ends_where_the_file_does(tmp_path):
    data = os.urandom(100_000)
    (tmp_path / "x").write_bytes(data)
    folder = Folder(tmp_path)
    assert folder.read("x") == data
    assert folder.read("x", 5, 50_000) == data[5:50_000]
    assert folder.read("x", 99_990, 200_000) == data[99_990:]
    assert folder.read("x", 100_000) == folder.read("x", 7, 7) == b""


@linux
@pytest.mark.slow
def test_two_gigabytes_can_be_read_at_once(tmp_path):
    path, _ = huge(tmp_path / "f", (2 << 30) + (16 << 20))
    # In a process of its own, which gives the memory back.
    code = (
        "import sys; from torchhook._features.storage import Folder; "
        "data = Folder(sys.argv[1]).read(sys.argv[2], 4096); print(len(data), data[-5:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), shards.name_of(0)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [str((2 << 30) + (16 << 20)), "b'hello'"], done.stderr

"""Files are there whole or not at all, first writer wins, on folders and object stores."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from torchhook._features import storage
from torchhook._features.storage import Folder, locate


@pytest.fixture(params=["folder", "file", "memory"])
def somewhere(request, tmp_path):
    url = {"folder": str(tmp_path / "a"), "file": f"file://{tmp_path}/b", "memory": f"memory://{tmp_path.name}"}
    if request.param == "memory":
        pytest.importorskip("fsspec")
    return locate(url[request.param])


def test_what_is_created_is_read_back(somewhere):
    assert somewhere.sizes("shards") == {}
    assert somewhere.create("shards/a", [b"one", memoryview(b"two")])
    assert somewhere.read("shards/a") == b"onetwo"
    assert somewhere.read("shards/a", 2, 5) == b"etw"
    assert somewhere.sizes("shards") == {"shards/a": 6}
    somewhere.remove("shards/a")
    somewhere.remove("shards/a")
    assert somewhere.sizes("shards") == {}
    with pytest.raises(FileNotFoundError):
        somewhere.read("shards/a")


def test_the_first_writer_wins_and_replace_overwrites(somewhere):
    assert somewhere.create("x", [b"first"])
    assert not somewhere.create("x", [b"second"])
    assert somewhere.read("x") == b"first"
    somewhere.replace("x", b"third")
    assert somewhere.read("x") == b"third"


def test_of_many_writers_at_once_exactly_one_wins(tmp_path):
    folder = Folder(tmp_path)
    won: list[int] = []

    def write(i: int) -> None:
        if folder.create("shards/s", [bytes([i]) * 100_000]):
            won.append(i)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert folder.read("shards/s") == bytes([won[0]]) * 100_000
    assert os.listdir(tmp_path / "shards") == ["s"]


def test_a_write_in_pieces_is_whole(tmp_path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda handle, buffers: real(handle, [buffers[0][:3]]))
    chunks = [b"abcdefgh", b"", memoryview(b"0123456789")]
    Folder(tmp_path).create("x", chunks)
    assert (tmp_path / "x").read_bytes() == b"".join(chunks)


@pytest.mark.parametrize("step", ["writev", "fsync", "link"])
def test_an_error_at_any_step_leaves_nothing(tmp_path, monkeypatch, step):
    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        Folder(tmp_path).create("shards/s", [b"data"])
    assert os.listdir(tmp_path / "shards") == []


def test_without_hard_links_files_are_renamed(tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert Folder(tmp_path).create("s", [b"data"])
    assert os.listdir(tmp_path) == ["s"]
    assert not Folder(tmp_path).create("s", [b"other"])


def test_sweep_removes_leftovers_of_dead_writers_only(tmp_path, monkeypatch):
    folder = Folder(tmp_path)
    (tmp_path / "shards").mkdir()
    dead, young, living = (tmp_path / "shards" / f".s.{name}.tmp" for name in ("dead", "young", "living"))
    for path in (dead, young, living):
        path.write_bytes(b"half")
    old = time.time() - 3600
    os.utime(dead, (old, old))
    os.utime(living, (old, old))
    with open(living, "rb") as file:
        storage.fcntl.flock(file, storage.fcntl.LOCK_EX)
        folder.sweep("shards")
    assert not dead.exists()
    assert young.exists()
    assert living.exists()


def test_new_files_have_the_permissions_that_the_umask_gives(tmp_path):
    old = os.umask(0o027)
    try:
        Folder(tmp_path).create("s", [b"data"])
    finally:
        os.umask(old)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o640

"""Files are there whole or not at all, first writer wins, on folders and object stores."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest
import torch

from torchhook._extract.api import extract
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


# -- substitutes ---------------------------------------------------------------------------------------


@pytest.fixture
def windows(monkeypatch):
    """What Windows has not, and what it refuses: as far as one can have it here."""
    held, opened, closed = {}, os.open, os.close

    def open_(path, flags, *rest):
        handle = opened(path, flags, *rest)
        if os.path.isdir(path):
            closed(handle)
            raise PermissionError(errno.EACCES, "Permission denied")
        held[handle] = os.path.abspath(path)
        return handle

    def close(handle):
        held.pop(handle, None)
        closed(handle)

    def refuse_open(real):
        def call(path, *rest):
            if os.path.abspath(path) in held.values():
                raise PermissionError(errno.EACCES, "used by another process")
            return real(path, *rest)

        return call

    def rename(old, new):
        if os.path.exists(new):
            raise FileExistsError(new)
        os.replace(old, new)

    monkeypatch.delattr(os, "writev")
    monkeypatch.delattr(os, "pread")
    monkeypatch.delattr(os, "link")
    monkeypatch.setattr(storage, "_WINDOWS", True)
    for module in (storage, storage.direct_io):
        monkeypatch.setattr(module, "fcntl", None)
    monkeypatch.setattr(storage.direct_io, "_DIRECT", 0)
    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "close", close)
    monkeypatch.setattr(os, "replace", refuse_open(os.replace))
    monkeypatch.setattr(os, "unlink", refuse_open(os.unlink))
    monkeypatch.setattr(os, "rename", refuse_open(rename))


def test_a_whole_store_without_what_windows_has_not(tmp_path, windows):
    folder = Folder(tmp_path / "deep" / "store")
    assert folder.create("shards/a", [b"one", memoryview(b"two"), b"", b"three"])
    assert not folder.create("shards/a", [b"late"])
    assert folder.read("shards/a") == b"onetwothree"
    assert folder.read("shards/a", 2, 5) == b"etw"
    folder.replace("x", b"1")
    folder.replace("x", b"2")
    assert folder.read("x") == b"2"
    folder.sweep("shards")
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 4)), torch.randn(40, 3)
    with torch.no_grad():
        expected = model(x)
    features = extract(model, x, "0", tmp_path / "features", batch_size=4, progress=False)
    torch.testing.assert_close(features["0"][:], expected)
    assert not list(tmp_path.rglob("*.tmp"))


def test_of_many_writers_on_windows_one_wins(tmp_path, windows):
    folder = Folder(tmp_path)
    real, won = folder._written, []

    def both(i):
        return folder.create("s", [bytes([i])])

    # The second comes between the first one's look and its rename.
    with real(tmp_path / "s", [b"first"]) as temporary:
        won.append(both(1))
        with pytest.raises(FileExistsError):
            os.rename(temporary, tmp_path / "s")
    assert won == [True]
    assert folder.read("s") == b"\x01"


def test_reads_of_more_than_the_system_gives_at_once_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_MOST_BYTES", 7)
    (tmp_path / "x").write_bytes(bytes(range(100)))
    assert Folder(tmp_path).read("x") == bytes(range(100))
    assert Folder(tmp_path).read("x", 3, 50) == bytes(range(3, 50))
    assert Folder(tmp_path).read("x", 90, 200) == bytes(range(90, 100))
    assert Folder(tmp_path).read("x", 5, 5) == b""


def test_writes_of_more_than_the_system_takes_at_once_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.direct_io, "_MOST_BYTES", 7)
    chunks = [bytes(range(100)), memoryview(b"abcdefgh"), b"x"]
    Folder(tmp_path).create("x", chunks)
    assert (tmp_path / "x").read_bytes() == b"".join(chunks)

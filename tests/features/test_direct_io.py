"""What is written is what was given, by whatever way the system takes it."""

from __future__ import annotations

import errno
import os
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchhook._features import direct_io

direct_only = pytest.mark.skipif(not direct_io._DIRECT, reason="this system has no direct writes")


def written(path, chunks):
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
    try:
        flags = direct_io.fcntl.fcntl(handle, direct_io.fcntl.F_GETFL)
        direct_io.write(handle, chunks)
        assert direct_io.fcntl.fcntl(handle, direct_io.fcntl.F_GETFL) == flags
    finally:
        os.close(handle)
    return path.read_bytes()


def chunk(nbytes, aligned, seed=0):
    """Random bytes in memory that begins with a block, or does not."""
    room = direct_io.empty((nbytes + direct_io.BLOCK,), torch.uint8).numpy()
    found = room[:nbytes] if aligned else room[1 : nbytes + 1]
    found[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return found.data


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (7,), (1, 2, 3, 4)])
def test_memory_begins_with_a_block(shape, dtype):
    found = direct_io.empty(shape, dtype)
    assert found.data_ptr() % direct_io.BLOCK == 0 or not found.numel()
    assert found.shape == shape
    assert found.dtype == dtype
    assert found.is_contiguous()


LENGTHS = st.one_of(st.integers(0, 9000), st.integers(0, 5).map(lambda n: n * direct_io.BLOCK))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.tuples(LENGTHS, st.booleans()), max_size=8))
def test_chunks_of_any_length_and_place_are_written_one_after_the_other(tmp_path, monkeypatch, parts):
    monkeypatch.setattr(direct_io, "_SMALL", 1)
    monkeypatch.setattr(direct_io, "_ROOM", 2 * direct_io.BLOCK)
    chunks = [chunk(nbytes, aligned, seed) for seed, (nbytes, aligned) in enumerate(parts)]
    assert written(tmp_path / "file", chunks) == b"".join(chunks)


@pytest.mark.parametrize("aligned", [False, True])
def test_a_large_file(tmp_path, aligned):
    chunks = [b"head" * 1024, chunk(5_000_001, aligned, 1), chunk(3_000_000, aligned, 2), b"end"]
    assert written(tmp_path / "file", chunks) == b"".join(chunks)


@direct_only
@pytest.mark.parametrize("good", [0, 1, 2])
def test_where_direct_writes_end_the_usual_ones_go_on(tmp_path, monkeypatch, good):
    chunks = [chunk(3 * direct_io.BLOCK, True, i) for i in range(5)] + [b"end"]
    monkeypatch.setattr(direct_io, "_SMALL", 1)
    real, count = os.writev, [0]

    def writev(handle, buffers):
        if direct_io.fcntl.fcntl(handle, direct_io.fcntl.F_GETFL) & direct_io._DIRECT:
            count[0] += 1
            if count[0] > good:
                raise OSError(errno.EINVAL, "Invalid argument")
        return real(handle, buffers)

    monkeypatch.setattr(os, "writev", writev)
    assert written(tmp_path / "file", chunks) == b"".join(chunks)
    assert count[0] == good + 1


def test_writes_that_take_less_than_they_were_given(tmp_path, monkeypatch):
    chunks = [chunk(50_001, i % 2 == 0, i) for i in range(4)]
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda handle, buffers: real(handle, [bytes(buffers[0])[:777]]))
    for small in (1, 1 << 20):
        monkeypatch.setattr(direct_io, "_SMALL", small)
        assert written(tmp_path / "file", chunks) == b"".join(chunks)


def test_without_direct_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_io, "_DIRECT", 0)
    chunks = [chunk(2_000_000, True), b"end"]
    assert written(tmp_path / "file", chunks) == b"".join(chunks)
    direct_io.warm({tmp_path / "file": 1})


@direct_only
def test_an_error_of_the_disk_is_not_taken_for_a_missing_ability(tmp_path, monkeypatch):
    def full(handle, buffers):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "file", [chunk(2_000_000, True)])


@direct_only
def test_files_that_fit_are_asked_for_and_no_others(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda handle, *rest: asked.append(os.fstat(handle).st_size))
    (tmp_path / "file").write_bytes(b"12345")
    direct_io.warm({tmp_path / "gone": 1, tmp_path / "file": 5})
    until = time.monotonic() + 10
    while not asked and time.monotonic() < until:
        time.sleep(0.01)
    assert asked == [5]
    direct_io.warm({tmp_path / "file": 1 << 60})
    time.sleep(0.05)
    assert asked == [5]

"""Slabs and writers: bounded, blocking, and honest about errors."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from torchhook._extract.fill import pieces
from torchhook._extract.slabs import Slab
from torchhook._extract.writer import Done, Writer
from torchhook._features import shards
from torchhook._features.manifest import ColumnSpec, Manifest
from torchhook._features.storage import Folder
from torchhook._features.store import Store
from torchhook._values.host_copies import HostCopies

MANIFEST = Manifest(
    columns=(ColumnSpec("a", torch.float32, (2,)), ColumnSpec("b", torch.int64, (), ragged=True)),
    rows=None,
    rows_per_shard=4,
    sites=("a", "b"),
    model="m",
    transform="None",
    row_bytes=16,
)


class Slow(Folder):
    """Commits only when told to."""

    def __init__(self, path):
        super().__init__(path)
        self.go = threading.Event()

    def create(self, name, chunks):
        self.go.wait()
        return super().create(name, chunks)


def fill(slab: Slab, value: float, rows: int = 4) -> Slab:
    copies = HostCopies()
    slab.columns["a"].put(0, torch.full((rows, 2), value), copies)
    slab.columns["b"].put(0, torch.arange(rows), [1] * rows, copies)
    slab.rows = rows
    return slab


def test_without_a_free_slab_the_model_waits(tmp_path):
    store = Store(tmp_path)
    store.storage = slow = Slow(tmp_path)
    writer = Writer(store, MANIFEST, slabs=3)
    for k in range(3):
        writer.submit(fill(writer.take(k), k))
    taken: list[Slab] = []
    thread = threading.Thread(target=lambda: taken.append(writer.take(3)))
    thread.start()
    time.sleep(0.1)
    assert taken == []
    slow.go.set()
    thread.join(5)
    assert len(taken) == 1
    writer.submit(fill(taken[0], 3))
    writer.close()
    assert len(store.sizes()) == 4


def test_an_error_surfaces_in_the_next_take_and_in_close(tmp_path):
    store = Store(tmp_path)
    writer = Writer(store, MANIFEST)
    slab = fill(writer.take(0), float("nan"))
    writer.submit(slab)
    time.sleep(0.5)
    with pytest.raises(RuntimeError, match="NaN in 4 rows"):
        writer.take(1)
    with pytest.raises(RuntimeError, match="NaN in 4 rows"):
        writer.close()
    assert store.sizes() == {}


def test_what_someone_else_committed_is_left_alone(tmp_path):
    store = Store(tmp_path)
    store.storage.create(shards.name_of(0), [b"theirs"])
    done: list[Done] = []
    writer = Writer(store, MANIFEST, done=done.append)
    writer.submit(fill(writer.take(0), 1.0))
    writer.close()
    assert [d.ours for d in done] == [False]
    assert store.storage.read(shards.name_of(0)) == b"theirs"


def test_a_ragged_column_grows_forgets_and_leaves_skipped_rows_empty():
    slab = Slab(MANIFEST.columns, 4, 1, pin=False).begin(0)
    copies, column = HostCopies(), slab.columns["b"]
    column.put(0, torch.arange(50), [20, 30], copies)
    column.put(1, torch.arange(3), [3], copies)  # the second row once more
    slab.skip(2, "broken")
    column.put(3, torch.arange(100), [100], copies)
    found = column.tensors(4)
    assert found["b:offsets"].tolist() == [0, 20, 23, 23, 123]
    assert torch.equal(found["b"], torch.cat([torch.arange(20), torch.arange(3), torch.arange(100)]))
    assert slab.columns["a"].row(2).isnan().all()
    slab.begin(1)
    assert column.tensors(2)["b:offsets"].tolist() == [0, 0, 0]


def test_a_short_last_shard_holds_only_its_rows(tmp_path):
    store = Store(tmp_path)
    writer = Writer(store, MANIFEST)
    writer.submit(fill(writer.take(0), 1.0, rows=3))
    writer.close()
    name = shards.name_of(0)
    header = shards.check(name, lambda a, b: store.storage.read(name, a, b), store.sizes()[0])
    assert header.entries["a"]["shape"] == [3, 2]
    assert header.entries["b:offsets"]["shape"] == [4]
    assert header.metadata["rows"] == "3"


@pytest.mark.parametrize(
    ("start", "good", "expected"),
    [
        (0, [0, 1, 2], [(0, 0, 0, 3)]),
        (2, [0, 1, 2, 3], [(0, 2, 0, 2), (1, 0, 2, 4)]),
        (4, [0, 2, 3], [(1, 0, 0, 1), (1, 2, 1, 3)]),
        (3, [1, 2], [(1, 0, 0, 2)]),
        (7, [0, 1, 2], [(1, 3, 0, 1)]),
    ],
)
def test_rows_are_cut_where_shards_end_and_rows_failed(start, good, expected):
    slabs = {k: Slab((), 4, 1, pin=False).begin(k) for k in (0, 1)}
    found = [(piece.slab.shard, piece.at, piece.low, piece.high) for piece in pieces(start, good, slabs, 4)]
    assert found == expected

"""The files of a store: who may write them, what is missing, and what is left when one is cleared or finished."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchhook._features.manifest import ColumnSpec, Manifest, shown, stored
from torchhook._features.store import Store
from torchhook.errors import ExtractError, StoreMismatchError

MANIFEST = Manifest(
    columns=(ColumnSpec("a", torch.float32, (2,)),),
    rows=10,
    rows_per_shard=4,
    sites=("a",),
    model="Net",
    transform="None",
)


def commit(store: Store, shard: int, rows: int = 4, manifest: Manifest = MANIFEST):
    metadata = {"shard": str(shard), "rows": str(rows), **manifest.marks}
    return store.commit(shard, {"a": torch.full((rows, 2), float(shard))}, metadata)


def test_the_first_manifest_is_the_stores_and_another_is_refused(tmp_path):
    store = Store(tmp_path)
    assert store.manifest() is None
    assert store.agree(MANIFEST) == MANIFEST
    same = dataclasses.replace(MANIFEST, about={"batch_size": 7})
    assert store.agree(same) == MANIFEST
    commit(store, 0)
    with pytest.raises(StoreMismatchError, match=r"sites: the store has a, this run a, \(model\)"):
        store.agree(dataclasses.replace(MANIFEST, sites=("a", "")))
    assert Manifest.from_json((tmp_path / "store.json").read_text(), "x") == MANIFEST
    (tmp_path / "store.json").write_text(json.dumps({"format": "torchhook-features", "version": 99}))
    with pytest.raises(ExtractError, match="not the manifest of a feature store: another format or version"):
        store.manifest()


def test_shards_are_committed_once_and_the_others_are_missing(tmp_path):
    store = Store(tmp_path)
    assert store.missing(MANIFEST) == [0, 1, 2]
    assert store.missing(dataclasses.replace(MANIFEST, rows=None)) is None
    assert commit(store, 1).ours
    path = tmp_path / "shards" / "s000000001.safetensors"
    again = commit(store, 1)
    assert not again.ours
    assert again.entry[:3] == (1, 4, path.stat().st_size)
    assert again.entry.checksum == store.header(1, path.stat().st_size).checksum
    assert store.missing(MANIFEST) == [0, 2]
    assert store.sizes() == {1: path.stat().st_size}
    assert torch.equal(load_file(path)["a"], torch.ones(4, 2))
    assert store.header(1, store.sizes()[1]).metadata["rows"] == "4"
    assert pickle.loads(pickle.dumps(store)).sizes() == store.sizes()


def test_a_store_is_finished_when_every_row_is_there(tmp_path):
    store = Store(tmp_path)
    whole = dataclasses.replace(MANIFEST, source="stream")
    open_end = store.agree(dataclasses.replace(whole, rows=None))
    assert open_end.rows is None
    assert open_end.plan == whole.plan  # its shards are written before anybody knows the end
    for shard in (0, 1):
        commit(store, shard, manifest=open_end)
    assert store.finish(whole) == [2]
    assert store.manifest().rows == 10  # a stream has come to its end
    assert not (tmp_path / "index.json").exists()
    commit(store, 2, rows=2, manifest=open_end)
    assert store.finish(whole) == []
    assert [entry[:2] for entry in json.loads((tmp_path / "index.json").read_text())["entries"]] == [
        [0, 4],
        [1, 4],
        [2, 2],
    ]
    with pytest.raises(ExtractError, match="holds 2 rows where 3 are expected of 11 in all"):
        store.finish(dataclasses.replace(whole, rows=11))


def test_another_runs_manifest_and_shards_are_refused_at_the_end_and_by_a_commit(tmp_path):
    store, other = Store(tmp_path), dataclasses.replace(MANIFEST, model="Other")
    store.agree(MANIFEST)
    commit(store, 1)
    assert commit(store, 1).ours is False
    with pytest.raises(StoreMismatchError, match="shard 1 was written by another run"):
        commit(store, 1, manifest=other)
    with pytest.raises(StoreMismatchError, match="another run has replaced the store"):
        store.finish(other)
    commit(store, 0, manifest=other)
    for refused in (lambda: store.finish(MANIFEST), lambda: store.agree(MANIFEST)):
        with pytest.raises(StoreMismatchError, match=r"shard 0 is of another run \(another model\)"):
            refused()


def test_only_a_store_is_cleared_and_only_its_own_files(tmp_path):
    store = Store(tmp_path)
    commit(store, 0)
    save_file({"a": torch.ones(1)}, tmp_path / "shards" / "s000000001.safetensors")
    store.clear()
    assert list(store.sizes()) == [1]  # without a manifest, a file is ours only if it says so
    store.storage.remove("shards/s000000001.safetensors")
    store.agree(MANIFEST)
    commit(store, 0)
    (tmp_path / "shards" / "notes.txt").write_text("mine")
    store.clear()
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["shards", "notes.txt"]


def test_rows_of_shards_are_counted_to_the_end_of_the_data():
    assert [MANIFEST.span(shard) for shard in range(3)] == [(0, 4), (4, 8), (8, 10)]
    assert MANIFEST.rows_in([0, 2]) == 6


@pytest.mark.parametrize("name", ["layer4", "fc:input", "relu#1", "", ":input", "[values]", "#1[0]", "attn/softmax"])
def test_what_is_shown_can_be_read(name):
    assert stored(shown(name)) == name
    assert shown(name)

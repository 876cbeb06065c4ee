"""The index: a cache in one file and in pages, never an error, which saves a request for every shard."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import nn

from torchhook._extract.api import extract
from torchhook._features import formats, index, shards
from torchhook._features.api import open_features, verify
from torchhook._features.index import Entry, Page
from torchhook._features.store import Store
from torchhook.errors import BrokenShardError, IncompleteStoreError

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


def E(out, data=X, **options):
    options = {"batch_size": 4, "rows_per_shard": 4, "progress": False, **options}
    return extract(nn.Sequential(nn.Identity()), data, "0", out, **options)


class Stops(torch.utils.data.Dataset):
    def __init__(self, at):
        self.at = at

    def __len__(self):
        return len(X)

    def __getitem__(self, row):
        if row == self.at:
            raise KeyboardInterrupt
        return X[row]


def headers_read(monkeypatch):
    read = []
    real = shards.header
    monkeypatch.setattr(shards, "header", lambda name, *rest: read.append(name) or real(name, *rest))
    return read


def pages(path):
    return sorted(name for name in os.listdir(path) if name.startswith("index."))


def test_a_run_that_stops_leaves_a_page_and_one_that_ends_the_whole_index(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        E(tmp_path, Stops(30))
    (page,) = pages(tmp_path)
    assert page != "index.json"
    assert sorted(entry[0] for entry in formats.unpacked((tmp_path / page).read_bytes())) == list(range(7))
    read = headers_read(monkeypatch)
    assert open_features(tmp_path, incomplete=True).missing == [7, 8, 9]
    assert read == []
    E(tmp_path)
    assert pages(tmp_path) == ["index.json"]
    # Of the three shards that were made, as they are written, and of the first, whose rows are run again to compare.
    assert {shards.number_of(name) for name in read} == {0, 7, 8, 9}
    read.clear()
    E(tmp_path)
    open_features(tmp_path)
    assert {shards.number_of(name) for name in read} <= {0}
    monkeypatch.undo()
    told = [Entry(*entry) for entry in formats.unpacked((tmp_path / "index.json").read_bytes())]
    store = Store(tmp_path)
    assert told == [index.of_header(k, store.header(k, size)) for k, size in sorted(store.sizes().items())]


@pytest.mark.parametrize(
    "damage",
    ["", "[", "7", "[7]", "[[0]]", '[["a", 1, 1, "x", {}]]', '[[0, 1, 1, "x", 5]]', "null", '{"a": 1}', "gone"],
)
def test_an_index_that_is_damaged_or_gone_is_made_again_from_the_headers(tmp_path, damage):
    E(tmp_path)
    good = (tmp_path / "index.json").read_bytes()
    (tmp_path / "index.json").unlink()
    if damage != "gone":
        (tmp_path / "index.json").write_text(damage)
    assert torch.equal(open_features(tmp_path)["0"][:], X)
    E(tmp_path)
    assert (tmp_path / "index.json").read_bytes() == good


def test_an_index_that_tells_of_other_shards_is_not_believed(tmp_path):
    E(tmp_path)
    os.truncate(tmp_path / shards.name_of(2), 5000)
    with pytest.raises(BrokenShardError, match="s000000002"):
        open_features(tmp_path)
    (tmp_path / shards.name_of(2)).unlink()
    with pytest.raises(IncompleteStoreError):
        open_features(tmp_path)
    assert torch.equal(E(tmp_path)["0"][:], X)


def test_pages_of_two_processes_are_read_together_and_what_is_discarded_is_forgotten(tmp_path):
    E(tmp_path)
    entries = [Entry(*entry) for entry in formats.unpacked((tmp_path / "index.json").read_bytes())]
    (tmp_path / "index.json").unlink()
    for part in (entries[:4], entries[4:8]):
        page = Page(Store(tmp_path).storage)
        for entry in part:
            page.add(entry)
        page.flush()
    assert len(pages(tmp_path)) == 2
    assert sorted(Store(tmp_path).contents(open_features(tmp_path).manifest).known) == list(range(8))
    with open(tmp_path / shards.name_of(1), "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert verify(tmp_path).discard() == [1]
    assert sorted(Store(tmp_path).contents(open_features(tmp_path, incomplete=True).manifest).known) == [
        0,
        *range(2, 8),
    ]
    assert torch.equal(E(tmp_path)["0"][:], X)
    assert pages(tmp_path) == ["index.json"]


def test_a_page_is_written_now_and_then_and_never_an_error(tmp_path, monkeypatch):
    storage = Store(tmp_path).storage
    page = Page(storage)
    page.flush()
    assert not os.listdir(tmp_path)  # nothing to tell
    page.add(Entry(0, 1, 1, "x", {}))
    assert not os.listdir(tmp_path)
    now = time.monotonic()
    monkeypatch.setattr(index.time, "monotonic", lambda: now + 31)
    page.add(Entry(1, 1, 1, "x", {}))
    assert len(formats.unpacked((tmp_path / pages(tmp_path)[0]).read_bytes())) == 2

    def full(name, data):
        raise OSError("No space left on device")

    monkeypatch.setattr(storage, "replace", full)
    page.add(Entry(2, 1, 1, "x", {}))
    page.flush()


def test_a_page_that_becomes_the_index_while_it_is_read_is_not_missed(tmp_path, monkeypatch):
    E(tmp_path)
    (tmp_path / "index.json").rename(tmp_path / "index.0.json")
    storage = Store(tmp_path).storage
    real = storage.read

    def read(name, *rest):
        if name == "index.0.json":
            (tmp_path / "index.0.json").rename(tmp_path / "index.json")
        return real(name, *rest)

    monkeypatch.setattr(storage, "read", read)
    assert len(index.contents(storage, 10).known) == 10


# -- a hundred thousand shards ------------------------------------------------------------------------------

MANY = 30_000  # more than are listed whole


@pytest.fixture(scope="module")
def request_counts():
    """An object store that counts, which needs fsspec: the tests before this line do not."""
    module = pytest.importorskip("benchmarks.request_counts", exc_type=ImportError)
    yield module
    module.CountingStore.objects.clear()


@pytest.mark.slow
def test_few_requests_open_and_go_on_with_a_store_of_many_shards(request_counts):
    _, found = request_counts.table(MANY)
    assert len(found) == 4
    assert max(found.values()) <= 50  # and as many for 100,000: `benchmarks/extract.py` prints them


def test_shards_that_no_index_knows_are_found_where_they_are_missing(request_counts):
    url = f"counted://bucket/{MANY}"
    request_counts.made(url, MANY, present=12_345, indexed=12_000)
    found = request_counts.run(url, MANY, dry_run=True)
    assert found.todo == MANY - 12_345


def test_a_shard_that_is_in_the_way_unseen_is_left_as_it_is(request_counts):
    """What a listing was too dear for is made again, and then found to be there."""
    url = f"counted://bucket/unseen{MANY}"
    request_counts.made(url, MANY, present=MANY, indexed=MANY)
    root = url.split("://")[1]
    objects = request_counts.CountingStore.objects
    kept = [entry for entry in formats.unpacked(objects[f"{root}/index.json"]) if entry[0] not in (7, 29_000)]
    objects[f"{root}/index.json"] = formats.packed(kept)
    features = request_counts.run(url, MANY)
    assert features.missing == []
    assert features["0"][29_000].tolist() == [29_000.0] * 2
    assert len(formats.unpacked(objects[f"{root}/index.json"])) == MANY


@pytest.mark.parametrize(
    ("missing", "known", "expected"),
    [
        ([], range(100), []),
        (range(50_000, 60_000), range(50_000), ["s00005"]),
        ([5], range(100_000), ["s000000"]),
        ([1_005, 2_005], range(100_000), ["s000001", "s000002"]),
        (range(12_000, 30_000), range(12_000), ["s00001", "s00002"]),
        ([123_456_789], range(123_450_000, 123_456_789), ["s123456"]),
    ],
)
def test_names_are_looked_for_by_beginnings_that_few_others_have(missing, known, expected):
    found = index._prefixes(missing, known)
    assert found == expected
    for shard in missing:
        assert any(shards.name_of(shard).startswith(f"shards/{prefix}") for prefix in found)

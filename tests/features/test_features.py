"""The reader: every way to ask for rows against a plain tensor of the same rows."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.extract import jobs
from torchhook import transforms
from torchhook._extract.api import extract
from torchhook._features.api import open_features
from torchhook.errors import IncompleteStoreError, MissingRecordError

ROWS = 150


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    out = tmp_path_factory.mktemp("store") / "f"
    ids = [f"row {i}" for i in range(ROWS)]
    extract(
        jobs.Net(), jobs.data(ROWS), ["first", "second"], out, ids=ids, batch_size=16, rows_per_shard=32, progress=False
    )
    return out


@pytest.fixture(scope="module")
def truth():
    return jobs.oracle(jobs.Net(), jobs.data(ROWS).tensors[0].split(16), "first", "second")


@pytest.fixture(params=["mmap", "read"])
def features(path, request):
    return open_features(path, access=request.param)


KEYS = [
    0, 31, 32, ROWS - 1, -1, -ROWS, np.int64(40), torch.tensor(77),
    slice(None), slice(5, 70), slice(30, 34), slice(0, 0), slice(140, 9), slice(3, 140, 7), slice(100, 20, -9),
    slice(-5, None),    [3], [149, 0, 0, 33, -2], [], range(60, 20, -3), np.array([4, 99]), torch.tensor([99, 98, 97]),
    torch.arange(ROWS) % 5 == 0, (torch.arange(ROWS) % 7 == 0).numpy(),
]  # fmt: skip


def _plain(key):
    if isinstance(key, torch.Tensor):
        return key.numpy()
    return np.array(key, dtype=int) if isinstance(key, (list, range)) else key


@pytest.mark.parametrize("key", KEYS, ids=range(len(KEYS)))
def test_rows_read_as_from_a_tensor(features, truth, key):
    for name, expected in truth.items():
        wanted = expected.numpy()[_plain(key)]
        found = features[name][key]
        assert found.dtype == expected.dtype
        assert found.shape == wanted.shape
        assert np.array_equal(found.numpy(), wanted)


def test_wrong_rows_and_names_are_errors(features):
    for key in (ROWS, -ROWS - 1, [0, ROWS]):
        with pytest.raises(IndexError, match=f"of {ROWS}"):
            features["first"][key]
    with pytest.raises(IndexError, match="mask"):
        features["first"][torch.ones(3, dtype=torch.bool)]
    with pytest.raises(TypeError, match="by number, slice, list or mask"):
        features["first"][[0.5]]
    with pytest.raises(MissingRecordError, match="Closest: 'first'"):
        features["frist"]


def test_changing_what_was_read_changes_nothing_in_the_store(features, truth):
    for key in (3, [3, 4], slice(3, 5), slice(0, ROWS)):
        features["first"][key].zero_()
        next(iter(features.dataset("first").__getitems__([3])))[0].zero_()
    assert torch.equal(features["first"][:], truth["first"])


def test_numpy_ids_labels_and_length(features, truth):
    assert np.array_equal(np.asarray(features["first"]), truth["first"].numpy())
    assert np.asarray(features["first"], dtype=np.float16).dtype == np.float16
    assert features["first"].shape == (ROWS, 16)
    assert len(features) == len(features["second"]) == ROWS
    assert features.ids[33] == "row 33"
    assert features.ids[-2:] == ["row 148", "row 149"]
    assert torch.equal(features.labels[:], torch.arange(ROWS) % 7)
    assert list(features) == ["first", "second"]
    assert "first" in features
    assert "150 rows" in repr(features)
    assert "<table" in features._repr_html_()


def test_a_store_pickles_as_its_path(features, truth):
    again = pickle.loads(pickle.dumps(features))
    assert torch.equal(again["first"][5], truth["first"][5])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_epoch_has_every_row_once(features, truth, workers):
    data = features.dataset("first", ids=True)
    seen = {}
    for x, y, ids in DataLoader(data, batch_size=16, shuffle=True, num_workers=workers):
        for row, label, name in zip(x, y, ids, strict=True):
            seen[name] = row, label
    assert len(seen) == ROWS
    for i in range(ROWS):
        row, label = seen[f"row {i}"]
        assert torch.equal(row, truth["first"][i])
        assert label == i % 7


@pytest.mark.parametrize("workers", [0, 2])
def test_whole_batches_come_from_the_loader(features, truth, workers):
    loader = features.dataset("second", labels=False).loader(64, workers=workers)
    assert torch.equal(torch.cat(list(loader)), truth["second"])
    assert [len(x) for x in features.dataset("second", labels=False).loader(64, shuffle=True, drop_last=True)] == [
        64,
        64,
    ]


def test_a_dataset_gives_rows_batches_several_layers_and_chosen_rows(features, truth):
    x, y = features.dataset("first")[5]
    assert torch.equal(x, truth["first"][5])
    assert y == 5
    x, y = features.dataset("first")[[5, 7]]
    assert torch.equal(x, truth["first"][[5, 7]])
    both = features.dataset(labels=False)
    assert torch.equal(both[9]["second"], truth["second"][9])
    assert torch.equal(both[-1]["second"], truth["second"][-1])
    some = features.dataset("first", rows=[10, 20, 30], labels=False, transform=lambda x: x * 2)
    assert len(some) == 3
    assert torch.equal(some[1], truth["first"][20] * 2)
    assert torch.equal(torch.stack(some.__getitems__([2, 0])), truth["first"][[30, 10]] * 2)


def test_npy_files_hold_every_row(features, truth, tmp_path):
    written = features.export(tmp_path)
    assert [p.rsplit("/", 1)[1] for p in written] == ["first.npy", "ids.txt", "labels.npy", "second.npy"]
    assert np.array_equal(np.load(tmp_path / "first.npy"), truth["first"].numpy())
    assert np.array_equal(np.load(tmp_path / "labels.npy"), np.arange(ROWS) % 7)
    assert (tmp_path / "ids.txt").read_text().splitlines()[149] == "row 149"


def test_hugging_face_reads_the_same_rows(path, truth, tmp_path):
    pytest.importorskip("datasets")
    data = open_features(path).to_hf()
    assert data.column_names == ["first", "second", "ids", "labels"]
    assert len(data) == ROWS
    torch_rows = data.with_format("torch")
    assert torch.equal(torch_rows[40]["first"], truth["first"][40])
    assert torch.equal(torch.stack(list(torch_rows[[1, 149]]["second"])), truth["second"][[1, 149]])
    assert data[33]["ids"] == "row 33"


def test_narrow_dtypes_and_ragged_rows_leave_in_wider_clothes(tmp_path):
    pytest.importorskip("datasets")

    def some(value):
        return transforms.Rows(
            row[: int(i) + 1] for i, row in zip(range(len(value)), value.unsqueeze(1).expand(-1, 9, -1), strict=True)
        )

    features = extract(
        jobs.Net(), jobs.data(20), ["first", "second"], tmp_path / "f", batch_size=5, rows_per_shard=10,
        dtype=torch.bfloat16, transform={"second": some}, progress=False,
    )  # fmt: skip
    assert features["first"].dtype == torch.bfloat16
    assert features["first"].numpy().dtype == np.float32
    features.export(tmp_path / "npy")
    assert np.load(tmp_path / "npy/first.npy").dtype == np.float32
    ends = np.load(tmp_path / "npy/second.offsets.npy")
    assert ends[:7].tolist() == [0, 1, 3, 6, 10, 15, 16]
    items = np.load(tmp_path / "npy/second.npy")
    assert np.array_equal(items[3:6], features["second"][2].float().numpy())
    assert np.array(features.to_hf()[2]["second"]).shape == (3, 12)
    assert features["second"].numpy()[2].shape == (3, 12)


def test_the_index_is_a_cache_that_can_go(path, truth):
    (path / "index.json").rename(path / "aside.json")
    assert torch.equal(open_features(path)["first"][:], truth["first"])
    (path / "index.json").write_text("[[0, 1, 2]]")
    assert len(open_features(path)) == ROWS
    (path / "aside.json").replace(path / "index.json")


# -- statistics --------------------------------------------------------------------------------------------


def test_statistics_of_one_pass_are_those_of_all_rows(features, truth):
    x = truth["first"].double()
    found = features.statistics("first", covariance=True, quantiles=(0.0, 0.25, 0.5, 1.0), top=4)
    assert found.count == ROWS
    assert torch.allclose(found.mean, x.mean(0))
    assert torch.allclose(found.std, x.std(0))
    assert torch.allclose(found.covariance, torch.cov(x.T))
    assert torch.equal(found.min, x.amin(0))
    assert torch.equal(found.max, x.amax(0))
    for q, values in found.quantiles.items():
        assert torch.allclose(values, x.quantile(q, dim=0))
    values, rows = x.topk(4, dim=0)
    assert torch.equal(found.top_values, values.T)
    assert torch.equal(found.top_rows, rows.T)


def test_a_sketch_gives_quantiles_within_its_error(features, truth):
    x = truth["second"].double()
    found = features.statistics("second", quantiles=(0.5,), resolution=8)
    median = found.quantiles[0.5]
    assert 0 < found.rank_error < 0.25
    assert ((x < median).double().mean(0) <= 0.5 + found.rank_error).all()
    assert ((x <= median).double().mean(0) >= 0.5 - found.rank_error).all()
    assert not torch.equal(median, x.quantile(0.5, dim=0))


def test_channels_of_maps_and_tokens_are_told_apart(tmp_path):
    maps = torch.randn(40, 3, 4, 5)
    model = torch.nn.Sequential(torch.nn.Identity())
    features = extract(model, maps, "0", tmp_path / "a", batch_size=8, rows_per_shard=16, progress=False)
    found = features.statistics("0", covariance=True, top=2)
    flat = maps.double().permute(0, 2, 3, 1).reshape(-1, 3)
    assert found.count == 40 * 20
    assert torch.allclose(found.mean, flat.mean(0))
    assert torch.allclose(found.covariance, torch.cov(flat.T))
    assert torch.equal(found.top_rows, maps.double().flatten(2).amax(2).topk(2, dim=0).indices.T)
    last = features.statistics("0", channel=-1)
    assert torch.allclose(last.mean, maps.double().mean((0, 1, 2)))
    tokens = maps.flatten(2).transpose(1, 2).contiguous()
    ragged = extract(
        model,
        tokens,
        "0",
        tmp_path / "b",
        transform=lambda v: transforms.Rows(v.unbind()),
        batch_size=8,
        progress=False,
    )
    assert torch.allclose(ragged.statistics("0").mean, flat.mean(0))


def test_one_row_in_one_shard_is_told_as_one(tmp_path):
    found = extract(jobs.Net(), jobs.data(1), "first", tmp_path, batch_size=1, rows_per_shard=1, progress=False)
    assert "1 row, " in str(found)
    assert "in 1 shard of 1 row\n" in str(found)
    assert repr(found["first"]).endswith(", 1 row>")
    assert ": 1 shard, " in str(found.verify())
    estimate = extract(jobs.Net(), jobs.data(1), "first", tmp_path / "b", batch_size=1, dry_run=True)
    assert "in 1 shard, 1 to do" in str(estimate)
    (tmp_path / "shards" / "s000000000.safetensors").unlink()
    assert "1 of 1 shard is not as it should be" in str(found.verify())
    with pytest.raises(IncompleteStoreError, match=r"lacks 1 of 1 shard \(0\)"):
        open_features(tmp_path)
    assert "incomplete: 1 shard is missing" in str(open_features(tmp_path, incomplete=True))

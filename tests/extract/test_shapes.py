"""Stores in other shapes: files, tables and data sets hold every column and every row, or say why not."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

from torchhook._extract.api import extract
from torchhook._features.api import open_features
from torchhook.errors import ExtractError, IncompleteStoreError

E = functools.partial(extract, progress=False)
X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


def same():
    return nn.Sequential(nn.Identity())


def test_an_incomplete_store_is_not_exported(tmp_path):
    E(same(), X, "0", tmp_path / "o", rows_per_shard=10)
    (tmp_path / "o" / "shards" / "s000000001.safetensors").unlink()
    features = open_features(tmp_path / "o", incomplete=True)
    with pytest.raises(IncompleteStoreError, match="lacks 1 shard"):
        features.export(tmp_path / "npy")
    assert not (tmp_path / "npy").exists()
    pytest.importorskip("datasets")
    with pytest.raises(IncompleteStoreError, match="lacks 1 shard"):
        features.to_hf()


class Names(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.a_input, self.labels = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.labels(self.a_input(self.a(x)))


def test_every_exported_column_has_a_name_of_its_own(tmp_path):
    data = torch.utils.data.TensorDataset(X, torch.arange(40))
    features = E(Names(), data, ["a:input", "a_input", "labels"], tmp_path / "o")
    written = features.export(tmp_path / "npy")
    assert len(set(written)) == 4
    arrays = [np.load(path) for path in written]
    for column in (*(features[name] for name in features), features.labels):
        assert sum(np.array_equal(array, column.numpy()) for array in arrays) == 1
    assert np.array_equal(np.load(tmp_path / "npy" / "labels.npy"), np.arange(40))
    pytest.importorskip("datasets")
    table = features.to_hf()
    assert table["labels"][:] == list(range(40))
    assert np.allclose(table["labels_2"][:], features["labels"].numpy())


def test_columns_without_width(tmp_path):
    features = E(same(), torch.zeros(5, 2, 0), "0", tmp_path, rows_per_shard=2)
    assert features["0"][:].shape == (5, 2, 0)
    with pytest.raises(ExtractError, match="hold no values"):
        features.statistics("0")
    pytest.importorskip("datasets")
    assert features.to_hf()[:]["0"] == [[[], []]] * 5


def test_a_dataset_takes_every_kind_of_index(tmp_path):
    data = torch.utils.data.TensorDataset(X, torch.arange(40))
    features = E(same(), data, "0", tmp_path, rows_per_shard=16, ids=[f"n{i}" for i in range(40)])
    dataset = features.dataset(ids=True)
    for index in (np.int64(7), torch.tensor(7), np.array(7), 7, -33):
        x, label, name = dataset[index]
        assert torch.equal(x, X[7])
        assert (label, name) == (7, "n7")
    mask = torch.zeros(40, dtype=torch.bool)
    mask[[3, 20]] = True
    for index in (mask, mask.numpy(), mask.tolist(), [3, 20], np.array([3, -20]), range(3, 21, 17), slice(3, 21, 17)):
        x, label, name = dataset[index]
        assert torch.equal(x, X[[3, 20]])
        assert (label.tolist(), name) == ([3, 20], ["n3", "n20"])
    assert len(features.dataset(rows=[])) == 0
    some = features.dataset(rows=slice(0, 5), ids=True)
    assert some[[False, True, False, False, True]][2] == ["n1", "n4"]
    assert [name for *_, name in features.dataset(rows=mask, ids=True)] == ["n3", "n20"]
    for wrong in (40, -41, [3, 40], np.int64(40)):
        with pytest.raises(IndexError):
            dataset[wrong]
    with pytest.raises(TypeError):
        dataset[1.5]

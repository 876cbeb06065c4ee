"""Columns in other processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.extract import jobs
from torchhook._extract.api import extract
from torchhook._features.api import open_features

ROWS = 40


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    out = tmp_path_factory.mktemp("columns") / "f"
    ids = [f"row\n{i}" for i in range(ROWS)]
    extract(jobs.Net(), jobs.data(ROWS), ["first", ""], out, ids=ids, batch_size=8, rows_per_shard=8, progress=False)
    return out


class OneColumn(Dataset):
    """What people write: a column kept in a data set of their own."""

    def __init__(self, column, ids):
        self.column, self.ids = column, ids

    def __len__(self):
        return len(self.column)

    def __getitem__(self, i):
        return self.column[i], self.ids[i]


@pytest.mark.parametrize("access", ["mmap", "read"])
def test_a_column_pickles(path, access):
    features = open_features(path, access=access)
    features["first"][3]  # a column in use, too
    for column in (features["first"], features["(model)"], features.ids, features.labels):
        again = pickle.loads(pickle.dumps(column))
        assert again.name == column.name
        assert repr(again[:]) == repr(column[:])


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_columns_are_read_by_workers(path, start):
    features = open_features(path)
    wanted = features["first"][:]
    data = OneColumn(features["first"], features.ids)
    context = multiprocessing.get_context(start)
    loader = DataLoader(data, batch_size=16, num_workers=1 + (start == "fork"), multiprocessing_context=context)
    rows, ids = zip(*loader, strict=True)
    assert torch.equal(torch.cat(rows), wanted)
    assert [name for batch in ids for name in batch] == [f"row\n{i}" for i in range(ROWS)]


def test_a_child_reads_on_while_a_thread_of_the_parent_held_the_lock(path):
    features = open_features(path)
    shards = features["first"]._shards
    with shards._lock:  # as another thread would, at the moment of the fork
        child = os.fork()
        if not child:
            os._exit(0 if features["first"][:].shape == (ROWS, 16) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

"""Where rows come from: lists, iterable data with workers, loaders that drop rows, layers with other axes."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset, get_worker_info

from torchhook import transforms as tf
from torchhook._extract.api import extract
from torchhook.errors import DataWarning, ExtractError

E = functools.partial(extract, progress=False)
X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


def same():
    return nn.Sequential(nn.Identity())


# -- lists ------------------------------------------------------------------------------------------


def test_a_list_of_batches_is_that(tmp_path):
    for name, batches in {
        "tensors": list(X.split(16)),
        "pairs": [(x, torch.arange(len(x))) for x in X.split(16)],
        "mappings": [{"input": x, "label": torch.arange(len(x))} for x in X.split(16)],
        "tuple": tuple(X.split(16)),
    }.items():
        features = E(same(), batches, "0", tmp_path / name)
        assert torch.equal(features["0"][:], X)
        assert features.labels is None or features.labels[:].tolist() == [*range(16), *range(16), *range(8)]


def test_a_list_of_rows_is_that(tmp_path):
    for name, rows in {
        "tensors": list(X),
        "pairs": [(x, i) for i, x in enumerate(X)],
        "mappings": [{"input": x, "label": i} for i, x in enumerate(X)],
        "named": [{"input": x, "label": "a"} for x in X],
    }.items():
        assert torch.equal(E(same(), rows, "0", tmp_path / name)["0"][:], X)
    images = list(torch.randn(5, 3, 4, 4))
    assert torch.equal(E(same(), images, "0", tmp_path / "images", batch_size=2)["0"][:], torch.stack(images))


@pytest.mark.parametrize(
    "data",
    [
        list(X.split(8)),
        [(x, x) for x in X.split(8)],
        [{"input": x} for x in X.split(8)],
        [torch.randn(n, 3) for n in (4, 7, 5)],
    ],
    ids=["tensors", "pairs", "mappings", "uneven"],
)
def test_a_list_that_may_be_of_rows_or_of_batches_is_refused_with_both_ways_out(tmp_path, data):
    with pytest.raises(ExtractError, match=r"rows or batches.*batch_size=.*iter\(data\)"):
        E(same(), data, "0", tmp_path / "a")
    batches = [b[0] if isinstance(b, tuple) else b.get("input") if isinstance(b, dict) else b for b in data]
    assert torch.equal(E(same(), iter(data), "0", tmp_path / "b")["0"][:], torch.cat(batches))


# -- iterable data sets --------------------------------------------------------------------------------


class Everything(IterableDataset):
    """Every worker gives all of it."""

    def __iter__(self):
        return iter(X)


class Sharded(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter(X if info is None else X[info.id :: info.num_workers])


class Known(Everything):
    """Another noise in every worker, and a length."""

    def __len__(self):
        return len(X)

    def __iter__(self):
        info = get_worker_info()
        return iter(X + (0 if info is None else info.id))


def test_workers_that_each_give_all_rows_are_refused(tmp_path):
    for data in (Everything(), DataLoader(Everything(), batch_size=8, num_workers=2)):
        with pytest.raises(ExtractError, match=r"2 workers .*the same rows.*get_worker_info.*workers=0"):
            E(same(), data, "0", tmp_path / "a", workers=2, batch_size=8)
    assert torch.equal(E(same(), Everything(), "0", tmp_path / "b", batch_size=8)["0"][:], X)
    assert torch.equal(E(same(), Everything(), "0", tmp_path / "c", batch_size=8, workers=1)["0"][:], X)


def test_workers_that_share_the_rows_are_fine(tmp_path):
    features = E(same(), Sharded(), "0", tmp_path / "a", workers=2, batch_size=8)
    found = {tuple(row) for row in features["0"][:].tolist()}
    assert len(features) == 40
    assert found == {tuple(row) for row in X.tolist()}


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_more_rows_than_a_data_set_has_are_refused(tmp_path):
    with pytest.raises(ExtractError, match="says that it has 40 rows, and gave more"):
        E(same(), Known(), "0", tmp_path / "a", workers=2, batch_size=8)
    assert torch.equal(E(same(), Known(), "0", tmp_path / "b", batch_size=7)["0"][:], X)


# -- loaders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 5])
def test_rows_that_a_loader_drops_are_dropped_and_told(tmp_path, size):
    loader = DataLoader(TensorDataset(X, torch.arange(40)), batch_size=16, drop_last=True)
    with pytest.warns(DataWarning, match="leaves out the last 8 of 40 rows: drop_last=True"):
        features = E(same(), loader, "0", tmp_path, batch_size=size)
    assert torch.equal(features["0"][:], X[:32])
    assert features.labels[:].tolist() == [*range(32)]


def test_a_sampler_may_drop_too(tmp_path):
    order = list(range(39, -1, -1))
    loader = DataLoader(X, batch_size=16, sampler=order, drop_last=True)
    with pytest.warns(DataWarning, match="the last 8 of 40"):
        assert torch.equal(E(same(), loader, "0", tmp_path / "a")["0"][:], X[order[:32]])
    assert len(E(same(), DataLoader(X, batch_size=8, drop_last=True), "0", tmp_path / "b")) == 40


# -- axes ---------------------------------------------------------------------------------------------


class TimeFirst(nn.Module):
    """A layer whose values are time, batch, channels, as those of torch's own transformers are by default."""

    def __init__(self):
        super().__init__()
        self.swapped, self.back, self.table = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x):
        self.table(x[0] * 2)
        return self.back(self.swapped(x.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("transform", [None, tf.pool("mean"), lambda value: value.flatten(1)])
def test_a_layer_whose_first_dim_is_not_the_rows_is_found_even_if_it_is_as_long(tmp_path, transform):
    x = torch.randn(16, 8, 5)
    for size in (8, 4):
        with pytest.raises(ExtractError, match=r"'swapped'.*Dim 0 must be the rows"):
            E(TimeFirst(), x, "swapped", tmp_path / "a", batch_size=size, transform=transform)
    with pytest.raises(ExtractError, match=r"'table'.*Dim 0 must be the rows"):
        E(TimeFirst(), x, "table", tmp_path / "a", batch_size=8)
    assert torch.equal(E(TimeFirst(), x, "back", tmp_path / "b", batch_size=8)["back"][:], x)
    swapped = E(TimeFirst(), x, "swapped", tmp_path / "c", batch_size=8, transform=lambda v: v.transpose(0, 1))
    assert torch.equal(swapped["swapped"][:], x)
    assert torch.equal(E(TimeFirst(), iter(x.split(8)), "back", tmp_path / "d")["back"][:], x)
    with pytest.raises(ExtractError, match=r"'swapped'.*Dim 0 must be the rows"):
        E(TimeFirst(), iter(x.split(8)), "swapped", tmp_path / "e", transform=transform)


# -- single numbers ------------------------------------------------------------------------------------


class Losing(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss, self.both = nn.Identity(), nn.Identity()

    def forward(self, x):
        self.both({"loss": x.mean(), "x": x})
        return self.loss(x.mean())


@pytest.mark.parametrize("site", ["loss", "both"])
def test_a_single_number_has_no_rows(tmp_path, site):
    with pytest.raises(ExtractError, match=r"is a single number for a batch of 8 rows.*transforms\.pick"):
        E(Losing(), X, site, tmp_path / "a", batch_size=8)
    assert torch.equal(E(Losing(), X, "both", tmp_path / "b", transform=tf.pick("x"))["both"][:], X)


# -- loaders and samplers with an order of their own --------------------------------------------------


class Backwards(SequentialSampler):
    def __iter__(self):
        return reversed(range(len(self.data_source)))


class Doubling(DataLoader):
    def __iter__(self):
        return ([x * 2] for (x,) in super().__iter__())


class Shortened(DataLoader):
    def __iter__(self):
        return itertools.islice(super().__iter__(), 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda data: DataLoader(data, 8, sampler=SequentialSampler(range(10))),
        lambda data: DataLoader(data, 8, sampler=Backwards(data)),
        lambda data: Doubling(data, 8),
        lambda data: Shortened(data, 8),
        lambda data: Doubling(data, 8, shuffle=False, drop_last=True),
    ],
    ids=["fewer", "backwards", "other values", "fewer batches", "other values, dropped"],
)
def test_rows_are_those_that_the_loader_gives_whatever_it_derives_from(tmp_path, make):
    wanted = torch.cat([x for (x,) in make(TensorDataset(X))])
    assert torch.equal(E(same(), make(TensorDataset(X)), "0", tmp_path)["0"][:], wanted)


def test_a_loader_of_ones_own_that_shuffles_is_refused(tmp_path):
    with pytest.raises(ExtractError, match="another order each time"):
        E(same(), Doubling(TensorDataset(X), 8, shuffle=True), "0", tmp_path)

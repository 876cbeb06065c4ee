"""Batches of every kind: whose rows are listed, odd, changed in place, or partly bad. The oracle is a bare call."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset

from torchhook._extract.api import extract
from torchhook.errors import ExtractError

E = functools.partial(extract, progress=False)
LIN = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


def same():
    return nn.Sequential(nn.Identity())


class Named(Dataset):
    """Rows with names, as torchvision's folders have them."""

    def __init__(self, rows):
        self.rows = rows
        self.samples = [(f"row {i}", 0) for i in range(len(rows))]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


# -- listed batches ---------------------------------------------------------------------------------


def test_ids_follow_the_order_of_a_sampler(tmp_path):
    backwards = list(range(39, -1, -1))
    loaders = {
        "batches": DataLoader(Named(X), batch_sampler=BatchSampler(backwards, 8, False)),
        "rows": DataLoader(Named(X), sampler=backwards, batch_size=8),
        "plain": DataLoader(Named(X), batch_size=8),
    }
    for name, loader in loaders.items():
        features = E(same(), loader, "0", tmp_path / name)
        order = range(40) if name == "plain" else backwards
        assert list(features.ids) == [f"row {i}" for i in order]
        assert torch.equal(features["0"][:], X[list(order)])


def test_listed_batches_are_kept(tmp_path):
    lengths = [2, 2, 2, 5, 5, 3, 3, 3, 3]
    rows = [torch.full((n, 3), float(i)) for i, n in enumerate(lengths)]
    loader = DataLoader(Named(rows), batch_sampler=[[3, 4], [0, 1, 2], [], [5, 6, 7, 8]])
    seen = []

    class Mean(nn.Module):
        def forward(self, x):
            seen.append(x[:, 0, 0].tolist())
            return x.mean(1)

    features = E(nn.Sequential(Mean()), loader, "0", tmp_path / "a", rows_per_shard=6)
    assert features["0"][:][:, 0].tolist() == [3, 4, 0, 1, 2, 5, 6, 7, 8]
    assert seen == [[3, 4], [0, 1, 2], [5], [6, 7, 8]]  # the shard ends after six rows
    for k in (0, 1):
        os.unlink(tmp_path / "a" / "shards" / f"s00000000{k}.safetensors")
        again = E(nn.Sequential(Mean()), loader, "0", tmp_path / "a", rows_per_shard=6)
        assert torch.equal(again["0"][:], features["0"][:])
    regrouped = E(same(), DataLoader(X, batch_sampler=[[1, 0], [2]]), "0", tmp_path / "b", batch_size=3)
    assert torch.equal(regrouped["0"][:], X[[1, 0, 2]])


# -- batches that are not like the first ----------------------------------------------------------------


@pytest.mark.parametrize("missing", ["label", "id"])
def test_labels_and_ids_may_not_come_to_an_end(tmp_path, missing):
    def batches():
        for i in range(3):
            batch = {"input": X[:4], "label": torch.ones(4), "id": torch.arange(4)}
            if i == 2:
                batch.pop(missing)
            yield batch

    def ids(batch):
        return batch.get("id")

    with pytest.raises(
        ExtractError, match=f"{missing}s: none in the batch, and the first batch had them.*Rows 8 to 11"
    ):
        E(same(), batches(), "0", tmp_path, ids=ids)


@pytest.mark.parametrize(
    ("first", "later", "fits"),
    [
        (torch.int64, torch.float32, False),
        (torch.int8, torch.int64, False),
        (torch.bool, torch.int64, False),
        (torch.float32, torch.complex64, False),
        (torch.int64, torch.int8, True),
        (torch.float32, torch.float64, True),
        (torch.float32, torch.int64, True),
        (torch.uint8, torch.bool, True),
    ],
)
def test_a_later_dtype_that_would_lose_values_is_an_error(tmp_path, first, later, fits):
    batches = [torch.ones(4, 2).to(first), torch.ones(4, 2).to(later)]
    if fits:
        features = E(same(), iter(batches), "0", tmp_path)
        assert torch.equal(features["0"][:], torch.ones(8, 2).to(first))
        return
    with pytest.raises(ExtractError, match=f"{first} in the first batch, {later} now"):
        E(same(), iter(batches), "0", tmp_path)
    with pytest.raises(ExtractError, match="in the first batch"):
        E(same(), iter([(X[:4], b[:, 0]) for b in batches]), "0", tmp_path / "labels")


def test_empty_batches_of_a_stream_are_passed_over(tmp_path):
    batches = [X[:0], X[:0], X[:5], X[5:5], X[5:]]
    assert torch.equal(E(same(), iter(batches), "0", tmp_path / "a")["0"][:], X)
    with pytest.raises(ExtractError, match="no rows"):
        E(same(), iter(batches[:2]), "0", tmp_path / "b")


def test_the_error_of_a_batch_over_many_shards_tells_the_rule(tmp_path):
    assert torch.equal(E(same(), iter(X.split(10)), "0", tmp_path / "a", rows_per_shard=5)["0"][:], X)
    with pytest.raises(ExtractError, match=r"10 rows reaches over 4 shards of 3 rows; it may reach over 3 at most"):
        E(same(), iter(X.split(10)), "0", tmp_path / "b", rows_per_shard=3)


# -- the order of streams -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda i: np.full((4, 3), i, dtype=np.float32),
        lambda i: [f"text {i}"] * 4,
        lambda i: {"rows": [b"%d" % i] * 4, "x": torch.zeros(4, 1)},
        lambda i: {"rows": np.array([f"text {i}", None, 3, 4], dtype=object), "x": torch.zeros(4, 1)},
        lambda i: {"rows": [i] * 4, "x": torch.zeros(4, 1)},
    ],
    ids=["arrays", "texts", "bytes", "objects", "numbers"],
)
def test_a_stream_of_anything_must_repeat_its_order(tmp_path, make):
    def run(numbers):
        return E(
            same(), (make(i) for i in numbers), "0", tmp_path, rows_per_shard=4,
            input_fn=lambda batch: torch.zeros(4, 1), labels=False,
        )  # fmt: skip

    run([1, 2, 3])
    (tmp_path / "shards" / "s000000002.safetensors").unlink()
    with pytest.raises(ExtractError, match="from row 0 on, the data is not what shard 0 was made of"):
        run([2, 1, 3])
    assert len(run([1, 2, 3])) == 12


# -- rows that are bad -----------------------------------------------------------------------------------


class Picky(nn.Module):
    """Doubles its input in place, and then does not like some of it."""

    def forward(self, x):
        x = torch.as_tensor(x)
        x.mul_(2)
        if bool((x > 100).any()):
            raise ArithmeticError("too large")
        return x


def picky():
    return nn.Sequential(Picky(), nn.Identity())


@pytest.mark.parametrize("kind", ["tensors", "arrays", "rows", "one batch"])
@pytest.mark.parametrize("bad", [0, 3, 21])
def test_a_model_that_works_in_place_and_fails_spoils_no_other_row(tmp_path, kind, bad):
    x = X.clone()
    x[bad, 1] = 1000
    size = 40 if kind == "one batch" else 8
    data = x.clone() if kind in ("rows", "one batch") else iter(x.clone().split(size))
    if kind == "arrays":
        data = iter([b.numpy().copy() for b in x.split(size)])
    batch = size if kind in ("rows", "one batch") else None
    features = E(picky(), data, "1", tmp_path, on_error="skip", batch_size=batch, rows_per_shard=size)
    assert set(features.skipped) == {bad}
    good = [i for i in range(40) if i != bad]
    assert torch.equal(features["1"][good], 2 * X[good])


def test_the_batch_that_is_measured_is_not_changed_for_the_run(tmp_path):
    for on_error in ("raise", "skip"):
        features = E(picky(), iter(X.clone().split(8)), "1", tmp_path / on_error, on_error=on_error)
        assert torch.equal(features["1"][:], 2 * X)
    (tmp_path / "raise" / "shards" / "s000000000.safetensors").unlink()
    E(picky(), iter(X.clone().split(8)), "1", tmp_path / "raise", on_error="skip")


def test_batches_of_single_bad_rows_may_come_first(tmp_path):
    x = X.clone()
    x[:3] = 1000
    features = E(picky(), iter(x.split(1)), "1", tmp_path, on_error="skip")
    assert set(features.skipped) == {0, 1, 2}
    assert torch.equal(features["1"][3:], 2 * X[3:])


def test_a_wrong_setting_is_an_error_at_once_even_if_rows_may_be_skipped(tmp_path):
    loaded = []

    class Telling(Named):
        def __getitem__(self, i):
            loaded.append(i)
            return super().__getitem__(i)

    with pytest.raises(ExtractError, match="no such field"):
        E(same(), Telling(X), "0", tmp_path, on_error="skip", batch_size=4, labels="klass")
    assert len(loaded) == 4


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_lists_arrays_and_texts_come_apart_with_their_rows(tmp_path, rows):
    x = X[: 3 * rows].clone()
    x[rows + 1] = 1000
    names = [f"n{i}" for i in range(len(x))]

    def batches():
        for at in range(0, len(x), rows):
            part = slice(at, at + rows)
            yield {
                "input": x[part], "id": names[part], "label": tuple(names[part]), "number": np.arange(len(x))[part],
                "size": (224, 224), "parts": [x[part], [*range(len(x))][part]],
            }  # fmt: skip

    seen = []

    def check(batch):
        assert batch["size"] == (224, 224)
        assert len(batch["id"]) == len(batch["number"]) == len(batch["parts"][0]) == len(batch["parts"][1])
        seen.append(batch["parts"][1])
        return batch["number"]

    model = picky()
    features = E(model, batches(), "1", tmp_path, on_error="skip", ids="id", input_fn=lambda b: b["input"])
    assert set(features.skipped) == {rows + 1}
    good = [i for i in range(len(x)) if i != rows + 1]
    assert features.ids[good] == features.labels[good] == [names[i] for i in good]
    assert torch.equal(features["1"][good], 2 * X[good])
    numbered = E(model, batches(), "1", tmp_path / "n", on_error="skip", ids=check, input_fn=lambda b: b["input"])
    assert numbered.ids[good].tolist() == good
    assert [rows] in seen

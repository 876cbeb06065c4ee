"""Data in memory: batches are slices, equal to what a loader collates, and no part of the user's own memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from torchhook._extract import in_memory, sources
from torchhook._extract.api import extract

X = torch.randn(50, 3, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(50) % 5


class Loaded(torch.utils.data.Dataset):
    """The same rows, one by one."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, row):
        return self.data[row]


DATA = {
    "tensor": X,
    "channels last": X.to(memory_format=torch.channels_last),
    "part of another": torch.randn(100, 6)[::2, 1:4],
    "numbers": Y,
    "array": X.numpy(),
    "fortran": np.asfortranarray(X.numpy()),
    "backwards": X.numpy()[::-1],
    "pairs": TensorDataset(X, Y),
    "alone": TensorDataset(X),
    "three": TensorDataset(X, Y, Y.bool()),
    "complex": torch.randn(50, 3, dtype=torch.complex64),
    "wide": np.arange(100, dtype=np.uint16).reshape(50, 2),
}


@pytest.mark.parametrize("order", [None, [3, 1, 1, 49, 0, 7, 20]])
@pytest.mark.parametrize("kind", DATA)
def test_batches_are_those_that_a_loader_makes(kind, order):
    data = DATA[kind]
    ours = sources.Indexed(data, order=order, batch_size=3)
    theirs = sources.Indexed(Loaded(data), order=order, batch_size=3)
    assert ours.memory is not None
    assert theirs.memory is None
    spans = [(0, 4), (5, 7)]
    for mine, other in zip(ours.batches(spans), theirs.batches(spans), strict=True):
        assert mine[:2] == other[:2]
        torch.testing.assert_close(mine.value, other.value, rtol=0, atol=0, check_stride=True)
        assert type(mine.value) is type(other.value)
    one, other = ours._single(5), theirs._single(5)
    torch.testing.assert_close(one.value, other.value, rtol=0, atol=0)


class Sub(torch.Tensor):
    pass


class Own(TensorDataset):
    def __getitem__(self, row):
        return (self.tensors[0][row] * 2,)


@pytest.mark.parametrize(
    "data",
    [
        X.as_subclass(Sub),
        Own(X),
        np.arange(5.0),
        np.array([["a"], ["b"]]),
        np.zeros((3, 2), ">f4"),
        np.ma.zeros((3, 2)),
        [1.0, 2.0],
        TensorDataset(X.to_sparse()),
        TensorDataset(X.as_subclass(Sub), Y),
    ],
)
def test_what_has_rows_of_its_own_making_is_asked_for_them(data):
    assert sources.Indexed(data).memory is None


def test_a_collate_function_of_the_users_is_called(tmp_path):
    loader = DataLoader(X, batch_size=8, collate_fn=lambda rows: torch.stack(rows) * 2)
    features = extract(nn.Sequential(nn.Identity()), loader, "0", tmp_path, progress=False)
    assert torch.equal(features["0"][:], X * 2)


@pytest.mark.parametrize("data", [X.clone(), X.clone().numpy(), TensorDataset(X.clone(), Y)])
def test_a_model_that_works_in_place_leaves_the_users_data_as_it_was(tmp_path, data):
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten())
    features = extract(model, data, "0", tmp_path, batch_size=8, progress=False)
    assert torch.equal(features["0"][:], X.relu())
    kept = data.tensors[0] if isinstance(data, TensorDataset) else torch.as_tensor(data)
    assert torch.equal(kept, X)


def test_rows_that_the_model_cannot_do_are_found_one_by_one(tmp_path):
    class Picky(nn.Module):
        def forward(self, x):
            if (x[:, 0] == 13).any():
                raise ValueError("thirteen")
            return x.add_(1)

    x = torch.arange(40.0)[:, None].repeat(1, 2)
    features = extract(nn.Sequential(Picky()), x, "0", tmp_path, batch_size=8, on_error="skip", progress=False)
    assert set(features.skipped) == {13}
    good = [row for row in range(40) if row != 13]
    assert torch.equal(features["0"][good], x[good] + 1)


def test_a_window_has_its_rows_by_the_same_numbers_and_no_others():
    whole = in_memory.of(TensorDataset(X, Y), range(49, -1, -1), default_collate, pin=False)
    part = whole.window(10, 30)
    assert [len(part_) for part_ in part.parts] == [20, 20]
    for mine, other in zip(part.rows(12, 17), whole.rows(12, 17), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(whole.rows(12, 17)[0], X.flip(0)[12:17])
    assert part.window(12, 14).rows(13, 14)[1].tolist() == [int(Y[49 - 13])]

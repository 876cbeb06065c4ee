"""An index of a column against the same index of a tensor."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from torchhook import transforms
from torchhook._extract.api import extract
from torchhook._features import columns, reading
from torchhook._features.api import open_features

ROWS, SHAPE = 23, (4, 5)
X = torch.arange(ROWS * 20.0).reshape(ROWS, *SHAPE)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    out = tmp_path_factory.mktemp("indexing") / "f"
    extract(nn.Sequential(nn.Identity()), X, "0", out, batch_size=4, rows_per_shard=4, progress=False)
    return out


@pytest.fixture(params=["mmap", "read"])
def column(path, request, monkeypatch):
    monkeypatch.setattr(reading, "MOST_MAPS", 2)  # of 6 shards: most of what is read was closed before
    monkeypatch.setattr(columns, "_TOGETHER", 3)
    return open_features(path, access=request.param)["0"]


def _numbers(chance, size):
    return [chance.randrange(-size, size) for _ in range(chance.choice([0, 1, 2, 2, 2, 3]))]


def _part(chance, size):
    """One part of an index, of a dim of this size: right ones, and some that are beyond."""

    def end():
        return chance.choice([None, chance.randrange(-size - 2, size + 2)])

    kinds = [
        lambda: chance.randrange(-size - 1, size + 1),
        lambda: None,
        lambda: Ellipsis,
        lambda: slice(end(), end(), chance.choice([None, 1, 2, 3])),
        lambda: _numbers(chance, size),
        lambda: torch.tensor([[chance.randrange(-size, size) for _ in range(2)] for _ in range(chance.choice([1, 2]))]),
        lambda: torch.tensor([chance.random() < 0.5 for _ in range(size)]),
        lambda: np.int64(chance.randrange(-size, size)),
        lambda: chance.choice([True, False, torch.tensor(chance.randrange(-size, size))]),
        lambda: np.array(_numbers(chance, size), dtype=np.int32),
        lambda: range(chance.randrange(size), chance.randrange(size)),
    ]
    return chance.choice(kinds)()


def _for_torch(key):
    """The same, where torch takes fewer types: what numpy or a list says, as a tensor."""
    if isinstance(key, tuple):
        return tuple(map(_for_torch, key))
    if isinstance(key, (list, range, np.ndarray)):
        return torch.as_tensor(np.array(key, dtype=np.int64))
    return int(key) if isinstance(key, np.integer) else key


def _keys(count, seed):
    chance = random.Random(seed)
    for _ in range(count):
        parts = tuple(_part(chance, size) for size in (ROWS, *SHAPE, 3)[: chance.randrange(5)])
        if chance.random() < 0.1:
            more = () if torch.__version__.startswith("2.6.") else parts[2:3]  # it miscounts the dims after a mask
            parts = (torch.tensor([[chance.random() < 0.2 for _ in range(4)] for _ in range(ROWS)]), *more)
        # Of more than one ellipsis, torch itself accepts some and miscounts others.
        if sum(part is Ellipsis for part in parts) < 2:
            yield parts[0] if len(parts) == 1 and chance.random() < 0.5 else parts


def test_random_indices_mean_what_a_tensor_means(column):
    refused = 0
    for key in _keys(1000, seed=0):
        try:
            wanted = X[_for_torch(key)]
        except (IndexError, TypeError):
            refused += 1
            with pytest.raises((IndexError, TypeError), match="'0'"):
                column[key]
        else:
            found = column[key]
            assert found.shape == wanted.shape, key
            assert torch.equal(found, wanted), key
    assert 100 < refused < 500


NAMED = [
    (3, 1), (3, 1, 2), (-20, 3), [-20, 3], (slice(None), 0), (..., 0), (slice(2, 9, 3), slice(None), -1), (), None, ...,
    ([0, 5, 5], [1, 2, 3]), ([0, 5], slice(None), [1, 2]), [True, False] * 11 + [True],
    torch.tensor([[0, 22], [1, -1]]),
    np.zeros(ROWS, dtype=bool), (torch.arange(ROWS) < 3, 1), X > 100, X[:, :, 0] % 40 == 0, np.uint8(200) // 10,
    np.array([7, 3], dtype=np.uint64), slice(30, 40), slice(np.int64(2), torch.tensor(5)), range(22, -1, -5),
]  # fmt: skip


@pytest.mark.parametrize("key", NAMED, ids=range(len(NAMED)))
def test_indices_that_people_write(column, key):
    plain = list(key) if isinstance(key, range) else key
    if isinstance(key, (np.ndarray, np.integer)) and key.dtype != bool:
        plain = key.astype(np.int64)  # torch takes unsigned ones for masks, or not at all
    assert torch.equal(column[key], X[plain])


def test_a_slice_may_go_backwards_as_in_numpy(column):
    assert torch.equal(column[::-2], X.flip(0)[::2])
    assert torch.equal(column[9:3:-2, 1], X[[9, 7, 5], 1])


@pytest.mark.parametrize(
    ("key", "error", "match"),
    [
        (ROWS, IndexError, f"row {ROWS} of {ROWS}"),
        (2**70, IndexError, f"of {ROWS}"),
        (np.array([2**64 - 1], dtype=np.uint64), IndexError, f"of {ROWS}"),
        ([0, -ROWS - 1], IndexError, f"row {-ROWS - 1} of {ROWS}"),
        ((3, 4), IndexError, "index 4 is out of bounds"),
        ((3, 1, 2, 0), IndexError, r"too many indices .* of shape \(23, 4, 5\)"),
        (torch.ones(ROWS + 1, dtype=torch.bool), IndexError, r"a mask of shape \(24,\) for 23 rows"),
        (torch.ones(ROWS, 5, dtype=torch.bool), IndexError, r"a mask of shape \(23, 5\)"),
        ((..., 1, ...), IndexError, "one ellipsis"),
        (0.5, TypeError, "by number, slice, list or mask, found float"),
        (torch.tensor([0.5]), TypeError, "found torch.float32"),
        (["a"], TypeError, "by number, slice, list or mask"),
        ("0", TypeError, "found str"),
        (torch.ones(ROWS, dtype=torch.uint8), TypeError, r"\.bool\(\) or \.long\(\)"),
        (slice(None, None, 0), ValueError, "zero"),
    ],
)
def test_what_cannot_be_meant_is_refused(column, key, error, match):
    with pytest.raises(error, match=match):
        column[key]


def test_rows_of_different_lengths_and_text_are_indexed_by_row(tmp_path):
    ids = [f"row {i}" for i in range(ROWS)]
    features = extract(
        nn.Sequential(nn.Identity()), X, "0", tmp_path / "f", batch_size=4, rows_per_shard=4, progress=False, ids=ids,
        transform=lambda v: transforms.Rows(row[: 1 + int(row[0, 0]) % 3] for row in v),
    )  # fmt: skip
    column = features["0"]
    rows = [x[: 1 + int(x[0, 0]) % 3] for x in X]
    assert torch.equal(column[-2], rows[-2])
    assert torch.equal(column[2, 0], rows[2][0])
    assert torch.equal(column[np.int64(2), :, 1], rows[2][:, 1])
    for key in ([5, -1], slice(3, 20, 4), torch.arange(ROWS) % 4 == 0, range(3), [], ..., ()):
        numbers = np.arange(ROWS)[np.array(key, dtype=int) if isinstance(key, (list, range)) else key]
        assert [row.tolist() for row in column[key]] == [rows[i].tolist() for i in numbers]
        assert features.ids[key] == [ids[i] for i in numbers]
    for key in ((slice(None), 0), None, True, torch.zeros(2, 2, dtype=torch.int64), (..., 0)):
        with pytest.raises(TypeError, match="different lengths, or text"):
            column[key]
    with pytest.raises(TypeError, match="different lengths, or text"):
        features.ids[3, 0]
    with pytest.raises(IndexError, match="row 23 of 23"):
        column[ROWS]

"""The tokens of a store, flat: what its rows hold, one after the other. The oracle is the rows, put together."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torchhook as th
from tests.token_data import rows_sorted
from torchhook.errors import ExtractError, IncompleteStoreError

ROWS = 37


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Embedding(500, 6), nn.Linear(6, 8), nn.Flatten()

    def forward(self, ids: Tensor) -> Tensor:
        return self.c(self.b(self.a(ids)))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of rows of different lengths, one of rows of one length."""
    folder, model = tmp_path_factory.mktemp("stores"), Net()
    ids, lengths = torch.arange(ROWS * 8).reshape(ROWS, 8), torch.arange(ROWS) * 5 % 8 + 1
    options: dict[str, Any] = {"batch_size": 5, "rows_per_shard": 10, "progress": False}
    th.extract(model, TensorDataset(ids, lengths), ["a", "b"], folder / "ragged", lengths=1, **options)
    th.extract(model, ids, ["a", "b", "c"], folder / "fixed", dtype=torch.float16, **options)
    return folder


@pytest.fixture(params=["ragged", "fixed"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["mmap", "read"])
def store(request: pytest.FixtureRequest, stores: Path, kind: str) -> Any:
    return th.open_features(stores / kind, access=request.param)


def flat(store: Any, site: str) -> Tensor:
    return torch.cat([store[site][i] for i in range(len(store))])


# -- reading ---------------------------------------------------------------------------------------------------


def test_they_are_indexed_like_a_tensor_of_all_tokens(store: Any) -> None:
    tokens, truth = store.tokens("b"), flat(store, "b")
    assert len(tokens) == len(truth)
    assert tokens.shape == tuple(truth.shape)
    assert tokens.dtype == truth.dtype
    some = torch.randint(0, len(truth), (50,), generator=torch.Generator().manual_seed(0))
    for index in (0, 7, -1, slice(None), slice(3, 90, 7), slice(5, 5), [5, 3, 5, -1], some, some.numpy(), range(4, 40)):
        assert torch.equal(tokens[index], truth[list(index) if isinstance(index, range) else index])
    mask = torch.arange(len(truth)) % 3 == 0
    assert torch.equal(tokens[mask], truth[mask])
    assert tokens[[]].shape == (0, 8)
    for i, token in zip(range(20), tokens, strict=False):
        assert torch.equal(token, truth[i])


@pytest.mark.parametrize("index", [1.5, True, "b", None, torch.tensor(1.0), torch.tensor(True), np.float32(2)])
def test_what_is_no_number_of_a_token_is_refused(store: Any, index: Any) -> None:
    tokens = store.tokens("b")
    for read in (tokens.__getitem__, tokens.where):
        with pytest.raises(TypeError, match="'b': tokens are chosen by number, slice, list or mask, found"):
            read(index)
    assert torch.equal(tokens[torch.tensor(3)], tokens[np.int32(3)])


def test_the_row_and_the_position_of_each_are_known(store: Any) -> None:
    tokens = store.tokens("b")
    rows, positions = tokens.where(slice(None))
    wanted = [(row, at) for row in range(len(store)) for at in range(len(store["b"][row]))]
    assert list(zip(rows.tolist(), positions.tolist(), strict=True)) == wanted
    assert tokens.where(-1) == wanted[-1]
    picked = tokens.where([40, 2, 40])
    assert list(zip(picked.rows.tolist(), picked.positions.tolist(), strict=True)) == [wanted[i] for i in (40, 2, 40)]
    for i in (0, 33, len(tokens) - 1):
        row, at = tokens.where(i)
        assert torch.equal(tokens[i], store["b"][row][at])


def test_what_is_read_is_a_copy(store: Any) -> None:
    tokens = store.tokens("b")
    before = tokens[:5]
    before.zero_()
    assert not torch.equal(tokens[:5], before)


def test_rows_without_positions_are_tokens_themselves(stores: Path) -> None:
    store = th.open_features(stores / "fixed")
    tokens = store.tokens("c")
    assert tokens.shape == (ROWS, 64)
    assert torch.equal(tokens[:], store["c"][:])
    assert tokens.where(5) == (5, 0)


def test_several_sites_are_dicts_of_the_same_token(store: Any) -> None:
    both = store.tokens("b", "a")
    assert both.shape == {"b": (len(both), 8), "a": (len(both), 6)}
    assert both.dtype == {"b": store["b"].dtype, "a": store["a"].dtype}
    found = both[[9, 4]]
    assert list(found) == ["b", "a"]
    for site in found:
        assert torch.equal(found[site], flat(store, site)[[9, 4]])
    assert "tokens: b " in repr(both)


def test_sites_with_other_numbers_of_tokens_and_maps_are_refused(stores: Path, tmp_path: Path) -> None:
    store = th.open_features(stores / "fixed")
    with pytest.raises(ExtractError, match="'a' and 'c': rows from 0 on have other numbers of tokens"):
        store.tokens("a", "c")
    with pytest.raises(TypeError, match="names of one or more sites"):
        store.tokens()
    maps = th.extract(nn.Sequential(nn.Identity()), torch.randn(6, 3, 4, 4), "0", tmp_path / "f", progress=False)
    with pytest.raises(TypeError, match=r"rows of shape \(3, 4, 4\) are no tokens"):
        maps.tokens("0")
    with pytest.raises(IndexError, match="token 9999 of"):
        store.tokens("a")[9999]


def test_skipped_rows_and_missing_shards_have_no_tokens(tmp_path: Path) -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            if (x == 13).any():
                raise ValueError("thirteen")
            return self.inner(x)

    x = torch.arange(40.0).reshape(20, 2, 1) + torch.zeros(20, 2, 3)
    for name, options in (("fixed", {}), ("ragged", {"lengths": torch.full((20,), 2)})):
        store = th.extract(
            Picky(),
            x,
            "inner",
            tmp_path / name,
            on_error="skip",
            batch_size=4,
            rows_per_shard=5,
            progress=False,
            **options,
        )
        assert list(store.skipped) == [6]
        tokens = store.tokens("inner")
        wanted = x[[i for i in range(20) if i != 6]].flatten(0, 1)
        assert torch.equal(tokens[:], wanted)
        assert tokens.where(12) == (7, 0)
        (tmp_path / name / "shards" / "s000000002.safetensors").unlink()
        with pytest.raises(IncompleteStoreError):
            th.open_features(tmp_path / name)
        left = th.open_features(tmp_path / name, incomplete=True).tokens("inner")
        rows = [i for i in range(20) if i != 6 and not 10 <= i < 15]
        assert torch.equal(left[:], x[rows].flatten(0, 1))
        assert left.where(slice(None)).rows.unique().tolist() == rows


# -- batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_every_token_once_in_one_order_for_all_sites(store: Any, workers: int) -> None:
    both = store.tokens("a", "b")
    loader = both.loader(16, shuffle=True, seed=3, workers=workers)
    epochs = [list(loader) for _ in range(2)]
    assert len(epochs[0]) == len(loader) == -(-len(both) // 16)
    truth = {site: flat(store, site) for site in ("a", "b")}
    found = {site: torch.cat([batch[site] for batch in epochs[0]]) for site in truth}
    # Which token each is, told by the first site, is what the second must be.
    order = torch.cat([(truth["a"] == token).all(1).nonzero()[0] for token in found["a"]])
    assert sorted(order.tolist()) == list(range(len(both)))
    assert torch.equal(found["b"], truth["b"][order])
    second = torch.cat([batch["b"] for batch in epochs[1]])
    assert not torch.equal(second, found["b"])
    assert torch.equal(rows_sorted(second), rows_sorted(truth["b"]))


def test_the_order_is_the_same_for_the_same_seed_and_epoch_and_for_one_site_alone(store: Any) -> None:
    def run(*sites: str, seed: int = 3, epoch: int = 0) -> Tensor:
        loader = store.tokens(*sites).loader(16, shuffle=True, seed=seed)
        loader.set_epoch(epoch)
        return torch.cat([batch["b"] if len(sites) > 1 else batch for batch in loader])

    first = run("b")
    assert torch.equal(run("a", "b"), first)
    assert torch.equal(run("b", epoch=1), run("b", epoch=1))
    assert not torch.equal(run("b", epoch=1), first)
    assert not torch.equal(run("b", seed=4), first)


def test_without_shuffle_they_come_in_order_and_the_last_batch_may_be_left_out(store: Any) -> None:
    tokens, truth = store.tokens("b"), flat(store, "b")
    assert torch.equal(torch.cat(list(tokens.loader(16))), truth)
    whole = list(tokens.loader(16, drop_last=True))
    assert [len(batch) for batch in whole] == [16] * (len(truth) // 16)
    for batch in (0, 2.5):
        with pytest.raises(ValueError, match=f"batch={batch}: give a number of tokens, 1 or more"):
            tokens.loader(batch)
    with pytest.raises(ValueError, match="seed=-1: give a whole number, 0 or more"):
        tokens.loader(4, shuffle=True, seed=-1)


def test_a_loader_draws_no_random_numbers_of_the_process(store: Any) -> None:
    before = torch.get_rng_state()
    list(store.tokens("b").loader(64, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_they_travel_to_other_processes(store: Any) -> None:
    tokens = pickle.loads(pickle.dumps(store.tokens("a", "b")))
    assert torch.equal(tokens[5]["b"], store.tokens("b")[5])

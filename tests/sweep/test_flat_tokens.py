"""Sweeps over sites whose rows are not dim 0 alone, as those of experts: each cell against a bare hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.language_models import made
from torchhook.errors import EditError

ROWS, TOKENS = 2, 5
CLEAN = torch.arange(2, 2 + ROWS * TOKENS).reshape(ROWS, TOKENS)
CORRUPTED = CLEAN.flip(1)
EXPERTS = "model.layers.1.mlp.experts"


def metric(output: Any) -> Tensor:
    found: Tensor = output.logits[:, -1, 7].sum()
    return found


def by_hand(model: nn.Module, ids: Tensor = CLEAN, other: Tensor = CORRUPTED) -> list[float]:
    kept: list[Tensor] = []
    found = []
    module = model.get_submodule(EXPERTS)
    handle = module.register_forward_hook(lambda _, args, out: kept.append(out.clone()))
    model(ids)
    handle.remove()
    for token in range(ids.shape[1]):

        def patch(_: Any, args: Any, out: Tensor, token: int = token) -> Tensor:
            new = out.clone()
            new.view(*ids.shape, -1)[:, token] = kept[0].view(*ids.shape, -1)[:, token]
            return new

        handle = module.register_forward_hook(patch)
        found.append(float(metric(model(other))))
        handle.remove()
    return found


@pytest.fixture(scope="module")
def moe() -> nn.Module:
    model: nn.Module = made("mixtral", initializer_range=0.2)
    return model


@pytest.mark.parametrize("batch", [None, 1, 3])
def test_the_tokens_of_experts_are_swept(moe: nn.Module, batch: int | None) -> None:
    with torch.no_grad():
        expected = by_hand(moe)
    sites = ["@experts.1", "@resid_post.1"]
    swept = th.sweep(moe, CLEAN, CORRUPTED, metric, sites=sites, batch=batch, progress=False)
    assert swept.values.shape == (2, TOKENS)
    assert swept.positions == list(range(TOKENS))
    torch.testing.assert_close(swept.values[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5)
    assert not swept.notes
    assert len(set(expected)) == TOKENS


def test_a_prompt_of_one_token_has_one(moe: nn.Module) -> None:
    ids, other = CLEAN[:, :1], CORRUPTED[:, :1]
    with torch.no_grad():
        expected = by_hand(moe, ids, other)
    swept = th.sweep(moe, ids, other, metric, sites="@experts.1", progress=False)
    torch.testing.assert_close(swept.values[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5)


def test_an_estimate_has_a_column_for_each_token(moe: nn.Module) -> None:
    kept: list[Tensor] = []

    def keep(_: Any, args: Any, out: Tensor) -> None:
        out.retain_grad()
        kept.append(out)

    handle = moe.get_submodule(EXPERTS).register_forward_hook(keep)
    moe(CLEAN)
    value = metric(moe(CORRUPTED))
    value.backward()
    handle.remove()
    moe.zero_grad()
    clean, corrupted = kept
    assert corrupted.grad is not None
    effects = ((clean - corrupted) * corrupted.grad).detach().view(ROWS, TOKENS, -1).sum((0, 2))
    swept = th.sweep(moe, CLEAN, CORRUPTED, metric, sites="@experts.1", estimate="gradient", progress=False)
    torch.testing.assert_close(swept.values[0], (value.detach() + effects).double(), rtol=1e-4, atol=1e-5)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.pooled, self.head = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.pooled(self.inner(x).mean(1)))
        return out


def test_what_has_no_tokens_is_refused_and_can_be_named() -> None:
    model, clean, corrupted = Pooled(), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    with pytest.raises(EditError, match=r"^pooled: .*shape \(2, 4\).* Name the dim of the tokens: dim="):
        th.sweep(model, clean, corrupted, torch.sum, sites=["inner", "pooled"], progress=False)
    swept = th.sweep(model, clean, corrupted, torch.sum, sites="pooled", dim=1, progress=False)
    assert swept.values.shape == (1, 4)


class TimeFirst(nn.Module):
    def __init__(self, streams: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.streams = streams
        self.embed, self.inner, self.head = nn.Embedding(64, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        x = self.head(self.inner(x.expand(4, -1, -1, -1) if self.streams else x.transpose(0, 1)).sin())
        return x.sum((0, -1)) if self.streams else x.sum(-1)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_tokens_that_come_before_rows_or_after_streams_are_swept(streams: bool, rows: int) -> None:
    model, clean, corrupted = TimeFirst(streams), CLEAN[:rows], CORRUPTED[:rows]
    weights = torch.randn((rows, TOKENS) if streams else (TOKENS, rows))

    def score(output: Tensor) -> Tensor:
        return output.mul(weights).sum()

    kept: list[Tensor] = []
    handle = model.inner.register_forward_hook(lambda _, args, out: kept.append(out.clone()))
    model(clean)
    handle.remove()
    expected = []
    for token in range(TOKENS):

        def patch(_: Any, args: Any, out: Tensor, token: int = token) -> Tensor:
            new, dim = out.clone(), 2 if streams else 0
            new.select(dim, token).copy_(kept[0].select(dim, token))
            return new

        handle = model.inner.register_forward_hook(patch)
        expected.append(score(model(corrupted)).item())
        handle.remove()
    swept = th.sweep(model, clean, corrupted, score, sites="inner", progress=False)
    torch.testing.assert_close(swept.values[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5)
    assert len(set(expected)) == TOKENS


def test_heads_that_share_a_dim_with_rows_are_swept() -> None:
    model = made("xglm")
    kept: list[Tensor] = []
    projection = model.model.layers[1].self_attn.q_proj
    with torch.no_grad():
        handle = projection.register_forward_hook(lambda _, args, out: kept.append(out.clone()))
        model(CLEAN)
        handle.remove()
        expected = []
        for head in range(4):

            def patch(_: Any, args: Any, out: Tensor, head: int = head) -> Tensor:
                new, part = out.clone(), slice(8 * head, 8 * head + 8)
                new[..., part] = kept[0][..., part]
                return new

            handle = projection.register_forward_hook(patch)
            expected.append(float(metric(model(CORRUPTED))))
            handle.remove()
    swept = th.sweep(model, CLEAN, CORRUPTED, metric, sites="@q.1", over="head", progress=False)
    torch.testing.assert_close(swept.values[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5)

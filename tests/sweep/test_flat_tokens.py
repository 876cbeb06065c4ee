"""Sweeps over sites whose rows and tokens share dim 0, as those of experts: each cell against a bare hook."""

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

"""Names of blocks that do more while they train: right in eval mode, and never wrong in the other."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from torchhook import edits
from torchhook.errors import SelectorError


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Inline(nn.Module):
    """Its drop path is a function, as in many a file of one's own: it hands on what it takes in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = Attention(), nn.LayerNorm(8)
        self.f = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def drop(self, x: Tensor) -> Tensor:
        return x / 0.5 * (torch.rand(x.shape[0], 1, 1) + 0.5).floor() if self.training else x

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.a(x))
        return x + self.drop(self.f(self.norm(x)))


class Unscaled(Inline):
    """Drops now and then, and does not make up for it: most passes show nothing."""

    def drop(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[0], 1, 1) > 0.3) if self.training else x


class ByPython(Inline):
    """Python's own random numbers decide."""

    def drop(self, x: Tensor) -> Tensor:
        return x * 0.0 if self.training and random.random() < 0.5 else x


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def by_hand(model: nn.Module, i: int) -> dict[str, Tensor]:
    """What the names mean, by bare hooks on the parts of a block in eval mode."""
    kept: dict[str, Tensor] = {}
    block: Any = model[i]  # type: ignore[index]
    handles = [
        block.register_forward_pre_hook(lambda _, args: kept.update(pre=args[0].clone())),
        block.register_forward_hook(lambda _, args, out: kept.update(post=out.clone())),
        block.a.register_forward_hook(lambda _, args, out: kept.update(attn=out.clone())),
        block.f.register_forward_hook(lambda _, args, out: kept.update(mlp=out.clone())),
        block.norm.register_forward_pre_hook(lambda _, args: kept.update(mid=args[0].clone())),
    ]
    with torch.no_grad():
        model(X)
    for handle in handles:
        handle.remove()
    return kept


@pytest.mark.parametrize("kind", [Inline, Unscaled, ByPython])
@pytest.mark.parametrize("training", [False, True])
def test_eval_mode_has_its_names_whatever_is_dropped_while_training(kind: type[nn.Module], training: bool) -> None:
    model = nn.Sequential(kind(), kind()).train(training)
    th.roles(model, X)
    model.eval()
    names = {"@resid_pre.1": "pre", "@resid_mid.1": "mid", "@resid_post.1": "post", "@attn_out.1": "attn"}
    names["@mlp_out.1"] = "mlp"
    with torch.no_grad(), th.capture(model, *names) as rec:
        model(X)
    expected = by_hand(model, 1)
    for name, part in names.items():
        assert torch.equal(rec[name], expected[part]), name


@pytest.mark.parametrize("kind", [Inline, Unscaled, ByPython])
def test_training_mode_has_none_of_those_that_are_other_values_there(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(), kind())
    roles = th.roles(model, X)
    assert set(roles.eval_only) == {f"{name}.{i}" for name in ("attn_out", "mlp_out", "resid_mid") for i in (0, 1)}
    assert "in eval mode only: @mlp_out.0" in str(roles)
    for name in ("@attn_out.1", "@mlp_out.0", "@resid_mid.1"):
        with pytest.raises(SelectorError, match=r"in eval mode only, and the model is in training mode.*model\.eval"):
            th.run(model.train(), X, capture=name)
        with pytest.raises(SelectorError, match="in eval mode only"), th.edit(model, {name: edits.zero()}):
            model(X)
    with th.capture(model, "@resid_post.0", "@resid_pre.1") as rec:
        model(X)
    assert torch.equal(rec["@resid_post.0"], rec["@resid_pre.1"])


def test_the_mode_is_asked_when_a_value_passes() -> None:
    model = nn.Sequential(Inline(), Inline()).eval()
    th.roles(model, X)
    session = th.capture(model, "@mlp_out.1")
    with session as rec:
        model(X)
    assert torch.equal(rec["@mlp_out.1"], by_hand(model, 1)["mlp"])
    with session:
        model[1].train()
        with pytest.raises(SelectorError, match="in training mode"):
            model(X)
    model.eval()
    with session as rec:
        model(X)
    assert len(rec.all("@mlp_out.1")) == 1


def test_what_runs_the_model_in_eval_mode_itself_takes_names_of_eval_mode() -> None:
    model = nn.Sequential(Inline(), Inline()).train()
    th.roles(model, X)
    found = th.statistics(model, iter([X]), "@mlp_out.1")
    expected = by_hand(model.eval(), 1)["mlp"]
    torch.testing.assert_close(found["@mlp_out.1"].mean.float(), expected.mean((0, 1)), rtol=1e-4, atol=1e-5)

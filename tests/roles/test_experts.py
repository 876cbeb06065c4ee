"""What experts make together, judged by hooks on them: past norms and factors, and without what all tokens share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th
from tests.roles_models import GROUPED, made

IDS = torch.tensor([[5, 9, 33, 21, 60, 7], [8, 2, 13, 44, 50, 31]])
GRANITE = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.3}


def kept(model: nn.Module, *paths: str) -> dict[str, Tensor]:
    """What modules return, by bare hooks."""
    seen: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen[path] = (output if isinstance(output, Tensor) else output[0]).clone()

        return hook

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    with torch.no_grad():
        model(IDS)
    for handle in handles:
        handle.remove()
    return seen


def recorded(model: nn.Module, *names: str) -> list[Tensor]:
    with torch.no_grad(), th.capture(model, *names) as rec:
        model(IDS)
    return [rec[name] for name in names]


@pytest.mark.parametrize("shared", [False, True])
def test_a_factor_behind_them_and_a_shared_expert_beside_them_are_no_part_of_them(shared: bool) -> None:
    kind = "GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM"
    model = made(kind, {**GRANITE, "shared_intermediate_size": 16} if shared else GRANITE)
    layer = "model.layers.1"
    found, total = recorded(model, "@experts.1", "@mlp_out.1")
    hand = kept(model, f"{layer}.block_sparse_moe", *([f"{layer}.shared_mlp"] if shared else []))
    torch.testing.assert_close(found.reshape(total.shape), hand[f"{layer}.block_sparse_moe"])
    torch.testing.assert_close(total, 0.3 * sum(hand.values(), torch.zeros(())))


def test_a_norm_behind_them_is_no_part_of_them() -> None:
    model = made("FlexOlmoForCausalLM", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2})
    found, total = recorded(model, "@experts.1", "@mlp_out.1")
    hand = kept(model, "model.layers.1.mlp", "model.layers.1.post_feedforward_layernorm")
    torch.testing.assert_close(found.reshape(total.shape), hand["model.layers.1.mlp"])
    assert torch.equal(total, hand["model.layers.1.post_feedforward_layernorm"])


def test_experts_that_are_added_in_place_to_a_shared_one_are_told_from_it() -> None:
    config = {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 8}
    model = made("Llama4ForCausalLM", {**GROUPED, **config, "moe_layers": [1]})
    found, total = recorded(model, "@experts.1", "@mlp_out.1")
    hand = kept(model, "model.layers.1.feed_forward.shared_expert", "model.layers.1.feed_forward")
    whole = hand["model.layers.1.feed_forward"]
    # What it returns was the shared one's own memory, which is copied here before it is written to.
    torch.testing.assert_close(found, whole.reshape(found.shape) - hand["model.layers.1.feed_forward.shared_expert"])
    torch.testing.assert_close(total.reshape(whole.shape), whole)


class _Experts(nn.Module):
    """Two of four for each token, all of them computed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.shared = nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(4, 16, 8))
        self.mix = nn.Linear(8, 8)

    def routed(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(2, -1)
        weights = torch.zeros(*x.shape[:-1], 4).scatter(-1, chosen, scores)
        made = torch.einsum("btd,edh->bteh", x, self.up).relu()
        return torch.einsum("bteh,ehd,bte->btd", made, self.down, weights)


class Mixed(_Experts):
    """A matrix behind the sum: nothing tells the two apart there."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.routed(x) + self.shared(x))


class Apart(_Experts):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.7 * (self.shared(x) + self.routed(x))


def test_what_cannot_be_told_from_a_shared_expert_is_refused() -> None:
    x = torch.randn(2, 5, 8)
    refused = th.roles(nn.Sequential(Mixed(), Mixed()), x).refused
    assert "no expert made" in refused["experts.1"]
    model = nn.Sequential(Apart(), Apart())
    th.roles(model, x)
    with torch.no_grad(), th.capture(model, "@experts.1", "@mlp_out.1", "@resid_pre.1") as rec:
        model(x)
        block: Any = model[1]
        torch.testing.assert_close(rec["@experts.1"], block.routed(rec["@resid_pre.1"]))
        shared = block.shared(rec["@resid_pre.1"])
    torch.testing.assert_close(rec["@mlp_out.1"], 0.7 * (rec["@experts.1"] + shared))
    assert F.cosine_similarity(rec["@mlp_out.1"].flatten(), rec["@experts.1"].flatten(), dim=0) < 0.9999

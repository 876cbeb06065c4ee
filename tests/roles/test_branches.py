"""Which branch is attention's: one in which nothing but its output projection comes after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th
from tests.roles.formulas import Hand, by_hand
from tests.roles_models import ENCODER_DECODER, GROUPED, SMALL, VISION, made
from torchhook._roles import probe

LLAMA = Hand()
MODELS: dict[str, tuple[str, dict[str, Any], list[Hand]]] = {
    "helium": ("HeliumForCausalLM", {**GROUPED, "head_dim": 8}, [LLAMA]),
    "cohere2": ("Cohere2ForCausalLM", {**GROUPED, "sliding_window": 4}, [Hand(style="parallel")]),
    "persimmon": ("PersimmonForCausalLM", SMALL, [Hand(attn="self_attn.dense", norm="model.final_layernorm")]),
    "glm4": (
        "Glm4ForCausalLM",
        {**GROUPED, "head_dim": 8},
        [Hand(attn="post_self_attn_layernorm", mlp="post_mlp_layernorm", z="self_attn.o_proj")],
    ),
    "biogpt": (
        "BioGptForCausalLM",
        SMALL,
        [
            Hand(
                "biogpt.layers",
                "self_attn.out_proj",
                "fc2",
                norm="biogpt.layer_norm",
                embed="biogpt.embed_tokens",
            )
        ],
    ),
    "ctrl": (
        "CTRLLMHeadModel",
        {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "dff": 48},
        [
            Hand(
                "transformer.h",
                "multi_head_attention.dense",
                "ffn",
                norm="transformer.layernorm",
                embed="transformer.w",
            )
        ],
    ),
    "mpnet": (
        "MPNetForMaskedLM",
        SMALL,
        [
            Hand(
                "mpnet.encoder.layer",
                "attention.attn.o",
                "output.dense",
                norm=None,
                embed="mpnet.embeddings.word_embeddings",
                middle="attention.LayerNorm",
                last="output.LayerNorm",
            )
        ],
    ),
    "megatron_bert": (
        "MegatronBertForMaskedLM",
        SMALL,
        [
            Hand(
                "bert.encoder.layer",
                "attention.output.dense",
                "output.dense",
                norm="bert.encoder.ln",
                embed="bert.embeddings.word_embeddings",
            )
        ],
    ),
    "dinov3": (
        "DINOv3ViTModel",
        VISION,
        [Hand("model.layer", "layer_scale1", "layer_scale2", z="attention.o_proj", norm="norm", embed=None)],
    ),
    "pegasus": (
        "PegasusForConditionalGeneration",
        ENCODER_DECODER,
        [
            Hand(
                f"model.{side}.layers",
                "self_attn.out_proj",
                "fc2",
                norm=f"model.{side}.layer_norm",
                embed=f"model.{side}.embed_tokens",
                prefix=f"{side}.",
                cross="encoder_attn.out_proj" if side == "decoder" else "",
            )
            for side in ("encoder", "decoder")
        ],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_names_of_models_that_are_not_on_the_page_are_what_hooks_give(name: str) -> None:
    kind, config, hands = MODELS[name]
    model = made(kind, config)
    roles = th.roles(model)
    inputs = {key: value.flip(-1) for key, value in probe.made_for(model).kwargs.items()}
    with torch.no_grad(), th.capture(model, [*roles]) as rec:
        model(**inputs)
    for hand in hands:
        with torch.no_grad():
            expected = by_hand(model, inputs, hand)
        for role, value in expected.items():
            if role in roles:
                torch.testing.assert_close(rec[f"@{role}"].reshape(value.shape), value, rtol=1e-5, atol=1e-5)
        found = [role for role in expected if role in roles]
        assert {"resid_pre", "resid_post", "attn_out", "mlp_out", "z"} <= {r.split(".")[-2] for r in found if "." in r}


def test_a_state_space_behind_attention_is_not_what_attention_adds() -> None:
    config = {
        **GROUPED,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    }
    roles = th.roles(made("Zamba2ForCausalLM", config))
    kinds = {role.rpartition(".")[0] for role in roles if role[-1].isdecimal()}
    assert kinds == {"@resid_pre", "@resid_post"}
    assert "another branch" in roles.refused["attn_out.1"]


def test_a_norm_that_returns_more_than_a_tensor_has_no_names_and_no_accident() -> None:
    roles = th.roles(made("IBertForMaskedLM", SMALL))
    assert not any("resid" in role or "attn" in role for role in roles)
    assert "is no tensor, but Inputs" in roles.refused["resid_post.0"]


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.wide = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(16, 8)
        self.low = nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(2, 8))
        self.f = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.gate, self.n = nn.Linear(8, 8), nn.LayerNorm(8)

    def attend(self, x: Tensor, fused: bool = True) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if fused:
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)


class FeedForwardBehind(_Parts):
    """One branch: attention, and a feed-forward part on what it makes."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.out(self.attend(x)))


class FeedForwardBehindEager(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.out(self.attend(x, fused=False)))


class Beside(_Parts):
    """Half of what goes into the projection is made without attention."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.wide(torch.cat([self.attend(x), torch.tanh(self.gate(x))], -1))
        return x + self.f(x)


class Gated(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(x, fused=False) * torch.sigmoid(self.gate(x)))
        return x + self.f(x)


class LowRank(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.low(self.attend(x))
        return x + self.f(x)


class Normed(_Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.n(self.attend(x, fused=False)))
        return x + self.f(x)


@pytest.mark.parametrize("block", [FeedForwardBehind, FeedForwardBehindEager, Beside])
def test_a_branch_that_is_more_than_attention_is_not_called_so(block: type[nn.Module]) -> None:
    roles = th.roles(nn.Sequential(block(), block()), torch.randn(2, 5, 8))
    assert not any(kind in role for role in roles for kind in ("attn_out", "@z", "@q", "@pattern"))
    assert "@resid_post.1" in roles


@pytest.mark.parametrize(("block", "module"), [(Gated, "out"), (LowRank, "low"), (Normed, "out")])
def test_gates_norms_and_projections_of_low_rank_belong_to_attention(block: type[nn.Module], module: str) -> None:
    roles = th.roles(nn.Sequential(block(), block()), torch.randn(2, 5, 8))
    assert roles["@attn_out.1"] == f"1.{module}"
    assert roles["@mlp_out.1"] == "1.f"

"""Queries are told from keys, and cross-attention from attention to the stream, by what follows from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.roles_models import HEADS, WIDTH, Attention, FeedForward, hooked, language_model, made

IDS = torch.tensor([[5, 9, 33, 21, 40, 7], [8, 2, 13, 44, 49, 31]])


class KeysFirst(Attention):
    """The scores of keys and queries, turned."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = (k @ q.transpose(-1, -2)).transpose(-1, -2)
        return scores / 2 + torch.full(scores.shape[-2:], -1e9).triu(1)


class Columns(Attention):
    """A column for each query, until the weights are turned."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = k @ q.transpose(-1, -2)
        return scores / 2 + torch.full(scores.shape[-2:], -1e9).tril(-1)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-2).transpose(-1, -2)


class EveryToken(KeysFirst):
    """No mask tells rows from columns."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (k @ q.transpose(-1, -2)).transpose(-1, -2) / 2


@pytest.mark.parametrize("kind", [Attention, KeysFirst, Columns, EveryToken])
def test_queries_are_never_keys_however_scores_are_computed(kind: type[Attention]) -> None:
    model = language_model(kind)
    roles = th.roles(model, IDS)
    projected = hooked(model, IDS, "1.1.attn.q_proj", "1.1.attn.k_proj")
    for name, hand in zip(("@q.1", "@k.1"), projected, strict=True):
        if name in roles:
            with torch.no_grad():
                _, rec = th.run(model, IDS, capture=[name])
            assert torch.equal(rec[name].transpose(1, 2).flatten(2), hand)
    assert ("@q.1" in roles) == ("@k.1" in roles) == (kind is Attention)
    assert kind is Attention or "changes nothing in 1.1.attn/matmul(1) but its own" in roles.refused["q.1"]


def test_one_token_does_not_tell_queries_from_keys() -> None:
    model = language_model()
    assert "less than two tokens" in th.roles(model, IDS[:, :1]).refused["k.1"]
    assert "@k.1" in th.roles(model, IDS[:, :2])


class TalkingHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(HEADS) + 0.2 * torch.randn(HEADS, HEADS))

    def weights(self, scores: Tensor) -> Tensor:
        return torch.einsum("bhij,hg->bgij", scores.softmax(-1), self.mix)


class MaskedTwice(Attention):
    def weights(self, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1) * torch.ones(scores.shape[-2:]).tril()
        return weights / weights.sum(-1, keepdim=True)


class Filled(Attention):
    def weights(self, scores: Tensor) -> Tensor:
        hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
        return scores.softmax(-1).masked_fill(hidden, torch.tensor(0.0))


class Learned(Attention):
    """Looks at parameters, which are no other sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(2, 6, WIDTH))

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        return super().forward(x, self.slots)


@pytest.mark.parametrize("kind", [TalkingHeads, MaskedTwice, Filled, Learned])
def test_attention_to_the_stream_or_to_parameters_is_no_cross_attention(kind: type[Attention]) -> None:
    model = language_model(kind)
    roles = th.roles(model, IDS)
    assert not [name for name in roles if "cross" in name]
    assert ("@attn_out.1" in roles) == (kind is not Learned)
    if "@attn_out.1" in roles:
        with torch.no_grad():
            _, rec = th.run(model, IDS, capture=["@attn_out.1", "@z.1"])
        (hand,) = hooked(model, IDS, "1.1.attn")
        assert torch.equal(rec["@attn_out.1"], hand)
        assert torch.equal(model[1][1].attn.o_proj(rec["@z.1"]), hand)


class Decoder(nn.Module):
    """Blocks that look at what is given beside the stream, or at what is made from its beginning."""

    def __init__(self, seen: str) -> None:
        super().__init__()
        self.seen, self.embed, self.source = seen, nn.Embedding(50, WIDTH), nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(_Decoding() for _ in range(3))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        seen = self.source(ids.flip(-1)) if self.seen == "source" else x.tanh()
        for block in self.blocks:
            x = block(x, seen)
        logits: Tensor = self.head(x)
        return logits


class _Decoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.cross, self.mlp = Attention(), Attention(), FeedForward()

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x + self.attn(x)
        x = x + self.cross(x, seen)
        return x + self.mlp(x)


@pytest.mark.parametrize("seen", ["source", "start"])
def test_cross_attention_looks_at_what_is_not_made_from_its_own_stream(seen: str) -> None:
    torch.manual_seed(0)
    model = Decoder(seen).eval()
    roles = th.roles(model, IDS)
    assert ("@cross_attn_out.1" in roles) == (seen == "source")
    if "@cross_attn_out.1" in roles:
        with torch.no_grad():
            _, rec = th.run(model, IDS, capture=["@cross_attn_out.1"])
        assert torch.equal(rec["@cross_attn_out.1"], *hooked(model, IDS, "blocks.1.cross"))


def test_a_mask_behind_the_softmax_of_a_model_of_transformers_makes_no_cross_attention() -> None:
    config = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48}
    model: Any = made("CpmAntForCausalLM", {**config, "num_hidden_layers": 3, "prompt_length": 4})
    inputs = {"input_ids": IDS}
    roles = th.roles(model, inputs)
    assert not [name for name in roles if "cross" in name]
    with torch.no_grad():
        _, rec = th.run(model, IDS, capture=["@attn_out.1"])
    (hand,) = hooked(model, inputs, "cpmant.encoder.layers.1.self_att.self_attention")
    assert torch.equal(rec["@attn_out.1"], hand)

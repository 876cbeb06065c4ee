"""Attention maps are those that the model computed, whether a fused kernel hid them or not."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th
from tests.oracle import hooks_on
from torchhook.attention import NoAttentionError


def by_hand(query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    return (scores if bias is None else scores + bias).softmax(-1)


class Fused(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)  # type: ignore[arg-type]


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 4, 6, 8) for _ in range(3))  # type: ignore[return-value]


def test_a_plain_fused_call(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    maps = th.attention(Fused(), *qkv)
    torch.testing.assert_close(maps[""], by_hand(qkv[0], qkv[1]))


def test_a_causal_call(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    bias = torch.full((6, 6), -torch.inf).triu(1)
    torch.testing.assert_close(th.attention(Fused(is_causal=True), *qkv)[""], by_hand(qkv[0], qkv[1], bias))


def test_masks_of_booleans_and_of_numbers(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    mask = torch.rand(6, 6) > 0.4
    mask[:, 0] = True
    bias = torch.zeros(6, 6).masked_fill(~mask, -torch.inf)
    expected = by_hand(qkv[0], qkv[1], bias)
    torch.testing.assert_close(th.attention(Fused(attn_mask=mask), *qkv)[""], expected)
    torch.testing.assert_close(th.attention(Fused(attn_mask=bias), *qkv)[""], expected)


def test_a_scale_of_its_own_and_dropout_left_out(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    maps = th.attention(Fused(scale=0.5, dropout_p=0.9), *qkv)
    torch.testing.assert_close(maps[""], (qkv[0] @ qkv[1].transpose(-1, -2) * 0.5).softmax(-1))


def test_grouped_queries(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv[0], qkv[1][:, :2], qkv[2][:, :2]
    maps = th.attention(Fused(enable_gqa=True), q, k, v)
    torch.testing.assert_close(maps[""], by_hand(q, k.repeat_interleave(2, 1)))


def test_a_query_that_may_look_nowhere_gives_zeros_like_the_kernel(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    model = Fused(attn_mask=mask)
    maps = th.attention(model, *qkv)
    assert not maps[""][:, :, 2].any()
    torch.testing.assert_close(maps[""] @ qkv[2], model(*qkv), equal_nan=False)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention_on_its_fast_path_and_off_it(grad: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=batch_first).eval()
    x = torch.randn(3, 5, 8)
    with torch.set_grad_enabled(grad):
        expected = model(x, x, x, average_attn_weights=False)[1]
        maps = th.attention(model, x, x, x, need_weights=False)
    torch.testing.assert_close(maps[""], expected)
    assert not maps[""].requires_grad


def test_vit_tiny_fused_equals_unfused() -> None:
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        fused = th.attention(model, x)
        for block in model.blocks:
            block.attn.fused_attn = False
        unfused = th.attention(model, x)
    assert fused.keys() == unfused.keys() == [f"blocks.{i}.attn" for i in range(12)]
    for name in fused:
        assert fused[name].shape == (1, 3, 197, 197)
        torch.testing.assert_close(fused[name], unfused[name], rtol=0, atol=1e-5)
        torch.testing.assert_close(fused[name].sum(-1), torch.ones(1, 3, 197))


def test_grouped_queries_of_a_real_model_are_what_it_reports_itself() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**options, intermediate_size=64, vocab_size=60, attn_implementation="eager")
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 50, (2, 7))
    with torch.no_grad():
        told = model(input_ids=ids, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")
        maps = th.attention(model, input_ids=ids)
    for layer, expected in enumerate(told):
        torch.testing.assert_close(maps[f"model.layers.{layer}.self_attn"], expected, rtol=1e-5, atol=1e-6)


def test_layers_restricts_and_the_model_is_left_as_it_was() -> None:
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
    maps = th.attention(model, torch.randn(1, 3, 224, 224), layers="blocks.[01].attn")
    assert maps.keys() == ["blocks.0.attn", "blocks.1.attn"]
    assert hooks_on(model) == []


def test_a_softmax_over_classes_is_no_attention() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    with pytest.raises(NoAttentionError, match="no attention call was seen in Sequential"):
        th.attention(model, torch.ones(2, 4))


def test_rollout_multiplies_the_layers_with_their_residual_connection() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(1, 5, 8)
    maps = th.attention(encoder, x)
    steps = [(maps[name].mean(1) + torch.eye(5)) / 2 for name in maps]
    torch.testing.assert_close(th.rollout(maps), steps[1] @ steps[0])
    torch.testing.assert_close(th.rollout(maps).sum(-1), torch.ones(1, 5))
    assert not torch.equal(th.rollout(maps, discard=0.5), th.rollout(maps))
    with pytest.raises(ValueError, match="from 0"):
        th.rollout(maps, discard=1.0)

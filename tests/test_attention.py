"""Attention maps are those that the model computed, whether a fused kernel hid them or not."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import torchhook as th
from tests.language_models import made
from tests.models import Restless
from tests.oracle import assert_same, hooks_on, snapshot
from torchhook.errors import NoAttentionError


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
    maps = th.attention(Fused(), qkv)
    torch.testing.assert_close(maps[""], by_hand(qkv[0], qkv[1]))


def test_a_causal_call(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    bias = torch.full((6, 6), -torch.inf).triu(1)
    torch.testing.assert_close(th.attention(Fused(is_causal=True), qkv)[""], by_hand(qkv[0], qkv[1], bias))


@pytest.mark.shows("Fused layers: attention maps of scaled_dot_product_attention")
def test_masks_of_booleans_and_of_numbers(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    mask = torch.rand(6, 6) > 0.4
    mask[:, 0] = True
    bias = torch.zeros(6, 6).masked_fill(~mask, -torch.inf)
    expected = by_hand(qkv[0], qkv[1], bias)
    torch.testing.assert_close(th.attention(Fused(attn_mask=mask), qkv)[""], expected)
    torch.testing.assert_close(th.attention(Fused(attn_mask=bias), qkv)[""], expected)


def test_a_scale_of_its_own_and_dropout_left_out(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    maps = th.attention(Fused(scale=0.5, dropout_p=0.9), qkv)
    torch.testing.assert_close(maps[""], (qkv[0] @ qkv[1].transpose(-1, -2) * 0.5).softmax(-1))


@pytest.mark.shows("Fused layers: attention maps of scaled_dot_product_attention")
def test_grouped_queries(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv[0], qkv[1][:, :2], qkv[2][:, :2]
    maps = th.attention(Fused(enable_gqa=True), (q, k, v))
    torch.testing.assert_close(maps[""], by_hand(q, k.repeat_interleave(2, 1)))


def test_a_query_that_may_look_nowhere_gives_zeros_like_the_kernel(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    model = Fused(attn_mask=mask)
    maps = th.attention(model, qkv)
    assert not maps[""][:, :, 2].any()
    torch.testing.assert_close(maps[""] @ qkv[2], model(*qkv), equal_nan=False)


@pytest.mark.shows("Fused layers: attention maps of scaled_dot_product_attention")
@pytest.mark.parametrize(("bias", "diagonal"), [(causal_upper_left, 0), (causal_lower_right, 2)])
def test_causal_biases_are_the_masks_that_they_stand_for(bias: Any, diagonal: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    expected = by_hand(q, k, torch.full((3, 5), -torch.inf).triu(diagonal + 1))
    model = Fused(attn_mask=bias(3, 5))
    maps = th.attention(model, (q, k, v))
    torch.testing.assert_close(maps[""], expected)
    torch.testing.assert_close(maps[""] @ v, model(q, k, v))


def test_a_mask_of_an_unknown_kind_is_refused(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    class Odd(Tensor):
        pass

    with pytest.raises(TypeError, match="attn_mask is a Odd"):
        th.attention(Fused(attn_mask=torch.zeros(6, 6).as_subclass(Odd)), qkv)
    weights = th.attention(Fused(attn_mask=nn.Parameter(torch.zeros(6, 6))), qkv)[""]
    torch.testing.assert_close(weights, by_hand(qkv[0], qkv[1]))


class SingleHead(nn.Module):
    """Attention without heads, as a fused call or with a softmax of its own."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.fused:
            return x + F.scaled_dot_product_attention(q, k, v)
        return x + by_hand(q, k) @ v


class SelfAttention(SingleHead):
    """Its name tells that a 3-D softmax is a map."""


@pytest.mark.parametrize("batch", [2, 5])  # 5 is also the number of tokens
@pytest.mark.parametrize("fused", [True, False])
def test_attention_without_heads_has_one_head_and_rolls_out(fused: bool, batch: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SelfAttention(fused), SelfAttention(fused))
    x = torch.randn(batch, 5, 8)
    expected = torch.eye(5).expand(batch, 5, 5)
    maps = th.attention(model, x)
    for name, layer in model.named_children():
        weights = by_hand(layer.q(x), layer.k(x))  # type: ignore[operator]
        torch.testing.assert_close(maps[name], weights[:, None])
        expected = (weights + torch.eye(5)) / 2 @ expected
        x = layer(x)
    torch.testing.assert_close(th.rollout(maps), expected)


def test_fused_attention_of_one_sequence_has_a_batch_and_a_head() -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(th.attention(Fused(), (x, x, x))[""], by_hand(x, x)[None, None])


class Windows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return by_hand(x, x) @ x


def test_maps_of_windows_keep_their_dims_and_do_not_roll_out() -> None:
    x = torch.randn(1, 3, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    maps = th.attention(nn.Sequential(Windows()), x)
    torch.testing.assert_close(maps["0"], by_hand(x, x))
    with pytest.raises(ValueError, match=r"^0: rollout needs maps of batch .* found \(1, 3, 2, 4, 4\)"):
        th.rollout(maps)


def test_windows_of_a_real_model_are_the_same_fused_or_not() -> None:
    model = timm.create_model("nest_tiny", pretrained=False).eval()
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    layers = [module for module in model.modules() if hasattr(module, "fused_attn")]
    found = []
    for fused in (True, False):
        for layer in layers:
            layer.fused_attn = fused
        with torch.no_grad():
            found.append(th.attention(model, x))
    assert found[0].keys() == found[1].keys()
    assert len(found[0].keys()) == len(layers) == 12
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=0, atol=1e-5)


@pytest.mark.shows("Fused layers: attention maps of nn.MultiheadAttention")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention_on_its_fast_path_and_off_it(fast: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=batch_first).eval()
    x = torch.randn(3, 5, 8)
    expected = model(x, x, x, average_attn_weights=False)[1]
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        maps = th.attention(model, th.Inputs((x, x, x), {"need_weights": False}))
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
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
    model = made("llama", attn_implementation="eager", num_hidden_layers=2)
    ids = torch.randint(3, 50, (2, 7))
    with torch.no_grad():
        told = model(input_ids=ids, output_attentions=True).attentions
        model.set_attn_implementation("sdpa")
        maps = th.attention(model, {"input_ids": ids})
    for layer, expected in enumerate(told):
        torch.testing.assert_close(maps[f"model.layers.{layer}.self_attn"], expected, rtol=1e-5, atol=1e-6)


def test_sites_restrict_and_the_model_is_left_as_it_was() -> None:
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
    maps = th.attention(model, torch.randn(1, 3, 224, 224), sites="blocks.[01].attn")
    assert maps.keys() == ["blocks.0.attn", "blocks.1.attn"]
    assert hooks_on(model) == []


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_everything_is_left_as_it_was_whatever_the_model_does(training: bool, fails: bool) -> None:
    model, x = Restless(fails).train(training), torch.randn(3, 4, 8)
    kept, before, grad = x.clone(), snapshot(model, versions=False), model.head.weight.grad
    with pytest.raises(KeyError, match="mine") if fails else contextlib.nullcontext():
        maps = th.attention(model, th.Inputs((x,), {"scale": 2.0}))
        assert maps.keys() == ["attn"]
    assert_same(before, snapshot(model, versions=False), "the model and the process")
    assert model.head.weight.grad is grad
    assert torch.equal(x, kept)


def test_the_run_is_in_eval_mode_without_gradients_so_that_no_dropout_is_in_the_maps() -> None:
    torch.manual_seed(0)
    drop, attend = nn.Dropout(0.9), SelfAttention(fused=True)
    model, x = nn.Sequential(drop, attend).train(), torch.randn(2, 5, 8)
    modes: list[tuple[bool, bool]] = []
    attend.register_forward_pre_hook(lambda module, args: modes.append((module.training, torch.is_grad_enabled())))
    torch.testing.assert_close(th.attention(model, x)["1"], by_hand(attend.q(x), attend.k(x))[:, None])
    assert modes == [(False, False)]
    assert all(module.training for module in model.modules())


def test_of_many_places_that_attend_the_nearest_to_the_chosen_one_is_named_first() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=32, n_layer=7, n_head=4)).eval()
    with pytest.raises(NoAttentionError) as told:
        th.attention(model, torch.arange(6)[None], sites="@z.5")
    assert str(told.value).startswith(
        "no attention call was seen in what sites= chose, '@z.5' (transformer.h.5.attn.c_proj). It is called in "
        "'transformer.h.5.attn', 'transformer.h.0.attn', "
    )
    assert "and 3 more: choose from these." in str(told.value)


@pytest.mark.parametrize("fused", [True, False])
def test_sites_without_attention_are_told_where_it_is(fused: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), SelfAttention(fused), nn.ReLU(), SelfAttention(fused))
    with pytest.raises(
        NoAttentionError, match=r"seen in what sites= chose, '0', '2'\. It is called in '1', '3': choose from these\.$"
    ):
        th.attention(model, torch.randn(1, 5, 8), sites=["0", nn.ReLU])
    with pytest.raises(NoAttentionError, match=r"chose, '\(model\)'\. It is called in '1', '3'"):
        th.attention(model, torch.randn(1, 5, 8), sites="(model)")
    with pytest.raises(NoAttentionError, match="no attention call was seen in Linear: it calls neither"):
        th.attention(nn.Linear(8, 8), torch.randn(1, 8), sites="")


def test_a_shared_module_has_its_maps_once_and_is_read_under_each_of_its_names() -> None:
    layer = SelfAttention(fused=True)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    maps = th.attention(nn.Sequential(layer, layer), x)
    assert maps.keys() == ["0"]
    first = by_hand(layer.q(x), layer.k(x))
    torch.testing.assert_close(maps["1#0"], first[:, None])
    x = layer(x)
    second = by_hand(layer.q(x), layer.k(x))
    rows = [(weights + torch.eye(5)) / 2 for weights in (first, second)]
    torch.testing.assert_close(th.rollout(maps), rows[1] @ rows[0])
    assert th.attention(nn.Sequential(layer, layer), x, sites="1").keys() == ["1"]


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


def test_maps_with_the_queries_before_the_heads_are_turned() -> None:
    class Windowed(nn.Module):
        num_heads = 2

        def forward(self, scores: Tensor) -> Tensor:  # as Longformer has them
            return scores.softmax(-1)

    scores = torch.randn(1, 5, 2, 3)
    assert torch.equal(th.attention(Windowed(), scores)["(model)"], scores.softmax(-1).transpose(1, 2))

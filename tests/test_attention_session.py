"""``with th.attention(model) as maps``: the maps of each call in the block, beside those that transformers reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th
from tests.oracle import hooks_on
from torchhook import edits
from torchhook.errors import NeverOpenedWarning, NeverRanWarning, NoAttentionError, SessionError
from torchhook.types import Recording, Session

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None),
    "llama, grouped queries": lambda: transformers.LlamaConfig(**GROUPED),
    "mistral, a window of 4": lambda: transformers.MistralConfig(**GROUPED, sliding_window=4),
    "gemma 2, soft caps and windows": lambda: transformers.Gemma2Config(
        **GROUPED, sliding_window=4, attn_logit_softcapping=0.5, query_pre_attn_scalar=8
    ),
    "bloom, alibi": lambda: transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
    "falcon, alibi": lambda: transformers.FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, eos_token_id=None
    ),
    "gpt-oss, sinks": lambda: transformers.GptOssConfig(
        **{**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
    ),
}
IDS = torch.tensor([[5, 9, 13, 21, 7, 3]])


def causal(name: str, implementation: str = "eager") -> Any:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():  # large enough that the maps are far from even
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return model


def paths(maps: Recording) -> list[str]:
    return list(maps.keys())


@pytest.mark.parametrize("name", CONFIGS)
def test_each_step_of_a_generation_has_the_maps_that_transformers_reports(name: str) -> None:
    model = causal(name)
    with th.attention(model) as maps:
        output = model.generate(
            IDS, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_attentions=True
        )
    assert len(output.attentions) == 4
    for layer, path in enumerate(paths(maps)):
        for step, expected in enumerate(output.attentions):
            # A sink is a column that transformers leaves out of what it reports.
            found = maps[path, step][..., : expected[layer].shape[-1]]
            torch.testing.assert_close(found, expected[layer], rtol=1e-5, atol=1e-6)


# Not those with soft caps or sinks: transformers has no fused kernel for them.
@pytest.mark.parametrize("name", ["gpt2", "llama, grouped queries", "mistral, a window of 4"])
def test_the_fused_kernel_has_the_same_maps(name: str) -> None:
    seen = {}
    for implementation in ("eager", "sdpa"):
        model = causal(name, implementation)
        with th.attention(model) as maps:
            model.generate(IDS, max_new_tokens=4, do_sample=False)
        seen[implementation] = {site: maps.all(site) for site in paths(maps)}
    assert seen["eager"].keys() == seen["sdpa"].keys()
    for site, steps in seen["eager"].items():
        assert [weights.shape[-2] for weights in steps] == [6, 1, 1, 1]
        for mine, other in zip(seen["sdpa"][site], steps, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama, grouped queries", "mistral, a window of 4", "falcon, alibi"])
def test_a_map_times_the_values_is_what_the_fused_call_gave(name: str) -> None:
    """Whatever it was called with: the one oracle that needs no second implementation."""
    model = causal(name, "sdpa")
    calls: list[tuple[Tensor, Tensor]] = []
    kernel = F.scaled_dot_product_attention

    def noting(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        out = kernel(query, key, value, **options)
        calls.append((value, out))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", noting)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
        model.generate(IDS, max_new_tokens=3, do_sample=False)
    with th.attention(model) as maps:
        model.generate(IDS, max_new_tokens=3, do_sample=False)
    found = [record.value for record in maps.records()]
    assert len(found) == len(calls) == 6
    for weights, (value, out) in zip(found, calls, strict=True):
        repeated = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
        # Queries of one token may have been given by the heads of their keys: the same numbers in other dims.
        torch.testing.assert_close(
            weights @ repeated, out.reshape(weights.shape[:3] + out.shape[3:]), rtol=1e-5, atol=1e-5
        )


def test_an_encoder_and_decoder_with_relative_biases() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    with th.attention(model) as maps:
        output = model.generate(
            IDS, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_attentions=True
        )
    assert len(output.decoder_attentions) == 3
    for layer in range(2):
        encoder = maps[f"encoder.block.{layer}.layer.0.SelfAttention"]
        torch.testing.assert_close(encoder, output.encoder_attentions[layer])
        for step in range(3):
            itself = maps[f"decoder.block.{layer}.layer.0.SelfAttention", step]
            other = maps[f"decoder.block.{layer}.layer.1.EncDecAttention", step]
            torch.testing.assert_close(itself, output.decoder_attentions[step][layer])
            torch.testing.assert_close(other, output.cross_attentions[step][layer])


def test_training_goes_on_and_no_dropout_is_in_the_maps() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, dropout=0.5, batch_first=True)
    x = torch.randn(2, 5, 8)
    torch.manual_seed(1)
    model(x).sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    torch.manual_seed(1)
    with th.attention(model) as maps:
        model(x).sum().backward()
    assert model.training
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(plain) == len(grads) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, grads, strict=True))
    _, expected = model.eval().self_attn(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(maps["self_attn"], expected)


def test_the_session_opens_again_with_maps_of_its_own() -> None:
    model = causal("gpt2")
    session = th.attention(model, sites="**.attn")
    with session as first:
        model(IDS)
    with session as second:
        model(IDS[:, :3])
        model(IDS[:, :2])
    assert [tuple(weights.shape) for weights in first.all("transformer.h.0.attn")] == [(1, 4, 6, 6)]
    assert [weights.shape[-1] for weights in second.all("transformer.h.0.attn")] == [3, 2]
    _, third = session.run(IDS[:, :4])
    assert third["transformer.h.1.attn"].shape == (1, 4, 4, 4)


@pytest.mark.parametrize("training", [True, False])
def test_edges_that_an_edit_around_it_cuts_are_not_in_the_maps(training: bool) -> None:
    models: dict[str, nn.Module] = {
        "self_attn/multi_head_attention_forward": nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True),
        "transformer.h.0.attn/scaled_dot_product_attention": causal("gpt2", "sdpa"),
    }
    for site, model in models.items():
        x = IDS if "gpt2" in type(model).__name__.lower() else torch.randn(1, 6, 8)
        with th.edit(model.train(training), {f"{site}:input": edits.block(queries=[3, 5], keys=1)}):
            with th.attention(model) as maps:
                model(x)
            again = th.attention(model, x)
        for found in (maps, again):
            weights = found[site.partition("/")[0]]
            assert (weights[:, :, [3, 5], 1] == 0).all()
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))


def test_a_model_that_never_attends_is_said_at_the_end_of_the_block() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1))
    with pytest.warns(NeverRanWarning, match="no attention call was seen in Sequential"), th.attention(model) as maps:
        model(torch.ones(2, 3))
    assert len(maps) == 0
    with pytest.raises(NoAttentionError):
        th.attention(model, torch.ones(2, 3))


def test_sites_that_do_not_attend_are_told_who_does() -> None:
    model = causal("gpt2")
    with pytest.warns(NeverRanWarning, match=r"choose from these") as told, th.attention(model, sites="**.mlp"):
        model(IDS)
    assert "'transformer.h.0.attn'" in str(told[0].message)


def test_a_block_that_calls_nothing_and_one_that_fails() -> None:
    model = causal("gpt2")
    with pytest.warns(NeverRanWarning, match="the model was not called"), th.attention(model):
        pass
    with pytest.raises(KeyError, match="mine"), th.attention(model):
        raise KeyError("mine")
    assert not hooks_on(model)


def test_one_that_is_never_opened_is_said() -> None:
    model = causal("gpt2")
    with pytest.warns(NeverOpenedWarning, match=r"th\.attention"):
        session = th.attention(model)
        assert isinstance(session, Session)
        del session


def test_a_session_that_is_read_like_its_maps_says_how_it_is_opened() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    forgotten = th.attention(encoder)
    for read in (lambda: forgotten["self_attn"], lambda: forgotten.all("self_attn"), lambda: forgotten.keys()):
        with pytest.raises(
            SessionError, match=r"never opened.*maps[\[.].*'with th.attention\(model\) as maps:'"
        ) as caught:
            read()
        assert "capture" not in str(caught.value)
    with forgotten:
        encoder(torch.randn(1, 5, 8))
        with pytest.raises(SessionError, match=r"or maps of 'with th\.attention\(model\) as maps:'"):
            forgotten["self_attn"]


# -- beside edits -------------------------------------------------------------------------------------------------


class Fused(nn.Module):
    """Two heads of four, by the fused call or by a softmax of its own."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.fused = nn.Linear(8, 24), nn.Linear(8, 8), fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT / 2).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Multi(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x, x, x, need_weights=False)[0]


def without_queries(value: Any) -> Any:
    return type(value)((value.args[0] * 0, *value.args[1:]), value.kwargs)


def attended(model: nn.Module, x: Tensor) -> Recording:
    with th.attention(model) as maps:
        model(x)
    return maps


def maps_beside(model: nn.Module, x: Tensor, change: dict[str, Any]) -> dict[str, Recording]:
    """The maps of a model with an edit, however the two are put together."""
    with th.edit(model, change):
        found = {"one call": th.attention(model, x), "inside of the edit": attended(model, x)}
    with th.attention(model) as maps, th.edit(model, change):
        model(x)
    with th.edit(model, change), th.attention(model, sites=list(maps)) as chosen:
        model(x)
    return {**found, "outside of the edit": maps, "chosen sites": chosen}


X = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("fused", [True, False])
def test_a_map_is_made_from_what_the_call_got_after_all_edits(fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Fused(fused))
    op = "scaled_dot_product_attention" if fused else "softmax"
    q, k, _ = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in model[0].qkv(X).chunk(3, -1))
    expected = (q @ k.mT / 2).index_fill(-1, torch.tensor([1]), -torch.inf).softmax(-1)
    change = {f"0/{op}:input": th.edits.block(queries=None, keys=1)}
    for way, maps in maps_beside(model, X, change).items():
        torch.testing.assert_close(maps["0"], expected, rtol=1e-5, atol=1e-6, msg=way)


@torch.no_grad()
def test_a_function_of_ones_own_on_the_fused_call_is_in_its_map() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Fused())
    for way, maps in maps_beside(model, X, {"0/scaled_dot_product_attention:input": without_queries}).items():
        assert torch.equal(maps["0"], torch.full((1, 2, 4, 4), 0.25)), way


@torch.no_grad()
def test_a_block_of_multi_head_attention_is_in_its_map() -> None:
    torch.manual_seed(0)
    model = Multi().eval()
    mask = torch.zeros(4, 4).index_fill(1, torch.tensor([1]), -torch.inf)
    expected = model.a(X, X, X, attn_mask=mask, average_attn_weights=False)[1]
    change = {"a/multi_head_attention_forward:input": th.edits.block(queries=None, keys=1)}
    for way, maps in maps_beside(model, X, change).items():
        torch.testing.assert_close(maps["a"], expected, rtol=1e-5, atol=1e-6, msg=way)


@torch.no_grad()
def test_an_edited_softmax_is_the_map_that_the_model_goes_on_with() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Fused(fused=False))
    even = torch.full((1, 2, 4, 4), 0.25)
    for way, maps in maps_beside(model, X, {"0/softmax": th.edits.replace(even)}).items():
        assert torch.equal(maps["0"], even), way


@torch.no_grad()
def test_the_edits_of_several_sessions_are_all_in_a_map() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Fused())
    site = "0/scaled_dot_product_attention:input"
    with th.edit(model, {site: th.edits.block(queries=None, keys=1)}), th.attention(model) as maps:
        with th.edit(model, {site: without_queries, "0.qkv": th.edits.scale(2)}), th.capture(model, site) as rec:
            model(X)
    mask = rec[site].kwargs["attn_mask"]
    expected = torch.zeros(1, 2, 4, 4).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
    torch.testing.assert_close(maps["0"], expected.expand(1, 2, 4, 4).softmax(-1))
    assert torch.equal(maps["0"][..., 1], torch.zeros(1, 2, 4))

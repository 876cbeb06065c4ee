"""``edits.block``: attention with edges cut, against attention written out by hand."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th
from tests.language_models import small_bert, small_gpt2, small_llama, small_t5
from torchhook import Inputs, edits
from torchhook._values.heads import KnownHeads
from torchhook.errors import EditError
from torchhook.types import Site

FUSED = Site("attn", op="scaled_dot_product_attention", port="input", call=0)
SOFTMAX = Site("attn", op="softmax", port="input", call=0)


def by_hand(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, bias: Any = 0.0, scale: Any = None) -> Tensor:
    """Attention as the textbook has it; ``allowed`` is true where a query sees a key."""
    repeat = query.shape[-3] // key.shape[-3] if query.dim() > 2 else 1
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, -3), value.repeat_interleave(repeat, -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale) + bias
    weights = torch.where(allowed, scores, torch.tensor(-math.inf)).softmax(-1)
    return weights @ value


def qkv(keys: int = 2, tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(3, 4, tokens, 8), torch.randn(3, keys, tokens, 8), torch.randn(3, keys, tokens, 8)


CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()
PADDED = torch.ones(3, 1, 5, 5, dtype=torch.bool)
PADDED[1, ..., 4] = False
BIAS = torch.linspace(-1, 1, 25).reshape(5, 5)

CALLS: dict[str, tuple[dict[str, Any], Tensor, Any]] = {
    "no mask": ({}, torch.ones(5, 5, dtype=torch.bool), 0.0),
    "causal": ({"is_causal": True}, CAUSAL, 0.0),
    "a mask of booleans": ({"attn_mask": PADDED}, PADDED, 0.0),
    "a mask of numbers": ({"attn_mask": BIAS}, torch.ones(5, 5, dtype=torch.bool), BIAS),
    "numbers and minus infinity": ({"attn_mask": BIAS.masked_fill(~CAUSAL, -math.inf)}, CAUSAL, BIAS),
    "the least number": ({"attn_mask": BIAS.masked_fill(~CAUSAL, torch.finfo(torch.float32).min)}, CAUSAL, BIAS),
    "its own scale": ({"scale": 0.1, "is_causal": True}, CAUSAL, 0.0),
}
CUTS: dict[str, tuple[dict[str, Any], Any]] = {
    "one edge": ({"queries": 3, "keys": 1}, (..., 3, 1)),
    "the last query": ({"queries": -1, "keys": [0, -2]}, (..., -1, [0, -2])),
    "a key for all that see others": ({"queries": slice(1, None), "keys": 0}, (..., slice(1, None), 0)),
    "a mask": ({"queries": [False, False, True, True, False], "keys": [0, 2]}, (..., [[2], [3]], [0, 2])),
    "one head": ({"queries": 4, "keys": 2, "heads": 1}, (slice(None), 1, 4, 2)),
    "heads from the end": ({"queries": 4, "keys": 2, "heads": [0, -1]}, (slice(None), [0, 3], 4, 2)),
    "one row": ({"queries": 2, "keys": 1, "rows": 0}, (0, slice(None), 2, 1)),
    "a row and a head": ({"queries": 2, "keys": 1, "rows": [1], "heads": [3]}, (1, 3, 2, 1)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("call", CALLS)
def test_a_fused_kernel_attends_as_written_out_by_hand(call: str, cut: str) -> None:
    (more, allowed, bias), (chosen, index) = CALLS[call], CUTS[cut]
    query, key, value = qkv(keys=4)
    allowed = allowed.expand(3, 4, 5, 5).clone()
    allowed[index] = False
    inputs = edits.block(**chosen)(Inputs((query, key, value), more), FUSED)
    found = F.scaled_dot_product_attention(*inputs.args, **inputs.kwargs)
    torch.testing.assert_close(found, by_hand(query, key, value, allowed, bias, more.get("scale")))


def test_grouped_queries_are_cut_by_the_heads_of_the_queries() -> None:
    query, key, value = qkv(keys=2)
    allowed = CAUSAL.expand(3, 4, 5, 5).clone()
    allowed[:, 3, 4, 1] = False
    given = Inputs((query, key, value), {"is_causal": True, "enable_gqa": True})
    inputs = edits.block(4, 1, heads=3)(given, FUSED)
    found = F.scaled_dot_product_attention(*inputs.args, **inputs.kwargs)
    torch.testing.assert_close(found, by_hand(query, key, value, allowed))


def test_arguments_may_come_by_position() -> None:
    query, key, value = qkv(keys=4)
    allowed = CAUSAL.expand(3, 4, 5, 5).clone()
    allowed[..., 4, 1] = False
    inputs = edits.block(4, 1)(Inputs((query, key, value, None, 0.0, True), {}), FUSED)
    found = F.scaled_dot_product_attention(*inputs.args, **inputs.kwargs)
    torch.testing.assert_close(found, by_hand(query, key, value, allowed))


@pytest.mark.parametrize("cut", CUTS)
def test_scores_become_what_they_are_by_hand(cut: str) -> None:
    chosen, index = CUTS[cut]
    scores = torch.randn(3, 4, 5, 5).masked_fill(~CAUSAL, -1e4)
    expected = scores.clone()
    expected[index] = -math.inf
    known = KnownHeads("attn", 4, 4, (8,), op="softmax")
    edit = edits.block(**chosen).placed(SOFTMAX, lambda: known)  # type: ignore[attr-defined]
    for given in (
        Inputs((scores,), {"dim": -1}),
        Inputs((scores, 3), {}),
        Inputs((scores,), {"dim": -1, "dtype": None}),
    ):
        found = edit(given, SOFTMAX)
        assert torch.equal(found.args[0], expected)
        assert found.kwargs == given.kwargs
    assert not scores.isinf().any()


def test_no_gradient_goes_along_an_edge_that_is_cut() -> None:
    query, key, value = (t.requires_grad_() for t in qkv(keys=4))
    inputs = edits.block(slice(2, None), 1)(Inputs((query, key, value), {"is_causal": True}), FUSED)
    F.scaled_dot_product_attention(*inputs.args, **inputs.kwargs)[:, :, 2:].sum().backward()
    assert value.grad is not None
    assert key.grad is not None
    assert not value.grad[:, :, 1].any()
    assert not key.grad[:, :, 1].any()
    assert value.grad[:, :, 0].all()


@pytest.mark.parametrize(
    ("more", "chosen"),
    [
        ({"is_causal": True}, {"queries": None, "keys": 0}),
        ({}, {"queries": 3, "keys": None}),
        ({"attn_mask": BIAS.masked_fill(~CAUSAL, -1e4)}, {"queries": 0, "keys": 0}),
        ({"attn_mask": CAUSAL}, {"queries": [0, 1], "keys": [0, 1], "heads": 2}),
    ],
)
def test_a_query_that_would_see_nothing_is_refused(more: dict[str, Any], chosen: dict[str, Any]) -> None:
    with pytest.raises(EditError, match=r"attn/scaled.*edits.block\(.*query \d would see no key any more"):
        edits.block(**chosen)(Inputs(qkv(keys=4), more), FUSED)


def test_a_query_that_saw_nothing_before_is_left_alone() -> None:
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[0] = False  # padding on the left
    inputs = edits.block(4, 1)(Inputs(qkv(keys=4), {"attn_mask": mask}), FUSED)
    assert torch.equal(inputs.kwargs["attn_mask"][0, 0].sum(-1), torch.tensor([0, 5, 5, 5, 4]))


@pytest.mark.parametrize(
    ("value", "site", "said"),
    [
        (Inputs(qkv(keys=4), {}), Site("attn", op="matmul", port="input"), "acts on the inputs of scaled_dot"),
        (Inputs((torch.zeros(2, 3),), {"dim": -1}), SOFTMAX, "not taken of scores"),
        (Inputs((torch.zeros(2, 4, 5, 5),), {"dim": 1}), SOFTMAX, "taken over dim 1, and not over the keys"),
        (Inputs(tuple(t[0, 0] for t in qkv(keys=4)), {}), FUSED, "have no dim of heads"),
        (Inputs((torch.zeros(2, 4, 5, 5),), {"dim": -1}), SOFTMAX, "known in a session only"),
    ],
)
def test_where_it_cannot_act_it_says_so(value: Any, site: Site, said: str) -> None:
    with pytest.raises(EditError, match=said):
        edits.block(1, 0, heads=0)(value, site)


def test_a_place_without_attention_is_refused_before_anything_runs() -> None:
    model, _ = small_gpt2()
    for site in ("transformer.h.0.attn", "transformer.h.0:input", "transformer.h.0.attn.c_proj:input"):
        with pytest.raises(EditError, match=r"cuts attention where.*one of '…/scaled_dot_product_attention:input', '…"):
            th.edit(model, {site: edits.block(1, 0)}).open()
    call = "transformer.h.0.attn/scaled_dot_product_attention"
    for site in (call, f"{call}:input.args.0"):
        with pytest.raises(EditError, match=rf"all that the call takes: '{call}:input'\."):
            th.edit(model, {site: edits.block(1, 0)}).open()


def test_an_address_that_is_advised_exists() -> None:
    model: Any = small_gpt2(attn_implementation="sdpa")[0]
    with pytest.raises(
        EditError, match=r"@q\.1: .*this is transformer\.h\.1\.attn/scaled.*:input\.args\.0\. Name"
    ) as told:
        th.edit(model, {"@q.1": edits.block(3, 1)}).open()
    (advised,) = re.findall(r"takes: '(.*?)'", str(told.value))
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad(), th.edit(model, {advised: edits.block(3, 1)}):
        maps = th.attention(model, ids)
    assert float(maps["transformer.h.1.attn"][0, :, 3, 1].abs().max()) == 0
    with pytest.raises(EditError, match=r"@z\.1: .*this is transformer\.h\.1\.attn\.c_proj:input\.") as told:
        th.edit(model, {"@z.1": edits.block(3, 1)}).open()
    assert "c_proj/" not in str(told.value)


def test_they_print_as_written_compare_and_pickle() -> None:
    edit = edits.block([1, -1], slice(0, 2), heads=3)
    assert repr(edit) == "edits.block([1, -1], slice(0, 2, None), heads=3)"
    assert pickle.loads(pickle.dumps(edit)) == edit != edits.block([1, -1], slice(0, 2))
    with pytest.raises(
        ValueError, match=r"takes its own queries, keys, heads and rows: only\(…, steps=\) may be around it"
    ):
        edits.only(edit, positions=1)
    with pytest.raises(TypeError, match=r"edits.block knows its dims"):
        edits.block(edits.along(0, dim=1), 0)


# -- whole models -----------------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[Callable[..., Any], str]] = {
    "gpt2": (small_gpt2, "transformer.h.*.attn"),
    "llama": (small_llama, "model.layers.*.self_attn"),
    "t5 encoder": (small_t5, "encoder.block.*.layer.0.SelfAttention"),
    "t5 across": (small_t5, "decoder.block.*.layer.1.EncDecAttention"),
    "bert": (small_bert, "encoder.layer.*.attention.self"),
}


def with_kernel(
    run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, chosen: Callable[[Tensor, Tensor], bool]
) -> Any:
    """Run with a kernel written out by hand, in which query 4 of head 1 does not see key 2, in chosen calls."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        mask, scale = more.get("attn_mask"), more.get("scale")
        allowed = torch.ones(len(query), 4, query.shape[2], key.shape[2], dtype=torch.bool)
        if more.get("is_causal"):
            allowed = allowed.tril()
        bias: Any = 0.0
        if mask is not None:
            allowed, bias = (allowed & mask, 0.0) if mask.dtype == torch.bool else (allowed, mask)
        if chosen(query, key):
            allowed = allowed.clone()
            allowed[:, 1, 4, 2] = False
        return by_hand(query, key, value, allowed, bias, scale)

    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", kernel)
        return run()


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_models_compute_what_a_kernel_by_hand_computes(
    name: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, path = MODELS[name]
    model, call = make()
    if padded:
        call["attention_mask"] = torch.tensor([[1] * 6, [1] * 5 + [0]])
    wanted = iter([True] * 2 + [False] * 9) if name == "t5 encoder" else iter([False, False] + [False, True] * 2)

    def chosen(query: Tensor, key: Tensor) -> bool:
        return next(wanted) if name.startswith("t5") else True

    def run() -> Tensor:
        with torch.no_grad():
            output = model(**call)
        return output.logits if hasattr(output, "logits") else output.last_hidden_state

    expected = with_kernel(run, monkeypatch, chosen)
    with th.edit(model, {f"{path}/scaled_dot_product_attention:input": edits.block(4, 2, heads=1)}):
        found = run()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(run(), expected, atol=1e-5)
    # The same model, with a softmax of its own.
    eager, _ = make(attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    model = eager
    with th.edit(model, {f"{path}/softmax:input": edits.block(4, 2, heads=1)}):
        torch.testing.assert_close(run(), expected, atol=1e-5, rtol=1e-5)


def test_a_generation_is_cut_at_the_steps_that_are_named() -> None:
    """With a cache, against one forward pass of all tokens by a model that is cut at the same edges."""
    model, call = small_llama()
    op = "model.layers.*.self_attn/scaled_dot_product_attention:input"
    prompt = call["input_ids"]
    more = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "output_logits": True}
    with th.edit(model, {op: edits.only(edits.block(None, [0, 1]), steps=slice(1, None))}):
        found = model.generate(prompt, **more, return_dict_in_generate=True)
    with torch.no_grad(), th.edit(model, {op: edits.block(slice(prompt.shape[1], None), [0, 1])}):
        whole = model(found.sequences[:, :-1]).logits[:, prompt.shape[1] - 1 :]
    torch.testing.assert_close(torch.stack(found.logits, 1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [None, "numbers", "booleans"])
def test_multihead_attention_is_cut(need_weights: bool, padded: bool, causal: str | None) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 5, 8)
    mask = {None: None, "numbers": torch.zeros(5, 5).masked_fill(~CAUSAL, -math.inf), "booleans": ~CAUSAL}[causal]
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 4] = True
    # torch wants both masks to be of one kind.
    said = torch.zeros(3, 5).masked_fill(padding, -math.inf) if causal == "numbers" else padding
    call = {"attn_mask": mask, "need_weights": need_weights, "key_padding_mask": said if padded else None}
    cut = torch.zeros(3, 2, 5, 5, dtype=torch.bool) if mask is None else (~CAUSAL).expand(3, 2, 5, 5).clone()
    cut[:, 1, 3, [0, 2]] = True
    expected, _ = module(x, x, x, attn_mask=cut.flatten(0, 1), key_padding_mask=padding if padded else None)
    model = nn.ModuleDict({"attn": module})["attn"]
    with th.edit(model, {"(model)/multi_head_attention_forward:input": edits.block(3, [0, 2], heads=1)}):
        found, _ = model(x, x, x, **call)
    torch.testing.assert_close(found, expected)


def test_a_sink_beside_the_keys_is_no_key() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8, "num_local_experts": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 1}
    config = GptOssConfig(vocab_size=50, **sizes, **heads, pad_token_id=0, attn_implementation="eager")
    model = GptOssForCausalLM(config).eval()
    site = "model.layers.0.self_attn/softmax"
    with th.capture(model, site) as rec, th.edit(model, {f"{site}:input": edits.block(-1, -1)}), torch.no_grad():
        model(torch.randint(0, 50, (1, 6)))
    weights = rec[site]
    assert weights.shape == (1, 4, 6, 7)
    assert not weights[..., -1, 5].any()
    assert weights[..., -1, 6].all()

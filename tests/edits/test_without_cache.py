"""Edits of some steps of a generation without a cache, which gives the model all tokens each time: as with a cache.

What is right is said by the same generation with a cache, which calls the model with the new tokens alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.language_models import made, small_gpt2, small_llama, small_t5
from torchhook import edits
from torchhook.errors import EditError, NeverRanWarning

MORE: dict[str, Any] = {
    "max_new_tokens": 5,
    "min_new_tokens": 5,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
    "pad_token_id": 0,
}
BLOCK = {"GPT2LMHeadModel": "transformer.h.1", "LlamaForCausalLM": "model.layers.0"}
ATTENTION = {"GPT2LMHeadModel": "transformer.h.0.attn", "LlamaForCausalLM": "model.layers.0.self_attn"}
JOINS = {
    "GPT2LMHeadModel": "transformer.h.1.attn.c_proj:input",
    "LlamaForCausalLM": "model.layers.1.self_attn.o_proj:input",
}


def same_with_and_without(model: Any, change: dict[str, Any], **more: Any) -> Any:
    """Check that a generation without a cache is the one with it, and changed at all; returns it."""
    prompt = torch.randint(1, 60, (2, 4), generator=torch.Generator().manual_seed(5))
    with th.edit(model, change):
        expected = model.generate(prompt, **MORE, **more)
    with th.edit(model, change):
        found = model.generate(prompt, use_cache=False, **MORE, **more)
    plain = model.generate(prompt, **MORE, **more)
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert any(not torch.allclose(one, other, atol=1e-3) for one, other in zip(plain.logits, found.logits, strict=True))
    return found


WHERE: list[dict[str, Any]] = [
    {"steps": slice(1, None)},
    {"steps": 0},
    {"steps": [0, 2]},
    {"steps": slice(1, 3)},
    {"steps": slice(1, None), "positions": -1},
    {"steps": 0, "positions": [1, -1]},
    {"steps": 0, "positions": torch.tensor([[True, False, True, False], [False, True, True, True]])},
    {"steps": slice(1, None), "rows": 1},
    {"steps": slice(0, None, 2)},
]


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
@pytest.mark.parametrize("where", WHERE, ids=str)
def test_steps_are_edited_as_with_a_cache(make: Any, where: dict[str, Any]) -> None:
    model, _ = make()
    vector = 3 * torch.randn(32, generator=torch.Generator().manual_seed(1))
    same_with_and_without(model, {BLOCK[type(model).__name__]: edits.only(edits.add(vector), **where)})


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
def test_every_kind_of_edit_sees_one_step_at_a_time(make: Any) -> None:
    """A function, the mean over tokens, one edit inside another, several in order, a leaf, heads, a larger value."""
    model, _ = make()
    name = type(model).__name__
    vector, seen = 2 * torch.randn(32, generator=torch.Generator().manual_seed(1)), list[Any]()

    def fading(value: Tensor, at: Any) -> Tensor:
        seen.append((at.step, tuple(value.shape)))
        return value + vector / (1 + at.step)

    later = {"steps": slice(1, None)}
    for site, edit in (
        (BLOCK[name], edits.only(fading, steps=slice(0, None))),
        (BLOCK[name], edits.only([edits.mean(dim=1), edits.scale(-4)], steps=0)),
        (BLOCK[name], edits.only(edits.only(edits.add(vector), rows=0), **later)),
        (BLOCK[name], edits.only(edits.only(edits.add(vector), **later), positions=-1)),
        (BLOCK[name], [edits.only(edits.scale(2), **later), edits.only(edits.add(vector), steps=0)]),
        (JOINS[name], edits.only(edits.scale(20), heads=[1, 3], **later)),
        (ATTENTION[name], edits.only(edits.at("0", edits.add(vector)), **later)),
        (ATTENTION[name], edits.at("0", edits.only(edits.add(vector), **later))),
        (ATTENTION[name], edits.only(lambda out: (out[0] + vector, *out[1:]), **later)),
        (f"{ATTENTION[name]}/scaled_dot_product_attention", edits.only(edits.scale(9), **later)),
        ("lm_head", edits.only(edits.scale(-1), **later)),
        ("lm_head", edits.only(edits.scale(-1), steps=0)),
    ):
        same_with_and_without(model, {site: edit})
    assert all(shape == (2, 1 if step else 4, 32) for step, shape in seen)


@pytest.mark.parametrize("make", [small_gpt2, small_llama])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_is_cut_at_the_steps_that_are_named(make: Any, implementation: str) -> None:
    model, _ = make(attn_implementation=implementation)
    op = "scaled_dot_product_attention" if implementation == "sdpa" else "softmax"
    site = f"{ATTENTION[type(model).__name__].replace('0', '*')}/{op}:input"
    for edit in (
        edits.only(edits.block(None, [0, 1]), steps=slice(1, None)),
        edits.only(edits.block(-1, -2), steps=slice(1, None)),
        edits.only(edits.block([2, -1], 0), steps=0),
        edits.only([edits.block(None, 0), edits.only(edits.block(None, 3, heads=2), steps=2)], steps=[1, 2]),
    ):
        same_with_and_without(model, {site: edit})


def test_beams_and_a_decoder_are_edited_by_their_steps() -> None:
    model, _ = small_gpt2()
    edit = edits.only(edits.scale(-5), steps=slice(1, None))
    same_with_and_without(model, {"transformer.h.0.mlp": edit}, num_beams=2)
    model, _ = small_t5()
    same_with_and_without(model, {"decoder.block.0.layer.2": edit})


@pytest.mark.parametrize("rows", [None, 1])
def test_rows_and_tokens_that_share_a_dim_are_told_apart(rows: int | None) -> None:
    """As experts have them: (N·T, D)."""
    model = made("mixtral")
    edit = edits.only(edits.scale(-300), steps=slice(1, None), rows=rows)
    _, rec = th.run(model, torch.ones(2, 4, dtype=torch.long), capture="model.layers.0.mlp.experts")
    assert rec["model.layers.0.mlp.experts"].shape == (8, 32)
    same_with_and_without(model, {"model.layers.0.mlp.experts": edit})


def test_tokens_that_come_before_rows_are_those_of_their_step() -> None:
    class Recurrent(nn.Module):
        """Takes (T, N, D) inside."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.turned = nn.Embedding(9, 4), nn.Identity()

        def forward(self, ids: Tensor) -> Tensor:
            return self.turned(self.embed(ids).transpose(0, 1)).transpose(0, 1)

        def generate(self, ids: Tensor, count: int) -> Tensor:
            for _ in range(count):
                out = self(ids)
                ids = torch.cat([ids, out[:, -1:].sum(-1).abs().long() % 9], 1)
            return out

    model, ids = Recurrent(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    plain = model.generate(ids, 4)
    with th.edit(model, {"turned": edits.only(edits.zero(), steps=[1, 2], rows=1)}):
        found = model.generate(ids, 4)
    assert not found[1, 3:5].any()
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1, :3], plain[1, :3])
    assert found[1, 5].any()


def test_gradients_flow_as_through_the_same_indexing() -> None:
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(9, 4), nn.Linear(4, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.layer(self.embed(ids))

        def generate(self, ids: Tensor, count: int) -> Tensor:
            for _ in range(count):
                out = self(ids)
                ids = torch.cat([ids, out[:, -1:].sum(-1).long().remainder(9)], 1)
            return out

    model, ids = Writer(), torch.tensor([[1, 2, 3]])
    with th.edit(model, {"embed": edits.only(lambda x: x.tanh() * 3, steps=[1, 2])}):
        model.generate(ids, 4).pow(2).sum().backward()
    found = model.embed.weight.grad
    model.zero_grad()

    def change(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return torch.cat([out[:, :3], out[:, 3:5].tanh() * 3, out[:, 5:]], 1)

    handle = model.embed.register_forward_hook(change)
    model.generate(ids, 4).pow(2).sum().backward()
    handle.remove()
    torch.testing.assert_close(found, model.embed.weight.grad)


class Windowed(nn.Module):
    """Takes the last four tokens only, all of them each time; what it pools has no tokens."""

    def __init__(self, window: int = 4) -> None:
        super().__init__()
        self.embed, self.pool, self.window = nn.Embedding(9, 4), nn.Identity(), window

    def forward(self, ids: Tensor) -> Tensor:
        return self.pool(self.embed(ids).sum(1))

    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            ids = torch.cat([ids, self(ids[:, -self.window :]).argmax(-1, keepdim=True)], 1)
        return ids


def test_tokens_of_which_nobody_knows_the_step_are_refused() -> None:
    model, ids, edit = Windowed(), torch.tensor([[1, 2, 3]]), edits.only(edits.zero(), steps=slice(1, None))
    with th.edit(model, {"embed": edit}):
        model.generate(ids, 2)  # it has grown to the window
        with pytest.raises(EditError, match=r"embed.*step 2.*which of its 4 tokens are new cannot be told.*cache"):
            model.generate(ids, 3)
    with pytest.warns(NeverRanWarning), th.edit(model, {"embed": edits.only(edits.zero(), steps=7)}):
        model.generate(ids, 3)
    # Everywhere, and by hand, nobody has to tell.
    with th.edit(model, {"embed": edits.only(edits.zero(), positions=-1)}):
        model.generate(ids, 5)


def test_values_whose_tokens_cannot_be_told_apart_are_refused() -> None:
    model, ids = Windowed(99), torch.tensor([[1, 2, 3]])
    for steps in (0, slice(1, None)):
        with th.edit(model, {"pool": edits.only(edits.scale(2), steps=steps)}):
            with pytest.raises(EditError, match=r"pool.*step 1.*shape \(1, 4\).*edits\.along"):
                model.generate(ids, 2)


@pytest.mark.parametrize(
    ("implementation", "sites"),
    [("sdpa", ["@k.0", "@v.0"]), ("eager", ["@k.0", "@v.0", "@pattern.0", "model.layers.0.self_attn/softmax:input"])],
)
def test_keys_of_which_a_step_with_a_cache_has_others_are_refused(implementation: str, sites: list[str]) -> None:
    model, ids = small_llama(attn_implementation=implementation)[0], torch.tensor([[1, 2, 3, 4]])
    for site in sites:
        with th.edit(model, {site: edits.only(edits.scale(3.0), steps=slice(1, 3))}):
            with pytest.raises(EditError, match=r"step 1.*keys.*use_cache=True"):
                model.generate(ids, use_cache=False, **MORE)


def test_queries_have_the_tokens_of_their_steps() -> None:
    model = small_llama()[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    same_with_and_without(model, {"@q.0": edits.only(edits.scale(3.0), steps=slice(1, 3))})


def test_a_recorded_generation_is_patched_and_noise_is_drawn_step_by_step() -> None:
    model = small_llama()[0]
    block, other = BLOCK["LlamaForCausalLM"], torch.tensor([[7, 8, 9, 10], [11, 12, 13, 14]])
    with th.capture(model, block) as rec:
        model.generate(other, **MORE)
    for steps in (0, slice(1, None)):
        same_with_and_without(model, {block: edits.only(edits.patch(rec), steps=steps)})
        same_with_and_without(model, {block: edits.only(edits.noise(3.0), steps=steps)})


def test_rows_of_beams_are_refused_for_they_move() -> None:
    model, ids = small_llama()[0], torch.tensor([[1, 2, 3, 4]])
    with th.edit(model, {BLOCK["LlamaForCausalLM"]: edits.only(edits.scale(3.0), steps=slice(1, 3), rows=[0, 1])}):
        model.generate(ids, num_beams=3, **MORE)
        with pytest.raises(EditError, match=r"rows=.*beams.*use_cache=True"):
            model.generate(ids, num_beams=3, use_cache=False, **MORE)

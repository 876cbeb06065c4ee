"""``edits.only`` in language models: positions, rows, heads and steps against hooks written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.language_models import small_bert, small_gpt2, small_llama, small_t5
from torchhook import edits
from torchhook.errors import EditError


def by_hand(x: Tensor, index: Any, change: Callable[[Tensor], Tensor]) -> Tensor:
    new = x.clone()
    new[index] = change(x[index])
    return new


# -- language models, by bare hooks -----------------------------------------------------------------------------------


def hooked(model: nn.Module, site: str, change: Callable[[Tensor], Tensor], call: dict[str, Any]) -> Tensor:
    """The logits with a hook written by hand."""
    path, _, port = site.partition(":")
    module = model.get_submodule(path)
    if port == "input":
        handle = module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    else:
        handle = module.register_forward_hook(lambda _, args, out: change(out))
    try:
        return logits(model(**call))
    finally:
        handle.remove()


def logits(output: Any) -> Tensor:
    found = output.logits if hasattr(output, "logits") else output.last_hidden_state
    assert isinstance(found, Tensor)
    return found


def heads_by_hand(sizes: tuple[int, ...], heads: list[int], positions: Any, change: Any) -> Callable[[Tensor], Tensor]:
    def changed(x: Tensor) -> Tensor:
        split = x.clone().unflatten(-1, sizes)
        for head in heads:
            split[:, positions, ..., head, :] = change(split[:, positions, ..., head, :])
        return split.flatten(2)

    return changed


PROJECTIONS = {
    "gpt2 fused": (small_gpt2, "transformer.h.1.attn.c_attn", (3, 4, 8), [1, 3]),
    "gpt2 joined": (small_gpt2, "transformer.h.1.attn.c_proj:input", (4, 8), [0]),
    "llama queries": (small_llama, "model.layers.1.self_attn.q_proj", (4, 8), [-1, 0]),
    "llama keys": (small_llama, "model.layers.0.self_attn.k_proj", (2, 8), [1]),
    "llama values": (small_llama, "model.layers.0.self_attn.v_proj", (2, 8), [0]),
    "llama joined": (small_llama, "model.layers.0.self_attn.o_proj:input", (4, 8), [2]),
    "t5 encoder": (small_t5, "encoder.block.1.layer.0.SelfAttention.v", (4, 6), [1, 2]),
    "t5 decoder": (small_t5, "decoder.block.0.layer.0.SelfAttention.o:input", (4, 6), [3]),
    "t5 across": (small_t5, "decoder.block.1.layer.1.EncDecAttention.k", (4, 6), [0]),
    "bert": (small_bert, "encoder.layer.0.attention.self.query", (4, 8), [2]),
    "bert joined": (small_bert, "encoder.layer.1.attention.output.dense:input", (4, 8), [2]),
}


@pytest.mark.parametrize("positions", [slice(None), [0, -1]], ids=["everywhere", "at two positions"])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_heads_of_projections_are_changed_as_bare_hooks_do(name: str, positions: Any) -> None:
    make, site, sizes, heads = PROJECTIONS[name]
    model, call = make()
    with torch.no_grad():
        expected = hooked(model, site, heads_by_hand(sizes, heads, positions, lambda x: x * -2), call)
        with th.edit(model, {site: edits.only(edits.scale(-2), heads=heads, positions=positions)}):
            edited = logits(model(**call))
        plain = logits(model(**call))
    assert torch.equal(edited, expected)
    assert not torch.equal(edited, plain)


@pytest.mark.parametrize("make", [small_gpt2, small_llama, small_t5])
def test_positions_and_rows_of_a_block_are_changed_as_bare_hooks_do(make: Any) -> None:
    model, call = make()
    site = {"GPT2": "transformer.h.1", "Llam": "model.layers.1", "T5Fo": "decoder.block.1"}[type(model).__name__[:4]]
    vector, masked = torch.randn(model.config.hidden_size), torch.rand(2, 6) > 0.5
    for chosen, index in (
        ({"positions": [1, -1], "rows": 1}, np.s_[1:2, [1, -1]]),
        ({"positions": [[2], [4]]}, ([[0], [1]], [[2], [4]])),
        ({"positions": masked}, masked),
    ):

        def change(out: Any, index: Any = index) -> Any:
            hidden = out if isinstance(out, Tensor) else out[0]
            new = by_hand(hidden, index, lambda x: x + vector)
            return new if isinstance(out, Tensor) else (new, *out[1:])

        edit = edits.only(edits.add(vector), **chosen)
        with torch.no_grad():
            _, seen = th.run(model, **call, capture=site)
            edit = edit if isinstance(seen[site], Tensor) else edits.at("0", edit)
            with th.edit(model, {site: edit}):
                edited = logits(model(**call))
            assert torch.equal(edited, hooked(model, site, change, call))


@pytest.mark.parametrize(
    ("make", "site"), [(small_llama, "model.layers.0.self_attn"), (small_gpt2, "transformer.h.0.attn")]
)
def test_heads_are_found_after_they_are_split(make: Any, site: str) -> None:
    """Queries and keys of the fused kernel, against the whole and the same indexing."""
    model, call = make()
    op = f"{site}/scaled_dot_product_attention:input"
    _, rec = th.run(model, **call, capture=op)
    query, key, _ = rec[op].args
    assert query.shape[1] == 4
    assert key.shape[1] == (2 if make is small_llama else 4)
    edit = edits.only(
        [edits.at("args.0", edits.zero()), edits.at("args.1", edits.scale(2))], heads=1, positions=[0, -1]
    )
    _, after = th.run(model, **call, capture=op, edit={op: edit})
    for old, new, change in ((query, after[op].args[0], torch.zeros_like), (key, after[op].args[1], lambda x: x * 2)):
        expected = old.clone()
        expected[:, 1:2, [0, -1]] = change(old[:, 1:2, [0, -1]])
        assert torch.equal(new, expected)


def test_steering_a_head_changes_gradients_as_a_bare_hook_does() -> None:
    model, call = small_llama()
    site, vector = "model.layers.1.self_attn.o_proj:input", torch.randn(8)

    def gradients(run: Callable[[], Tensor]) -> list[Tensor]:
        model.zero_grad()
        run().pow(2).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def by_edit() -> Tensor:
        with th.edit(model, {site: edits.only(lambda x: x.tanh() + vector, heads=2, positions=-1)}):
            return logits(model(**call))

    def change(x: Tensor) -> Tensor:
        split = x.unflatten(-1, (4, 8))
        part = split[:, -1:, 2:3].tanh() + vector
        after = torch.cat([split[:, -1:, :2], part, split[:, -1:, 3:]], 2)
        return torch.cat([split[:, :-1], after], 1).flatten(2)

    expected = gradients(lambda: hooked(model, site, change, call))
    for found, wanted in zip(gradients(by_edit), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("model.layers.0", "is in no attention that says how many heads it has"),
        ("model.layers.0.mlp.down_proj:input", "is in no attention"),
        ("model.layers.0.self_attn", "no longer, or not yet, divided into heads"),
        ("model.layers.0.self_attn.o_proj", "'o_proj' joins the heads: they are in its input"),
        ("model.layers.0.self_attn.q_proj:input", "'q_proj' makes the heads: they are in its output"),
        ("model.layers.0.self_attn.k_proj", "heads=3 is outside of the 2 that there are (LlamaAttention"),
    ],
)
def test_heads_that_are_not_there_are_never_guessed(site: str, said: str) -> None:
    model, call = small_llama()
    edit = edits.only(edits.zero(), heads=3)
    with th.edit(model, {site: edit if site != "model.layers.0.self_attn" else edits.at("0", edit)}):
        with pytest.raises(EditError) as caught:
            model(**call)
    assert said in str(caught.value)


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [small_gpt2, small_llama, small_t5])
@pytest.mark.parametrize(
    ("steps", "meant"), [(0, {0}), ([0, 2], {0, 2}), (slice(1, None), {1, 2, 3}), (slice(0, 4, 2), {0, 2})]
)
def test_steps_of_a_generation_are_changed_as_a_counting_hook_does(make: Any, steps: Any, meant: set[int]) -> None:
    model, call = make()
    call = {name: call[name] for name in ("input_ids",)}
    site = {"GPT2": "transformer.h.0.mlp", "Llam": "model.layers.0.mlp", "T5Fo": "decoder.block.0.layer.2"}[
        type(model).__name__[:4]
    ]
    more = {
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
    }
    count = 0

    def change(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return by_hand(out, np.s_[:, -1:], lambda x: x * -5) if count - 1 in meant else out

    handle = model.get_submodule(site).register_forward_hook(change)
    expected = model.generate(**call, **more)
    handle.remove()
    with th.edit(model, {site: edits.only(edits.scale(-5), positions=-1, steps=steps)}):
        found = model.generate(**call, **more)
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert torch.equal(one, other)


def test_a_position_of_the_prompt_needs_the_step_in_a_generation() -> None:
    model, call = small_gpt2()
    more = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with th.edit(model, {"transformer.h.0": edits.only(edits.zero(), positions=3)}):
        with pytest.raises(
            EditError, match=r"positions=3 is outside of the 1 that there are.*say steps=0 for the prompt"
        ):
            model.generate(call["input_ids"], **more)
    with th.edit(model, {"transformer.h.0": edits.only(edits.zero(), positions=3, steps=0)}):
        model.generate(call["input_ids"], **more)


# -- several prompts in one block -----------------------------------------------------------------------------------


GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


def steered_by_hand(model: Any, site: str, prompt: Tensor) -> Tensor:
    """What is written with a bare hook that leaves every call of more than one token alone."""
    handle = model.get_submodule(site).register_forward_hook(lambda _, args, out: out * 3 if out.shape[1] == 1 else out)
    try:
        written = model.generate(prompt, min_new_tokens=5, **GREEDY)
    finally:
        handle.remove()
    assert isinstance(written, Tensor)
    return written


@pytest.mark.parametrize("way", ["only", "site.step"])
def test_edits_of_the_new_tokens_leave_the_prompt_of_every_generation_in_a_block_alone(way: str) -> None:
    model, _ = small_gpt2()
    site, told = "transformer.h.1", []

    def later(value: Tensor, at: Any) -> Tensor:
        told.append((at.call, at.step))
        return value * 3 if at.step else value

    edit = later if way == "site.step" else edits.only(edits.scale(3.0), steps=slice(1, None))
    prompts = torch.randint(1, model.config.vocab_size, (3, 1, 4), generator=torch.Generator().manual_seed(3))
    expected = [steered_by_hand(model, site, prompt) for prompt in prompts]
    with th.edit(model, {site: edit}), torch.no_grad():
        found = [model.generate(prompt, min_new_tokens=5, **GREEDY) for prompt in prompts]
        model(prompts[0])
    assert all(map(torch.equal, found, expected))
    if way == "site.step":
        assert told == [*((call, call % 5) for call in range(15)), (15, None)]

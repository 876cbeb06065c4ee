"""Generation with transformers: steps and positions of what was kept, and joined values against one forward pass
without a cache, seen by a bare hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.language_models import ENDS, made

transformers = pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    return made("gpt2", n_layer=2, **ENDS)


def llama() -> nn.Module:
    return made("llama", num_hidden_layers=2)


def qwen2() -> nn.Module:
    return made("qwen2", num_hidden_layers=2)


def gemma() -> nn.Module:
    return made("gemma", num_hidden_layers=2)


def gemma2() -> nn.Module:
    # A window of 4, so that layers with and without one take turns within a dozen tokens.
    return made("gemma2", num_hidden_layers=2, sliding_window=4)


def t5() -> nn.Module:
    return made("t5", num_layers=2, decoder_start_token_id=0, **ENDS)


def mamba() -> nn.Module:
    return made("mamba", num_hidden_layers=2, **ENDS)


BLOCKS = {
    gpt2: "transformer.h.1",
    llama: "model.layers.1",
    qwen2: "model.layers.1",
    gemma: "model.layers.1",
    gemma2: "model.layers.1",
    t5: "decoder.block.1.layer.2",
    mamba: "backbone.layers.1",
}


def built(make: Callable[[], nn.Module], scale: float = 4.0) -> nn.Module:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)  # else a random model says the same thing at every step
    return model


def prompt(rows: int = 2, length: int = 5) -> Tensor:
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(1))


def generated(model: nn.Module, ids: Tensor, tokens: int = 6, **options: Any) -> Any:
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": tokens, **options}
    return model.generate(ids, **options)  # type: ignore[operator]


def whole(model: nn.Module, name: str, ids: Tensor, sequence: Tensor, **options: Any) -> Tensor:
    """What one forward pass without a cache over the whole sequence gives there; its last token was never given."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(
        lambda module, args, output: seen.append((output[0] if isinstance(output, tuple) else output).clone())
    )
    tokens = {"input_ids": sequence[:, :-1]}
    if model.config.is_encoder_decoder:
        tokens = {"input_ids": ids, "decoder_input_ids": sequence[:, :-1]}
    with torch.no_grad():
        model(**tokens, use_cache=False, **options)
    handle.remove()
    assert len(seen) == 1
    return seen[0]


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= 1e-5 * max(1.0, float(wanted.abs().max()))


def told(rec: Any, name: str) -> list[tuple[int | None, int | None]]:
    return [(record.step, record.position) for record in rec.records(name)]


def capture(model: nn.Module, *names: str, **options: Any) -> Any:
    """A T5 layer gives a tuple, of which the first is what flows."""
    return th.capture(model, *names, transform=lambda v: v[0] if isinstance(v, tuple) else v, **options)


@pytest.mark.shows("transformers: a generation joined from its steps equals one forward pass without a cache")
@pytest.mark.parametrize(
    ("make", "cache"),
    # A state space model has no static cache.
    [(make, cache) for make in BLOCKS for cache in (None, "static", "no") if (make, cache) != (mamba, "static")],
    ids=lambda value: getattr(value, "__name__", value or "by default"),
)
def test_a_joined_generation_equals_one_forward_pass(make: Callable[[], nn.Module], cache: str | None) -> None:
    model, name, ids = built(make), BLOCKS[make], prompt()
    options = {"use_cache": False} if cache == "no" else {"cache_implementation": cache} if cache else {}
    with capture(model, name) as rec:
        sequence = generated(model, ids, **options)
    start = 1 if make is t5 else 5
    later = [0] * 5 if cache == "no" else [start + step for step in range(5)]
    assert told(rec, name) == list(enumerate([0, *later]))
    close(rec.cat(name, dim=1), whole(model, name, ids, sequence))


@pytest.mark.parametrize("make", [gpt2, llama, gemma2], ids=lambda make: make.__name__)
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 9])
def test_every_chunk_of_a_prefill_is_step_0_and_has_its_own_position(make: Any, chunk: int) -> None:
    model, name, ids = built(make), BLOCKS[make], prompt()
    with capture(model, name) as rec:
        sequence = generated(model, ids, tokens=4, prefill_chunk_size=chunk)
    assert told(rec, name) == [*((0, at) for at in range(0, 5, chunk)), (1, 5), (2, 6), (3, 7)]
    close(rec.cat(name, dim=1), whole(model, name, ids, sequence))


@pytest.mark.parametrize("make", [gpt2, llama, qwen2, gemma, t5], ids=lambda make: make.__name__)
def test_beam_search_is_joined_along_the_beams_that_it_returns_and_not_otherwise(make: Any) -> None:
    # Small weights, or each beam would go on alone.
    model, name, ids = built(make, scale=0.1 if make is gemma else 1.0), BLOCKS[make], prompt()
    with capture(model, name) as rec:
        out = generated(model, ids, num_beams=3, num_return_sequences=2, return_dict_in_generate=True)
    with pytest.raises(ValueError, match=r"a row is another beam at each step.*beams=out\.beam_indices"):
        rec.cat(name, dim=1)
    wanted = whole(model, name, ids.repeat_interleave(2, 0), out.sequences)
    close(rec.cat(name, dim=1, beams=out.beam_indices), wanted)
    assert rec[name, 0].shape[0] == 6
    # That rows do change places here, or this would show nothing.
    assert not torch.equal(out.beam_indices, out.beam_indices[:, :1].expand_as(out.beam_indices))


def test_a_beam_that_ends_early_is_followed_to_its_end_with_zeros_behind() -> None:
    model, ids = built(gpt2), prompt(rows=3)
    name = BLOCKS[gpt2]
    for eos in range(3, 60):
        with capture(model, name) as rec:
            out = generated(model, ids, num_beams=2, return_dict_in_generate=True, eos_token_id=eos)
        ends = (out.beam_indices >= 0).sum(1)
        if len(set(ends.tolist())) > 1:
            break
    joined, wanted = rec.cat(name, dim=1, beams=out.beam_indices), whole(model, name, ids, out.sequences)
    assert joined.shape == wanted.shape
    for row, end in enumerate(ends.tolist()):
        close(joined[row, : 4 + end], wanted[row, : 4 + end])
        assert not joined[row, 4 + end :].any()


def near(make: Callable[[], nn.Module], model: nn.Module, noise: float = 0.3) -> nn.Module:
    """A model that mostly says the same thing, and not always."""
    other = built(make)
    other.load_state_dict(model.state_dict())
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * noise * parameter.std() if parameter.numel() > 1 else 0)
    return other.eval()


@pytest.mark.parametrize("make", [gpt2, llama, qwen2], ids=lambda make: make.__name__)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("noise", [0.05, 0.3, 2.0])
def test_candidates_that_assisted_decoding_rejects_are_left_out(make: Any, tokens: int, noise: float) -> None:
    model, name, ids = built(make), BLOCKS[make], prompt(rows=1)
    assistant = near(make, model, noise)
    with capture(model, name) as rec:
        sequence = generated(model, ids, tokens=tokens, assistant_model=assistant)
    assert torch.equal(sequence, generated(model, ids, tokens=tokens))
    steps = told(rec, name)
    assert [step for step, _ in steps] == list(range(len(steps)))
    close(rec.cat(name, dim=1), whole(model, name, ids, sequence))


def test_candidates_behind_the_end_of_the_text_are_left_out() -> None:
    model, name, ids = built(gpt2), BLOCKS[gpt2], prompt(rows=1)
    assistant, behind = near(gpt2, model, 0.05), 0
    for eos in generated(model, ids, tokens=9)[0, 5:].unique().tolist():
        with capture(model, name) as rec:
            sequence = generated(model, ids, tokens=9, eos_token_id=eos, assistant_model=assistant)
        last = rec.records(name)[-1]
        behind += last.position + last.value.shape[1] > sequence.shape[1] - 1
        close(rec.cat(name, dim=1), whole(model, name, ids, sequence))
    assert behind  # the end of the text came before that of the candidates, at least once


def test_assisted_decoding_does_reject_and_the_rejected_are_still_in_the_records() -> None:
    model, name, ids = built(gpt2), BLOCKS[gpt2], prompt(rows=1)
    with capture(model, name) as rec:
        sequence = generated(model, ids, tokens=13, assistant_model=near(gpt2, model))
    assert sum(record.value.shape[1] for record in rec.records(name)) > rec.cat(name, dim=1).shape[1]
    assert rec.cat(name, dim=1).shape[1] == sequence.shape[1] - 1


def test_prompt_lookup_is_joined_by_position() -> None:
    model, name = built(llama), BLOCKS[llama]
    ids = prompt(rows=1).repeat(1, 3)
    with capture(model, name) as rec:
        sequence = generated(model, ids, tokens=9, prompt_lookup_num_tokens=4)
    assert max(record.value.shape[1] for record in rec.records(name)[1:]) > 1
    close(rec.cat(name, dim=1), whole(model, name, ids, sequence))


def test_the_assistant_has_its_own_steps_and_one_sequence() -> None:
    model, ids = built(gpt2), prompt(rows=1)
    assistant, name = near(gpt2, model), BLOCKS[gpt2]
    with capture(assistant, name) as rec:
        sequence = generated(model, ids, tokens=9, assistant_model=assistant)
    joined = rec.cat(name, dim=1)
    # The last tokens may have been rejected, or never given to the assistant.
    common = min(joined.shape[1], sequence.shape[1] - 1)
    wanted = whole(assistant, name, ids, sequence)
    agree = [bool((joined[:, i] - wanted[:, i]).abs().max() < 1e-4) for i in range(common)]
    assert all(agree[: common - 5])


@pytest.mark.parametrize("make", [gpt2, llama, gemma, qwen2], ids=lambda make: make.__name__)
def test_a_left_padded_batch_equals_single_prompts(make: Any) -> None:
    model, name, ids = built(make), BLOCKS[make], prompt(rows=3, length=6)
    lengths = [6, 3, 4]
    mask = torch.stack([(torch.arange(6) >= 6 - length).long() for length in lengths])
    ids = torch.where(mask.bool(), ids, torch.zeros_like(ids))
    with capture(model, name) as rec:
        sequences = generated(model, ids, attention_mask=mask)
    joined = rec.cat(name, dim=1)
    mask = torch.cat([mask, mask.new_ones(3, joined.shape[1] - 6)], dim=1).bool()
    for row, length in enumerate(lengths):
        single = ids[row : row + 1, 6 - length :]
        with capture(model, name) as alone:
            sequence = generated(model, single)
        assert torch.equal(sequences[row, 6 - length :], sequence[0])
        close(joined[row, mask[row]], alone.cat(name, dim=1)[0])
        close(joined[row, mask[row]], whole(model, name, single, sequence)[0])
    assert told(rec, name) == list(enumerate([0, 6, 7, 8, 9, 10]))


def test_two_generations_are_told_apart_and_each_is_joined_by_its_calls() -> None:
    model, name = built(gpt2), BLOCKS[gpt2]
    a, b = prompt(length=5), prompt(length=7)
    for options in ({}, {"use_cache": False}, {"prefill_chunk_size": 3}):
        with capture(model, name) as rec:
            sequences = [generated(model, ids, tokens=3, **options) for ids in (a, b, a)]
        each = len(rec.records(name)) // 3 if "prefill_chunk_size" not in options else None
        ends = [0, each, 2 * each, 3 * each] if each else [0, 4, 9, 13]
        assert [record.step for record in rec.records(name)].count(1) == 3
        with pytest.raises(ValueError, match=rf"several sequences.*'{name}#0:{ends[1]}', '{name}#{ends[1]}:{ends[2]}'"):
            rec.cat(name, dim=1)
        for i, (ids, sequence) in enumerate(zip((a, b, a), sequences, strict=True)):
            close(rec.cat(f"{name}#{ends[i]}:{ends[i + 1]}", dim=1), whole(model, name, ids, sequence))


def test_generations_of_one_token_each_are_told_apart() -> None:
    model, name = built(gpt2), BLOCKS[gpt2]
    for options in ({}, {"use_cache": False}):
        with capture(model, name) as rec:
            for _ in range(3):
                generated(model, prompt(), tokens=1, **options)
        assert told(rec, name) == [(0, 0)] * 3
        with pytest.raises(ValueError, match="several sequences"):
            rec.cat(name, dim=1)


def test_a_conversation_that_keeps_its_cache_is_one_sequence_and_each_turn_begins_at_step_0() -> None:
    model, name, ids = built(llama), BLOCKS[llama], prompt()
    cache = transformers.DynamicCache(config=model.config)
    with capture(model, name) as rec:
        turn = generated(model, ids, tokens=3, past_key_values=cache)
        turn = torch.cat([turn, prompt(length=4)], 1)
        sequence = generated(model, turn, tokens=3, past_key_values=cache)
    assert told(rec, name) == [(0, 0), (1, 5), (2, 6), (0, 7), (1, 12), (2, 13)]
    close(rec.cat(name, dim=1), whole(model, name, ids, sequence))


def test_sampled_sequences_of_one_prompt_are_rows() -> None:
    model, name, ids = built(gpt2), BLOCKS[gpt2], prompt(rows=1)
    with capture(model, name) as rec:
        sequences = generated(model, ids, do_sample=True, num_return_sequences=3)
    close(rec.cat(name, dim=1), whole(model, name, ids, sequences))


def test_what_generate_calls_beside_the_model_itself_has_no_step() -> None:
    model, ids = built(t5), prompt()
    with capture(model, "encoder.block.1.layer.1", "decoder.block.1.layer.2") as rec:
        generated(model, ids, tokens=3)
    assert told(rec, "encoder.block.1.layer.1") == [(None, None)]
    assert told(rec, "decoder.block.1.layer.2") == [(0, 0), (1, 1), (2, 2)]


def test_a_plain_call_has_no_step_and_a_call_after_generating_has_none() -> None:
    model, name, ids = built(gpt2), BLOCKS[gpt2], prompt()
    with capture(model, name, "lm_head") as rec, torch.no_grad():
        model(ids)
        generated(model, ids, tokens=2)
        model.lm_head(torch.zeros(1, 1, 32))
        model(ids)
    assert told(rec, name) == [(None, None), (0, 0), (1, 5), (None, None)]
    assert [step for step, _ in told(rec, "lm_head")] == [None, 0, 1, None, None]
    with pytest.raises(ValueError, match=rf"calls 0, 3 passed outside of the generation.*'{name}#1:3'"):
        rec.cat(name, dim=1)
    assert rec.cat(f"{name}#1:3", dim=1).shape[1] == 6


@pytest.mark.parametrize("make", [gpt2, mamba], ids=lambda make: make.__name__)
def test_a_loop_of_ones_own_has_steps_too(make: Any) -> None:
    model, name, ids = built(make), BLOCKS[make], prompt()
    cache_name = "cache_params" if make is mamba else "past_key_values"
    with capture(model, name) as rec, torch.no_grad():
        out = model(ids, use_cache=True)
        sequence = ids
        for _ in range(4):
            token = out.logits[:, -1:].argmax(-1)
            sequence = torch.cat([sequence, token], 1)
            out = model(token, use_cache=True, **{cache_name: getattr(out, cache_name)})
    sequence = torch.cat([sequence, sequence[:, :1]], 1)  # the last one is not looked at
    assert told(rec, name) == [(0, 0), (1, 5), (2, 6), (3, 7), (4, 8)]
    close(rec.cat(name, dim=1), whole(model, name, ids, sequence))
    close(rec.cat(f"{name}#1:", dim=1), whole(model, name, ids, sequence)[:, 5:])


def test_the_base_of_a_model_and_what_holds_one_have_steps_too() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language = built(llama)

        def forward(self, ids: Tensor) -> Any:
            return self.language(ids)

    holder, ids = Holder(), prompt()
    wanted = [(0, 0), (1, 5), (2, 6)]
    for model, name in ((holder, "language.model.layers.1"), (holder.language.model, "layers.1")):
        with capture(model, name) as rec:
            sequence = generated(holder.language, ids, tokens=3)
        assert told(rec, name) == wanted
        close(rec.cat(name, dim=1), whole(holder.language, "model.layers.1", ids, sequence))


def test_edits_from_a_call_on_change_the_later_steps_alone() -> None:
    model, name, ids = built(gpt2), BLOCKS[gpt2], prompt()
    with th.capture(model, name, edit={f"{name}#2:": th.edits.add(100.0)}) as rec:
        generated(model, ids, tokens=4)
    with th.capture(model, name) as plain:
        generated(model, ids, tokens=4)
    for call in range(4):
        changed = bool((rec[name, call] > 50).all())
        assert changed == (call >= 2)
    assert torch.equal(rec[name, 1], plain[name, 1])


def test_a_model_that_makes_no_use_of_the_cache_that_it_is_handed_is_given_all_tokens_each_time() -> None:
    """The first GPT; positions were added up as if each call had been given new tokens."""
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = transformers.OpenAIGPTConfig(**sizes, **ENDS)
    model, ids, name = built(lambda: transformers.OpenAIGPTLMHeadModel(config)), prompt(), "transformer.h.1"
    with capture(model, name) as rec:
        sequence = generated(model, ids, tokens=4)
    assert told(rec, name) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    with torch.no_grad():
        states = model(sequence[:, :-1], output_hidden_states=True).hidden_states
    close(rec.cat(name, dim=1)[0], states[2])


def test_two_texts_that_are_written_by_turns_are_told_apart() -> None:
    model, name, ids = built(llama), BLOCKS[llama], prompt()
    with capture(model, name) as rec, torch.no_grad():
        caches = [model(text, use_cache=True).past_key_values for text in (ids, ids.flip(1))]
        for token in (ids[:, :1], ids[:, 1:2]):
            for cache in caches:
                model(token, past_key_values=cache)
    assert told(rec, name) == [(0, 0), (0, 0), (1, 5), (1, 5), (2, 6), (2, 6)]
    with pytest.raises(ValueError, match="several sequences"):
        rec.cat(name, dim=1)
    with pytest.raises(ValueError, match="several sequences"):
        rec.cat(f"{name}#1:3", dim=1)


def test_the_calls_of_guided_decoding_without_the_prompt_are_a_sequence_of_their_own() -> None:
    model, name, ids = built(llama), BLOCKS[llama], prompt()
    with capture(model, name) as rec:
        generated(model, ids, tokens=4, guidance_scale=1.5)
    assert told(rec, name)[::2] == [(0, 0), (1, 5), (2, 6), (3, 7)]
    assert told(rec, name)[1::2] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    with pytest.raises(ValueError, match="several sequences"):
        rec.cat(f"{name}#1:3", dim=1)


def test_beam_search_without_a_cache_is_joined_from_the_last_token_of_each_step() -> None:
    model, name, ids = built(gpt2), BLOCKS[gpt2], prompt(rows=3)
    for eos in (None, *range(3, 20)):
        with capture(model, name) as rec:
            options = {"num_beams": 2, "use_cache": False, "eos_token_id": eos, "return_dict_in_generate": True}
            out = generated(model, ids, **options)
        joined, wanted = rec.cat(name, dim=1, beams=out.beam_indices), whole(model, name, ids, out.sequences)
        assert joined.shape == wanted.shape
        for row, end in enumerate((out.beam_indices >= 0).sum(1).tolist()):
            close(joined[row, : 4 + end], wanted[row, : 4 + end])


def test_keys_of_a_cache_are_not_joined_though_they_would_fit() -> None:
    """Each call has those of all tokens so far: joined, the first would be there once for every step."""
    model = llama()
    ids = torch.randint(3, 50, (2, 5))
    with torch.no_grad(), th.capture(model, "@k.0", "@q.0") as rec:
        model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    with pytest.raises(ValueError, match=r"dim 2 holds more than its own tokens.*rec\['@k\.0#-1'\]"):
        rec.cat("@k.0", dim=2)
    assert rec["@k.0#-1"].shape[2] == rec.cat("@q.0", dim=2).shape[2] == 7

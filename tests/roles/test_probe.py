"""What a model is tried with when nobody says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import torchhook as th
from torchhook._roles import probe

SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
FEW: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 8}),
    "gpt2 of four": ("GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 4}),
    # Counts from where padding ends, which is after two of its positions.
    "roberta": ("RobertaForMaskedLM", {**SIZES, "max_position_embeddings": 8, "pad_token_id": 1}),
    "bert": ("BertForMaskedLM", {**SIZES, "max_position_embeddings": 5}),
    "bart": (
        "BartForConditionalGeneration",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 7,
        },
    ),
}


@pytest.mark.parametrize("name", FEW)
def test_a_model_with_few_positions_has_its_names(name: str) -> None:
    kind, sizes = FEW[name]
    config = getattr(transformers, kind).config_class(vocab_size=40, **sizes)
    model = getattr(transformers, kind)(config).eval()
    found = th.roles(model)
    longer = {**sizes, **{key: 64 for key in ("n_positions", "max_position_embeddings") if key in sizes}}
    other = getattr(transformers, kind)(getattr(transformers, kind).config_class(vocab_size=40, **longer)).eval()
    assert dict(found) == dict(th.roles(other))
    assert found.refused.keys() == th.roles(other).refused.keys()
    assert any("mlp_out.1" in role for role in found)


def test_a_model_with_many_positions_is_tried_with_nine_tokens() -> None:
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=40)
    ids = probe.made_for(transformers.GPT2LMHeadModel(config)).kwargs["input_ids"]
    assert ids.shape == torch.Size([2, 9])

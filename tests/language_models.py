"""Small language models with random weights, each with what to call it with: no downloads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Made = tuple[Any, dict[str, Any]]


def _ready(model: nn.Module, **call: Any) -> Made:
    return model.eval(), call


def _ids(rows: int = 2, tokens: int = 6) -> torch.Tensor:
    return torch.randint(3, 50, (rows, tokens), generator=torch.Generator().manual_seed(1))


_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def small_gpt2(**more: Any) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=4, **_ENDS, **more)
    return _ready(GPT2LMHeadModel(config), input_ids=_ids(), use_cache=False)


def small_llama(**more: Any) -> Made:
    """Four heads of queries share two of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=50, max_position_embeddings=32, **sizes, **heads, **_ENDS, **more)
    return _ready(LlamaForCausalLM(config), input_ids=_ids(), use_cache=False)


def small_t5(**more: Any) -> Made:
    """Its heads together are not as wide as the model: 4 × 6, and 32."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    ends = {"decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {"d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=50, **sizes, **ends, **more)
    return _ready(
        T5ForConditionalGeneration(config), input_ids=_ids(), decoder_input_ids=_ids(2, 6).flip(1), use_cache=False
    )


def small_bert(**more: Any) -> Made:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return _ready(BertModel(BertConfig(vocab_size=50, **sizes, **more)), input_ids=_ids())

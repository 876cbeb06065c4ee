"""Small models of transformers: built from configs, with random weights that are the same every time, no downloads."""

from __future__ import annotations

import warnings
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION: dict[str, Any] = {
    **{key: value for key, value in SMALL.items() if key not in ("vocab_size", "max_position_embeddings")},
    "image_size": 16,
    "patch_size": 4,
}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # a class of transformers, and what its config is made with
    # decoders, one branch after the other
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
        },
    ),
    "gpt_bigcode": (
        "GPTBigCodeForCausalLM",
        {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4},
    ),
    "opt": (
        "OPTForCausalLM",
        {**{k: v for k, v in SMALL.items() if k != "intermediate_size"}, "ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    "bloom": ("BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": 64, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64, "expansion_ratio": 2},
    ),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}),
    "gemma3": ("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}),
    "olmo": ("OlmoForCausalLM", GROUPED),
    "olmo2": ("Olmo2ForCausalLM", GROUPED),
    "phi3": ("Phi3ForCausalLM", GROUPED),
    "granite": ("GraniteForCausalLM", {**GROUPED, "residual_multiplier": 0.22, "embedding_multiplier": 12.0}),
    "nemotron": ("NemotronForCausalLM", GROUPED),
    "stablelm": ("StableLmForCausalLM", GROUPED),
    "starcoder2": ("Starcoder2ForCausalLM", GROUPED),
    "exaone4": ("Exaone4ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "glm": ("GlmForCausalLM", {**GROUPED, "head_dim": 8}),
    "smollm3": ("SmolLM3ForCausalLM", GROUPED),
    "xglm": (
        "XGLMForCausalLM",
        {
            "vocab_size": 64,
            "d_model": 32,
            "ffn_dim": 48,
            "num_layers": 3,
            "attention_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
    # decoders, both branches side by side
    "gptj": (
        "GPTJForCausalLM",
        {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", SMALL),
    "codegen": (
        "CodeGenForCausalLM",
        {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4},
    ),
    "falcon": ("FalconForCausalLM", {**SMALL, "bos_token_id": 1, "eos_token_id": 2}),
    "phi": ("PhiForCausalLM", SMALL),
    "cohere": ("CohereForCausalLM", GROUPED),
    # mixtures of experts
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {
            **GROUPED,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**GROUPED, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    ),
    "olmoe": ("OlmoeForCausalLM", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **GROUPED,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    # encoders
    "bert": ("BertForMaskedLM", SMALL),
    "roberta": ("RobertaForMaskedLM", SMALL),
    "electra": ("ElectraForMaskedLM", {**SMALL, "embedding_size": 16}),
    "deberta_v2": ("DebertaV2ForMaskedLM", {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**SMALL, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "albert": ("AlbertForMaskedLM", {**SMALL, "embedding_size": 16}),
    # images
    "vit": ("ViTForImageClassification", VISION),
    "deit": ("DeiTForImageClassification", VISION),
    "dinov2": ("Dinov2Model", {**VISION, "mlp_ratio": 2}),
    "siglip": ("SiglipVisionModel", VISION),
    "beit": ("BeitForImageClassification", VISION),
    # encoder and decoder
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4},
    ),
    "bart": ("BartForConditionalGeneration", ENCODER_DECODER),
    "marian": ("MarianMTModel", {**ENCODER_DECODER, "pad_token_id": 0, "decoder_start_token_id": 0}),
    # neither
    "mamba": ("MambaForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4}),
}

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""Ids of special tokens: many configs have some that a vocabulary of 64 does not reach."""


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        import pytest  # here: tests.gpu runs without it

        pytest.skip("transformers is not installed")
    return transformers


def from_config(kind: str, config: dict[str, Any], attn_implementation: str | None = None) -> Any:
    """A model of a class of transformers in eval mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a library says of itself while it is imported
        cls: Any = getattr(_transformers(), kind)
        options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        torch.manual_seed(0)
        return cls._from_config(cls.config_class(**config), **options).eval()


def made(name: str, kind: str | None = None, *, attn_implementation: str | None = None, **changes: Any) -> Any:
    """One of ``MODELS``, with ``changes`` of its config; ``kind`` is another class of the same config."""
    usual, config = MODELS[name]
    return from_config(kind or usual, {**config, **changes}, attn_implementation)


HAS_GROUPED_PRODUCT = hasattr(torch.nn.functional, "grouped_mm") or hasattr(torch, "_grouped_mm")
NO_GROUPED_PRODUCT = "this version of torch has no grouped product, and the experts take another way"


def checkpointed(model: Any, reentrant: bool = False) -> Any:
    """The model with activation checkpointing, which has another name from transformers 5.23 on."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    return model


# -- with what to call them with --------------------------------------------------------------------------------

Made = tuple[Any, dict[str, Any]]


def ids(rows: int = 2, tokens: int = 6) -> torch.Tensor:
    return torch.randint(3, 50, (rows, tokens), generator=torch.Generator().manual_seed(1))


def small_gpt2(**changes: Any) -> Made:
    return made("gpt2", **{**ENDS, **changes}), {"input_ids": ids(), "use_cache": False}


def small_llama(**changes: Any) -> Made:
    """Four heads of queries share two of keys and values."""
    return made("llama", **{"num_hidden_layers": 2, **changes}), {"input_ids": ids(), "use_cache": False}


def small_t5(**changes: Any) -> Made:
    """Its heads together are not as wide as the model: 4 × 6, and 32."""
    tokens = {"input_ids": ids(), "decoder_input_ids": ids().flip(1), "use_cache": False}
    return made("t5", **{"d_kv": 6, "num_layers": 2, "decoder_start_token_id": 0, **changes}), tokens


def small_bert(**changes: Any) -> Made:
    return made("bert", "BertModel", **changes), {"input_ids": ids()}

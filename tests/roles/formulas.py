"""What every standard name must be, written by hand from the code of each architecture, and read by bare hooks.

``HAND`` says of each model where its blocks are and which of their modules are added to the stream; everything else
follows: the sums, what goes into the projection, the attention that the model itself reports.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Hand:
    """One stack of blocks, by hand."""

    blocks: str = "model.layers"
    attn: str = "self_attn.o_proj"
    mlp: str = "mlp"
    z: str = ""
    """The output projection, where it is not the module that ``attn`` names."""
    norm: str | None = "model.norm"
    embed: str | None = "model.embed_tokens"
    style: str = "serial"
    middle: str = ""
    """The norm that the first sum goes through, in post-norm blocks."""
    last: str = ""
    """The one that the last sum goes through."""
    factor: float = 1.0
    factors: tuple[str, str] = ("", "")
    """Parameters of the block that the two branches are multiplied by."""
    prefix: str = ""
    cross: str = ""


LLAMA = Hand()
GPT2 = Hand("transformer.h", "attn.c_proj", norm="transformer.ln_f", embed="transformer.wte")
POST_NORMS = Hand(attn="post_attention_layernorm", mlp="post_feedforward_layernorm", z="self_attn.o_proj")
PARALLEL = Hand(style="parallel")


def _bert(name: str) -> Hand:
    return Hand(
        f"{name}.encoder.layer",
        "attention.output.dense",
        "output.dense",
        norm=None,
        embed=f"{name}.embeddings.word_embeddings",
        middle="attention.output.LayerNorm",
        last="output.LayerNorm",
    )


def _bart(side: str) -> Hand:
    return Hand(
        f"model.{side}.layers",
        "self_attn.out_proj",
        "fc2",
        norm=None,
        embed=f"model.{side}.embed_tokens",
        middle="self_attn_layer_norm",
        last="final_layer_norm",
        prefix=f"{side}.",
        cross="encoder_attn.out_proj" if side == "decoder" else "",
    )


def _t5(side: str, mlp: int) -> Hand:
    return Hand(
        f"{side}.block",
        "layer.0.SelfAttention.o",
        f"layer.{mlp}.DenseReluDense.wo",
        norm=f"{side}.final_layer_norm",
        embed=f"{side}.embed_tokens",
        prefix=f"{side}.",
        cross="layer.1.EncDecAttention.o" if side == "decoder" else "",
    )


def _same(names: str, hand: Hand) -> dict[str, list[Hand]]:
    return {name: [hand] for name in names.split()}


HAND: dict[str, list[Hand]] = {
    "gpt2": [GPT2],
    "gpt_neo": [dataclasses.replace(GPT2, attn="attn.attention.out_proj")],
    "gpt_bigcode": [GPT2],
    "opt": [
        Hand(
            "model.decoder.layers",
            "self_attn.out_proj",
            "fc2",
            norm="model.decoder.final_layer_norm",
            embed="model.decoder.embed_tokens",
        )
    ],
    "bloom": [
        Hand(
            "transformer.h",
            "self_attention.dense",
            "mlp.dense_4h_to_h",
            norm="transformer.ln_f",
            embed="transformer.word_embeddings",
        )
    ],
    "mpt": [
        Hand("transformer.blocks", "attn.out_proj", "ffn.down_proj", norm="transformer.norm_f", embed="transformer.wte")
    ],
    **_same("llama mistral qwen2 qwen3 gemma olmo phi3 nemotron stablelm starcoder2 glm smollm3", LLAMA),
    **_same("mixtral qwen2_moe qwen3_moe olmoe deepseek_v3 gpt_oss", LLAMA),
    **_same("gemma2 gemma3 olmo2 exaone4", POST_NORMS),
    "granite": [dataclasses.replace(LLAMA, factor=0.22)],
    "xglm": [Hand(attn="self_attn.out_proj", mlp="fc2", norm="model.layer_norm")],
    "gptj": [dataclasses.replace(GPT2, attn="attn.out_proj", style="parallel")],
    "codegen": [dataclasses.replace(GPT2, attn="attn.out_proj", style="parallel")],
    "gpt_neox": [
        Hand(
            "gpt_neox.layers",
            "attention.dense",
            norm="gpt_neox.final_layer_norm",
            embed="gpt_neox.embed_in",
            style="parallel",
        )
    ],
    "falcon": [
        Hand(
            "transformer.h",
            "self_attention.dense",
            norm="transformer.ln_f",
            embed="transformer.word_embeddings",
            style="parallel",
        )
    ],
    "phi": [dataclasses.replace(PARALLEL, attn="self_attn.dense", norm="model.final_layernorm")],
    "cohere": [PARALLEL],
    "bert": [_bert("bert")],
    "roberta": [_bert("roberta")],
    "electra": [_bert("electra")],
    "deberta_v2": [_bert("deberta")],
    "distilbert": [
        Hand(
            "distilbert.transformer.layer",
            "attention.out_lin",
            "ffn.lin2",
            norm=None,
            embed="distilbert.embeddings.word_embeddings",
            middle="sa_layer_norm",
            last="output_layer_norm",
        )
    ],
    "modernbert": [Hand(attn="attn.Wo", norm="model.final_norm", embed="model.embeddings.tok_embeddings")],
    "vit": [Hand("vit.layers", "attention.o_proj", norm="vit.layernorm", embed=None)],
    "deit": [Hand("deit.layers", "attention.o_proj", norm="deit.layernorm", embed=None)],
    "dinov2": [
        Hand("encoder.layer", "layer_scale1", "layer_scale2", z="attention.o_proj", norm="layernorm", embed=None)
    ],
    "beit": [
        Hand("beit.layers", "attention.o_proj", norm=None, embed=None, factors=("lambda_1", "lambda_2")),
    ],
    "siglip": [Hand("encoder.layers", "self_attn.out_proj", norm="post_layernorm", embed=None)],
    "t5": [_t5("encoder", 1), _t5("decoder", 2)],
    "bart": [_bart("encoder"), _bart("decoder")],
    "marian": [_bart("encoder"), _bart("decoder")],
}


def _first(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = value[0]
    return value


def by_hand(model: nn.Module, inputs: dict[str, Tensor], hand: Hand) -> dict[str, Tensor]:
    """Every name of one stack, from bare hooks with ``.clone()`` and sums."""
    seen: dict[str, Tensor] = {}
    handles = []

    def after(key: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen.setdefault(key, _first(output).clone())

        return hook

    def before(key: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen.setdefault(key, (args[0] if args else kwargs["hidden_states"]).clone())

        return hook

    blocks = model.get_submodule(hand.blocks)
    for i, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(before(f"resid_pre.{i}"), with_kwargs=True))
        handles.append(block.register_forward_hook(after(f"resid_post.{i}")))
        for kind, path in (("attn_out", hand.attn), ("mlp_out", hand.mlp), ("cross_attn_out", hand.cross)):
            if path:
                handles.append(block.get_submodule(path).register_forward_hook(after(f"{kind}.{i}")))
        projection = block.get_submodule(hand.z or hand.attn)
        handles.append(projection.register_forward_pre_hook(before(f"z.{i}"), with_kwargs=True))
    for kind, path in (("norm_final", hand.norm), ("embed", hand.embed)):
        if path is not None:
            handles.append(model.get_submodule(path).register_forward_hook(after(kind)))
    try:
        model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    for i, block in enumerate(blocks):
        _sums(seen, i, block, hand)
    return {hand.prefix + name: value for name, value in seen.items()}


def _sums(seen: dict[str, Tensor], i: int, block: nn.Module, hand: Hand) -> None:
    for kind, name in zip(("attn_out", "mlp_out"), hand.factors, strict=True):
        factor = block.get_parameter(name) if name else hand.factor
        seen[f"{kind}.{i}"] = seen[f"{kind}.{i}"] * factor
    if hand.style == "parallel":
        return
    middle = seen[f"resid_pre.{i}"] + seen[f"attn_out.{i}"]
    if hand.middle:
        middle = block.get_submodule(hand.middle)(middle)
    seen[f"resid_mid.{i}"] = middle
    if hand.cross:
        crossed = middle + seen[f"cross_attn_out.{i}"]
        norm = "encoder_attn_layer_norm" if hand.middle else ""
        seen[f"resid_mid_cross.{i}"] = block.get_submodule(norm)(crossed) if norm else crossed


def attended(attention: Tensor, values: Tensor) -> Tensor:
    """What attention makes of values with the weights that a model reports, heads beside each other."""
    if values.dim() == 3:
        values = values.unflatten(0, (attention.shape[0], -1))
    values = values.repeat_interleave(attention.shape[1] // values.shape[1], dim=1)
    return (attention @ values).transpose(1, 2).flatten(2)


def biases(attention: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """What was added to the scores, up to a constant for each query: the same for every row of a batch."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    left = attention.double().log() - (q @ k.transpose(-1, -2) * scale).double()
    seen = torch.isfinite(left)
    left = left.masked_fill(~seen, 0.0)
    return (left - left.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)).masked_fill(~seen, 0.0)

"""Which heads a site has, on architectures of transformers: found right or refused, never wrong.

The oracle is the fused kernel or the softmax, whose heads are a dim of their own: zeros in one of its arguments or in
its result, put there by a function of the test.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from torchhook import Inputs, edits
from torchhook._core.heads import known_heads
from torchhook._core.index import Index
from torchhook._core.select import resolve
from torchhook.errors import EditError, NeverRanWarning, SelectorError

_BASE = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SHARED = {**_BASE, **_ENDS, "num_key_value_heads": 2}
_OLD = {"vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32, **_ENDS}

# The config, and the projections whose heads are found; where there is no "q", it is fused and refused.
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "GPT2": (_OLD, "c_attn c_proj:input"),
    "GPTNeoX": ({**_BASE, **_ENDS}, "dense:input"),
    "GPTJ": ({**_OLD, "rotary_dim": 4}, "k_proj v_proj q_proj out_proj:input attn_dropout attn_dropout:input"),
    "Llama": (_SHARED, "q_proj k_proj v_proj o_proj:input"),
    "Qwen3": ({**_SHARED, "head_dim": 16}, "q_proj k_proj v_proj o_proj:input q_norm q_norm:input k_norm k_norm:input"),
    "Gemma2": ({**_SHARED, "head_dim": 16}, "q_proj k_proj v_proj o_proj:input"),
    "Phi3": (_SHARED, "o_proj:input"),
    "Falcon": ({**_BASE, **_ENDS}, "dense:input"),
    "Bloom": (
        {"vocab_size": 50, "hidden_size": 32, "n_layer": 1, "n_head": 4, **_ENDS},
        "dense:input attention_dropout attention_dropout:input",
    ),
    "GPTBigCode": (_OLD, "c_proj:input"),
    "Bert": ({**_BASE, **_ENDS}, "query key value dense:input"),
    "DistilBert": (
        {"vocab_size": 50, "dim": 32, "hidden_dim": 48, "n_layers": 1, "n_heads": 4, "pad_token_id": 0},
        "q_lin k_lin v_lin out_lin:input",
    ),
    "ModernBert": ({**_BASE, **_ENDS, "global_attn_every_n_layers": 1}, "Wo:input"),
    # The rank of the queries is as large as all heads together, by chance.
    "DeepseekV3": (
        {
            **_BASE,
            **_ENDS,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "q_lora_rank": 40,
            "kv_lora_rank": 36,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 9,
        },
        "q_b_proj o_proj:input",
    ),
    "Albert": ({**_BASE, **_ENDS, "embedding_size": 16}, "query key value dense:input"),
}
IDS = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(0))
HEAD = 1


def made(name: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name][0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of jit, in some of its own
        model = transformers.AutoModel.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    assert isinstance(model, nn.Module)
    return model


def run(model: nn.Module, edit: dict[str, Any]) -> Tensor:
    with torch.no_grad(), th.edit(model, edit):
        output: Tensor = model(input_ids=IDS)[0]
    return output


def without(argument: int | None, repeat: int = 1) -> Callable[[Any], Any]:
    """Zeros in one head, of an argument or of the value itself; where keys were repeated, in all that are the same."""

    def cut(tensor: Tensor) -> Tensor:
        new = tensor.clone()
        new[:, HEAD * repeat : (HEAD + 1) * repeat] = 0
        return new

    if argument is None:
        return cut
    return lambda value: Inputs(
        tuple(cut(one) if at == argument else one for at, one in enumerate(value.args)), value.kwargs
    )


def oracles(model: nn.Module) -> list[Tensor]:
    found = [op for op in th.ops(model, {"input_ids": IDS}) if op.name in ("scaled_dot_product_attention", "softmax")]
    site = f"{found[0].path}/{found[0].name}"
    outputs = [run(model, {site: without(None)})]
    if found[0].name == "softmax" and getattr(model.config, "num_key_value_heads", 4) == 2:
        return [*outputs, run(model, {site: without(None, 2)})]  # a head of values is that of two of the queries
    if found[0].name == "scaled_dot_product_attention":
        _, seen = th.run(model, input_ids=IDS, capture=f"{site}:input")
        heads = [tensor.shape[1] for tensor in seen[f"{site}:input"].args]
        outputs += [run(model, {f"{site}:input": without(at)}) for at in range(3) if heads[at] > HEAD]
        outputs += [run(model, {f"{site}:input": without(at, 2)}) for at in (1, 2) if heads[at] == 4]
    return outputs


@pytest.mark.parametrize("name", CONFIGS)
def test_heads_are_found_right_or_refused(name: str) -> None:
    model = made(name)
    expected, right, wrong = oracles(model), [], []
    softmax_only = len(expected) < 3
    for path, _ in model.named_modules():
        for port in ("", ":input"):
            site = (path or "(model)") + port
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", NeverRanWarning)
                    output = run(model, {site: edits.only(edits.zero(), heads=HEAD)})
            except (EditError, SelectorError, NeverRanWarning):
                continue
            short = site.rpartition(".")[2]
            # Without a fused kernel, the oracle knows values and what comes after the softmax, not queries and keys.
            checked = not softmax_only or not short.startswith(("q_", "k_"))
            fits = any(torch.allclose(output, one, atol=1e-6) for one in expected)
            (right if fits or not checked else wrong).append(short)
    assert wrong == []
    assert sorted(right) == sorted(CONFIGS[name][1].split())


class Mixer(nn.Module):
    """An attention by another name, and a model that counts heads too."""

    def __init__(self, named: bool = True) -> None:
        super().__init__()
        self.n_heads = 4
        self.q_proj, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mlp = nn.ModuleDict({"proj": nn.Linear(8, 8)})
        self.deep = nn.ModuleDict({"q": nn.Linear(8, 8)})
        if named:
            self.head_dim = 2


def known(model: nn.Module, site: str) -> Any:
    index = Index(model)
    return known_heads(index, resolve(index, site)[0])


def test_a_module_that_counts_heads_is_an_attention_for_its_own_projections_alone() -> None:
    found = known(Mixer(), "q_proj")
    assert (found.queries, found.keys, found.dims, found.joined) == (4, 4, (2,), True)
    assert known(Mixer(), "out:input").joined
    assert not known(Mixer(), "out").joined
    assert not known(Mixer(), "mlp.proj:input").counts
    assert not known(Mixer(), "deep.q").counts


class SharedKeys(nn.Module):
    """Keys and values in one projection, which is as large as the queries: twice half as many heads."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 8
        self.add_module(name, nn.Linear(32, 32))
        self.forward = lambda x: getattr(self, name)(x)


@pytest.mark.parametrize("name", ["kv", "to_kv", "kv_proj", "key_value"])
def test_keys_and_values_in_one_projection_are_not_taken_for_queries(name: str) -> None:
    model = SharedKeys(name)
    with th.edit(model, {name: edits.only(edits.zero(), heads=1)}):
        with pytest.raises(EditError, match="a fused projection of size 32"):
            model(torch.randn(1, 3, 32))


def test_without_a_size_nothing_is_derived() -> None:
    model = Mixer(named=False)
    assert known(model, "q_proj").dims == ()
    model.forward = lambda x: model.q_proj(x)  # type: ignore[method-assign]
    with th.edit(model, {"q_proj": edits.only(edits.zero(), heads=0)}):
        with pytest.raises(EditError, match=r"no number of heads times their size: Mixer at '\(model\)' has 4 heads\."):
            model(torch.randn(1, 3, 8))

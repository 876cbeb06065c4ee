"""Roles on many configs of transformers, judged by bare hooks, sums by hand, and what the models report themselves."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import torchhook as th
from tests.roles.formulas import HAND, attended, biases, by_hand
from tests.roles_models import MODELS, build
from torchhook._roles import probe

FAST = ("gpt2", "llama", "gemma2", "gptj", "mixtral", "bert", "vit", "t5")
SLOW = [name for name in MODELS if name not in FAST]
ZOO = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@functools.cache
def _captured(name: str) -> tuple[Any, dict[str, Tensor], Any, Any, Any]:
    """A model, other inputs than the probe's, its roles, and what was captured by all of their names."""
    model = build(name)
    roles = th.roles(model)
    inputs = {key: value.flip(-1) for key, value in probe.made_for(model).kwargs.items()}
    with torch.no_grad(), th.capture(model, [*roles]) as rec:
        output = model(**inputs, output_hidden_states=True)
    return model, inputs, roles, rec, output


@pytest.mark.parametrize("name", ZOO)
def test_every_name_is_what_hooks_and_sums_by_hand_give(name: str) -> None:
    model, inputs, roles, rec, _ = _captured(name)
    judged = 0
    for hand in HAND.get(name, []):
        with torch.no_grad():
            expected = by_hand(model, inputs, hand)
        for role, value in expected.items():
            if role not in roles:
                assert role in roles.refused
                continue
            found = rec[f"@{role}"]
            torch.testing.assert_close(found.reshape(value.shape), value, rtol=1e-5, atol=1e-5)
            judged += 1
        kinds = {role.rpartition(".")[0] for role in expected if role[-1].isdecimal()}
        stack = {n for n in roles.sites if n.rpartition(".")[0] in kinds and n[-1].isdecimal()}
        assert stack <= expected.keys(), "a name that was found and is not there by hand"
    assert judged >= (14 if name in HAND else 0)
    # Those without a formula have nothing that would need one.
    assert name in HAND or not any(kind in role for role in roles for kind in ("attn", "mlp", "mid", "z."))


@pytest.mark.parametrize("name", ZOO)
def test_the_stream_is_what_the_model_reports_bit_for_bit(name: str) -> None:
    _, _, roles, rec, output = _captured(name)
    if "logits" in roles:
        assert torch.equal(rec["@logits"], output.logits)
    for prefix, key in (
        ("", "hidden_states"),
        ("encoder.", "encoder_hidden_states"),
        ("decoder.", "decoder_hidden_states"),
    ):
        reported = getattr(output, key, None)
        count = sum(1 for role in roles if role.startswith(f"@{prefix}resid_pre."))
        if reported is None or not count:
            continue
        if name in LATE:
            assert all(torch.equal(rec[f"@{prefix}resid_post.{i}"], reported[i]) for i in range(count - 1))
            continue
        for i in range(count):
            assert torch.equal(rec[f"@{prefix}resid_pre.{i}"], reported[i])
            if i:
                assert torch.equal(rec[f"@{prefix}resid_post.{i - 1}"], reported[i])
        ends = [
            rec[f"@{prefix}{end}"] for end in (f"resid_post.{count - 1}", "norm_final") if f"{prefix}{end}" in roles
        ]
        assert any(torch.equal(reported[-1], end) for end in ends)


LATE = {"mamba"}
"""They do not report what goes into their first block."""

SCALES = {"gpt_neo": 1.0, "opt": 1.0, "t5": 1.0, "xglm": 1.0, "granite": 1.0}
"""What scores are multiplied by, where that is not one over the root of the size of a head."""
CAPPED = {"gemma2"}
"""Their scores go through a tanh: they are no sums."""


@pytest.mark.parametrize("name", ZOO)
def test_queries_keys_and_values_make_the_attention_that_the_model_reports(name: str) -> None:
    model, inputs, roles, rec, _ = _captured(name)
    eager = build(name, attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        output = eager(**inputs, output_attentions=True)
    for prefix, key in (("", "attentions"), ("encoder.", "encoder_attentions"), ("decoder.", "decoder_attentions")):
        for i, attention in enumerate(getattr(output, key, None) or ()):
            if attention is None or f"@{prefix}z.{i}" not in roles or f"@{prefix}v.{i}" not in roles:
                continue
            z, v = rec[f"@{prefix}z.{i}"], rec[f"@{prefix}v.{i}"]
            torch.testing.assert_close(attended(attention, v), z, rtol=1e-3, atol=1e-4)
            if f"@{prefix}q.{i}" in roles and f"@{prefix}k.{i}" in roles and name not in CAPPED:
                q, k = (_with_heads(rec[f"@{prefix}{kind}.{i}"], attention) for kind in "qk")
                added = biases(attention, q, k, SCALES.get(name, q.shape[-1] ** -0.5))
                torch.testing.assert_close(added[0], added[1], rtol=1e-3, atol=2e-4)


# All of theirs are refused; `th.roles(model).refused` says why.
WITHOUT_PATTERN = {"codegen", "gpt_oss", "albert", "mamba"}


@pytest.mark.parametrize("name", [n for n in ZOO if n not in ("vit", "t5")])
def test_patterns_are_those_that_the_model_reports(name: str) -> None:
    model = build(name, attn_implementation="eager")
    roles = th.roles(model)
    inputs = probe.made_for(model).kwargs
    patterns = [role for role in roles if "pattern." in role]
    assert patterns or name in WITHOUT_PATTERN
    if not patterns:
        return
    judged = 0
    with torch.no_grad(), th.capture(model, patterns) as rec:
        output = model(**inputs, output_attentions=True)
    for prefix, key in (("", "attentions"), ("encoder.", "encoder_attentions"), ("decoder.", "decoder_attentions")):
        for i, attention in enumerate(getattr(output, key, None) or ()):
            if attention is not None and f"@{prefix}pattern.{i}" in roles:
                found = _with_heads(rec[f"@{prefix}pattern.{i}"], attention)
                torch.testing.assert_close(found, attention, rtol=0, atol=0)
                judged += 1
    assert judged


def _with_heads(value: Tensor, attention: Tensor) -> Tensor:
    """Some models make one dim of batch and heads."""
    return value if value.dim() == 4 else value.unflatten(0, attention.shape[:2])

"""Tokens of what attention takes, ``(N, heads, T, D)``: streams, statistics and stores, by bare hooks and numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchhook as th
from tests.language_models import small_gpt2, small_llama
from torchhook import transforms as tf
from torchhook.errors import ExtractError

LENGTHS = [6, 3, 4, 6, 2, 5]


def batch(side: str = "right") -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (len(LENGTHS), 6), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(6) < torch.tensor(LENGTHS)[:, None]
    mask = mask if side == "right" else mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "position_ids": positions}


def values(model: Any, data: dict[str, Tensor], of_gpt2: bool) -> Tensor:
    """What the projection makes of each token, by a bare hook: values are turned by no position."""
    seen: list[Tensor] = []
    module = model.transformer.h[1].attn.c_attn if of_gpt2 else model.model.layers[1].self_attn.v_proj
    handle = module.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    with torch.no_grad():
        model(**data)
    handle.remove()
    return seen[0][..., 64:] if of_gpt2 else seen[0]


KINDS = [(small_gpt2, "eager"), (small_gpt2, "sdpa"), (small_llama, "eager"), (small_llama, "sdpa")]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("make", "kernel"), KINDS)
def test_a_token_is_all_of_its_heads(make: Any, kernel: str, side: str) -> None:
    model, _ = make(attn_implementation=kernel)
    data = batch(side)
    expected = values(model, data, make is small_gpt2)[data["attention_mask"].bool()]
    # Batches of three and of one row: of one that has no padding, a fused kernel is given each head once.
    for size in (3, 1):
        stream = th.stream(model, data, "@v.1", shuffle=False, batch=100, buffer=100, batch_size=size)
        (found,) = list(stream)
        torch.testing.assert_close(found, expected)
        numbers = th.statistics(model, data, "@v.1", batch_size=size, covariance=True)["@v.1"]
        assert numbers.count == sum(LENGTHS)
        torch.testing.assert_close(numbers.mean, expected.double().mean(0), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(numbers.max.float(), expected.amax(0))
        by_numpy = torch.from_numpy(np.cov(expected.double().numpy().T))
        torch.testing.assert_close(numbers.covariance, by_numpy, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("make", "kernel"), KINDS)
def test_statistics_for_each_position_are_of_tokens(make: Any, kernel: str) -> None:
    model, _ = make(attn_implementation=kernel)
    data = batch()
    whole = values(model, data, make is small_gpt2)
    found = th.statistics(model, data, "@v.1", per="token", batch_size=3)["@v.1"]
    for position in range(6):
        real = whole[data["attention_mask"][:, position].bool(), position].double()
        torch.testing.assert_close(found.mean[position], real.mean(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("make", "kernel"), KINDS)
def test_without_padding_a_value_of_heads_is_no_map(make: Any, kernel: str) -> None:
    model, call = make(attn_implementation=kernel)
    ids = call["input_ids"]
    expected = values(model, {"input_ids": ids}, make is small_gpt2).flatten(0, 1)
    found = th.statistics(model, {"input_ids": ids}, "@v.1")["@v.1"]
    assert found.count == 12
    torch.testing.assert_close(found.mean, expected.double().mean(0), rtol=1e-5, atol=1e-7)
    (tokens,) = list(th.stream(model, {"input_ids": ids}, "@v.1", shuffle=False, batch=100, buffer=100))
    torch.testing.assert_close(tokens, expected)


@pytest.mark.parametrize(("make", "kernel"), KINDS)
def test_rows_of_a_store_are_cut_at_their_tokens(tmp_path: Path, make: Any, kernel: str) -> None:
    model, _ = make(attn_implementation=kernel)
    data = batch()
    whole = values(model, data, make is small_gpt2)
    features = th.extract(
        model, data, "@v.1", tmp_path, lengths="attention_mask", progress=False, batch_size=3, labels=False
    )
    rows = features["@v.1"][:]
    assert [tuple(row.shape[1:]) for row in rows] == [(4, 8) if make is small_gpt2 else (2, 8)] * 6
    for row, length, expected in zip(rows, LENGTHS, whole, strict=True):
        torch.testing.assert_close(row.flatten(1), expected[:length])
    every = features.tokens("@v.1")[:]
    torch.testing.assert_close(every.flatten(1), whole[data["attention_mask"].bool()])


@pytest.mark.parametrize(("make", "kernel"), KINDS)
def test_transforms_leave_padding_out_of_tokens_after_heads(make: Any, kernel: str) -> None:
    model, _ = make(attn_implementation=kernel)
    data, heads = batch("left"), 4 if make is small_gpt2 else 2
    whole = values(model, data, make is small_gpt2).unflatten(-1, (heads, 8))
    mask = data["attention_mask"].bool()
    alone = [row[real] for row, real in zip(whole, mask, strict=True)]
    wanted = {
        "mean": (tf.pool("mean"), torch.stack([row.mean(0) for row in alone])),
        "max": (tf.pool("max"), torch.stack([row.amax(0) for row in alone])),
        "first": (tf.tokens(0), torch.stack([row[0] for row in alone])),
        "two": (tf.tokens([0, -1]), torch.stack([row[[0, -1]].transpose(0, 1) for row in alone])),
        "part": (tf.only(positions=-1), torch.stack([row[-1:].transpose(0, 1) for row in alone])),
        "head": (tf.only(positions=0, heads=1), torch.stack([row[:1, 1:2].transpose(0, 1) for row in alone])),
    }
    for name, (transform, expected) in wanted.items():
        with torch.no_grad(), th.capture(model, "@v.1", transform=transform) as rec:
            model(**data)
        found = rec["@v.1"]
        # With a mask, fused kernels and eager ones are given each head of keys twice.
        expected = expected if name == "head" else expected.repeat_interleave(4 // heads, 1)
        torch.testing.assert_close(found, expected)
    with torch.no_grad(), th.capture(model, "@v.1", transform=tf.statistics()) as rec:
        model(**data)
    torch.testing.assert_close(rec["@v.1"]["mean"], torch.stack([row.mean() for row in alone]))
    with torch.no_grad(), th.capture(model, "@v.1", transform=tf.topk(1, dim=2)) as rec:
        model(**data)
    largest = torch.stack([row.amax(0) for row in alone]).repeat_interleave(4 // heads, 1)
    torch.testing.assert_close(rec["@v.1"]["values"][:, :, 0], largest)


def test_after_a_function_of_ones_own_sizes_tell_or_it_is_said() -> None:
    model, call = small_llama(attn_implementation="eager")
    turned = tf.compose(_turned, tf.tokens("last"))
    with torch.no_grad(), th.capture(model, "@q.0") as whole:
        model(**call)
    with torch.no_grad(), th.capture(model, "@q.0", transform=turned) as rec:
        model(**call)
    assert torch.equal(rec["@q.0"], whole["@q.0"][:, :, -1])
    with (
        torch.no_grad(),
        th.capture(model, "@q.0", transform=turned),
        pytest.raises(th.errors.TransformError, match="heads may be dim 1 or dim 2"),
    ):
        model(call["input_ids"][:, :4])


def _turned(value: Tensor) -> Tensor:
    return value.transpose(1, 2)


def test_a_map_is_no_heads_and_the_way_out_is_right() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1))
    with pytest.raises(ExtractError, match=r"heads before tokens, lambda v: v.transpose\(1, 2\).flatten\(2\)"):
        list(th.stream(model, torch.ones(2, 3, 5, 5), "0", batch=10, buffer=10))
    assert th.statistics(model, torch.ones(2, 3, 5, 5), "0")["0"].count == 50


def bloom() -> Any:
    """Its product is of three dims: every row comes once for each of its heads."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    return BloomForCausalLM(BloomConfig(**sizes, pad_token_id=0)).eval()


def test_rows_and_heads_in_one_dim_have_the_padding_of_their_rows() -> None:
    model = bloom()
    data = batch()
    call = {name: data[name] for name in ("input_ids", "attention_mask")}
    seen: list[Tensor] = []
    fused = model.transformer.h[1].self_attention.query_key_value
    handle = fused.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    with torch.no_grad():
        model(**call)
    handle.remove()
    whole = seen[0].unflatten(-1, (4, 3, 8))[..., 2, :]  # each head's query, key and value together
    alone = [row[:length] for row, length in zip(whole, LENGTHS, strict=True)]
    wanted = {
        "last": (tf.tokens("last"), [row[-1] for row in alone]),
        "mean": (tf.pool("mean"), [row.mean(0) for row in alone]),
        "max": (tf.compose(tf.topk(1, dim=1), tf.pick("values"), _first), [row.amax(0) for row in alone]),
        "part": (tf.compose(tf.only(positions=-1), _first), [row[-1] for row in alone]),
    }
    for transform, expected in wanted.values():
        with torch.no_grad(), th.capture(model, "@v.1", transform=transform) as rec:
            model(**call)
        torch.testing.assert_close(rec["@v.1"].unflatten(0, (6, 4)), torch.stack(expected))
    (tokens,) = list(th.stream(model, call, "@v.1", shuffle=False, batch=100, buffer=100, batch_size=3))
    torch.testing.assert_close(tokens, torch.cat(alone).flatten(1))
    mean = th.statistics(model, call, "@v.1", batch_size=3)["@v.1"].mean
    torch.testing.assert_close(mean, torch.cat(alone).flatten(1).double().mean(0), rtol=1e-5, atol=1e-7)
    edit = {"@v.1": th.edits.only(th.edits.zero(), rows=1)}
    with torch.no_grad(), th.capture(model, "@v.1", edit=edit) as rec:
        model(**call)
    assert rec["@v.1"].unflatten(0, (6, 4)).eq(0).flatten(1).all(1).tolist() == [False, True, *[False] * 4]


def _first(value: Tensor) -> Tensor:
    return value[:, 0]


@pytest.mark.parametrize(("make", "kernel"), KINDS)
def test_heads_whose_tokens_are_gone_are_one_token(tmp_path: Path, make: Any, kernel: str) -> None:
    model, _ = make(attn_implementation=kernel)
    data = batch()
    whole = values(model, data, make is small_gpt2)
    alone = [row[:length] for row, length in zip(whole, LENGTHS, strict=True)]
    for transform, expected in (
        (tf.tokens("last"), torch.stack([row[-1] for row in alone])),
        (tf.compose(tf.pool("mean"), tf.cast(torch.float64)), torch.stack([row.mean(0) for row in alone]).double()),
    ):
        options: dict[str, Any] = {"transform": transform, "batch_size": 3}
        (tokens,) = list(th.stream(model, data, "@v.1", shuffle=False, batch=100, buffer=100, **options))
        torch.testing.assert_close(tokens, expected)
        found = th.statistics(model, data, "@v.1", **options)["@v.1"]
        assert found.count == 6
        torch.testing.assert_close(found.mean, expected.double().mean(0), rtol=1e-5, atol=1e-7)
        # A store keeps what passes: with a mask, heads of keys and values come once for each head of queries.
        heads = expected.unflatten(1, (-1, 8))
        heads = heads.repeat_interleave(4 // heads.shape[1], 1)
        for name, more in (("lengths", {"lengths": "attention_mask"}), ("special", {"drop_special": [1]})):
            out = tmp_path / f"{name} {transform}"
            stored = th.extract(model, data, "@v.1", out, progress=False, labels=False, **options, **more)["@v.1"][:]
            torch.testing.assert_close(stored.reshape(6, 4, 8), heads)

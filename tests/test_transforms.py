"""Each transform against the same thing written by hand."""

from __future__ import annotations

import builtins
import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import torchhook as th
from tests.language_models import small_llama
from torchhook import edits
from torchhook import transforms as tf
from torchhook._values import padding
from torchhook.errors import TransformError

x3 = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
x4 = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("transform", "value", "expected"),
    [
        (tf.pool(), x3, x3.mean(1)),
        (tf.pool(), x4, x4.mean((2, 3))),
        (tf.pool("max"), x4, x4.flatten(2).max(2).values),
        (tf.pool("sum", dims=1), x4, x4.sum(1)),
        (tf.pool("mean", dims=(1, 2)), x4, x4.mean((1, 2))),
        (tf.pool(), x3[:, 0], x3[:, 0]),
        (tf.tokens("cls"), x3, x3[:, 0]),
        (tf.tokens("last"), x3, x3[:, 4]),
        (tf.tokens("patches"), x3, x3[:, 1:]),
        (tf.tokens("patches", prefix=2), x3, x3[:, 2:]),
        (tf.tokens(3), x3, x3[:, 3]),
        (tf.tokens([0, 4]), x3, x3[:, [0, 4]]),
        (tf.cast(torch.float16), x3, x3.half()),
        (tf.narrow(1, 3), x3, x3[:, 1:3]),
        (tf.narrow(None, None, 2, dim=-1), x4, x4[..., ::2]),
        (tf.compose(tf.tokens(0), tf.cast(torch.bfloat16)), x3, x3[:, 0].bfloat16()),
    ],
    ids=repr,
)
def test_a_transform_gives_what_the_same_line_of_torch_gives(transform, value, expected):
    for again in (transform, pickle.loads(pickle.dumps(transform))):
        found = again(value)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    assert repr(pickle.loads(pickle.dumps(transform))) == repr(transform)


def test_topk_keeps_values_and_their_places():
    found = tf.topk(2, largest=False)(x3)
    order = x3.sort(-1)
    assert torch.equal(found["values"], order.values[..., :2])
    assert torch.equal(found["indices"], order.indices[..., :2])


def test_statistics_are_per_row():
    found = tf.statistics()(torch.tensor([[0.0, 2.0], [4.0, 4.0]]))
    assert found["mean"].tolist() == [1.0, 4.0]
    assert found["std"].tolist() == [1.0, 0.0]
    assert found["min"].tolist() == [0.0, 4.0]
    assert found["max"].tolist() == [2.0, 4.0]
    assert found["zeros"].tolist() == [0.5, 0.0]
    assert tf.statistics()(torch.tensor([3, 0]))["zeros"].tolist() == [0.0, 1.0]


def test_statistics_are_of_every_kind_of_number():
    found = tf.statistics()(torch.tensor([[3 + 4j, 0j]]))
    expected = {"mean": [2.5], "std": [2.5], "min": [0.0], "max": [5.0], "zeros": [0.5]}
    assert {name: value.tolist() for name, value in found.items()} == expected
    assert tf.statistics()(torch.tensor([[1.0, 3.0]]).to(torch.float8_e5m2))["mean"].tolist() == [2.0]


def test_transforms_map_over_nested_values_and_leave_other_leaves():
    found = tf.pool()((x3, {"a": x4, "b": None}, "text"))
    assert torch.equal(found[0], x3.mean(1))
    assert torch.equal(found[1]["a"], x4.mean((2, 3)))
    assert found[1]["b"] is None
    assert found[2] == "text"


def test_pick_reaches_one_leaf_and_names_what_is_there_otherwise():
    assert tf.pick(1)((x3, x4)) is x4
    with pytest.raises(
        TransformError, match=r"^transforms\.pick\('hidden'\): no leaf 'hidden' here; there are: '0', '1'\.$"
    ):
        tf.pick("hidden")((x3, x4))
    with pytest.raises(TransformError, match=r"^transforms\.pick\('0'\): .* a bare Tensor\.$"):
        tf.pick(0)(x3)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tf.pool("median"), "'mean', 'max', 'sum'"),
        (lambda: tf.tokens("first"), "'cls', 'last', 'patches'"),
        (lambda: tf.tokens("cls")(torch.zeros(2, 3)), r"\(N, T, ...\), found \(2, 3\)"),
    ],
)
def test_a_wrong_use_says_what_is_possible(make, text):
    with pytest.raises(ValueError, match=text):
        make()


MADE = {
    "pool": lambda: tf.pool("mean"),
    "pool of another kind": lambda: tf.pool("max"),
    "pool of dims": lambda: tf.pool("mean", dims=(1, 2)),
    "tokens": lambda: tf.tokens("cls"),
    "tokens by position": lambda: tf.tokens([0, 5]),
    "topk": lambda: tf.topk(3),
    "topk of the smallest": lambda: tf.topk(3, largest=False),
    "cast": lambda: tf.cast(torch.float16),
    "narrow": lambda: tf.narrow(0, 3),
    "narrow of another dim": lambda: tf.narrow(0, 3, dim=2),
    "statistics": lambda: tf.statistics(),
    "pick": lambda: tf.pick("1.0"),
    "pick by number": lambda: tf.pick(1),
    "compose": lambda: tf.compose(tf.pick(1), tf.pool("mean")),
    "compose the other way": lambda: tf.compose(tf.pool("mean"), tf.pick(1)),
    "compose with a function": lambda: tf.compose(torch.relu, tf.pick(1)),
}


@pytest.mark.parametrize("name", MADE)
def test_a_transform_is_a_value(name):
    transform = MADE[name]()
    for again in (MADE[name](), pickle.loads(pickle.dumps(transform)), copy.deepcopy(transform)):
        assert again == transform
        assert hash(again) == hash(transform)
        assert repr(again) == repr(transform)
    for other, make in MADE.items():
        assert (make() == transform) is (other == name)
    assert transform != name


def test_equal_transforms_compare_equal_and_differ_by_their_options():
    assert tf.pool("mean") == tf.pool("mean")
    assert tf.pool("mean") != tf.pool("max")
    assert len({tf.cast(torch.half), tf.cast(torch.float16)}) == 1
    assert len({make() for make in [*MADE.values()] * 2}) == len(MADE)


def test_positions_may_be_a_tensor_and_are_compared_as_numbers():
    assert tf.tokens(torch.tensor([0, 4])) == tf.tokens([0, 4])
    assert torch.equal(tf.tokens(torch.tensor([0, 4]))(x3), x3[:, [0, 4]])


def test_tensors_are_compared_by_their_numbers_and_not_by_how_they_print():
    one, other = torch.zeros(2000), torch.zeros(2000)
    other[1000] = 1.0
    assert repr(one) == repr(other)
    made = [tf._EachTensor(torch.add, (value,), {}) for value in (one, one.clone(), other)]
    assert made[0] == made[1]
    assert hash(made[0]) == hash(made[1])
    assert made[0] != made[2]


def test_a_transform_is_what_the_protocol_says_and_so_is_a_plain_function():
    def norms(value: torch.Tensor) -> torch.Tensor:
        return value.norm(dim=-1)

    kinds: list[tf.Transform] = [tf.pool("mean"), tf.pick(0), tf.compose(tf.pool()), norms, torch.relu]
    model = torch.nn.Sequential(torch.nn.Identity())
    for transform in kinds[:1] + kinds[2:]:
        _, rec = th.run(model, x3, capture="0", transform=transform)
        assert torch.equal(rec["0"], transform(x3))


def test_nothing_shadows_a_builtin():
    assert not set(tf.__all__) & set(dir(builtins))


# -- parts ----------------------------------------------------------------------------------------------------------


def test_only_keeps_the_part_that_an_edit_would_change() -> None:
    model, call = small_llama()
    sites = [
        "model.layers.*.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.1.self_attn.o_proj:input",
    ]
    transform = tf.only(positions=[0, -1], rows=1, heads=1)
    _, whole = th.run(model, **call, capture=sites)
    _, parts = th.run(model, **call, capture=sites, transform=transform)
    assert len(parts) == 4
    for site in whole:
        heads = whole[site].unflatten(-1, (-1, 8))
        assert torch.equal(parts[site], heads[1:, [0, -1]][:, :, 1:2])
    op = "model.layers.0.self_attn/scaled_dot_product_attention"
    _, part = th.run(model, **call, capture=op, transform=tf.compose(transform, tf.cast(torch.half)))
    _, all_ = th.run(model, **call, capture=op)
    assert torch.equal(part[op], all_[op][1:, 1:2, [0, -1]].half())


def test_a_session_with_only_opens_again_and_keeps_safe_values() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    session = th.capture(model, "0", "1", transform=tf.only(positions=slice(0, 2)))
    for _ in range(2):
        x = torch.randn(2, 3, 4)
        with session as rec:
            model(x)
        expected = model[0](x)[:, :2]
        assert torch.equal(rec["0"], expected)
        assert torch.equal(rec["1"], expected.relu())


def test_only_says_what_is_not_there_and_is_a_value() -> None:
    with pytest.raises(ValueError, match=r"transforms.only needs positions=, rows= or heads="):
        tf.only()
    with pytest.raises(TransformError, match=r"transforms.only\(heads=3\): where the heads are cannot be told"):
        tf.only(heads=3)(torch.zeros(1, 2, 4))
    with pytest.raises(TransformError, match=r"positions=5 is outside of the 2 that there are"):
        tf.only(positions=5)(torch.zeros(1, 2, 4))
    one = tf.only(positions=[0, 1], heads=edits.along(0, dim=2, count=2))
    assert pickle.loads(pickle.dumps(one)) == one != tf.only(positions=[0, 1])
    assert repr(one) == "only(positions=[0, 1], heads=edits.along(0, 2, 2))"


def test_only_counts_positions_among_what_is_no_padding() -> None:
    x = torch.arange(8.0).reshape(2, 4, 1)
    with padding.knowing(padding.given("lengths=", [2, 4], 2)):
        assert tf.only(positions=-1)(x).flatten().tolist() == [1.0, 7.0]
        assert tf.only(positions=[0, 1])(x).flatten().tolist() == [0.0, 1.0, 4.0, 5.0]
        with pytest.raises(TransformError, match="positions are counted in each"):
            tf.only(positions=slice(0, 2))(x)


def test_heads_are_found_in_an_extraction_and_in_attached_features(tmp_path: Path) -> None:
    model, call = small_llama()
    site = "model.layers.0.self_attn.o_proj:input"
    _, whole = th.run(model, **call, capture=site)
    expected = whole[site].unflatten(-1, (4, 8))[:, -1:, 2:3]
    batches = iter([{"input_ids": call["input_ids"]}])
    features = th.extract(model, batches, site, out=tmp_path, transform=tf.only(positions=-1, heads=2), progress=False)
    torch.testing.assert_close(torch.as_tensor(features[site][:]), expected)
    for attach in (True, False):
        wrapped = th.FeatureLayers(model, [site], transform=tf.only(positions=-1, heads=2), attach=attach)
        found, _ = wrapped(**call)
        assert torch.equal(found[0].detach(), expected)

"""Nested values: random trees against a slow reference, and every kind of node by example."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchhook._values import tree

patient = settings(deadline=None)  # the machine may be busy


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    first: Any
    second: Any = None


@dataclasses.dataclass(frozen=True)
class Sealed:
    inside: Any


class Holder:
    """A plain object, like a key-value cache."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


TENSORS = st.integers(0, 10**6).map(lambda n: torch.full((2,), float(n)))
OTHERS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3) | st.binary()
KEYS = st.from_regex(r"[a-z]{1,3}", fullmatch=True)


def nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3).map(deque),
        st.builds(Pair, inner, inner),
        st.builds(Box, inner, inner),
        st.builds(Sealed, inner),
    )


TREES = st.recursive(TENSORS | OTHERS, nodes, max_leaves=12)


def opened(value: Any) -> list[tuple[str, Any]] | None:
    """What is one level down, by name. Written by hand for the kinds above."""
    if isinstance(value, Pair):
        return [("left", value.left), ("right", value.right)]
    if isinstance(value, (list, tuple, deque)):
        return [(str(i), child) for i, child in enumerate(value)]
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, Box):
        return [("first", value.first), ("second", value.second)]
    if isinstance(value, Sealed):
        return [("inside", value.inside)]
    return None


def reference_leaves(value: Any, above: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    inside = opened(value)
    if inside is None:
        return [(".".join(above), value)]
    return [pair for key, child in inside for pair in reference_leaves(child, (*above, key))]


def same(a: Any, b: Any) -> bool:
    """Equal in type and content, tensors and arrays included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    inside, others = opened(a), opened(b)
    if inside is None or others is None:
        return inside is others and a == b
    return len(inside) == len(others) and all(
        k == j and same(x, y) for (k, x), (j, y) in zip(inside, others, strict=True)
    )


@patient
@given(TREES)
def test_a_map_that_changes_nothing_rebuilds_the_same_value(value: Any) -> None:
    assert same(tree.map_tensors(lambda t: t, value), value)


@patient
@given(TREES)
def test_a_map_reaches_every_tensor_and_leaves_the_original_alone(value: Any) -> None:
    before = reference_leaves(value)
    saved = [leaf.clone() if isinstance(leaf, Tensor) else leaf for _, leaf in before]
    after = reference_leaves(tree.map_tensors(lambda t: t + 1, value))
    assert [a for a, _ in after] == [a for a, _ in before]
    for (_, old), (_, new), copy in zip(before, after, saved, strict=True):
        assert same(old, copy)
        assert same(new, old + 1) if isinstance(old, Tensor) else new is old


@patient
@given(TREES)
def test_leaves_are_those_of_the_reference_with_the_same_addresses(value: Any) -> None:
    found, expected = list(tree.leaves(value)), reference_leaves(value)
    assert [a for a, _ in found] == [a for a, _ in expected]
    assert all(x is y for (_, x), (_, y) in zip(found, expected, strict=True))
    wanted = [leaf for _, leaf in expected if isinstance(leaf, Tensor)]
    assert all(x is y for x, y in zip(tree.tensors(value), wanted, strict=True))


@patient
@given(TREES)
def test_every_leaf_is_found_again_at_its_address(value: Any) -> None:
    for address, leaf in tree.leaves(value):
        assert tree.get(value, address) is leaf


@patient
@given(TREES, st.data())
def test_put_changes_one_leaf_and_nothing_else(value: Any, data: st.DataObject) -> None:
    before = reference_leaves(value)
    if not before:
        return
    place = data.draw(st.integers(0, len(before) - 1))
    changed = tree.put(value, before[place][0], lambda leaf: ("was", leaf))
    after = dict(tree.leaves(changed))
    address = before[place][0]
    dot = "." if address else ""
    assert tree.get(changed, address) == ("was", before[place][1])
    assert after[f"{address}{dot}1"] is before[place][1]
    for i, (other, leaf) in enumerate(before):
        assert i == place or after[other] is leaf
    assert all(x is y for (_, x), (_, y) in zip(reference_leaves(value), before, strict=True))


@patient
@given(TREES)
def test_describe_never_fails_and_stays_one_line(value: Any) -> None:
    assert "\n" not in tree.describe(value)


def test_an_array_is_copied_because_its_memory_may_be_a_tensors() -> None:
    source = torch.zeros(3)
    kept = tree.map_tensors(lambda t: t, {"a": source.numpy()})
    source.add_(1)
    assert kept["a"].tolist() == [0, 0, 0]


def test_a_dict_key_may_hold_dots_and_the_longest_key_wins() -> None:
    value = {"a": {"b.c": 1, "b": {"c": 2, "d": 3}}}
    assert tree.get(value, "a.b.c") == 1
    assert tree.get(value, "a.b.d") == 3
    assert tree.get({"x.y": 1, "x": {"y": 2}}, "x.y") == 1
    assert tree.put({"x.y": 1}, "x.y", lambda v: v + 1) == {"x.y": 2}


def test_a_wrong_address_lists_what_there_is() -> None:
    with pytest.raises(KeyError, match=r"no leaf 'z' here; there are: 'a', 'b\.0'"):
        tree.get({"a": 1, "b": [2]}, "z")
    with pytest.raises(KeyError, match="no leaf '0' here; there are: a bare Tensor"):
        tree.get(torch.zeros(1), "0")
    with pytest.raises(KeyError, match="no leaf"):
        tree.put((1, 2), "2", lambda v: v)


def test_a_part_that_is_not_a_leaf_has_an_address_too() -> None:
    value = {"a": (1, [2, 3])}
    assert tree.get(value, "a.1") == [2, 3]
    assert tree.get(value, "") is value
    assert tree.put(value, "a.1", len) == {"a": (1, 2)}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(()), "()"),
        (torch.zeros(3), "(3,)"),
        (torch.zeros(2, 3), "(2, 3)"),
        ((torch.zeros(2, 3), None), "((2, 3), None)"),
        ((torch.zeros(2, 3),), "((2, 3),)"),
        ([torch.zeros(1)] * 6, "[(1,), (1,), (1,), (1,), … 6 in all]"),
        ({"a": torch.zeros(1), "b": None, "c": 3}, "{a=(1,), c=3}"),
        (Pair(torch.zeros(1), "x"), "Pair{left=(1,), right='x'}"),
        (Box(torch.zeros(1)), "Box{first=(1,)}"),
        ({str(i): i for i in range(6)}, "{0=0, 1=1, 2=2, 3=3, …}"),
        ("x" * 40, "'xxxxxxxxxxxxxxxxxxxx..."),
        (torch.float32, "dtype"),
        (np.zeros(3), "ndarray"),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged), "(2, ragged)"),
        ((), "()"),
    ],
    ids=str,
)
def test_describe_by_example(value: Any, text: str) -> None:
    assert tree.describe(value) == text


def test_a_value_with_many_parts_is_summarized_in_one_line() -> None:
    grown = [torch.empty(2, i, 64, 64, 64, 64, 64, 64, 64, 64, device="meta") for i in range(30)]
    states = (torch.zeros(1, 10, 64),) * 13
    output = {"flag": True, "loss": None, "logits": torch.zeros(1, 10, 200), "hidden_states": states, "note": "x" * 24}
    assert tree.describe(output) == "logits (1, 10, 200) + hidden_states 13 × (1, 10, 64) + 2 more"
    assert tree.describe(((torch.zeros(1, 4, 10, 16),) * 2,) * 12) == "12 × ((1, 4, 10, 16), (1, 4, 10, 16))"
    assert tree.describe(grown) == "[(2, 0, 64, 64, 64, 64, 64, 64, 64, 64), 29 more]"
    assert tree.describe((torch.zeros(1, 10, 64), {str(i): torch.zeros(1, 10, 64) for i in range(9)})) == (
        "((1, 10, 64), dict of 9 tensors)"
    )
    assert tree.describe({"x" * 300: 1}).endswith("…")


def test_the_outputs_of_a_language_model_are_named_with_their_cache() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=12, n_embd=8, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    output = transformers.GPT2Model(config)(torch.zeros(1, 10, dtype=torch.long))
    assert tree.describe(output) == "last_hidden_state (1, 10, 8) + cache of 12 layers"


@patient
@given(TREES)
def test_no_value_takes_more_than_a_line(value: Any) -> None:
    assert len(tree.describe(value)) <= 72
    assert len(tree.describe([value, {"key": value}, (value,)] * 9)) <= 72


def test_tensors_are_put_in_by_place() -> None:
    shared, row = torch.zeros(1), [torch.zeros(1)]
    value = {"a": shared, "b": (shared, row, row), "c": Holder(x=row, y=row)}
    places = list(tree.tensors(value))
    filled = tree.with_tensors(value, range(len(places)))
    assert filled["a"] == 0
    assert filled["b"] == (1, [2], [3])
    assert list(tree.leaves(tree.with_tensors(value, places))) == list(tree.leaves(value))


def test_parts_are_replaced_where_one_says_and_not_opened() -> None:
    value = {"rows": [1, 2], "deep": ([3], {"more": [[4]]}), "other": None}
    mapped = tree.map_parts(len, value, where=lambda part: isinstance(part, list))
    assert mapped == {"rows": 2, "deep": (1, {"more": 1}), "other": None}
    assert value["rows"] == [1, 2]

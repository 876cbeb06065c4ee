"""What stands for a lost class: read like the original, and safe to print, walk, compare, copy and pickle."""

from __future__ import annotations

import copy
import gc
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchhook._values import tree
from torchhook._values.loaded import Loaded, Opaque, loaded, named, named_tuple

HIDING = {"keys": 1, "values": [2], "items": "x", "get": None, "__len__": 3, "self": 4, "0": 5}
"""Fields that are called like methods."""


def test_fields_are_read_by_name_position_and_attribute() -> None:
    box = loaded("Box", {"first": 1, "second": (2, 3)})
    assert (box.first, box["first"], box[0]) == (1, 1, 1)
    assert (box.second, box["second"], box[-1]) == ((2, 3), (2, 3), (2, 3))
    assert box[:1] == [1]
    assert list(box) == box.keys() == ["first", "second"]
    assert box.values() == [1, (2, 3)]
    assert box.items() == [("first", 1), ("second", (2, 3))]
    assert (box.get("first"), box.get("third"), box.get("third", 7)) == (1, None, 7)
    assert (len(box), "first" in box, "third" in box) == (2, True, False)
    assert repr(box) == "Box(first=1, second=(2, 3))"


def test_what_is_not_there_is_named_with_what_is() -> None:
    box = loaded("Box", {"first": 1, "second": 2})
    with pytest.raises(AttributeError, match="this Box has no field 'third'; it has first, second"):
        box.third
    with pytest.raises(KeyError, match="Box has no field 'third'; it has first, second"):
        box["third"]
    with pytest.raises(IndexError):
        box[2]


def test_a_field_hides_a_method_from_the_reader_and_from_nobody_else() -> None:
    layer = loaded("Layer", HIDING)
    assert all(getattr(layer, name) == layer[name] == value for name, value in HIDING.items())
    assert list(layer) == list(HIDING)
    assert len(layer) == len(HIDING)
    assert layer == loaded("Layer", HIDING)
    assert repr(layer) == "Layer(keys=1, values=[2], items='x', get=None, __len__=3, self=4, 0=5)"
    assert tree.describe(layer) == "Layer{keys=1, values=[2], items='x', __len__=3, …}"
    assert [address for address, _ in tree.leaves(layer)] == [*["keys", "values.0"], *list(HIDING)[2:]]
    changed = tree.put(layer, "values.0", lambda leaf: leaf + 1)
    assert changed.values == [3]
    assert layer.values == [2]
    assert type(changed) is type(layer)


def test_two_are_equal_when_name_fields_and_order_are() -> None:
    one = loaded("Box", {"a": 1, "b": 2})
    assert one == loaded("Box", {"a": 1, "b": 2})
    assert one != loaded("Bag", {"a": 1, "b": 2})
    assert one != loaded("Box", {"b": 2, "a": 1})
    assert one != loaded("Box", {"a": 1, "b": 3})
    assert one != {"a": 1, "b": 2}


def test_it_is_a_key_whatever_it_holds() -> None:
    one, other = loaded("Box", {"a": [1], "b": "x"}), loaded("Box", {"a": [2], "b": "x"})
    table = {one: 1, other: 2}
    assert table[loaded("Box", {"a": [2], "b": "x"})] == 2


def test_classes_of_one_name_are_one_class_as_long_as_anything_is_of_it() -> None:
    one, other = loaded("Box", {"a": 1}), loaded("Box", {"b": 2})
    assert type(one) is type(other)
    assert tree.same_structure(one, loaded("Box", {"a": 3}))
    assert not tree.same_structure(one, other)
    assert named_tuple("Pair", ["a", "b"]) is named_tuple("Pair", ["a", "b"])
    assert named_tuple("Pair", ["a", "b"]) is not named_tuple("Pair", ["a", "c"])
    before = len(named.__globals__["_classes"])
    loaded("Soon gone", {})
    gc.collect()
    assert len(named.__globals__["_classes"]) <= before


MADE: dict[str, Any] = {
    "object": loaded("Layer", HIDING),
    "list": named("Rows", list)([1, 2]),
    "tuple": named("Triple", tuple)([1, 2]),
    "deque": named("Ring", deque)([1, 2], 2),
    "set": named("Bag", set)([1, 2]),
    "dict": named("Named", dict)({1: 2}),
    "named tuple": named_tuple("Pair", ["left", "right"])(1, [2]),
    "opaque": Opaque("builtins.range", "range(0, 3)"),
}


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
@pytest.mark.parametrize("value", MADE.values(), ids=MADE)
def test_copies_and_pickles_are_the_same_again(value: Any, again: Callable[[Any], Any]) -> None:
    if hasattr(value, "__dict__") and not isinstance(value, Loaded):
        value.extra = [7]
    found = again(value)
    assert type(found) is type(value)
    assert found == value
    assert getattr(found, "extra", None) == getattr(value, "extra", None)
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)


def test_a_deep_copy_shares_nothing() -> None:
    value = loaded("Box", {"a": [torch.zeros(1)]})
    found = copy.deepcopy(value)
    found.a[0] += 1
    found.b = 2
    assert value.a[0].item() == 0
    assert "b" not in value


def test_what_could_not_be_saved_is_a_leaf_and_says_so() -> None:
    value = {"a": Opaque("builtins.range", "range(0, 3)"), "b": [Opaque("mine.Color", "<Color.RED: 1>")]}
    assert [address for address, _ in tree.leaves(value)] == ["a", "b.0"]
    assert tree.describe(value) == "{a=range (not saved), b=[mine.Color (not saved)]}"
    assert str(value["a"]) == "range(0, 3)"

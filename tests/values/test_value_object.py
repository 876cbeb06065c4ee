"""Objects that are what they hold: how they print, when they are equal, and that they travel."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from torchhook._values.value_object import ValueObject, same, shown


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Thing(ValueObject):
    room = "things."
    first: Any
    second: Any = None
    third: int = dataclasses.field(default=3, kw_only=True)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Other(ValueObject):
    first: Any


def nested() -> list[torch.Tensor]:
    return [torch.ones(2), torch.ones(3)]


ALIKE: dict[str, tuple[Any, Any]] = {
    "numbers": (1, 1.0),
    "text": ("a", "a"),
    "nothing": (None, None),
    "NaN": (math.nan, float("nan")),
    "tensors": (torch.ones(2), torch.ones(2)),
    "tensors with NaN": (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan])),
    "sparse tensors": (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
    "nested tensors": tuple(torch.nested.nested_tensor(nested(), layout=torch.jagged) for _ in range(2)),
    "meta tensors": (torch.ones(2, device="meta"), torch.ones(2, device="meta")),
    "arrays": (np.ones(2), np.ones(2)),
    "nested values": ({"a": [torch.ones(2), None]}, {"a": [torch.ones(2), None]}),
    "slices": (slice(1, 4), slice(1, 4)),
    "value objects": (_Thing(torch.ones(2)), _Thing(torch.ones(2))),
    "lists of value objects": ([_Thing(torch.ones(2))], [_Thing(torch.ones(2))]),
    "functions": (torch.relu, torch.relu),
}

UNLIKE: dict[str, tuple[Any, Any]] = {
    "numbers": (1, 2),
    "values": (torch.ones(2), torch.zeros(2)),
    "one element": (torch.tensor([1.0, math.nan]), torch.tensor([2.0, math.nan])),
    "shapes": (torch.ones(2), torch.ones(1)),
    "dtypes": (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    "a tensor and a number": (torch.ones(()), 1.0),
    "a list and a tuple": ([1], (1,)),
    "lengths": ([1], [1, 1]),
    "names": ({"a": 1}, {"b": 1}),
    "value objects": (_Thing(torch.ones(2)), _Thing(torch.zeros(2))),
    "classes of value objects": (_Thing(1), _Other(1)),
    "a value object and another": (_Thing(1), 1),
    "arrays": (np.ones(2), np.zeros(2)),
    "an array and a list": (np.ones(2), [1.0, 1.0]),
    "functions": (torch.relu, torch.tanh),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_holds_the_same_is_the_same_and_has_the_same_hash(name: str) -> None:
    one, other = ALIKE[name]
    assert same(one, other)
    assert _Thing(one) == _Thing(other)
    assert hash(_Thing(one)) == hash(_Thing(other))


@pytest.mark.parametrize("name", UNLIKE)
def test_what_holds_something_else_is_another(name: str) -> None:
    one, other = UNLIKE[name]
    assert not same(one, other)
    assert not same(other, one)
    assert _Thing(one) != _Thing(other)


def test_a_value_object_equals_nothing_else() -> None:
    assert _Thing(1) != 1
    assert _Thing(1) != _Other(1)
    assert (_Thing(1) == "thing") is False


def test_every_field_counts() -> None:
    assert _Thing(1, 2) != _Thing(1, 3)
    assert _Thing(1, third=4) != _Thing(1)


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (_Thing(1), "things.thing(1)"),
        (_Thing("a", 2.5), "things.thing('a', 2.5)"),
        (_Thing(1, third=4), "things.thing(1, third=4)"),
        (_Thing(1, 2, third=4), "things.thing(1, 2, third=4)"),
        (_Thing(torch.zeros(768)), "things.thing((768,))"),
        (_Thing(torch.tensor([1.0, 2.0])), "things.thing(tensor([1.0, 2.0]))"),
        (_Thing(torch.tensor(3)), "things.thing(tensor(3))"),
        (_Thing(torch.relu), "things.thing(relu)"),
        (_Thing([_Other(1), torch.zeros(2, 3)]), "things.thing([other(1), (2, 3)])"),
        (_Thing({"a": (torch.zeros(9),)}), "things.thing({'a': ((9,),)})"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_prints_as_it_was_written(thing: _Thing, text: str) -> None:
    assert repr(thing) == text


def test_a_function_is_shown_by_its_name() -> None:
    assert shown(torch.relu) == "relu"
    assert shown(test_a_value_object_equals_nothing_else) == "test_a_value_object_equals_nothing_else"


@pytest.mark.parametrize("travel", [lambda v: pickle.loads(pickle.dumps(v)), copy.deepcopy, copy.copy])
def test_it_travels(travel: Any) -> None:
    thing = _Thing([torch.ones(2), None], _Other(torch.zeros(3)), third=5)
    again = travel(thing)
    assert again == thing
    assert repr(again) == repr(thing)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        _Thing(1).first = 2  # type: ignore[misc]

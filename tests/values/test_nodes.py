"""Every kind of node by example: what it opens into, and that it stays what it was."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from torch import nn

from torchhook._values import tree


class Holder:
    """A plain object, like a key-value cache."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


@pytest.mark.parametrize("kind", [OrderedDict, dict])
def test_a_mapped_dict_keeps_its_keys_and_their_order(kind: type) -> None:
    value = kind([("b", torch.zeros(1)), (3, torch.ones(1)), (("t", 1), None)])
    mapped = tree.map_tensors(lambda t: t, value)
    assert type(mapped) is kind
    assert list(mapped) == ["b", 3, ("t", 1)]


def test_subclasses_of_containers_keep_their_type_and_their_own_attributes() -> None:
    class Rows(list):
        pass

    class Ring(deque):
        pass

    class Named(dict):
        pass

    class Counts(defaultdict):
        pass

    for value in (
        Rows([torch.zeros(1)]),
        Ring([torch.zeros(1)]),
        Named(a=torch.zeros(1)),
        Counts(int, a=torch.zeros(1)),
    ):
        value.title = "mine"  # type: ignore[union-attr]
        mapped = tree.map_tensors(lambda t: t + 1, value)
        assert type(mapped) is type(value)
        assert mapped.title == "mine"
        assert next(tree.tensors(mapped)).item() == 1
        assert next(tree.tensors(value)).item() == 0


def test_a_default_dict_and_a_bounded_deque_stay_what_they_are() -> None:
    counts = defaultdict(list, a=torch.zeros(1))
    ring = deque([torch.zeros(1)], maxlen=3)
    mapped_counts = tree.map_tensors(lambda t: t, counts)
    mapped_ring = tree.map_tensors(lambda t: t, ring)
    assert mapped_counts.default_factory is list
    assert mapped_ring.maxlen == 3
    assert mapped_ring is not ring


def test_a_frozen_dataclass_is_rebuilt_and_its_init_is_not_called_again() -> None:
    made = []

    @dataclasses.dataclass(frozen=True)
    class Checked:
        value: Any

        def __post_init__(self) -> None:
            made.append(self)

    mapped = tree.map_tensors(lambda t: t + 1, Checked(torch.zeros(1)))
    assert mapped.value.item() == 1
    assert len(made) == 1


def test_a_dataclass_field_without_a_value_is_passed_over() -> None:
    @dataclasses.dataclass
    class Late:
        a: Any
        b: Any = dataclasses.field(init=False)

    value = Late(torch.zeros(1))
    assert [address for address, _ in tree.leaves(value)] == ["a"]
    assert not hasattr(tree.map_tensors(lambda t: t, value), "b")


def test_a_packed_sequence_is_a_node_and_stays_one() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    mapped = tree.map_tensors(lambda t: t.clone(), packed)
    assert type(mapped) is type(packed)
    assert [a for a, _ in tree.leaves(packed)] == ["data", "batch_sizes", "sorted_indices", "unsorted_indices"]
    padded, lengths = nn.utils.rnn.pad_packed_sequence(mapped)
    assert padded.shape == (3, 2, 2)
    assert lengths.tolist() == [3, 1]


def test_torchs_own_return_types_are_nodes_and_stay_what_they_are() -> None:
    value = torch.max(torch.tensor([[1.0, 5.0]]), dim=1)
    mapped = tree.map_tensors(lambda t: t.clone(), value)
    assert type(mapped) is type(value)
    assert mapped.values.item() == 5.0
    assert mapped.indices.item() == 1


def test_a_transformers_output_is_a_node_with_its_keys() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.BaseModelOutput(last_hidden_state=torch.zeros(1), hidden_states=(torch.zeros(2), torch.zeros(3)))
    assert [a for a, _ in tree.leaves(value)] == ["last_hidden_state", "hidden_states.0", "hidden_states.1"]
    mapped = tree.map_tensors(lambda t: t + 1, value)
    assert type(mapped) is type(value)
    assert mapped.last_hidden_state.item() == 1
    assert mapped["hidden_states"][1].tolist() == [1, 1, 1]
    assert value.last_hidden_state.item() == 0


def test_a_plain_object_that_holds_tensors_is_a_node() -> None:
    value = Holder(keys=[torch.zeros(1)], length=3)
    mapped = tree.map_tensors(lambda t: t + 1, value)
    assert mapped is not value
    assert mapped.keys[0].item() == 1
    assert value.keys[0].item() == 0
    assert mapped.length == 3


@pytest.mark.parametrize(
    "value",
    [
        nn.Linear(1, 1),
        nn.Linear,
        len,
        lambda: torch.zeros(1),
        types,
        torch.Generator(),
        torch.Size([1, 2]),
        torch.float16,
        torch.device("cpu"),
        range(3),
        {1, 2},
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_holds_no_data_is_a_leaf_and_passes_as_itself(value: Any) -> None:
    assert tree.unpack(value) is None
    assert tree.map_tensors(lambda t: t + 1, value) is value


def test_unknown_classes_are_opened_through_torchs_registry() -> None:
    from torch.utils import _pytree  # the registry a user's class may be in

    class Registered:
        def __init__(self, a: Any, note: str) -> None:
            self.a, self.note = a, note

    _pytree.register_pytree_node(Registered, lambda r: ([r.a], r.note), lambda a, note: Registered(*a, note))
    try:
        mapped = tree.map_tensors(lambda t: t + 1, Registered(torch.zeros(1), "kept"))
        assert mapped.a.item() == 1
        assert mapped.note == "kept"
    finally:
        # Torch 2.6 has no function for it.
        getattr(_pytree, "_deregister_pytree_node", _pytree.SUPPORTED_NODES.pop)(Registered)


class Word(str):
    note: Any


def test_a_string_or_number_of_a_users_own_is_a_leaf_whatever_it_carries() -> None:
    word = Word("text")
    word.note = "mine"
    assert tree.unpack(word) is None
    assert tree.map_tensors(lambda t: t, [word])[0] is word
    assert tree.describe(word) == "'text'"

"""Nested values: random trees against a slow reference, and every kind of node by example."""

from __future__ import annotations

import dataclasses
import logging
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

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


@pytest.mark.parametrize("kind", [OrderedDict, dict])
def test_a_mapped_dict_keeps_its_keys_and_their_order(kind: type) -> None:
    value = kind([("b", torch.zeros(1)), (3, torch.ones(1)), (("t", 1), None)])
    mapped = tree.map_tensors(lambda t: t, value)
    assert type(mapped) is kind
    assert list(mapped) == ["b", 3, ("t", 1)]


def test_subclasses_of_containers_keep_their_type_and_their_own_attributes() -> None:
    class Rows(list):
        pass

    class Named(dict):
        pass

    rows, named = Rows([torch.zeros(1)]), Named(a=torch.zeros(1))
    rows.title = named.title = "mine"  # type: ignore[attr-defined]
    for value in (rows, named):
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


def test_an_object_that_holds_only_data_is_copied_so_that_what_is_put_in_later_does_not_show() -> None:
    cache = Holder(length=3, layers=[])
    kept = tree.map_tensors(lambda t: t + 1, cache)
    cache.layers.append(torch.zeros(1))
    cache.length = 4
    assert kept.layers == []
    assert kept.length == 3


def test_an_object_that_holds_itself_is_a_leaf() -> None:
    knot = Holder(data=torch.zeros(1))
    knot.me = knot
    assert tree.unpack(knot) is None
    far = Holder(data=1)
    far.next = Holder(back=far)
    assert tree.unpack(far) is None


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
        _pytree._deregister_pytree_node(Registered)


# -- objects that do not want to be copied ------------------------------------------------------------


class Single:
    """The only one of its kind, however one asks for another."""

    _one: Any = None

    def __new__(cls) -> Any:
        if cls._one is None:
            cls._one = super().__new__(cls)
        return cls._one


class Uncopied(Holder):
    def __copy__(self) -> Any:
        return self


class UncopiedList(list):
    def __copy__(self) -> Any:
        return self


class UncopiedDict(dict):
    def __copy__(self) -> Any:
        return self


@dataclasses.dataclass
class UncopiedBox:
    h: Any

    def __copy__(self) -> Any:
        return self


def single() -> Single:
    value = Single()
    value.h = torch.zeros(1)  # type: ignore[attr-defined]
    return value


@pytest.mark.parametrize(
    "make",
    [
        lambda: Uncopied(h=torch.zeros(1)),
        lambda: UncopiedList([torch.zeros(1)]),
        lambda: UncopiedDict(h=torch.zeros(1)),
        lambda: UncopiedBox(torch.zeros(1)),
        single,
    ],
    ids=["object", "list", "dict", "dataclass", "singleton"],
)
def test_an_object_whose_copy_is_itself_is_never_written_to(make: Any) -> None:
    value = make()
    (address,) = (a for a, _ in tree.leaves(value))
    original = tree.get(value, address)
    for mapped in (
        tree.map_tensors(lambda t: t + 1, value),
        tree.put(value, address, lambda t: t + 1),
        tree.with_tensors(value, [torch.ones(1)]),
    ):
        assert mapped is not value
        assert type(mapped) is type(value)
        assert tree.get(mapped, address).item() == 1
    assert tree.get(value, address) is original
    assert original.item() == 0


class Sealing(Holder):
    """Its attribute can be read and not set."""

    @property
    def h(self) -> Any:
        return vars(self)["h"]


class Stubborn(Sealing):
    def __copy__(self) -> Any:
        raise TypeError("no copies")


@pytest.mark.parametrize("kind", [Sealing, Stubborn])
def test_an_object_that_cannot_be_made_again_is_kept_by_reference(kind: type[Sealing]) -> None:
    part = kind(h=torch.zeros(1))
    mapped = tree.map_tensors(lambda t: t + 1, {"part": part, "other": torch.zeros(1)})
    assert mapped["part"] is part
    assert part.h.item() == 0
    assert mapped["other"].item() == 1


# -- what is opened of an object -------------------------------------------------------------------------


def test_attributes_of_a_dataclass_that_are_no_fields_are_opened_where_they_hold_tensors() -> None:
    @dataclasses.dataclass
    class Late:
        a: Tensor

        def __post_init__(self) -> None:
            self.b = self.a * 2
            self.inner = {"c": self.a + 3}
            self.note = "mine"

    value = Late(torch.ones(1))
    kept = tree.map_tensors(torch.clone, value)
    for tensor in (value.a, value.b, value.inner["c"]):
        tensor.zero_()
    assert [kept.a.item(), kept.b.item(), kept.inner["c"].item(), kept.note] == [1, 2, 4, "mine"]
    assert [address for address, _ in tree.leaves(value)] == ["a", "b", "inner.c"]


def test_an_attribute_that_leads_back_to_its_dataclass_stays_as_it_is() -> None:
    value = Box(torch.zeros(1))
    value.parent = Holder(child=value)  # type: ignore[attr-defined]
    mapped = tree.map_tensors(lambda t: t + 1, value)
    assert mapped.first.item() == 1
    assert mapped.parent is value.parent  # type: ignore[attr-defined]


def test_only_the_part_that_holds_itself_is_a_leaf() -> None:
    knot: list[Any] = []
    knot.append(knot)
    logger = logging.getLogger("torchhook.test.part")
    value = Holder(h=torch.zeros(1), log=logger, knot=knot, below=Holder(h=torch.zeros(1), log=logger))
    before = dict(vars(logger))
    mapped = tree.map_tensors(lambda t: t + 1, value)
    assert [mapped.h.item(), mapped.below.h.item()] == [1, 1]
    assert [value.h.item(), value.below.h.item()] == [0, 0]
    assert mapped.log is mapped.below.log is logger
    assert mapped.knot is knot
    assert vars(logger) == before
    assert dict(tree.leaves(value))["log"] is logger
    assert len(list(tree.tensors(value))) == 2
    assert tree.same_structure(value, mapped)
    assert tree.put(value, "below.h", lambda t: t + 5).below.h.item() == 5
    assert tree.describe(value) == "Holder{h=(1,), log=Logger, knot=list, below=Holder{h=(1,), log=Logger}}"


def test_parts_of_several_loops_never_end_in_a_loop() -> None:
    a, b, c, d = (Holder(h=torch.zeros(1)) for _ in range(4))
    a.b, b.c, c.a, a.d, d.b = b, c, a, d, b
    value = Holder(h=torch.zeros(1), a=a, d=d)
    mapped = tree.map_tensors(lambda t: t + 1, value)
    assert mapped.h.item() == 1
    assert mapped.a is a
    assert tree.same_structure(value, mapped)
    for part in (a, b, c, d):
        assert tree.unpack(part) is None


def test_a_chain_too_deep_to_go_through_is_opened_as_far_as_one_goes() -> None:
    value = Holder(h=torch.zeros(1))
    for _ in range(3000):
        value = Holder(h=torch.zeros(1), next=value)
    mapped = tree.map_tensors(lambda t: t + 1, value)
    assert [mapped.h.item(), mapped.next.next.h.item(), value.h.item()] == [1, 1, 0]


def test_tensors_are_put_in_by_place() -> None:
    shared, row = torch.zeros(1), [torch.zeros(1)]
    value = {"a": shared, "b": (shared, row, row), "c": Holder(x=row, y=row)}
    places = list(tree.tensors(value))
    filled = tree.with_tensors(value, range(len(places)))
    assert filled["a"] == 0
    assert filled["b"] == (1, [2], [3])
    assert list(tree.leaves(tree.with_tensors(value, places))) == list(tree.leaves(value))

"""Everything that is no tensor through a file and back: random trees, a table of kinds, and what is left of a class."""

from __future__ import annotations

import enum
import math
import pickle
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

import torchhook as th
from tests.recording.round_trips import Box, Pair, round_trip, same
from torchhook._recording import saving
from torchhook._recording.address import Site
from torchhook._recording.records import Recording
from torchhook._values import tree
from torchhook._values.loaded import Loaded, Opaque

same_folder = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
"""For tests that write to one folder again and again, on machines that may be busy."""

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex128,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


@st.composite
def some_tensor(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=count, max_size=count)))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    tensor = (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)
    how = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "conjugate"]))
    if how == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, 1)
    if how == "strided" and tensor.dim() and tensor[::2].numel() > 1:
        return tensor[::2]
    if how == "expanded":
        return tensor.unsqueeze(0).expand(2, *tensor.shape)
    if how == "conjugate" and tensor.is_complex():
        return tensor.conj()
    return tensor


@st.composite
def some_array(draw: st.DrawFn) -> np.ndarray:
    kind = draw(st.sampled_from(["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]))
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    array = np.arange(math.prod(shape)).astype(kind).reshape(shape)
    return array[::-1] if array.size > 1 and len(array) > 1 and draw(st.booleans()) else array


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    st.sampled_from([*DTYPES, torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")]),
)
KEYS = st.text(max_size=3) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))


def nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=3).map(MappingProxyType),
        st.lists(inner, max_size=2).map(deque),
        st.builds(Pair, inner, inner),
        st.builds(Box, inner, inner),
    )


VALUES = st.recursive(some_tensor() | some_array() | SCALARS, nodes, max_leaves=8)


@settings(same_folder, max_examples=150)
@given(VALUES)
def test_any_value_comes_back_as_it_was(tmp_path: Path, value: Any) -> None:
    assert same(round_trip(value, tmp_path), value)


@settings(same_folder, max_examples=50)
@given(st.lists(VALUES, max_size=4))
def test_what_was_loaded_saves_to_the_same_again(tmp_path: Path, values: list[Any]) -> None:
    first, about = saving.load(saving.save(tmp_path / "a", values, {"n": 1}))
    assert about == {"n": 1}
    second, _ = saving.load(saving.save(tmp_path / "b", first, {"n": 1}))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert len(second) == len(values)


@same_folder
@given(some_tensor())
def test_the_tensors_of_a_recording_open_in_stock_safetensors(tmp_path: Path, tensor: Tensor) -> None:
    path = saving.save(tmp_path / "a", [tensor], {})
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == saving.FORMAT
        (name,) = file.keys()
        found = file.get_tensor(name)
    assert same(torch.view_as_complex(found) if tensor.is_complex() else found, tensor)


# -- leaves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, -0.0, 5e-324, 1.7976931348623157e308, 0.1])
def test_every_float_comes_back_to_the_bit(tmp_path: Path, number: float) -> None:
    assert same(round_trip(number, tmp_path), number)
    assert same(round_trip(complex(number, -number), tmp_path), complex(number, -number))


def test_what_a_module_was_called_with_comes_back_as_inputs(tmp_path: Path) -> None:
    found = round_trip(tree.Inputs((torch.ones(1),), {"mask": None}), tmp_path)
    assert type(found) is tree.Inputs
    assert found.args[0].item() == 1
    assert found.kwargs == {"mask": None}


class Strange:
    def __repr__(self) -> str:
        return "<strange " + "x" * 500 + ">"


def test_what_cannot_be_saved_comes_back_as_its_type_and_text(tmp_path: Path) -> None:
    found = round_trip([Strange(), len, iter(())], tmp_path)
    assert all(type(leaf) is Opaque for leaf in found)
    assert found[0].type.endswith("test_value_codecs.Strange")
    assert found[0].text.startswith("<strange xxx")
    assert len(found[0].text) <= 200
    assert found[1] == Opaque("builtins.builtin_function_or_method", "<built-in function len>")
    assert round_trip(found, tmp_path) == found


def test_no_code_of_the_users_is_run_on_load(tmp_path: Path) -> None:
    ran: list[str] = []

    class Trap:
        def __reduce__(self) -> Any:
            return ran.append, ("pickled",)

        def __setstate__(self, state: Any) -> None:
            ran.append("restored")

    path = saving.save(tmp_path / "a", [Trap()], {})
    assert saving.load(path)[0][0].type.endswith("Trap")
    assert ran == []
    assert pickle.PROTO not in path.read_bytes()[:8]


# -- kinds -----------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Level(enum.IntEnum):
    LOW = 1


class Share(float):
    pass


class Word(str):
    note: str


WORD = Word("text")
WORD.note = "mine"

AS_IT_WAS: dict[str, Any] = {
    "set": {1, "a", (2, None)},
    "frozenset": frozenset({1.5, b"x"}),
    "set of frozensets": {frozenset({1}), frozenset()},
    "slice": slice(None, -1, 2),
    "slice of strings": slice("a", None),
    "range": range(2, 10, 3),
    "ellipsis": (..., slice(None)),
    "deque": deque([1, [2]]),
    "bounded deque": deque([1, 2], maxlen=2),
    "default dict": defaultdict(list, {"a": [1], 2: []}),
    "ordered dict": OrderedDict([("b", 1), ("a", {"c": 2})]),
    "ordered dict of other keys": OrderedDict([(2, 1), (None, 0)]),
    "counter": Counter("aab"),
    "proxy": MappingProxyType({"a": 1, 2: (3,)}),
    "dict of other keys": {None: 1, 2: "b", ("x", 1): [], True: 0.5, b"k": None, frozenset({1}): 2},
    "key that is a named tuple": {Pair(1, "a"): 2, Pair(2, "a"): 3},
    "named tuple": Pair(1, (2, Pair(None, []))),
    "nested empty containers": [(), [], {}, set(), frozenset(), OrderedDict(), deque(), ((), [{}])],
    "complex": complex(1, -2),
    "huge integer": 10**40,
    "bytearray": bytearray(b"\x00\xff"),
    "numpy string": np.str_("naïve"),
    "empty numpy string": np.str_(""),
    "numpy bytes": np.bytes_(b"\x01\x00"),
    "numpy float": np.float64(0.1),
    "numpy integer": np.int64(-3),
    "numpy bool": np.True_,
    "numpy complex": np.complex128(1 - 2j),
    "time": np.datetime64("2024-05-06T07:08:09", "ns"),
    "array of strings": np.array([["a", "bcd"]]),
    "empty array of strings": np.array([], dtype="U3"),
    "array of times": np.array(["2024-01-01", "NaT"], dtype="M8[D]"),
    "array of no dims": np.array(2.5),
    "layout": torch.sparse_coo,
    "memory format": torch.channels_last,
    "scheme": torch.per_tensor_affine,
    "device": torch.device("cuda", 1),
    "size": torch.Size([2, 0]),
}
NAMED_ONLY: dict[str, tuple[Any, str]] = {
    "enum": (Color.RED, "Color"),
    "enum of integers": (Level.LOW, "Level"),
    "number of a user's own": (Share(0.5), "Share"),
    "string of a user's own": (WORD, "Word"),
    "array of objects": (np.array([None, {}]), "numpy.ndarray"),
    "wide float": (np.longdouble(0.1), "numpy.longdouble"),
    "memory": (memoryview(b"abc"), "builtins.memoryview"),
    "class": (Box, "builtins.type"),
    "function": (round_trip, "builtins.function"),
    "module": (nn.ReLU(), "torch.nn.modules.activation.ReLU"),
    "lock": (threading.Lock(), "_thread.lock"),
    "generator": ((i for i in ()), "builtins.generator"),
    "set of a user's own": (type("Bag", (set,), {})({1}), "Bag"),
}


def assert_no_difference(a: Recording, b: Recording) -> None:
    assert [(row.status, row.note) for row in th.diff(a, b)] == [("same", "")] * len(a)


@pytest.mark.parametrize("value", AS_IT_WAS.values(), ids=AS_IT_WAS)
def test_kinds_of_python_numpy_and_torch_come_back_as_what_they_were(tmp_path: Path, value: Any) -> None:
    for inside in (value, [value], {"a": (value,)}, Box(value), Pair(None, value)):
        assert same(round_trip(inside, tmp_path), inside)


@pytest.mark.parametrize(("value", "kind"), NAMED_ONLY.values(), ids=NAMED_ONLY)
def test_what_a_file_cannot_hold_comes_back_as_its_name_and_the_table_says_so(
    tmp_path: Path, value: Any, kind: str
) -> None:
    made = Recording("Net")
    made.opened(Site("fc")).append((0, 0, value))
    made.opened(Site("deep")).append((0, 1, {"a": [torch.ones(1), value]}))
    found = th.load(made.save(tmp_path / "a"))
    for leaf in (found["fc"], found["deep"]["a"][1]):
        assert type(leaf) is Opaque
        assert leaf.type.endswith(kind)
        assert leaf.text == repr(value)[:200]
    lines = str(found).splitlines()
    name = kind.removeprefix("builtins.")
    assert lines[3].startswith("fc")
    assert f"{name} (not saved)" in lines[3]
    assert lines[-1].startswith("not saved, only as text: ")
    assert lines[-1].endswith(f"{name} in fc, deep")
    assert_no_difference(made, found)


def test_an_array_with_a_mask_is_not_taken_for_one_without(tmp_path: Path) -> None:
    found = round_trip(np.ma.masked_array([1, 2], [True, False]), tmp_path)
    assert type(found) is Opaque
    assert found.type.endswith("MaskedArray")


def test_what_could_not_be_saved_is_told_of_in_sets_too(tmp_path: Path) -> None:
    made = Recording("Net")
    made.opened(Site("")).append((0, 0, {Color.RED, 2}))
    found = th.load(made.save(tmp_path / "a"))
    assert len(found[""]) == 2
    assert str(found).splitlines()[-1].endswith("Color in (model)")


def test_a_default_factory_of_the_users_is_left_out(tmp_path: Path) -> None:
    found = round_trip(defaultdict(lambda: 3, a=1), tmp_path)
    assert type(found) is defaultdict
    assert found.default_factory is None
    assert found == {"a": 1}
    assert round_trip(defaultdict(list, a=1), tmp_path)["new"] == []


def test_sets_of_tensors_come_back_as_sets(tmp_path: Path) -> None:
    found = round_trip({torch.ones(1), torch.zeros(1)}, tmp_path)
    assert type(found) is set
    assert sorted(tensor.item() for tensor in found) == [0, 1]


def test_a_set_is_written_the_same_whatever_its_order_is(tmp_path: Path) -> None:
    words = [f"word {i}" for i in range(50)]
    saving.save(tmp_path / "a", [set(words)], {})
    words.reverse()
    saving.save(tmp_path / "b", [set(words)], {})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("key", [Color.RED, Level.LOW, len], ids=str)
def test_a_key_that_cannot_be_saved_keeps_its_address(tmp_path: Path, key: Any) -> None:
    value = {key: torch.ones(1), "other": torch.zeros(2)}
    found = round_trip(value, tmp_path)
    assert [address for address, _ in tree.leaves(found)] == [address for address, _ in tree.leaves(value)]
    (opaque, _) = found
    assert type(opaque) is Opaque


def test_keys_that_read_alike_stay_apart(tmp_path: Path) -> None:
    class Silent:
        def __repr__(self) -> str:
            return "?"

    found = round_trip({Silent(): 1, Silent(): 2, Silent(): 3}, tmp_path)
    assert list(found.values()) == [1, 2, 3]
    alike = [Loose(), Loose(), Loose(), Loose()]
    for part, held in zip(alike, (1, 1, torch.ones(2), torch.ones(2)), strict=True):
        part.held = held  # type: ignore[attr-defined]
    found = round_trip({part: number for number, part in enumerate(alike)}, tmp_path)
    assert list(found.values()) == [0, 1, 2, 3]


def test_a_key_whose_class_alone_gave_it_a_hash_can_be_read(tmp_path: Path) -> None:
    class Frozen(list):
        def __hash__(self) -> int:  # type: ignore[override]
            return 0

    found = round_trip({Frozen([1]): "x"}, tmp_path)
    assert list(found.values()) == ["x"]


def test_a_class_whose_repr_raises_can_be_saved(tmp_path: Path) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert round_trip(Broken(), tmp_path).text == "its repr raised RuntimeError"


def test_a_container_that_holds_itself_ends_in_a_name(tmp_path: Path) -> None:
    knot: list[Any] = [torch.ones(1)]
    knot.append({"back": knot})
    found = round_trip(knot, tmp_path)
    assert found[0].item() == 1
    assert found[1]["back"].type == "builtins.list"


def test_a_value_nested_beyond_all_reason_ends_in_a_name(tmp_path: Path) -> None:
    deep: Any = 1
    for level in range(500):
        deep = [(deep,), {"a": deep}, Box(deep), Pair(deep, 0)][level % 4]
    found, depth = round_trip(deep, tmp_path), 0
    while not isinstance(found, Opaque):
        found, depth = tree.unpack(found).children[0], depth + 1  # type: ignore[union-attr]
    assert depth > 50


# -- subclasses of containers ------------------------------------------------------------------------


class Rows(list):
    pass


class Ring(deque):
    pass


class Triple(tuple):
    pass


@pytest.mark.parametrize(
    ("value", "base"),
    [(Rows([torch.ones(1), "a"]), list), (Triple([torch.ones(1), "a"]), tuple), (Ring([1, 2], 2), deque)],
    ids=["list", "tuple", "deque"],
)
def test_a_subclass_of_a_sequence_comes_back_as_a_sequence_of_its_name(tmp_path: Path, value: Any, base: type) -> None:
    once = round_trip(value, tmp_path)
    for found in (once, round_trip(once, tmp_path)):
        assert isinstance(found, base)
        assert type(found).__name__ == type(value).__name__
        assert type(found) is type(once)
        assert list(found) == list(value)
        assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)
        assert tree.describe(found) == tree.describe(value)


def test_the_attributes_of_a_subclass_come_along_where_they_hold_tensors(tmp_path: Path) -> None:
    value = Rows([1, 2])
    value.extra = torch.full((2,), 3.0)  # type: ignore[attr-defined]
    found = round_trip(value, tmp_path)
    assert list(found) == [1, 2]
    assert found.extra.tolist() == [3, 3]


def test_torchs_own_tuples_come_back_as_they_were(tmp_path: Path) -> None:
    largest = torch.max(torch.tensor([[1.0, 5.0]]), dim=1)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    found = round_trip((largest, packed), tmp_path)
    assert type(found[0]) is type(largest)
    assert found[0].indices.item() == 1
    assert type(found[1]) is type(packed)
    assert nn.utils.rnn.pad_packed_sequence(found[1])[1].tolist() == [3, 1]


def test_a_return_type_that_this_torch_lacks_is_a_named_tuple(tmp_path: Path, monkeypatch: Any) -> None:
    path = saving.save(tmp_path / "a", [torch.max(torch.tensor([[1.0, 5.0]]), dim=1)], {})
    monkeypatch.delattr(torch.return_types, "max")
    ((found,), _) = saving.load(path)
    values, indices = found
    assert found.values is values
    assert indices.item() == 1


def test_a_named_tuple_is_unpacked_as_one(tmp_path: Path) -> None:
    left, right = found = round_trip(Pair(torch.ones(1), {"deep": Pair(1, 2)}), tmp_path)
    assert (left, right) == (found.left, found[1])
    assert right["deep"]._asdict() == {"left": 1, "right": 2}
    assert type(right["deep"]) is type(found)
    assert repr(right["deep"]) == "Pair(left=1, right=2)"


# -- objects ------------------------------------------------------------------------------------------


def test_a_loaded_object_is_read_by_name_position_and_attribute(tmp_path: Path) -> None:
    found = round_trip(Box(torch.ones(1), {"deep": Box(1, 2)}), tmp_path)
    assert type(found) is type(found.second["deep"])
    assert type(found).__name__ == "Box"
    assert found.first is found["first"] is found[0]
    assert found[-1] is found.second
    assert found[0:1] == [found.first]
    assert found.second["deep"].second == 2
    assert list(found) == ["first", "second"]
    with pytest.raises(AttributeError, match="this Box has no field 'middle'; it has first, second"):
        found.middle
    with pytest.raises(KeyError, match="Box has no field 'middle'; it has first, second"):
        found["middle"]


def test_loaded_objects_can_be_mapped_and_described(tmp_path: Path) -> None:
    found = round_trip(Box(torch.ones(2), None), tmp_path)
    assert isinstance(found, Loaded)
    assert tree.describe(found) == "Box{first=(2,)}"
    assert tree.map_tensors(lambda t: t + 1, found).first.tolist() == [2, 2]


def test_an_object_with_only_arrays_is_opened_again(tmp_path: Path) -> None:
    value = Box(np.arange(3), len)
    found = round_trip(value, tmp_path)
    assert [address for address, _ in tree.leaves(found)] == ["first", "second"]


def test_an_object_whose_fields_are_called_like_methods_is_shown_walked_and_saved_again(tmp_path: Path) -> None:
    value = Loose()
    fields = ["keys", "values", "items", "get", "__len__", "__iter__", "_fields", "copy", "0"]
    for number, name in enumerate(fields):
        setattr(value, name, torch.full((1,), float(number)))
    made = Recording("Net")
    made.opened(Site("fc")).append((0, 0, {"cache": [value]}))
    found = th.load(made.save(tmp_path / "a"))
    layer = found["fc"]["cache"][0]
    assert [vars(layer)[name].item() for name in fields] == list(range(len(fields)))
    assert [getattr(layer, name).item() for name in fields] == list(range(len(fields)))
    assert str(found) == str(made)
    assert_no_difference(made, found)
    assert repr(layer).startswith("Loose(keys=tensor([0.]), values=tensor([1.])")
    assert list(layer) == fields
    assert [leaf.item() for _, leaf in tree.leaves(layer)] == list(range(len(fields)))
    again = th.load(found.save(tmp_path / "b"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert again["fc"]["cache"][0].items.item() == 2


def test_a_transformers_output_comes_back_with_its_fields(tmp_path: Path) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.BaseModelOutput(last_hidden_state=torch.ones(1, 2), hidden_states=(torch.zeros(1),))
    found = round_trip(value, tmp_path)
    assert type(found).__name__ == "BaseModelOutput"
    assert torch.equal(found.last_hidden_state, value.last_hidden_state)
    assert found.hidden_states[0].item() == 0
    assert list(found) == ["last_hidden_state", "hidden_states"]


class Named(dict):
    pass


class Loose:
    pass


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict([(1, torch.ones(1)), (0, torch.zeros(1))]),
        OrderedDict([((2, "a"), torch.ones(1)), (None, None), ("1", 1), (1, 2)]),
        defaultdict(list, {3: [torch.ones(2)], -1: []}),
        Named({1.5: torch.ones(1), "x": OrderedDict([(7, torch.zeros(2))])}),
        MappingProxyType({5: torch.ones(1)}),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_dict_of_another_type_is_read_by_its_own_keys(tmp_path: Path, value: Any) -> None:
    def plain(part: Any) -> Any:
        return {k: plain(v) for k, v in part.items()} if isinstance(part, (dict, MappingProxyType)) else part

    for found in (round_trip(value, tmp_path), round_trip(round_trip(value, tmp_path), tmp_path)):
        assert type(found).__name__ == type(value).__name__
        assert same(plain(found), plain(value))
        assert tree.describe(tree.map_tensors(torch.clone, found)) == tree.describe(found)


def test_the_attributes_of_a_dict_of_another_type_come_along(tmp_path: Path) -> None:
    value = Named({1: torch.ones(1)})
    value.extra = torch.full((2,), 3.0)  # type: ignore[attr-defined]
    found = round_trip(value, tmp_path)
    assert dict(found) == {1: torch.ones(1)}
    assert found.extra.tolist() == [3, 3]


def test_a_part_that_holds_itself_is_opaque_and_the_rest_is_saved(tmp_path: Path) -> None:
    knot: list[Any] = []
    knot.append(knot)
    value = Loose()
    value.h, value.knot, value.rows = torch.ones(1), knot, [1, {"a": 2}]  # type: ignore[attr-defined]
    found = round_trip(value, tmp_path)
    assert found.h.item() == 1
    assert found.knot == Opaque("builtins.list", "[[...]]")
    assert found.rows == [1, {"a": 2}]

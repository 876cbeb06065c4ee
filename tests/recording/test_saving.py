"""Values to files and back: random trees of everything, every tensor kind, and documents that make no sense."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

from torchhook._recording import saving, tensor_file
from torchhook._recording.saving import Loaded, Opaque
from torchhook._values import tree
from torchhook._version import __version__
from torchhook.errors import RecordingFileError

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


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    first: Any
    second: Any = None


def round_trip(value: Any, folder: Path) -> Any:
    path = saving.save(folder / "value.safetensors", [value], {})
    ((found,), _) = saving.load(path)
    return found


def raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(found: Any, value: Any) -> bool:
    """Whether ``found`` is what a file should give back for ``value``, to the bit."""
    if isinstance(value, Tensor):
        return found.dtype == value.dtype and found.shape == value.shape and raw(found) == raw(value)
    if isinstance(value, np.ndarray):
        return found.dtype == value.dtype and found.shape == value.shape and found.tobytes() == value.tobytes()
    if isinstance(value, (Pair, Box, OrderedDict, deque)):
        node = tree.unpack(value)
        assert node is not None
        return (
            isinstance(found, Loaded)
            and type(found).__name__ == type(value).__name__
            and list(found) == node.keys
            and all(same(found[k], c) for k, c in zip(node.keys, node.children, strict=True))
        )
    if type(found) is not type(value):
        return False
    if isinstance(value, (list, tuple)):
        return len(found) == len(value) and all(map(same, found, value))
    if isinstance(value, dict):
        return same(list(found), list(value)) and same(list(found.values()), list(value.values()))
    if isinstance(value, float):
        return found.hex() == value.hex() or (math.isnan(found) and math.isnan(value))
    if isinstance(value, complex):
        return same(found.real, value.real) and same(found.imag, value.imag)
    return bool(found == value)


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
NAMES = st.from_regex(r"[a-z]{1,4}_", fullmatch=True)


def nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(NAMES, inner, max_size=3).map(OrderedDict),
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


# -- kinds of tensors ------------------------------------------------------------------------------


def quietly(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized, nested and CSR tensors warn that they exist
        return make()


EYE = torch.eye(4) * torch.arange(1.0, 5.0)


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_sparse_tensors_keep_layout_dtype_and_values(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    blocks = {"blocksize": (2, 2)} if "bs" in layout else {}
    value = quietly(lambda: EYE.to(dtype).to_sparse(layout=getattr(torch, layout), **blocks))
    found = quietly(lambda: round_trip(value, tmp_path))
    assert (found.layout, found.dtype, found.shape) == (value.layout, dtype, value.shape)
    assert torch.equal(found.to_dense(), value.to_dense())


def test_a_sparse_tensor_without_entries_or_with_dense_dims_keeps_its_shape(tmp_path: Path) -> None:
    nothing = torch.sparse_coo_tensor(torch.zeros(2, 0).long(), torch.zeros(0), (3, 4), check_invariants=True)
    hybrid = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 5), (3, 5), check_invariants=True)
    for value in (nothing, hybrid):
        found = round_trip(value, tmp_path)
        assert found.shape == value.shape
        assert torch.equal(found.to_dense(), value.to_dense())


def test_repeated_sparse_entries_still_add_up(tmp_path: Path) -> None:
    value = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (2,), check_invariants=True)
    found = round_trip(value, tmp_path)
    assert found._nnz() == 2
    assert found.to_dense().tolist() == [3, 0]


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32])
def test_quantized_tensors_keep_their_integers_and_scales(tmp_path: Path, dtype: torch.dtype) -> None:
    one = quietly(lambda: torch.quantize_per_tensor(EYE, 0.1, 3, dtype))
    each = quietly(
        lambda: torch.quantize_per_channel(EYE, torch.rand(4).double() + 0.1, torch.arange(4), 1, torch.qint8)
    )
    found = quietly(lambda: round_trip((one, each), tmp_path))
    for new, old in zip(found, (one, each), strict=True):
        assert new.dtype == old.dtype
        assert torch.equal(new.int_repr(), old.int_repr())
        assert torch.equal(new.dequantize(), old.dequantize())
    assert (found[0].q_scale(), found[0].q_zero_point()) == (0.1, 3)
    assert torch.equal(found[1].q_per_channel_scales(), each.q_per_channel_scales())
    assert torch.equal(found[1].q_per_channel_zero_points(), each.q_per_channel_zero_points())
    assert found[1].q_per_channel_axis() == 1


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_keep_their_parts(tmp_path: Path, layout: torch.layout) -> None:
    parts = [torch.rand(2, 3), torch.rand(1, 3)]
    value = quietly(lambda: torch.nested.nested_tensor(parts, layout=layout))
    found = quietly(lambda: round_trip(value, tmp_path))
    assert found.is_nested
    assert found.layout == layout
    assert all(torch.equal(a, b) for a, b in zip(found.unbind(), parts, strict=True))


def test_meta_and_fake_tensors_come_back_as_meta(tmp_path: Path) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2, 3, dtype=torch.float16)
    for value in (torch.empty(2, 3, dtype=torch.float16, device="meta"), fake):
        found = round_trip(value, tmp_path)
        assert (found.device.type, found.shape, found.dtype) == ("meta", (2, 3), torch.float16)


def test_parameters_and_subclasses_come_back_as_plain_tensors(tmp_path: Path) -> None:
    class Marked(Tensor):
        pass

    for value in (nn.Parameter(torch.rand(3)), torch.rand(3).as_subclass(Marked), torch.rand(3).requires_grad_() * 2):
        found = round_trip(value, tmp_path)
        assert type(found) is Tensor
        assert not found.requires_grad
        assert found.tolist() == value.tolist()


def test_a_layout_of_the_machine_is_saved_as_numbers(tmp_path: Path) -> None:
    assert torch.equal(round_trip(EYE.to_mkldnn(), tmp_path), EYE)


def test_a_copy_on_write_tensor_is_saved_without_ending_the_sharing(tmp_path: Path) -> None:
    source = torch.rand(1000)
    kept = torch._lazy_clone(source)
    assert torch.equal(round_trip(kept, tmp_path), source)


def test_the_numbers_of_other_layouts_are_listed_by_parts() -> None:
    value = EYE.to_sparse()
    assert [p.shape for p in saving.parts(value)] == [(2, 4), (4,)]


# -- other leaves ----------------------------------------------------------------------------------


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
    found = round_trip([Strange(), range(3), torch.strided], tmp_path)
    assert all(type(leaf) is Opaque for leaf in found)
    assert found[0].type.endswith("test_saving.Strange")
    assert found[0].text.startswith("<strange xxx")
    assert len(found[0].text) <= 200
    assert found[1] == Opaque("builtins.range", "range(0, 3)")
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


def test_a_loaded_object_is_read_by_name_position_and_attribute(tmp_path: Path) -> None:
    found = round_trip(Pair(torch.ones(1), {"deep": Box(1, 2)}), tmp_path)
    assert type(found).__name__ == "Pair"
    assert found.left is found["left"] is found[0]
    assert found[-1] is found.right
    assert found[0:1] == [found.left]
    assert found.right["deep"].second == 2
    assert list(found) == ["left", "right"]
    with pytest.raises(AttributeError, match="this Pair has no field 'middle'; it has left, right"):
        found.middle
    with pytest.raises(KeyError):
        found["middle"]


def test_loaded_objects_can_be_mapped_and_described(tmp_path: Path) -> None:
    found = round_trip(Pair(torch.ones(2), None), tmp_path)
    assert tree.describe(found) == "Pair{left=(2,)}"
    assert tree.map_tensors(lambda t: t + 1, found).left.tolist() == [2, 2]


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


def test_a_file_from_before_dicts_of_another_type_were_told_apart_still_loads(tmp_path: Path) -> None:
    document = '{"values": [{"fields": ["OrderedDict", ["1", "0"], [{"leaf": 5}, {"tensor": "t0"}]]}], "about": {}}'
    ((found,), _) = saving.load(written(tmp_path / "a", {"t0": torch.ones(1)}, recording=document))
    assert list(found) == ["1", "0"]
    assert found["1"] == 5
    assert found["0"].item() == 1


# -- documents -------------------------------------------------------------------------------------


def test_the_file_says_which_versions_wrote_it(tmp_path: Path) -> None:
    _, metadata = tensor_file.read(saving.save(tmp_path / "a", [], {}))
    versions = json.loads(metadata["recording"])["versions"]
    assert versions["torch"] == torch.__version__
    assert set(versions) >= {"torchhook", "torch", "python"}


def test_the_document_is_json_that_any_language_reads(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    path = saving.save(tmp_path / "a", [math.nan, math.inf, complex(-math.inf, math.nan), [-math.inf]], {})
    _, metadata = tensor_file.read(path)
    assert json.loads(metadata["recording"], parse_constant=refuse)["about"] == {}


def written(path: Path, tensors: dict[str, Tensor] | None = None, **metadata: str) -> Path:
    about = {"format": saving.FORMAT, "version": "1", "recording": '{"values": [], "about": {}}', **metadata}
    return tensor_file.write(path, tensors or {}, about)


def test_another_programs_file_is_named_by_its_format(tmp_path: Path) -> None:
    path = written(tmp_path / "a", format="pt")
    with pytest.raises(RecordingFileError) as caught:
        saving.load(path)
    assert str(caught.value) == f"{path} is not a torchhook recording: its format is 'pt'."


def test_a_newer_format_says_to_upgrade(tmp_path: Path) -> None:
    path = written(tmp_path / "a", version="99")
    with pytest.raises(RecordingFileError) as caught:
        saving.load(path)
    assert str(caught.value) == (
        f"{path} has format version 99; this torchhook ({__version__}) reads up to {saving.VERSION}: "
        "install a newer one from its repository."
    )


@pytest.mark.parametrize(
    "document",
    [
        "not json",
        "[]",
        "{}",
        '{"values": [{}], "about": {}}',
        '{"values": [{"a": 1, "b": 2}], "about": {}}',
        '{"values": [{"unheard": 1}], "about": {}}',
        '{"values": [{"tensor": "t9"}], "about": {}}',
        '{"values": [{"float": "x"}], "about": {}}',
        '{"values": [{"dtype": "nothing"}], "about": {}}',
        '{"values": [{"complex": ["1"]}], "about": {}}',
        '{"values": [{"fields": ["A", ["x"], []]}], "about": {}}',
        '{"values": [3], "about": {}}',
    ],
)
def test_a_document_that_makes_no_sense_is_one_clear_error(tmp_path: Path, document: str) -> None:
    path = written(tmp_path / "a", recording=document)
    with pytest.raises(RecordingFileError, match=r"cannot be understood: \w+Error"):
        saving.load(path)


def test_a_version_that_is_no_number_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RecordingFileError, match="cannot be understood: ValueError"):
        saving.load(written(tmp_path / "a", version="one"))

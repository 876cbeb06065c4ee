"""What is kept of a passing value: every mode against bare clones, and who shares memory with whom."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad as fwAD
from torch.nn.attention.bias import causal_lower_right

import torchhook as th
from torchhook._core import keep as room
from torchhook._core.index import Index
from torchhook._core.keep import Keep

patient = settings(deadline=None)  # the machine may be busy

is_cow: Callable[[Tensor], bool] = torch._C._is_cow_tensor
address: Callable[[Tensor], int] = torch._C._data_address
"""Unlike ``data_ptr()``, asking for it does not end copy-on-write."""


@pytest.fixture
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose a value is, is looked for at once, and not only when it has become worth it."""
    monkeypatch.setattr(room, "_COPIED_FIRST", 0)


@pytest.fixture(params=["copy-on-write", "fallback"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test that takes this runs twice: as torch is, and as if it had no lazy clones."""
    if request.param == "fallback":
        monkeypatch.setattr(room, "lazy_clone", torch.clone)
    return request.param


def value_of(keep: Keep, passing: Any) -> Any:
    return keep.value(passing)


def recorded_by(keep: Keep, passing: Any) -> Any:
    """What the hot path keeps, which has the common case written out."""
    rows: list[tuple[int, int, Any]] = []
    keep.recorder(rows.append, itertools.count())(passing, 7)
    ((call, _, kept),) = rows
    assert call == 7
    return kept


@pytest.fixture(params=[value_of, recorded_by], ids=["value", "recorder"])
def door(request: pytest.FixtureRequest) -> Callable[[Keep, Any], Any]:
    """The two ways in, which must keep the same."""
    return request.param  # type: ignore[no-any-return]


class Marked(Tensor):
    """A tensor subclass."""


def quietly(make: Callable[[], Tensor]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized, nested and CSR tensors warn that they exist
        return make()


def numbers() -> Tensor:
    return torch.arange(1.0, 13.0).reshape(3, 4)


KINDS: dict[str, Callable[[], Tensor]] = {
    "plain": numbers,
    "on the graph": lambda: numbers().requires_grad_() * 2,
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: numbers().t(),
    "every second": lambda: numbers()[:, ::2],
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "channels last": lambda: torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "view": lambda: numbers().view(-1),
    "detached": lambda: numbers().detach(),
    "parameter": lambda: nn.Parameter(numbers()),
    "from numpy": lambda: torch.from_numpy(np.arange(6.0)),
    "float16": lambda: numbers().half(),
    "bfloat16": lambda: numbers().bfloat16(),
    "float8": lambda: numbers().to(torch.float8_e4m3fn),
    "complex": lambda: torch.complex(numbers(), -numbers()),
    "conjugate": lambda: torch.complex(numbers(), -numbers()).conj(),
    "negative bit": lambda: torch.complex(numbers(), -numbers()).conj().imag,
    "integers": lambda: numbers().long(),
    "booleans": lambda: numbers() > 3,
    "sparse": lambda: numbers().to_sparse(),
    "CSR": lambda: quietly(lambda: numbers().to_sparse_csr()),
    "quantized": lambda: quietly(lambda: torch.quantize_per_tensor(numbers(), 0.1, 3, torch.quint8)),
    "nested": lambda: quietly(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "subclass": lambda: numbers().as_subclass(Marked),
    "mkldnn": lambda: numbers().to_mkldnn(),
}


def dense(tensor: Tensor) -> list[Tensor]:
    """The same numbers as plain dense tensors, to compare by."""
    if tensor.is_nested:
        return list(tensor.detach().unbind())
    if tensor.is_quantized:
        return [tensor.dequantize()]
    if tensor.layout != torch.strided:
        return [tensor.detach().to_dense()]
    return [tensor.detach().as_subclass(Tensor)]


def agree(one: Tensor, other: Tensor) -> bool:
    def bits(t: Tensor) -> Tensor:
        return t.float() if t.dtype == torch.float8_e4m3fn else t

    assert one.dtype == other.dtype
    assert one.layout == other.layout
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(dense(one), dense(other), strict=True))


def overwrite(tensor: Tensor) -> None:
    with torch.no_grad():
        if tensor.is_quantized:
            tensor.copy_(quietly(lambda: torch.quantize_per_tensor(torch.zeros(tensor.shape), 0.1, 3, torch.quint8)))
        elif tensor.layout in (torch.sparse_coo, torch.sparse_csr) or tensor.is_nested:
            tensor.mul_(0)
        else:
            tensor.zero_()


@pytest.mark.parametrize("mode", ["copy", "live", "clone"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_safe_value_is_what_a_bare_clone_would_have_kept(kind: str, mode: str, way: str, door) -> None:
    tensor = KINDS[kind]()
    oracle = tensor.detach().clone()
    kept = door(Keep(mode), tensor)
    assert kept is not tensor
    assert type(kept) is (Tensor if type(tensor) is nn.Parameter else type(tensor))
    assert agree(kept, oracle)
    if kind not in ("empty", "expanded", "mkldnn"):  # these cannot be written to
        overwrite(tensor)
        assert agree(kept, oracle)
    assert kept.requires_grad == (tensor.requires_grad and mode == "live")


@pytest.mark.parametrize("kind", KINDS)
def test_writing_to_a_kept_value_does_not_reach_the_model(kind: str, way: str, door) -> None:
    tensor = KINDS[kind]()
    oracle = tensor.detach().clone()
    kept = door(Keep("copy"), tensor)
    if kind not in ("empty", "expanded", "mkldnn"):
        overwrite(kept)
    assert agree(tensor, oracle)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_is_the_bare_tensor(kind: str, door) -> None:
    tensor = KINDS[kind]()
    assert door(Keep("reference"), tensor) is tensor


@pytest.mark.shows("Gradient modes: captures")
@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", ["copy", "live", "clone"])
def test_values_are_safe_in_every_gradient_mode(grad_mode: Any, mode: str, way: str, door) -> None:
    with grad_mode():
        for value in (numbers() * 2, numbers()[1:], numbers().t()):
            oracle = value.clone()
            kept = door(Keep(mode), value)
            value.add_(1)
            assert torch.equal(kept, oracle)


@pytest.mark.shows("Kinds of tensors: captures of meta and fake tensors")
def test_a_meta_or_fake_tensor_is_kept_as_what_it_is(way: str, door) -> None:
    from torch._subclasses import FakeTensorMode

    kept = door(Keep(), torch.empty(3, device="meta"))
    assert kept.device.type == "meta"
    assert kept.shape == (3,)
    with FakeTensorMode():
        fake = torch.empty(2, 3)
        assert type(door(Keep(), fake)) is type(fake)
        assert Keep(dtype=torch.float16).value(fake).dtype == torch.float16


class WithUnits(Tensor):
    """As a user writes them: what it carries is handed on by no operation."""

    units: str


def carrying(kind: str) -> Tensor:
    if kind == "causal bias":
        return causal_lower_right(3, 5)
    tensor = numbers().as_subclass(WithUnits)
    tensor.units = "mV"
    return tensor


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float64}, {"device": "cpu"}], ids=str)
@pytest.mark.parametrize("mode", ["copy", "clone", "live"])
@pytest.mark.parametrize("kind", ["causal bias", "units"])
def test_a_subclass_is_kept_with_what_it_carries_beside_its_numbers(
    kind: str, mode: str, options: dict[str, Any], door
) -> None:
    tensor = carrying(kind)
    before = dict(vars(tensor))
    assert before
    kept = door(Keep(mode, **options), tensor)
    assert type(kept) is type(tensor)
    assert vars(kept) == before == vars(tensor)


@pytest.mark.shows("torch.func: captures under vmap")
@pytest.mark.parametrize("in_dim", [0, 1])
@pytest.mark.parametrize("mode", ["copy", "clone"])
def test_under_vmap_the_whole_batch_is_kept_with_its_dimension_first(mode: str, in_dim: int, way: str, door) -> None:
    kept: list[Tensor] = []

    def doubled(row: Tensor) -> Tensor:
        value = row * 2
        kept.append(door(Keep(mode), value))
        return value.add_(1)

    batch = numbers()
    torch.vmap(doubled, in_dims=in_dim)(batch)
    assert torch.equal(kept[0], (batch if in_dim == 0 else batch.t()) * 2)


def test_live_values_carry_the_gradient_of_the_moment_they_were_kept(way: str) -> None:
    base = torch.tensor([1.0, 2.0], requires_grad=True)
    value = base * 3
    kept = Keep("live").value(value)
    value.mul_(100)
    assert kept.tolist() == [3, 6]
    (grad,) = torch.autograd.grad(kept.sum(), base, retain_graph=True)
    assert grad.tolist() == [3, 3]
    (grad,) = torch.autograd.grad(value.sum(), base)
    assert grad.tolist() == [300, 300]


def test_nested_values_are_kept_whole_with_other_leaves_as_they_are(way: str, door) -> None:
    note = object()
    value = {"a": (torch.zeros(2), None), "b": [torch.ones(1, dtype=torch.int32)], "c": note}
    kept = door(Keep(), value)
    value["a"][0].add_(1)  # type: ignore[index]
    assert kept["a"][0].tolist() == [0, 0]
    assert kept["a"][1] is None
    assert kept["c"] is note
    assert kept is not value


def test_an_array_is_kept_as_it_was(way: str) -> None:
    array = np.zeros(3)
    kept = Keep().value(array)
    array += 1
    assert kept.tolist() == [0, 0, 0]


# -- copy-on-write ---------------------------------------------------------------------------------


def test_where_nothing_is_written_nothing_is_copied(door) -> None:
    value = torch.rand(1000)
    kept = door(Keep(), value)
    assert is_cow(kept)
    assert is_cow(value)
    assert address(kept) == address(value)
    assert (value + 1).shape == kept.shape  # reading it, as the next layer does, copies nothing either
    assert address(kept) == address(value)
    value.add_(1)
    assert address(kept) != address(value)


def test_a_live_value_shares_memory_in_the_same_way() -> None:
    value = torch.rand(1000, requires_grad=True) * 2
    kept = Keep("live").value(value)
    assert is_cow(kept)
    assert address(kept) == address(value)


def test_a_clone_never_shares_memory(door) -> None:
    value = torch.rand(1000)
    kept = door(Keep("clone"), value)
    assert not is_cow(kept)
    assert not is_cow(value)
    assert address(kept) != address(value)


@pytest.mark.usefixtures("looks_at_once")
def test_a_whole_model_shares_every_value_that_it_does_not_overwrite() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(inplace=True))
    with th.capture(model) as rec:
        output = model(torch.rand(2, 4))
    assert address(rec["3"]) == address(output)
    assert [is_cow(rec[name]) for name in "0123"] == [True] * 4
    assert not torch.equal(rec["2"], rec["3"])


@pytest.mark.parametrize("kind", ["quantized", "sparse", "nested", "subclass", "from numpy", "mkldnn"])
def test_what_cannot_be_shared_is_cloned(kind: str, door) -> None:
    tensor = KINDS[kind]()
    kept = door(Keep(), tensor)
    assert agree(kept, tensor)
    if kind in ("subclass", "from numpy"):
        assert not is_cow(kept)
        assert address(kept) != address(tensor)


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", ["copy", "live"])
def test_a_small_view_does_not_hold_on_to_a_large_storage(grad_mode: Any, mode: str, door) -> None:
    with grad_mode():
        large = torch.rand(1000, 100)
        for view in (large[:3], large.t()[0], large.view(-1)[5:6], large.unbind()[0]):
            kept = door(Keep(mode), view)
            assert kept.untyped_storage().nbytes() == view.nbytes
        most = large[:900]
        kept = door(Keep(mode), most)
        assert kept.untyped_storage().nbytes() == large.nbytes  # shared: not worth a copy


def test_a_recording_does_not_hold_on_to_the_model_or_the_callers_input() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.rand(1, 2)
    with th.capture(model, "1", device="cpu") as rec:
        model(x)
    held = [weakref.ref(model[0].weight), weakref.ref(x), weakref.ref(model)]
    del model, x
    gc.collect()
    assert [reference() for reference in held] == [None, None, None]
    assert rec["1"].shape == (1, 2)


def test_a_transform_that_takes_a_little_keeps_only_that_little() -> None:
    kept = Keep(transform=lambda t: t[:, 0]).value(torch.rand(100, 100))
    assert kept.untyped_storage().nbytes() == 400


class Owner(nn.Module):
    """Hands its own tensors and its caller's on to layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))
        self.register_buffer("table", torch.rand(4, 3))
        self.layer = nn.Identity()

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        seen = [
            self.layer(self.weight),
            self.layer(self.weight.view(1, 3)),
            self.layer(self.table),
            self.layer(self.table[:3]),
            self.layer(x),
            self.layer(x.t()),
            self.layer(mask),
        ]
        return sum(t.sum() for t in seen)  # type: ignore[return-value]


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", ["copy", "live", "clone"])
def test_memory_that_outlives_the_forward_is_never_made_copy_on_write(grad_mode: Any, mode: str, way: str) -> None:
    model, x, mask = Owner(), torch.rand(3, 3), torch.rand(5)
    outliving = {"weight": model.weight, "table": model.table, "x": x, "mask": mask}
    before = {name: t.data_ptr() for name, t in outliving.items()}
    with grad_mode(), th.capture(model, "**", ":input", "layer:input", keep=mode) as rec:
        model(x, mask=mask)
    assert not any(is_cow(t) for t in outliving.values())
    kept = [t.detach().clone() for t in rec.all("layer")]
    with torch.no_grad():
        for tensor in outliving.values():
            tensor.add_(1)
    assert {name: t.data_ptr() for name, t in outliving.items()} == before
    assert all(torch.equal(a, b) for a, b in zip(rec.all("layer"), kept, strict=True))


def test_numpy_views_of_the_callers_input_follow_it_after_the_session() -> None:
    x = torch.zeros(2, 2)
    view = x.numpy()
    model = nn.Sequential(nn.Identity())
    with th.capture(model, "0", "0:input") as rec:
        model(x)
    x.add_(1)
    assert view.tolist() == [[1, 1], [1, 1]]
    assert rec["0:input"].tolist() == [[0, 0], [0, 0]]


@pytest.mark.usefixtures("looks_at_once")
def test_what_the_model_owns_and_what_it_was_called_with_are_not_shared(door) -> None:
    owned, first, second = torch.rand(3), torch.rand(3), torch.rand(3)
    keep = Keep()
    keep.owned_by(lambda: [owned])
    for called_with, free in ((first, second), (second, first)):
        keep.called_with([called_with])
        for outliving in (owned, called_with):
            assert not is_cow(door(keep, outliving))
            assert not is_cow(door(keep, outliving.view(3, 1)))
            assert not is_cow(outliving)
        kept = door(keep, free.clone())
        assert is_cow(kept)


def test_a_kept_value_holds_no_graph_and_does_not_hold_the_model_tensor_itself(door) -> None:
    value = torch.rand(3, requires_grad=True) * 2
    reference = weakref.ref(value)
    kept = door(Keep(), value)
    assert kept.grad_fn is None
    del value
    gc.collect()
    assert reference() is None


# -- device, dtype, transform ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["copy", "live", "reference", "clone"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floating_point_values_are_cast_and_others_are_not(mode: str, dtype: torch.dtype, way: str) -> None:
    value = {"f": torch.rand(3), "i": torch.arange(3), "b": torch.ones(2, dtype=torch.bool), "c": torch.ones(1) * 1j}
    kept = Keep(mode, dtype=dtype).value(value)
    assert torch.equal(kept["f"], value["f"].to(dtype))
    assert [kept[k].dtype for k in "ibc"] == [torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["copy", "live", "clone"])
def test_a_value_is_safe_whether_or_not_it_had_to_be_moved_or_cast(device, dtype, mode: str, way: str, door) -> None:
    for kind in ("plain", "on the graph", "view", "expanded", "sparse", "quantized"):
        value = KINDS[kind]()
        keep = Keep(mode, device=device, dtype=dtype)
        kept = door(keep, value)
        keep.wait()
        before = [t.clone() for t in dense(kept)]
        if kind != "expanded":
            overwrite(value)
        assert all(torch.equal(a, b) for a, b in zip(dense(kept), before, strict=True))
        assert kept.device.type == "cpu"
        assert kept.requires_grad == (mode == "live" and value.requires_grad)


def test_device_cpu_copies_nothing_that_is_there_already() -> None:
    value = torch.rand(1000)
    assert address(Keep(device="cpu").value(value)) == address(value)
    assert address(Keep(dtype=torch.float32).value(value)) == address(value)


def test_a_live_value_stays_on_the_graph_through_cast_and_transform(way: str) -> None:
    base = torch.ones(2, requires_grad=True)
    kept = Keep("live", dtype=torch.float64, transform=lambda t: t * 5).value(base * 3)
    assert kept.dtype == torch.float64
    (grad,) = torch.autograd.grad(kept.sum(), base)
    assert grad.tolist() == [15, 15]


def test_meta_is_a_device_like_any_other() -> None:
    kept = Keep(device="meta").value(torch.rand(2, 3))
    assert kept.device.type == "meta"
    assert kept.shape == (2, 3)


def test_transform_comes_first_then_the_cast_then_the_move(way: str) -> None:
    seen: list[tuple[torch.dtype, bool, bool]] = []

    def transform(value: Tensor) -> Tensor:
        seen.append((value.dtype, value.requires_grad, torch.is_grad_enabled()))
        return value.sum(dim=0)

    value = torch.rand(3, 2, requires_grad=True) * 1
    kept = Keep(dtype=torch.float16, device="meta", transform=transform).value(value)
    assert seen == [(torch.float32, True, False)]
    assert (kept.dtype, kept.device.type, kept.shape) == (torch.float16, "meta", (2,))


def test_a_transform_sees_the_passing_value_itself_and_may_return_anything(way: str) -> None:
    value = (torch.rand(2), "note")
    seen: list[Any] = []

    def transform(passing: Any) -> Any:
        seen.append(passing)
        return {"mean": passing[0].mean(), "shape": tuple(passing[0].shape), "raw": passing[0].numpy()}

    expected = value[0].clone()
    kept = Keep(transform=transform).value(value)
    assert seen[0] is value
    assert kept["mean"] == expected.mean()
    assert kept["shape"] == (2,)
    value[0].zero_()
    assert kept["raw"].tolist() == expected.tolist()


@pytest.mark.parametrize("mode", ["copy", "live"])
def test_a_transform_that_returns_the_value_unchanged_is_still_safe(mode: str, way: str) -> None:
    value = torch.rand(3)
    expected = value.clone()
    kept = Keep(mode, transform=lambda t: t).value(value)
    value.zero_()
    assert torch.equal(kept, expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mode": "x"}, ValueError, "keep='x' is not a way to keep values; use 'copy', 'live', 'reference', 'clone'."),
        ({"transform": 3}, TypeError, "transform must be callable, found int."),
        ({"dtype": "float16"}, TypeError, "dtype must be a torch.dtype, found 'float16'."),
    ],
)
def test_a_wrong_policy_is_refused_at_the_door(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        Keep(**arguments)
    assert str(caught.value) == message


# -- random values ---------------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A tensor somewhere in a larger storage, and the storage's own tensor."""
    base = torch.arange(120.0).reshape(4, 5, 6).clone()
    view = base
    for _ in range(draw(st.integers(0, 4))):
        step = draw(st.sampled_from(["t", "slice", "index", "flat", "stride", "none"]))
        if step == "t" and view.dim() >= 2:
            view = view.transpose(0, -1)
        elif step == "slice" and view.dim() and view.shape[0]:
            view = view[draw(st.integers(0, view.shape[0])) :]
        elif step == "index" and view.dim() and view.shape[0]:
            view = view[draw(st.integers(0, view.shape[0] - 1))]
        elif step == "flat" and view.is_contiguous():
            view = view.view(-1)
        elif step == "stride" and view.dim():
            view = view[::2]
    return view, base


@patient
@given(
    views(),
    st.sampled_from(["copy", "live", "clone"]),
    st.sampled_from(["none", "no_grad", "inference"]),
    st.booleans(),
)
def test_any_view_is_kept_as_it_was_whoever_writes_first(pair, mode: str, grad_mode: str, kept_first: bool) -> None:
    view, base = pair
    modes = {"none": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with modes[grad_mode]():
        oracle, whole = view.clone(), base.clone()
        kept = Keep(mode).value(view)
        again = recorded_by(Keep(mode), view)
        if kept_first:
            kept.add_(1)
            assert torch.equal(base, whole)
            assert torch.equal(again, oracle)
            base.zero_()
            assert torch.equal(kept, oracle + 1)
        else:
            base.zero_()
            assert torch.equal(kept, oracle)
        assert torch.equal(again, oracle)
        assert not view.any()


@pytest.mark.usefixtures("looks_at_once")
def test_what_is_recorded_is_what_value_keeps_and_views_are_shared_where_their_memory_is_new() -> None:
    buffer, given = torch.randn(4, 4), torch.randn(4, 4)
    keep = Keep()
    keep.owned_by(lambda: [buffer], lambda: frozenset({id(buffer)}))
    keep.called_with([given])
    made = torch.randn(4, 4) * 2
    passing = {
        "made": (made, True),
        "a view of it": (made.view(16), True),
        "a small view of it": (made[0, :1], False),
        "the buffer": (buffer, False),
        "a view of the buffer": (buffer.t(), False),
        "what it was called with": (given, False),
        "a view of that": (given.reshape(2, 8), False),
    }
    for name, (value, shared) in passing.items():
        expected, kept = value.clone(), [keep.kept(value), keep.value(value)]
        assert [is_cow(one) for one in kept] == [shared, shared], name
        value.add_(0)  # a write
        assert all(torch.equal(one, expected) for one in kept), name


@pytest.mark.usefixtures("looks_at_once")
def test_where_torch_does_not_say_what_a_view_is_of_the_memory_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "base_of", lambda tensor: tensor)
    buffer = torch.randn(4, 4)
    keep = Keep()
    keep.owned_by(lambda: [buffer], lambda: frozenset({id(buffer)}))
    made = torch.randn(4, 4) * 2
    assert is_cow(keep.kept(made.view(16)))
    assert not is_cow(keep.kept(made[0, :1]))
    assert not is_cow(keep.kept(buffer.t()))
    assert torch.equal(keep.kept(buffer.t()), buffer.t())


# -- what costs nothing where nobody looks --------------------------------------------------------------


class Large(nn.Module):
    """A layer among many that need not be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rest = nn.Linear(3, 3), nn.ModuleList(nn.Identity() for _ in range(50))
        self.register_buffer("held", torch.ones(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.held


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "live": ("layer", {"keep": "live"}),
    "live, in half": ("layer", {"keep": "live", "dtype": torch.float16}),
    "input": ("layer:input", {}),
    "gradient": ("layer:grad", {}),
    "transform": ("layer", {"transform": torch.neg}),
    "a view of it": ("layer", {"transform": lambda value: value[:1]}),
    "by sites": ("layer", {"transform": {"layer": torch.neg}}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_few_small_values_are_kept_without_a_look_at_the_rest_of_the_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site, options), model, x = OPTIONS[name], Large(), torch.randn(2, 3)
    for looked in ("plain_ids", "owned"):
        monkeypatch.setattr(Index, looked, lambda *args: pytest.fail("the whole model was looked at"))
    for _ in range(3):
        with th.capture(model, site, **options) as rec:
            model(x).sum().backward()
        value = rec[site].detach().clone()
        x.mul_(2)
        model.layer.weight.data.mul_(0.5)
        assert torch.equal(rec[site], value)


def test_who_keeps_more_looks_once_for_each_session(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, looks = Large(), torch.randn(2, 3), list[int]()
    found = Index.plain_ids
    monkeypatch.setattr(Index, "plain_ids", lambda index: looks.append(1) or found(index))
    for _ in range(2):
        looks.clear()
        with th.capture(model, "layer:grad", "layer", keep="live", transform={"layer": torch.neg}) as rec:
            for _ in range(100):
                model(x).sum().backward()
        assert sum(looks) <= 2  # one for those with a transform, one for the others
        assert len(rec.all("layer")) == 100


def test_what_the_model_owns_is_never_shared_however_much_is_kept() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.ones(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.held

    model = nn.Sequential(Returns())
    with th.capture(model, "0", keep="live") as rec:
        for _ in range(60):
            model(torch.ones(1))
    raw = model[0].held.numpy()  # a raw pointer, as others may have
    raw[:] = 7
    assert all(torch.equal(value, torch.ones(2, 3)) for value in rec.all("0"))
    assert torch.equal(model[0].held, torch.full((2, 3), 7.0))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, for tangents
@pytest.mark.parametrize("mode", ["copy", "clone"])
@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize("transform", [None, torch.neg])
def test_what_is_kept_has_no_tangent(mode: str, learning: bool, transform: Any) -> None:
    model, x = nn.Linear(3, 3).requires_grad_(learning), torch.randn(2, 3)
    with fwAD.dual_level():
        with th.capture(model, keep=mode, transform=transform) as rec:
            output = model(fwAD.make_dual(x, torch.ones_like(x)))
        assert fwAD.unpack_dual(output).tangent is not None
        assert fwAD.unpack_dual(rec["(model)"]).tangent is None
    assert torch.equal(rec["(model)"], -output.detach() if transform else output.detach())

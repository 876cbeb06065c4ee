"""Two recordings side by side: the numbers, the order, what is missing, names that differ."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchhook._recording.address import Site, parse
from torchhook._recording.differences import Diff, compare
from torchhook._recording.records import Recording, load
from torchhook.errors import MissingRecordError

NAN, INF = math.nan, math.inf


def recording(*values: tuple[str, Any], name: str = "") -> Recording:
    """A recording made by hand: addresses and values in the order in which they ran."""
    made, calls = Recording(name), {}
    for address, value in values:
        site = parse(address)
        calls[site] = calls.get(site, -1) + 1
        made.opened(site).append((calls[site], next(made.order), value))
    return made


def one(a: Any, b: Any, **options: Any) -> Any:
    return compare(recording(("x", a)), recording(("x", b)), **options)[0]


def test_the_numbers_are_those_worked_out_by_hand() -> None:
    row = one(torch.tensor([3.0, 4.0, 0.0]), torch.tensor([3.0, 4.0, 12.0]))
    assert (row.status, row.max_abs, row.mismatches, row.elements) == ("differs", 12.0, 1, 3)
    assert row.relative == pytest.approx(12 / 5)
    assert row.cosine == pytest.approx(25 / (5 * 13))


def test_equal_values_are_the_same_even_when_nothing_is_tolerated() -> None:
    row = one(torch.randn(5), torch.randn(5), rtol=0, atol=0)
    assert row.status == "differs"
    value = torch.randn(5)
    row = one(value, value.clone(), rtol=0, atol=0)
    assert (row.ok, row.max_abs, row.relative, row.mismatches) == (True, 0.0, 0.0, 0)
    assert row.cosine == pytest.approx(1)


def test_a_tolerance_is_measured_against_the_scale_of_the_value() -> None:
    value = torch.tensor([1000.0, 1e-6])
    assert one(value, value + torch.tensor([0.0, 1e-3])).ok
    assert not one(value * 1e-6, value * 1e-6 + torch.tensor([0.0, 1e-3])).ok


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [
        (torch.float64, 1e-12, 1e-6),
        (torch.float32, 2e-6, 1e-3),
        (torch.float16, 5e-3, 0.1),
        (torch.bfloat16, 5e-2, 0.5),
    ],
)
def test_tolerances_are_those_of_the_coarser_side(dtype: torch.dtype, within: float, beyond: float) -> None:
    value = torch.ones(8, dtype=torch.float64)
    assert one(value, (value + within).to(dtype)).ok
    assert one((value + within).to(dtype), value).ok
    assert not one(value, (value + beyond).to(dtype)).ok


def test_precision_that_was_lost_before_does_not_come_back() -> None:
    value = torch.ones(4)
    rounded = ("a", value.bfloat16())
    assert not compare(recording(("a", value), ("b", value)), recording(("a", value), ("b", value + 0.01))).ok
    assert compare(recording(("a", value), ("b", value)), recording(rounded, ("b", value + 0.01))).ok


def test_tolerances_can_be_numbers_or_change_some_dtypes_only() -> None:
    value = torch.ones(4)
    assert one(value, value + 0.1, rtol=0.2).ok
    assert one(value, value + 0.1, rtol={torch.float32: 0.2}).ok
    assert not one(value, value + 0.1, rtol={torch.float16: 0.2}).ok
    assert one(value, value + 0.1, rtol=0, atol=0.2).ok
    with pytest.raises(ValueError, match="rtol=-1"):
        one(value, value, rtol=-1)


@pytest.mark.parametrize(
    ("a", "b", "decibels"),
    [
        ([3.0, 4.0], [3.3, 4.4], 20.0),  # a noise of a tenth
        ([10.0, 0.0], [10.0, 1.0], 20.0),
        ([1.0, 1.0], [2.0, 2.0], 0.0),  # as loud as the signal
        ([1.0, 0.0], [1.0, 10.0], -20.0),
        ([1.0, 2.0], [1.0, 2.0], INF),
        ([0.0, 0.0], [0.0, 1.0], -INF),
        ([0.0, 0.0], [0.0, 0.0], INF),
    ],
)
def test_the_signal_to_noise_ratio_is_that_worked_out_by_hand(a: list[float], b: list[float], decibels: float) -> None:
    value = torch.tensor(a, dtype=torch.float64)
    row = one(value, torch.tensor(b, dtype=torch.float64))
    assert row.sqnr == pytest.approx(decibels, abs=1e-9)
    assert compare(recording(("x", value)), recording(("x", value))).data()["sqnr"] == [INF]


def test_a_row_without_numbers_has_no_signal_to_noise_ratio() -> None:
    assert math.isnan(one(torch.tensor([1.0]), torch.tensor([NAN])).sqnr)
    assert math.isnan(one(torch.ones(2), torch.ones(3)).sqnr)


def test_what_only_b_has_is_listed_and_counted_apart() -> None:
    x = torch.ones(1)
    diff = compare(recording(("fc", x)), recording(("fc", x), ("new", x), ("head", x)))
    assert (diff.ok, diff.first) == (True, None)
    assert [row.status for row in diff] == ["same", "only in B", "only in B"]
    assert str(diff).startswith("Diff of A and B: 3 sites, all the same; 2 only in B\n")
    diff = compare(recording(("fc", x), ("gone", x)), recording(("fc", x), ("new", x)))
    assert diff.first is not None
    assert (diff.ok, diff.first.site) == (False, "gone")
    assert "1 differs, the first at gone; 1 only in B" in str(diff)


def test_the_tolerances_are_printed_and_where_they_grow() -> None:
    x = torch.ones(2)
    a = recording(("a", x), ("b", x), ("c", x))
    lines = str(compare(a, recording(("a", x), ("b", x.half()), ("c", x)))).splitlines()[-2:]
    assert lines == [
        "tolerated: |a - b| <= 1e-08 + 0.0001 * max(|a|, rms of a)",
        "tolerated from b on: |a - b| <= 1e-05 + 0.025 * max(|a|, rms of a), and |a - b| <= 0.0083 * |a| in the norm",
    ]
    assert str(compare(a, a, rtol=0.5, atol=2)).splitlines()[-1] == "tolerated: |a - b| <= 2 + 0.5 * max(|a|, rms of a)"


def test_names_that_leave_everything_out_are_refused() -> None:
    x = recording(("fc", torch.ones(1)))
    with pytest.raises(MissingRecordError, match="names leaves every site of A out"):
        compare(x, x, names=lambda path: None)


def test_integers_and_booleans_must_be_equal() -> None:
    big = torch.tensor([2**60])
    assert one(big, big.clone()).ok
    assert one(big, big + 1).mismatches == 1
    assert one(torch.tensor([True, False]), torch.tensor([True, True])).mismatches == 1


def test_complex_numbers_and_small_floats_are_compared_with_others() -> None:
    real = torch.tensor([3.0, 4.0])
    assert one(real, real + 0j).ok
    row = one(real, torch.tensor([3 + 1j, 4 + 0j]))
    assert (row.mismatches, row.max_abs) == (1, 1.0)
    assert row.relative == pytest.approx(1 / 5)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert one(real, real.to(dtype)).max_abs == 0
        assert one(real.to(dtype), real + 8).mismatches == 2


def test_the_same_nans_and_infinities_agree_and_others_do_not() -> None:
    value = torch.tensor([NAN, INF, -INF, 1.0])
    row = one(value, value.clone())
    assert row.ok
    assert (row.max_abs, row.cosine, row.nans) == (0.0, 1.0, (1, 1))
    row = one(torch.tensor([1.0, 2.0]), torch.tensor([NAN, 2.0]))
    assert (row.status, row.mismatches, row.nans) == ("differs", 1, (0, 1))
    assert math.isnan(row.max_abs)
    assert "NaN: 0 in A, 1 in B" in row.note
    assert one(torch.tensor([INF]), torch.tensor([5.0])).mismatches == 1
    assert one(torch.tensor([5.0]), torch.tensor([INF])).mismatches == 1
    assert one(torch.tensor([INF]), torch.tensor([-INF])).mismatches == 1


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3),
        torch.zeros(0),
        torch.tensor(2.0),
        torch.randn(2, 2, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        (torch.ones(2), None, {"a": 3}),
        None,
    ],
    ids=["zeros", "empty", "scalar", "complex", "sparse", "nested", "tuple", "none"],
)
def test_every_kind_of_value_is_the_same_as_itself(value: Any) -> None:
    assert compare(recording(("x", value)), recording(("x", value))).ok


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_values_are_compared_by_what_they_stand_for() -> None:
    value = torch.tensor([1.0, -2.0, 3.0])
    quantized = torch.quantize_per_tensor(value + 0.03, 0.1, 0, torch.qint8)
    assert one(value, quantized).max_abs == pytest.approx(0, abs=1e-6)
    assert one(value, torch.quantize_per_tensor(value * 2, 0.1, 0, torch.qint8)).mismatches == 3


def test_one_zero_vector_has_no_angle_and_two_are_alike() -> None:
    assert one(torch.zeros(2), torch.zeros(2)).cosine == 1
    row = one(torch.zeros(2), torch.ones(2))
    assert (row.cosine, row.relative) == (0, INF)


def test_a_shape_that_differs_is_said() -> None:
    row = one(torch.zeros(2, 3), torch.zeros(3, 2))
    assert (row.status, row.note) == ("shape", "(2, 3) in A, (3, 2) in B")


def test_the_worst_leaf_of_a_nested_value_is_named() -> None:
    a = {"logits": torch.ones(3), "states": (torch.ones(2), torch.ones(2))}
    b = {"logits": torch.ones(3), "states": (torch.ones(2), torch.tensor([1.0, 5.0]))}
    row = one(a, b)
    assert (row.leaf, row.mismatches, row.elements, row.max_abs) == ("states.1", 1, 7, 4.0)


def test_a_structure_that_differs_is_said() -> None:
    row = one((torch.ones(2), torch.ones(2)), torch.ones(2))
    assert (row.status, row.note) == ("structure", "((2,), (2,)) in A, (2,) in B")
    assert one(None, torch.ones(2)).status == "structure"
    assert one(3, 4).status == "structure"


def test_tensors_that_pair_up_are_compared_through_another_wrapping() -> None:
    row = one((torch.ones(2),), torch.ones(2))
    assert row.ok
    assert "in A" in row.note
    assert one((torch.ones(2), None), {"logits": torch.zeros(2)}).status == "differs"


def test_rows_come_in_the_order_of_execution_call_by_call_with_what_only_one_side_has() -> None:
    x = torch.ones(1)
    a = recording(("conv", x), ("relu", x), ("drop", x), ("fc", x), ("relu", x))
    b = recording(("conv", x), ("new", x), ("relu", x), ("fc", x))
    diff = compare(a, b)
    assert [(row.site, row.status) for row in diff] == [
        ("conv", "same"),
        ("new", "only in B"),
        ("relu#0", "same"),
        ("drop", "only in A"),
        ("fc", "same"),
        ("relu#1", "only in A"),
    ]
    assert not diff.ok
    assert diff.first is not None
    assert diff.first.site == "drop"  # what only B has is no difference
    assert [row.site for row in diff.missing] == ["new", "drop", "relu#1"]


def test_a_value_that_differs_comes_before_what_is_only_missing() -> None:
    x = torch.ones(1)
    diff = compare(recording(("gone", x), ("fc", x)), recording(("fc", x + 1)))
    assert diff.first is not None
    assert diff.first.site == "fc"


def test_names_are_mapped_by_path_prefix_address_or_function() -> None:
    x = torch.ones(1)
    a = recording(("stem", x), ("layer1.0.conv", x * 2), ("relu", x * 3), ("relu", x * 4), ("drop", x))
    b = recording(("first", x), ("blocks.0.conv", x * 2), ("act1", x * 3), ("act2", x * 4))
    names = {"stem": "first", "layer1": "blocks", "relu#0": "act1", "relu#1": "act2", "drop": None}
    diff = compare(a, b, names=names)
    assert diff.ok, diff
    assert [row.other for row in diff] == ["first", "blocks.0.conv", "act1", "act2"]

    def rename(path: str) -> str | None:
        return None if path in ("relu", "drop") else path.replace("stem", "first").replace("layer1", "blocks")

    diff = compare(a, b, names=rename)
    assert [(row.site, row.status) for row in diff][:2] == [("stem", "same"), ("layer1.0.conv", "same")]
    assert [row.site for row in diff.missing] == ["act1", "act2"]


def test_the_longest_prefix_counts_and_ports_go_along() -> None:
    x = torch.ones(1)
    a = recording(("h.0.mlp:input", x), ("h.0.attn", x + 1))
    b = recording(("blocks.0.mlp:input", x), ("attention", x + 1))
    assert compare(a, b, names={"h": "blocks", "h.0.attn": "attention"}).ok


def test_a_map_that_names_nothing_is_refused_with_the_closest_name() -> None:
    rec = recording(("layer1", torch.ones(1)))
    with pytest.raises(MissingRecordError, match=r"names: 'layr1' is no site of A\. Closest: 'layer1'"):
        compare(rec, rec, names={"layr1": "x"})
    with pytest.raises(TypeError, match="names= is a dict"):
        compare(rec, rec, names=["layer1"])  # type: ignore[arg-type]


def test_an_empty_recording_is_refused_with_what_to_do() -> None:
    with pytest.raises(MissingRecordError, match=r"recording B is empty: .* inside the with block of th\.capture"):
        compare(recording(("x", 1)), Recording())
    with pytest.raises(MissingRecordError, match="recording A of Net is empty"):
        compare(Recording("Net"), recording(("x", 1)))
    silent = Recording("Net")
    silent.missing[""] = "the model never ran."
    with pytest.raises(MissingRecordError, match=r"A of Net is empty: '\(model\)' never ran: the model never ran\."):
        compare(silent, recording(("x", 1)))


def test_the_model_itself_is_read_and_named_as_it_is_printed() -> None:
    x = torch.ones(1)
    a, b = recording(("fc", x), (":input", x), ("", x)), recording(("fc", x), ("net:input", x), ("net", x))
    for key in ("(model)", ""):
        diff = compare(a, b, names={key: "net"})
        assert diff.ok
    assert diff["(model)"] is diff[""]
    assert diff["(model):input"] is diff[":input"]
    printed = [line.split()[:2] for line in str(diff).splitlines()[4:6]]
    assert printed == [["(model):input", "net:input"], ["(model)", "net"]]
    assert compare(b, a, names={"net": "(model)"}).ok
    assert compare(b, a, names=lambda path: "(model)" if path == "net" else path).ok
    with pytest.raises(MissingRecordError, match=r"names: '' is no site of A|names: '\(model\)' is no site of A"):
        compare(recording(("fc", x)), b, names={"(model)": "net"})


def test_a_diff_is_read_by_address_and_by_column() -> None:
    diff = compare(recording(("a", torch.ones(1)), ("b", 1)), recording(("a", torch.zeros(1)), ("b", 1)))
    assert len(diff) == 2
    assert diff["a"] is diff[0]
    with pytest.raises(MissingRecordError, match="no site 'aa' in this diff"):
        diff["aa"]
    assert diff.data()["site"] == ["a", "b"]
    assert diff.data()["max_abs"][0] == 1.0


def test_a_diff_prints_itself_as_a_table() -> None:
    a = recording(("conv", torch.tensor([1.0, 2.0])), ("fc", torch.tensor([4.0])), name="Net")
    b = recording(("conv", torch.tensor([1.0, 2.0])), ("fc", torch.tensor([5.0])), name="Net")
    diff = compare(a, b, notes=["a note"])
    # 4 against 5: the difference is 1/4 of the value, and 20 * log10(4) are 12.04 decibels.
    assert str(diff) == (
        "Diff of Net and Net: 2 sites, 1 differs, the first at fc\n"
        "site  max error  relative  SQNR dB    cosine  mismatches  dtype\n"
        "-------------------------------------------------------------------------------------\n"
        "conv          0         0      inf  1.000000           -  float32\n"
        "fc     1.00e+00  2.50e-01     12.0  1.000000      1 of 1  float32  differs; the first\n"
        "a note\n"
        "tolerated: |a - b| <= 1e-08 + 0.0001 * max(|a|, rms of a)"
    )
    assert "differs; the first" in diff._repr_html_()
    assert "all the same" in str(compare(a, a))


def test_a_saved_and_loaded_recording_compares_as_the_original(tmp_path: Path) -> None:
    rec = recording(
        ("relu", torch.randn(3)), ("lstm", (torch.randn(2), (torch.randn(1), None))), ("relu", torch.ones(2))
    )
    again = load(rec.save(tmp_path / "a.safetensors"))
    for diff in (compare(rec, again, rtol=0, atol=0), compare(again, rec, rtol=0, atol=0)):
        assert diff.ok
        assert [row.site for row in diff] == ["relu#0", "lstm", "relu#1"]


def test_a_shared_module_is_found_under_another_of_its_names() -> None:
    a, b = recording(("tied", torch.ones(1))), recording(("head", torch.ones(1)))
    b.other_names = lambda: [("tied", "head")]
    assert compare(a, b).ok


def test_nothing_of_the_recordings_is_changed() -> None:
    value = torch.tensor([NAN, 1.0, INF])
    a, b = recording(("x", value)), recording(("x", value.clone()))
    before: Tensor = value.clone()
    assert isinstance(compare(a, b), Diff)
    assert torch.equal(value.nan_to_num(7.0), before.nan_to_num(7.0))
    assert a.sites == [Site("x")]


def test_numbers_that_round_to_nothing_are_printed_without_a_sign() -> None:
    # As large an error as the value, at a right angle to it: 0 dB, and a cosine of 0 but for rounding.
    found = compare(recording(("x", torch.tensor([1.0, 0.0]))), recording(("x", torch.tensor([-1e-10, 1e-3]))))
    _, _, _, decibels, cosine, *_ = found.table().rows[0]
    assert (decibels, cosine) == ("0.0", "0.000000")

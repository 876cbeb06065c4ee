"""Recordings: every way to read one, what a wrong key says, how it prints, and that it reads without its model."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from torchhook._recording.address import Site
from torchhook._recording.records import Record, Recording, load
from torchhook._values import tree
from torchhook.errors import AmbiguousCallError, MissingRecordError, NeverRanError, NeverRanWarning, RecordingFileError


def recording(*rows: tuple[str, int, Any], name: str = "Net") -> Recording:
    """A recording made by hand: address, call, value."""
    made = Recording(name)
    for address, call, value in rows:
        path, _, port = address.partition(":")
        made.opened(Site(path, port=port or "output")).append((call, next(made.order), value))
    return made


@pytest.fixture
def rec() -> Recording:
    return recording(
        ("conv", 0, torch.zeros(1, 2)),
        ("relu", 0, torch.full((1, 2), 10.0)),
        ("fc:input", 0, torch.ones(3)),
        ("relu", 1, torch.full((1, 2), 11.0)),
        ("relu", 2, torch.full((1, 2), 12.0)),
    )


# -- reading ---------------------------------------------------------------------------------------


def test_a_site_that_ran_once_is_read_by_its_address(rec: Recording) -> None:
    assert rec["conv"].shape == (1, 2)
    assert rec["fc:input"].tolist() == [1, 1, 1]
    assert rec[Site("conv")] is rec["conv"]
    assert rec["conv", 0] is rec["conv#0"] is rec["conv"]


def test_a_call_is_picked_by_pair_or_by_address(rec: Recording) -> None:
    for call in range(3):
        assert rec["relu", call][0, 0] == 10 + call
        assert rec[f"relu#{call}"] is rec["relu", call]
        assert rec[Site("relu", call=call)] is rec["relu", call]
        assert rec[Site("relu"), call] is rec["relu", call]
    assert rec["relu", -1] is rec["relu", 2]
    assert rec["relu", -3] is rec["relu", 0]


def test_a_site_that_ran_more_than_once_says_how_to_pick(rec: Recording) -> None:
    with pytest.raises(AmbiguousCallError) as caught:
        rec["relu"]
    assert str(caught.value) == (
        "'relu' ran more than once: 3 records, calls 0, 1, 2. Pick one with rec['relu', 0], "
        "or take rec.all('relu') or rec.cat('relu')."
    )


def test_a_long_list_of_calls_is_cut_short() -> None:
    many = recording(*(("relu:input", call, call) for call in range(20)))
    with pytest.raises(
        AmbiguousCallError, match=r"20 records, calls 0, 1, 2, 3, 4, 5, 6, 7, …\. Pick one with rec\['relu:"
    ):
        many["relu:input"]


def test_a_call_that_was_not_kept_lists_those_that_were(rec: Recording) -> None:
    for key in (("relu", 3), "relu#3", ("relu", -4)):
        with pytest.raises(MissingRecordError, match=r"^'relu' has no record of call -?\d; kept are calls 0, 1, 2\.$"):
            rec[key]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("rel", "nothing was recorded at 'rel'. Closest: 'relu'."),
        ("fc", "nothing was recorded at 'fc'. There are: 'conv', 'relu', 'fc:input'."),
        ("conv:input", "nothing was recorded at 'conv:input'. Closest: 'fc:input', 'conv'."),
        (Site("zzz"), "nothing was recorded at 'zzz'. There are: 'conv', 'relu', 'fc:input'."),
    ],
)
def test_a_site_that_was_not_recorded_names_the_closest(rec: Recording, key: Any, message: str) -> None:
    with pytest.raises(MissingRecordError) as caught:
        rec[key]
    assert str(caught.value) == message
    assert isinstance(caught.value, KeyError)
    for read in (rec.all, rec.cat, rec.records):
        with pytest.raises(MissingRecordError, match=re.escape(message)):
            read(key)


def test_an_empty_recording_says_only_that_there_is_nothing() -> None:
    with pytest.raises(MissingRecordError, match=r"^nothing was recorded at 'fc'\.$"):
        Recording()["fc"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (3, "a recording is read by address, found int."),
        (None, "a recording is read by address, found NoneType."),
        (("relu", "1"), "rec[site, call]: the call must be an integer, found '1'."),
        (("relu", slice(1)), "rec[site, call]: the call must be an integer, found slice(None, 1, None)."),
    ],
)
def test_a_key_of_the_wrong_kind_is_a_type_error(rec: Recording, key: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        rec[key]
    assert str(caught.value) == message
    assert key not in rec


def test_all_gives_every_call_in_call_order() -> None:
    late = recording(("relu", 1, "b"), ("relu", 0, "a"), ("relu", 2, "c"))  # nested calls finish out of order
    assert late.all("relu") == ["a", "b", "c"]
    assert late.all("relu#1") == ["b"]
    assert late.all(Site("relu")) == ["a", "b", "c"]


def test_len_in_keys_and_iteration_are_about_sites(rec: Recording) -> None:
    assert len(rec) == 3
    assert rec.keys() == list(rec) == ["conv", "relu", "fc:input"]
    assert rec.sites == [Site("conv"), Site("relu"), Site("fc", port="input")]
    for key in ("relu", "relu#1", ("relu", 2), Site("relu"), "fc:input"):
        assert key in rec
    for key in ("fc", "relu#7", ("relu", 7), Site("fc"), 3, None):
        assert key not in rec


def test_items_come_call_by_call_where_a_site_ran_more_than_once(rec: Recording) -> None:
    assert [key for key, _ in rec.items()] == ["conv", "relu#0", "relu#1", "relu#2", "fc:input"]
    assert all(rec[key] is value for key, value in rec.items())
    assert [v is w for v, (_, w) in zip(rec.values(), rec.items(), strict=True)] == [True] * 5
    assert dict(rec.items())["relu#2"][0, 0] == 12


def test_records_carry_site_call_order_shape_dtype_device_and_size(rec: Recording) -> None:
    records = rec.records()
    assert [(str(r.site), r.call, r.order) for r in records] == [
        ("conv", 0, 0),
        ("relu", 0, 1),
        ("fc:input", 0, 2),
        ("relu", 1, 3),
        ("relu", 2, 4),
    ]
    assert [r.call for r in rec.records("relu")] == [0, 1, 2]
    first = records[0]
    assert (first.shape, first.dtype, first.device, first.nbytes) == ((1, 2), "float32", "cpu", 8)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ("None", "-", "-", 0)),
        ((torch.zeros(2), torch.zeros(3, dtype=torch.int8)), ("((2,), (3,))", "float32/int8", "cpu", 11)),
        ([torch.zeros(2, device="meta"), torch.zeros(1)], ("[(2,), (1,)]", "float32", "meta/cpu", 12)),
        (torch.eye(3).to_sparse(), ("(3, 3)", "float32", "cpu", 3 * 4 + 6 * 8)),
        (
            torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
            ("(2, ragged)", "float32", "cpu", 20),
        ),
    ],
    ids=["None", "tuple", "two devices", "sparse", "nested"],
)
def test_a_record_describes_any_value(value: Any, expected: tuple[str, str, str, int]) -> None:
    record = Record(Site("a"), 0, 0, value)
    assert (record.text, record.dtype, record.device, record.nbytes) == expected


def test_the_shape_of_a_record_is_that_of_its_tensor_or_of_each_by_its_leaf() -> None:
    def of(value: Any) -> Any:
        return Record(Site("a"), 0, 0, value).shape

    assert of(torch.zeros(2, 3)) == torch.Size([2, 3]) == np.zeros((2, 3)).shape == of(np.zeros((2, 3)))
    assert of(torch.zeros(())) == ()
    assert of(torch.eye(3).to_sparse()) == (3, 3)
    assert of({"h": torch.zeros(2), "c": [None, torch.zeros(1, 4)]}) == {"h": (2,), "c.1": (1, 4)}
    assert of(None) == of("text") == {}
    parts = [torch.zeros(2, 5), torch.zeros(3, 5)]
    for layout in (torch.jagged, torch.strided):
        with warnings.catch_warnings():  # that they are a prototype
            warnings.simplefilter("ignore")
            nested = torch.nested.nested_tensor(parts, layout=layout)
        assert of(nested) == (2, None, 5)


# -- cat -------------------------------------------------------------------------------------------


def test_cat_joins_the_calls_on_the_first_dimension(rec: Recording) -> None:
    assert rec.cat("relu").tolist() == [[10, 10], [11, 11], [12, 12]]
    assert rec.cat("conv").shape == (1, 2)
    assert rec.cat("relu#1").tolist() == [[11, 11]]


def test_cat_joins_nested_values_leaf_by_leaf() -> None:
    calls = [{"h": torch.full((2, 3), float(i)), "c": (torch.full((1,), float(i)), None)} for i in range(3)]
    joined = recording(*(("lstm", i, value) for i, value in enumerate(calls))).cat("lstm")
    assert torch.equal(joined["h"], torch.cat([c["h"] for c in calls]))
    assert joined["c"][0].tolist() == [0, 1, 2]
    assert joined["c"][1] is None


def test_cat_of_shapes_that_do_not_fit_says_so() -> None:
    uneven = recording(("a", 0, torch.zeros(1, 2)), ("a", 1, torch.zeros(1, 3)))
    with pytest.raises(ValueError, match=r"^a: cannot concatenate \(1, 2\), \(1, 3\) on dim 0; use rec\.all\('a'\)\.$"):
        uneven.cat("a")
    with pytest.raises(ValueError, match=r"^a: cannot concatenate \(\), \(\) on dim 0"):
        recording(("a", 0, torch.tensor(1.0)), ("a", 1, torch.tensor(2.0))).cat("a")
    with pytest.raises(ValueError, match=r"^a: the calls have different numbers of tensors; use rec\.all\('a'\)\.$"):
        recording(("a", 0, [torch.zeros(1)]), ("a", 1, [torch.zeros(1)] * 2)).cat("a")


# -- stores, aliases, waiting ----------------------------------------------------------------------


def test_a_limited_store_keeps_the_newest_and_their_call_numbers() -> None:
    ring = Recording()
    store = ring.opened(Site("relu"), limit=2)
    for call in range(5):
        store.append((call, next(ring.order), call * 10))
    assert len(store) == 2
    assert ring.all("relu") == [30, 40]
    assert ring["relu#3"] == 30
    assert ring["relu", -1] == 40
    with pytest.raises(MissingRecordError, match=r"'relu' has no record of call 0; kept are calls 3, 4\."):
        ring["relu", 0]


@pytest.mark.parametrize("limit", [0, -1, 1.5, "2"])
def test_a_limit_that_makes_no_sense_is_refused(limit: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^max_records={limit!r}: give a positive number, or None to keep every record"
    ):
        Recording().opened(Site("relu"), limit)


def test_max_records_through_the_front_door() -> None:
    model = nn.Sequential(nn.ReLU())
    with th.capture(model, "0", max_records=2) as rec:
        for n in range(5):
            model(torch.full((1,), float(n)))
    assert [t.item() for t in rec.all("0")] == [3, 4]
    assert [r.call for r in rec.records("0")] == [3, 4]
    with pytest.raises(ValueError, match="max_records=0"):
        th.capture(model, "0", max_records=0)


def test_a_store_belongs_to_a_site_and_all_of_its_calls() -> None:
    made = Recording()
    assert made.opened(Site("a")) is made.opened(Site("a", call=3))
    assert made.opened(Site("a")) is not made.opened(Site("a", port="input"))


def test_an_alias_reads_the_same_records(rec: Recording) -> None:
    rec.other_names = lambda: [("activation", "relu")]
    assert rec["activation", 1] is rec["relu", 1]
    assert rec["activation#2"] is rec["relu#2"]
    assert rec.all("activation") == rec.all("relu")
    assert "activation" in rec
    assert "activation:input" not in rec
    assert rec.keys() == ["conv", "relu", "fc:input"]


def test_a_shared_module_is_read_under_each_of_its_names() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    model.append(model[0])
    with th.capture(model, "2") as rec:
        model(torch.ones(1, 2))
    assert rec.keys() == ["2"]
    assert rec["0", 0] is rec["2", 0]
    assert rec["0#1"] is rec["2#1"]
    assert len(rec.all("0")) == 2


def test_clear_forgets_the_records_and_keeps_the_sites_open(rec: Recording) -> None:
    rec.clear()
    assert len(rec) == 0
    assert rec.keys() == []
    rec.opened(Site("relu")).append((7, next(rec.order), "new"))
    assert rec["relu"] == "new"


@pytest.mark.parametrize(
    "read",
    [
        lambda r: r["conv"],
        lambda r: r.all("conv"),
        lambda r: r.cat("conv"),
        lambda r: r.records(),
        lambda r: list(r.items()),
        lambda r: list(r.values()),
        lambda r: r.table(),
        lambda r: repr(r),
    ],
)
def test_reading_waits_for_values_that_are_still_on_their_way(rec: Recording, read: Any) -> None:
    waited: list[int] = []
    rec.wait_with(lambda: waited.append(1))
    read(rec)
    assert waited


# -- sites that never ran --------------------------------------------------------------------------


def test_a_site_that_never_ran_says_why_when_it_is_read(rec: Recording) -> None:
    rec.missing["aux"] = "a branch that was not taken?"
    with pytest.raises(NeverRanError, match=r"^'aux' was selected and never ran: a branch that was not taken\?$"):
        rec["aux"]
    assert "aux" not in rec


def test_reading_inside_the_session_before_the_model_ran_says_so() -> None:
    model = nn.Sequential(nn.ReLU())
    with th.capture(model, "0") as rec:
        with pytest.raises(NeverRanError) as caught:
            rec["0"]
        model(torch.ones(1))
    assert str(caught.value) == "'0' has not run yet: call the model inside the session, then read."
    assert rec["0"].item() == 1


def test_a_site_that_never_ran_is_reported_on_exit_and_remembered() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.ReLU(), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Branches()
    with pytest.warns(
        NeverRanWarning, match="1 selected site never ran:\n  'unused': the model ran without calling it"
    ):
        with th.capture(model, "used", "unused") as rec:
            model(torch.ones(1))
    assert list(rec.missing) == ["unused"]
    with pytest.raises(NeverRanError, match="'unused' was selected and never ran: the model ran without calling it"):
        rec["unused"]
    assert str(rec).splitlines()[-1].startswith("never ran: unused (the model ran without calling it")


# -- what a module was called with -----------------------------------------------------------------


class Takes(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("args", "kwargs", "whole"),
    [
        ((torch.ones(1),), {}, False),
        (((torch.ones(1), 2),), {}, False),
        ((torch.ones(1), 2), {}, True),
        ((torch.ones(1),), {"mask": None}, True),
        ((), {"x": torch.ones(1)}, True),
        ((), {}, True),
    ],
)
def test_one_positional_argument_is_itself_and_anything_else_has_args_and_kwargs(args, kwargs, whole: bool) -> None:
    model = nn.Module()
    model.layer = Takes()
    with th.capture(model, "layer:input") as rec:
        model.layer(*args, **kwargs)
    found = rec["layer:input"]
    if whole:
        assert isinstance(found, th.Inputs)
        assert type(found.args) is tuple
        assert tree.describe(found.args) == tree.describe(args)
        assert list(found.kwargs) == list(kwargs)
    else:
        assert type(found) is type(args[0])
        assert tree.describe(found) == tree.describe(args[0])


# -- copies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("travel", [lambda r: pickle.loads(pickle.dumps(r)), copy.deepcopy], ids=["pickle", "copy"])
def test_a_copy_holds_what_was_kept_so_far_and_fills_by_itself(rec: Recording, travel: Any) -> None:
    rec.wait_with(lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = travel(rec)
    assert str(again) == str(rec)
    assert [(r.site, r.call, r.order) for r in again.records()] == [(r.site, r.call, r.order) for r in rec.records()]
    before = len(rec.all("conv"))
    again.opened(Site("conv")).append((7, next(again.order), torch.zeros(1)))
    assert len(rec.all("conv")) == before
    assert again.records()[-1].call == 7


def test_the_copy_of_a_ring_buffer_is_one() -> None:
    rec = Recording()
    for call in range(5):
        rec.opened(Site("x"), 2).append((call, next(rec.order), call))
    again = copy.deepcopy(rec)
    again.opened(Site("x")).append((5, next(again.order), 5))
    assert (rec.all("x"), again.all("x")) == ([3, 4], [4, 5])


# -- showing ---------------------------------------------------------------------------------------

GOLDEN = """\
Recording of Net: 3 sites, 44 B
site      calls  shape   dtype    device  size
----------------------------------------------
conv          1  (1, 2)  float32  cpu      8 B
relu          3  (1, 2)  float32  cpu     24 B
fc:input      1  (3,)    float32  cpu     12 B"""


def test_a_recording_prints_as_a_table(rec: Recording) -> None:
    assert str(rec) == repr(rec) == str(rec.table()) == GOLDEN


def test_the_table_tells_of_different_shapes_other_threads_and_sites_that_never_ran() -> None:
    odd = recording(("", 0, torch.zeros(2)), ("", 1, torch.zeros(3)), ("", 2, None), name="")
    odd.elsewhere["fc"] = 4
    odd.recomputed["block"] = 1
    odd.missing["aux"] = "a branch?"
    odd.missing[""] = "never called."
    assert str(odd) == (
        "Recording: 1 site, 20 B\n"
        "site     calls  shape            dtype  device  size\n"
        "----------------------------------------------------\n"
        "(model)      3  (2,) and 2 more  -      -       20 B\n"
        "not recorded, in other threads: fc (4 times)\n"
        "recomputed in the backward pass: block (once)\n"
        "never ran: aux (a branch?)\n"
        "never ran: (model) (never called.)"
    )


def test_an_empty_recording_prints_too() -> None:
    assert str(Recording("Net")).splitlines()[0] == "Recording of Net: 0 sites, 0 B"


def test_html_escapes_names_and_values() -> None:
    evil = "<script>alert('&')</script>"
    shown = recording((evil, 0, torch.zeros(1)), (f"{evil}x", 0, evil), name=evil)
    shown.missing[evil] = evil
    shown.elsewhere[evil] = 1
    page = shown._repr_html_()
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;") >= 4


# -- saving ----------------------------------------------------------------------------------------


def test_a_saved_recording_opens_without_its_model(rec: Recording, tmp_path: Path) -> None:
    rec.other_names = lambda: [("activation", "relu")]
    rec.missing["aux"] = "a branch?"
    path = rec.save(tmp_path / "run.safetensors")
    again = load(path)
    assert str(again) == str(rec)
    assert again.keys() == rec.keys()
    assert again.model_name == "Net"
    assert again.missing == {"aux": "a branch?"}
    assert [(r.site, r.call, r.order) for r in again.records()] == [(r.site, r.call, r.order) for r in rec.records()]
    for key, value in rec.items():
        assert torch.equal(again[key], value)
    assert torch.equal(again["activation", 1], rec["relu", 1])


def test_calls_kept_by_a_ring_keep_their_numbers_through_a_file(tmp_path: Path) -> None:
    ring = recording(("relu", 3, torch.zeros(1)), ("relu", 7, torch.ones(1)))
    again = load(ring.save(tmp_path / "a"))
    assert [r.call for r in again.records("relu")] == [3, 7]
    assert again["relu#7"].item() == 1


def test_odd_names_operations_and_ports_survive_a_file(tmp_path: Path) -> None:
    made = Recording("Modèle <1>")
    sites = [Site("a/b"), Site("a", "b"), Site("x:input"), Site("x", port="input"), Site(""), Site("#1"), Site("日本")]
    for site in sites:
        made.opened(site).append((0, next(made.order), str(site)))
    again = load(made.save(tmp_path / "a"))
    assert again.sites == sites
    assert [again[site] for site in sites] == [made[site] for site in sites]
    assert again.model_name == "Modèle <1>"


def test_an_empty_recording_can_be_saved(tmp_path: Path) -> None:
    assert len(load(Recording().save(tmp_path / "a"))) == 0


def test_a_real_run_comes_back_from_its_file_to_the_bit(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.LSTM(4, 2))
    with th.capture(model, "**", "0:input") as rec:
        model(torch.randn(5, 3))
    again = th.load(rec.save(tmp_path / "a"))
    assert again.keys() == rec.keys() == ["0:input", "0", "1", "2"]
    for key in rec.keys():  # noqa: SIM118
        for new, old in zip(tree.tensors(again[key]), tree.tensors(rec[key]), strict=True):
            assert torch.equal(new, old)
    assert isinstance(again["2"], tuple)


def test_saving_waits_for_the_values(rec: Recording, tmp_path: Path) -> None:
    waited: list[int] = []
    rec.wait_with(lambda: waited.append(1))
    rec.save(tmp_path / "a")
    assert waited


def test_a_recording_whose_description_makes_no_sense_is_refused(tmp_path: Path) -> None:
    from torchhook._recording import saving

    for about in ({}, {"model": "m", "aliases": {}, "missing": {}, "records": [["oops", 0]]}):
        path = saving.save(tmp_path / "a", [1], about)
        with pytest.raises(RecordingFileError, match="cannot be understood"):
            load(path)


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_truncated_recording_is_a_clear_error(rec: Recording, tmp_path: Path, cut: int) -> None:
    path = rec.save(tmp_path / "run")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(RecordingFileError, match=r"run cannot be read: .*Write it again, or take it from a backup\."):
        load(path)


def test_one_tensor_in_several_places_is_concatenated_place_by_place() -> None:
    rec = Recording()
    store, shared = rec.opened(Site("fc")), torch.zeros(1)
    store.append((0, next(rec.order), (shared, [shared], shared)))
    store.append((1, next(rec.order), (torch.ones(1), [torch.full((1,), 2.0)], torch.full((1,), 3.0))))
    first, (second,), third = rec.cat("fc")
    assert [first.tolist(), second.tolist(), third.tolist()] == [[0, 1], [0, 2], [0, 3]]


def test_only_what_is_in_a_recording_is_offered_in_place_of_what_is_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.warns(NeverRanWarning), th.capture(model, "0", "1", "(model)") as rec:
        model[0](torch.ones(1, 2))
    with pytest.raises(MissingRecordError, match=r"^nothing was recorded at '2'\. There are: '0'\.$"):
        rec["2"]
    _, rec = th.run(model, torch.ones(1, 2), capture="(model)")
    with pytest.raises(MissingRecordError, match=r"^nothing was recorded at '2'\. There are: '\(model\)'\.$"):
        rec["2"]
    with pytest.raises(MissingRecordError, match=r"^nothing was recorded at '\(model\):input'\."):
        rec["(model):input"]
    with pytest.raises(MissingRecordError, match=r"has no record of call 1; kept is call 0\.$"):
        rec["(model)#1"]
    _, rec = th.run(model, torch.ones(1, 2), capture="0")
    with pytest.raises(MissingRecordError, match=r"at '0#x'\. '#x' names no call of '0': write '#1' for one"):
        rec["0#x"]

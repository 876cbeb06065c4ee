"""Some of the calls of a site: what is kept, edited, reported and read, against bare hooks that count."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from torchhook import edits
from torchhook.errors import (
    AmbiguousCallError,
    ExtractError,
    MissingRecordError,
    NeverRanError,
    NeverRanWarning,
    SelectorError,
)


class Loop(nn.Module):
    """One layer, called again and again."""

    def __init__(self, times: int = 5) -> None:
        super().__init__()
        self.step = nn.Linear(3, 3)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.step(x))
        return x


@pytest.fixture
def model() -> Loop:
    torch.manual_seed(0)
    return Loop()


X = torch.linspace(-1, 1, 6).reshape(2, 3)


def calls(model: Loop) -> list[Tensor]:
    """Every output, by a bare hook."""
    seen: list[Tensor] = []
    handle = model.step.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    model(X)
    handle.remove()
    return seen


RANGES = {
    "1:": slice(1, None),
    ":2": slice(None, 2),
    "1:3": slice(1, 3),
    "0:3": slice(0, 3),
    "-1": slice(-1, None),
    "-2": slice(-2, -1),
    "-3:": slice(-3, None),
    "-9:": slice(-9, None),
    "3:9": slice(3, 9),
    ":-1": slice(None, -1),
    "-3:-1": slice(-3, -1),
    "1:-1": slice(1, -1),
    "-4:3": slice(-4, 3),
}


@pytest.mark.parametrize("text", RANGES)
@pytest.mark.parametrize("port", ["", ":output"])
def test_a_capture_keeps_the_calls_that_are_named(model: Loop, text: str, port: str, tmp_path: Path) -> None:
    wanted = list(enumerate(calls(model)))[RANGES[text]]
    with th.capture(model, f"step#{text}{port}") as rec:
        model(X)
    found = rec.records("step")
    assert [record.call for record in found] == [call for call, _ in wanted]
    assert all(torch.equal(record.value, value) for record, (_, value) in zip(found, wanted, strict=True))
    assert rec.keys() == ["step"]
    assert not rec.missing
    # The same words find it again, also in a copy and in a file.
    rec.save(tmp_path / "r.safetensors")
    for one in (rec, pickle.loads(pickle.dumps(rec)), copy.deepcopy(rec), th.load(tmp_path / "r.safetensors")):
        assert len(one.all(f"step#{text}{port}")) == len(wanted)
        assert [record.call for record in one.records(f"step#{text}")] == [call for call, _ in wanted]


@pytest.mark.parametrize("text", [*RANGES, ":"])
def test_a_recording_is_read_by_the_calls_that_are_named(model: Loop, text: str) -> None:
    seen = calls(model)
    with th.capture(model, "step") as rec:
        model(X)
    if text == ":":
        with pytest.raises(MissingRecordError):
            rec.all("step#:")
        return
    chosen = RANGES[text]
    wanted = seen[chosen]
    found = rec.all(f"step#{text}")
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(rec.cat(f"step#{text}"), torch.cat(wanted))
    assert torch.equal(rec.cat(f"step#{text}", dim=1), torch.cat(wanted, 1))
    assert f"step#{text}" in rec
    assert [record.call for record in rec.records(f"step#{text}")] == list(range(5))[chosen]


def test_one_value_is_read_by_a_range_that_holds_one(model: Loop) -> None:
    with th.capture(model, "step") as rec:
        model(X)
    assert rec["step#-1"] is rec["step", -1] is rec["step", 4] is rec["step#4:"]
    assert rec["step#0:1"] is rec["step#0"]
    with pytest.raises(AmbiguousCallError, match=r"'step#1:3' has 2 records.*rec\.all\('step#1:3'\)"):
        rec["step#1:3"]
    with pytest.raises(MissingRecordError, match=r"'step' has no record of calls 5:; kept are calls 0, 1, 2, 3, 4\."):
        rec.all("step#5:")
    with pytest.raises(MissingRecordError, match="no record of call -6"):
        rec["step#-6"]
    assert "step#5:" not in rec
    assert "step#-6" not in rec


def test_ports_are_named_after_the_calls(model: Loop) -> None:
    inputs: list[Tensor] = []
    handle = model.step.register_forward_pre_hook(lambda module, args: inputs.append(args[0].clone()))
    model(X)
    handle.remove()
    with th.capture(model, "step#1::input", "step#:2") as rec:
        model(X)
    assert [r.call for r in rec.records("step:input")] == [1, 2, 3, 4]
    assert [r.call for r in rec.records("step")] == [0, 1]
    assert all(map(torch.equal, rec.all("step:input"), inputs[1:]))
    assert torch.equal(rec["step#-1:input"], inputs[4])
    assert torch.equal(rec.cat("step#3::input"), torch.cat(inputs[3:]))


def test_globs_types_and_operations_take_calls(model: Loop) -> None:
    with th.capture(model, "*#1:", "/tanh#-1") as rec:
        model(X)
    assert [r.call for r in rec.records("step")] == [1, 2, 3, 4]
    assert [r.call for r in rec.records("/tanh")] == [4]
    assert torch.equal(rec["/tanh"], model(X))


def test_several_selectors_at_one_site_keep_what_any_of_them_names_once(model: Loop) -> None:
    with th.capture(model, "step#0", "step#0:2", "step#1:3", "step#-1") as rec:
        model(X)
    assert [r.call for r in rec.records("step")] == [0, 1, 2, 4]
    with th.capture(model, "step#-1", "step#0", "step") as rec:
        model(X)
    assert [r.call for r in rec.records("step")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("text", "alive"), [("step#-1", 1), ("step#-3:", 3), ("step#:2", 2)])
def test_what_is_not_named_is_released_while_the_model_runs(model: Loop, text: str, alive: int) -> None:
    kept: list[weakref.ref[Tensor]] = []
    most = 0

    def note(value: Tensor) -> Tensor:
        nonlocal most
        made = value.detach().clone()
        kept.append(weakref.ref(made))
        most = max(most, sum(one() is not None for one in kept))
        return made

    model.times = 20
    with th.capture(model, text, transform=note, keep="reference"):
        model(X)
        gc.collect()
        assert sum(one() is not None for one in kept) == alive
        assert most <= alive + 1  # the new one comes before the old one goes


def test_a_limit_holds_beside_the_calls(model: Loop) -> None:
    for text, limit, wanted in (("step#1:", 2, [3, 4]), ("step#-3:", 2, [3, 4]), ("step#:3", 1, [2])):
        with th.capture(model, text, max_records=limit) as rec:
            model(X)
        assert [r.call for r in rec.records("step")] == wanted
    with pytest.raises(ValueError, match="max_records=0"), th.capture(model, "step#-1", max_records=0):
        pass


def test_gradients_of_some_calls_come_in_backwards_and_are_kept_right(model: Loop) -> None:
    with th.capture(model, "step:grad") as every:
        model(X).sum().backward()
    for text, wanted in (("1:", [1, 2, 3, 4]), ("-1", [4]), ("-2:", [3, 4]), (":2", [0, 1])):
        with th.capture(model, f"step#{text}:grad") as rec:
            model(X).sum().backward()
        assert [r.call for r in rec.records("step:grad")] == wanted
        for call in wanted:
            assert torch.equal(rec["step:grad", call], every["step:grad", call])


def test_an_edit_changes_the_calls_that_are_named(model: Loop) -> None:
    def by_hand(chosen: range) -> Tensor:
        count = iter(range(9))
        handle = model.step.register_forward_hook(
            lambda module, args, output: output * 2 if next(count) in chosen else None
        )
        output = model(X)
        handle.remove()
        return output

    for text, chosen in (("1:", range(1, 9)), (":2", range(2)), ("1:3", range(1, 3)), ("3", range(3, 4))):
        wanted = by_hand(chosen)
        with th.edit(model, {f"step#{text}": edits.scale(2)}):
            assert torch.equal(model(X), wanted)
    assert not torch.equal(model(X), by_hand(range(1, 9)))


@pytest.mark.parametrize("text", ["-1", "-2:", ":-1", "1:-1"])
def test_an_edit_of_the_last_calls_is_refused_with_a_way_out(model: Loop, text: str) -> None:
    with pytest.raises(SelectorError) as caught, th.edit(model, {f"step#{text}:input": edits.zero()}):
        pass
    assert str(caught.value) == (
        f"'step#{text}:input': which call is the last is known only when it is over, so that an edit would come too "
        "late. Count from the first call: 'step#0:input', 'step#1::input'."
    )


@pytest.mark.parametrize("text", ["2:2", "3:1", ":0", "-1:-2", "-1:-1"])
def test_a_range_without_calls_is_refused(model: Loop, text: str) -> None:
    with pytest.raises(SelectorError, match=f"'step#{text}' names no call"):
        th.capture(model, f"step#{text}")


def test_calls_that_never_came_are_reported(model: Loop) -> None:
    session = th.capture(model, "step#7:", "step#3:9", "step#-7", "step#5")
    with pytest.warns(NeverRanWarning, match="step#7:"), session as rec:
        model(X)
    assert rec.missing == {
        "step#7:": "it ran 5 times, so there were no calls 7:.",
        "step#-7": "it ran 5 times, so there was no call -7.",
        "step#5": "it ran 5 times, so there was no call 5.",
    }
    with pytest.warns(NeverRanWarning), th.capture(model, "step#7:") as rec:
        model(X)
    with pytest.raises(NeverRanError, match="'step#7:' was selected and never ran: it ran 5 times"):
        rec.all("step#7:")


def test_edits_of_calls_that_never_came_are_reported(model: Loop) -> None:
    with pytest.warns(NeverRanWarning, match="it ran 5 times, so there were no calls 5:8"):
        with th.edit(model, {"step#5:8": edits.zero()}):
            model(X)


def test_stop_ends_the_pass_at_the_last_call_that_is_named(model: Loop) -> None:
    ran = []
    handle = model.step.register_forward_hook(lambda *call: ran.append(1))
    _, rec = th.run(model, X, capture="step#1:3", stop=True)
    handle.remove()
    assert len(ran) == 3
    assert [r.call for r in rec.records("step")] == [1, 2]
    with pytest.raises(SelectorError, match=r"'step#1:': stop=True ends the pass at the last call.*'step#1:3'"):
        th.run(model, X, capture="step#1:", stop=True)
    with pytest.raises(SelectorError, match="known only when it is over"):
        th.run(model, X, capture="step#-1", stop=True)


def test_a_name_that_looks_like_a_range_is_a_name_where_there_is_one() -> None:
    model = nn.Module()
    model.forward = lambda x: model.get_submodule("a#1:")(x)  # type: ignore[method-assign]
    model.add_module("a#1:", nn.Linear(3, 3))
    with th.capture(model, "a#1:") as rec:
        model(X)
    assert rec["a#1:"].shape == (2, 3)
    assert rec.keys() == ["a#1:"]


def test_a_shared_layer_is_read_by_its_other_name_and_its_calls(model: Loop) -> None:
    model.other = model.step
    with th.capture(model, "step#1:") as rec:
        model(X)
    assert len(rec.all("other#2:")) == 3


def test_saved_calls_keep_their_numbers(model: Loop, tmp_path: Path) -> None:
    with th.capture(model, "step#-2:") as rec:
        model(X)
    rec.save(tmp_path / "r.safetensors")
    loaded = th.load(tmp_path / "r.safetensors")
    assert [r.call for r in loaded.records("step")] == [3, 4]
    assert torch.equal(loaded["step#-1"], rec["step#4"])
    assert len(loaded.all("step#4:")) == 1
    assert all(record.step is None and record.position is None for record in loaded.records())


def test_a_session_that_opens_again_counts_anew(model: Loop) -> None:
    session = th.capture(model, "step#-1")
    for times in (5, 3):
        model.times = times
        with session as rec:
            model(X)
        assert [r.call for r in rec.records("step")] == [times - 1]


def test_features_are_one_call_each(model: Loop) -> None:
    features, _ = th.FeatureLayers(model, ["step#-1"])(X)
    assert torch.equal(features[0], calls(model)[-1])
    for text in ("-1", "1:"):
        with pytest.raises(SelectorError, match="a feature is one call, counted from the first: 'step#1'"):
            th.FeatureLayers(model, [f"step#{text}"], attach=True)


def test_an_extraction_wants_one_call_of_a_range(model: Loop, tmp_path: Path) -> None:
    assert th.extract(model, iter([X]), "step#1:2", out=tmp_path / "a")["step#1:2"].shape == (2, 3)
    with pytest.raises(ExtractError, match=r"'step#1:' runs 4 times in one forward pass: .*'step#1' to 'step#4'"):
        th.extract(model, iter([X]), "step#1:", out=tmp_path / "b")
    with pytest.raises(ExtractError, match=r"'step:input' runs 5 times .*'step#0:input' to 'step#4:input'"):
        th.extract(model, iter([X]), "step:input", out=tmp_path / "c")


def test_a_sweep_patches_the_calls_of_a_range_one_by_one(model: Loop) -> None:
    swept = th.sweep(model, X, X.flip(0), sites="step#1:3", metric=lambda output: output[0, 0], positions=None)
    assert [str(site) for site in swept.sites] == ["step#1", "step#2"]


def test_a_feature_that_ran_several_times_is_named_with_its_port_behind_the_call(model: Loop) -> None:
    for text, one in (("step#1:", "step#0"), ("step:input", "step#0:input")):
        with pytest.raises(AmbiguousCallError, match=f"'{text}' ran . times. Say which call: '{one}' is the first"):
            th.FeatureExtractor(model, [text])(X)

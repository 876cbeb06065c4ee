"""The door: options, life, reports, and that a watched model stays as it was."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import assert_same, snapshot
from tests.watch.helpers import X, assert_close, by_numpy, hooks_on, mlp
from torchhook._watch.alarms import Alarms
from torchhook._watch.api import watch
from torchhook._watch.statistics import DEFAULT
from torchhook.errors import NeverRanWarning, SelectorError, SessionError


def test_watching_changes_neither_the_outputs_nor_the_gradients() -> None:
    model, twin = mlp(), mlp()
    expected = twin(X)
    expected.sum().backward()
    with watch(model, statistics=(*DEFAULT, "histogram")):
        found = model(X)
        found.sum().backward()
    assert torch.equal(found, expected)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("use", ["step()", "flush()", "table()", "last", "paused()", "history", "alarms"])
def test_what_needs_an_open_watch_says_how_to_open_it(use: str) -> None:
    model = mlp()
    w = watch(model, steps="manual")
    with pytest.raises(SessionError, match=rf"^{re.escape(use)}: this watch is not open yet.*with block, or call open"):
        with eval(f"w.{use}"):  # paused() begins with its block
            pass
    assert str(w) == "<watch of 6 sites: not open yet>"
    with w:
        model(X)
    assert len(w.history) == 1


def test_a_step_that_was_forgotten_is_pointed_out() -> None:
    model = mlp()
    with watch(model) as w:
        model(X)
        with pytest.raises(SessionError, match="steps='manual'"):
            w.step()
        with pytest.raises(SessionError, match="no step has been measured"):
            w.last
        w.flush()
        assert w.last["5"]["mean"] == pytest.approx(model(X).mean().item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore:watch measured nothing")
def test_a_closed_watch_that_has_nothing_says_why() -> None:
    """Not that a step is to be ended: there will be none."""
    model = mlp()
    never, late, broken = watch(model), watch(model, every=5, start=1), watch(model)
    with never:
        pass
    with late:
        model(X)
    with contextlib.suppress(ZeroDivisionError), broken:
        model(X)
        raise ZeroDivisionError
    for w, why in (
        (never, "the model was not called"),
        (late, "none of the 1 steps was a multiple of every=5"),
        (broken, "an error ended the block before a measured step was over"),
    ):
        with pytest.raises(SessionError, match=f"this watch is closed, and it measured nothing: {why}"):
            w.last
        assert f"it measured nothing: {why}" in str(w)


def test_a_watch_that_keeps_no_history_measures_and_says_so() -> None:
    model, told = mlp(), list[int]()
    with watch(model, history=0, log=lambda step, values: told.append(step)) as w:
        model(X)
    assert told == [0]
    with pytest.raises(SessionError, match="history=0 keeps no snapshot"):
        w.last


def test_a_pause_hides_validation_from_the_count_and_the_statistics() -> None:
    model = mlp()
    with watch(model, every=2) as w:
        model(X)
        with w.paused():
            assert [shot.step for shot in w.history] == [0]
            for _ in range(3):
                model(X * 100)
        model(X)
        model(X)
    assert [shot.step for shot in w.history] == [0, 2]
    assert w.history[0].sites["0"] == w.history[1].sites["0"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"log": 3}, TypeError, "expected a TensorBoard SummaryWriter"),
        ({"every": 0}, ValueError, "1 or more"),
        ({"statistics": ["men"]}, ValueError, "Closest: 'mean'"),
        ({"steps": "epochs"}, ValueError, "'calls'"),
        ({"alarms": Alarms(vanishing=0.0), "threads": "some"}, ValueError, "threads"),
    ],
)
def test_wrong_options_are_refused_and_leave_no_hook(options: Any, error: Any, message: str) -> None:
    model = mlp()
    with pytest.raises(error, match=message):
        watch(model, **options)
    assert hooks_on(model) == 0


def test_a_model_without_layers_is_the_one_layer() -> None:
    model = nn.Linear(4, 2)
    with watch(model) as w:
        output = model(torch.ones(3, 4))
        output.sum().backward()
    assert set(w.last) == {"", "weight", "bias"}
    assert w.last[""]["mean"] == pytest.approx(output.mean().item(), rel=1e-5)


def test_a_name_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(SelectorError, match="layer9"):
        watch(mlp(), "layer9")


def test_the_table_shows_the_newest_step_and_the_alarms() -> None:
    model = mlp()
    with watch(model, statistics=["mean", "update_ratio"]) as w:
        assert "no step measured yet" in str(w)
        model(X)
        model(X)
    lines = str(w.table()).splitlines()
    assert lines[0] == "step 1"
    assert lines[1].split() == ["site", "mean", "update_ratio"]
    assert [line.split()[0] for line in lines[3:]] == list(w.last)
    assert lines[3].split()[1] == f"{w.last['0']['mean']:.4g}"
    assert "<table" in w._repr_html_()


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.fails:
            raise RuntimeError("the model's own error")
        return self.second(x)


@pytest.mark.parametrize("steps", ["calls", "manual"])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_nothing_is_left_behind(steps: Any, error: type[BaseException] | None) -> None:
    model = mlp()
    before = snapshot(model)
    try:
        with watch(model, every=2, steps=steps) as w:
            for _ in range(3):
                model(X).sum().backward()
                if steps == "manual":
                    w.step()
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt) as raised:
        assert type(raised) is error  # noqa: PT017
    model.zero_grad()
    assert_same(before, snapshot(model), "model")


def test_a_forward_that_raises_passes_its_own_error_and_the_next_step_goes_on() -> None:
    model = Fragile()
    before = snapshot(model)
    with watch(model) as w:
        model.fails = True
        with pytest.raises(RuntimeError, match="the model's own error"):
            model(torch.ones(2, 3))
        model.fails = False
        model(torch.ones(2, 3))
    assert_same(before, snapshot(model), "model")
    first, second = (shot.sites for shot in w.history)
    assert "first" in first
    assert "second" not in first
    assert_close(second["second"], by_numpy([model(torch.ones(2, 3))]))
    model.fails = True
    with pytest.raises(RuntimeError, match="the model's own error"), watch(model) as w:
        model(torch.ones(2, 3))
    model.fails = False
    assert_same(before, snapshot(model), "model")
    assert len(w.history) == 0


def test_a_dropped_watch_takes_its_hooks_along_at_once() -> None:
    model = mlp()
    gc.disable()
    try:
        w = watch(model).open()
        output = model(X)
        assert hooks_on(model) > 1
        del w
        assert hooks_on(model) == 0
    finally:
        gc.enable()
    output.sum().backward()
    with pytest.warns(ResourceWarning, match=r"keep what th.watch\(...\).open\(\) returns") as caught:
        watch(model).open()
    assert caught[0].filename == __file__
    assert hooks_on(model) == 0


def test_a_watched_model_can_be_copied_and_pickled_in_the_middle_of_a_step() -> None:
    model = mlp()
    with watch(model) as w:
        model(X).sum().backward()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(X * 100).sum().backward()
        assert len(w.history) == 0
    assert len(w.history) == 1


def test_layers_that_never_ran_are_reported_once_at_the_end() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Half()
    w = watch(model).open()
    for _ in range(3):
        model(torch.ones(1, 2))
    with pytest.warns(NeverRanWarning, match=r"1 watched site never ran:\n  'unused': the model ran without") as caught:
        w.close()
    assert [w.filename for w in caught] == [__file__]


def test_a_watch_that_measured_nothing_says_so() -> None:
    model = mlp()
    for start, steps, why in ((0, 0, "the model was not called"), (1, 2, "none of the 2 steps was a multiple")):
        w = watch(model, every=10, start=start).open()
        for _ in range(steps):
            model(X)
        with pytest.warns(NeverRanWarning, match=f"measured nothing: {why}") as caught:
            w.close()
        assert [w.filename for w in caught] == [__file__]

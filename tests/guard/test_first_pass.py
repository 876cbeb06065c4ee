"""The ways out of a run other than returning, and what else may be around it."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.guard.faults import NAN, Apply, at_zero, ones
from torchhook._guard.api import guard
from torchhook.errors import GuardError, GuardWarning


def picky(x: Tensor) -> Tensor:
    if x.isnan().any():
        raise ValueError("expected numbers")
    return x


def test_an_error_that_a_nan_led_to_is_told_with_what_made_the_nan() -> None:
    model = nn.Sequential(Apply(lambda x: x / x), Apply(picky))
    with pytest.raises(GuardError, match="'0/div#0' made 8 NaN") as caught:
        with guard(model):
            model(ones() * 0)
    assert isinstance(caught.value.__cause__, ValueError)
    g = guard(model).open()
    with pytest.raises(ValueError, match="expected numbers") as bare:
        model(ones() * 0)
    with pytest.warns(GuardWarning, match="in a call that ended with an error of its own: '0/div#0' made 8 NaN"):
        g.close()
    notes = getattr(bare.value, "__notes__", ["the guard saw NaN in what '0' was given or returned"])  # Python 3.11
    assert "the guard saw NaN in what '0' was given or returned" in "".join(notes)
    assert [str(f.site) for f in g.findings] == ["0/div#0"]


def test_an_error_without_a_nan_passes_unchanged_and_the_guard_goes_on() -> None:
    def maybe(x: Tensor) -> Tensor:
        if x[0, 0] == 7:
            raise KeyError("mine")
        return x

    model = nn.Sequential(nn.Identity(), Apply(maybe), Apply(lambda x: x / 0))
    with guard(model, action="record") as g:
        with pytest.raises(KeyError) as caught:
            model(ones() * 7)
        model(ones())
    assert not getattr(caught.value, "__notes__", [])
    assert [(str(f.site), f.run) for f in g.findings] == [("2/div#0", 1)]


def test_an_error_that_the_model_catches_is_its_own() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails = nn.Sequential(Apply(picky))
            self.last = Apply(lambda x: x / 0)

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(ValueError):
                self.fails(x * NAN)
            return self.last(x)

    model = Tries()
    with guard(model, action="record") as g:
        model(ones())
    assert "last/div#0" in [str(f.site) for f in g.findings]


def test_a_model_called_while_an_error_is_handled_is_guarded_as_ever() -> None:
    model = nn.Sequential(Apply(lambda x: x / 0))
    with pytest.raises(GuardError) as caught:  # noqa: PT012
        with guard(model):
            try:
                raise KeyError("before")
            except KeyError:
                model(ones())
    assert isinstance(caught.value.__context__, KeyError)


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.armed = True

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise KeyboardInterrupt
        return x


def test_after_an_interrupt_the_next_run_is_a_new_one() -> None:
    model = nn.Sequential(Apply(lambda x: x / 0), Interrupted())
    with guard(model, action="record") as g:
        with pytest.raises(KeyboardInterrupt):
            model(ones())
        model[1].armed = False
        model[0].function = lambda x: x.log()
        model(ones() * 0)
    first, second = g.findings
    assert "'0#0' returned +Inf; what made it could not be found, because the pass was ended early" in str(first)
    assert str(second.site) == "0/log#1"


def test_a_run_that_a_session_stops_is_told_when_the_next_begins() -> None:
    model = nn.Sequential(Apply(lambda x: x / 0), nn.Identity(), nn.Linear(4, 4))
    with guard(model, action="record") as g:
        th.run(model, ones(), capture="1", stop=True)
        model[0].function = lambda x: x
        model(ones())
    assert [(str(f.site), f.run) for f in g.findings] == [("0#0", 0)]


def test_other_threads_are_not_guarded_and_disturb_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x * x), nn.Linear(4, 4))
    stop = threading.Event()

    def elsewhere() -> None:
        while not stop.is_set():
            model(ones() * NAN)

    thread = threading.Thread(target=elsewhere)
    with guard(model, action="record") as g:
        thread.start()
        for i in range(30):
            model(ones() * (NAN if i == 20 else 1))
        stop.set()
        thread.join()
    assert [(f.kind, f.run, f.times) for f in g.findings] == [("input", 20, 1)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_answer_is_the_same(mode: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), Apply(lambda x: x / 0), nn.Linear(4, 4))
    for _ in range(2):
        with mode(), guard(model, action="record") as g:
            for _ in range(3):
                model(ones())
        assert [(str(f.site), f.times) for f in g.findings] == [("2/div#0", 3)]
    with guard(model, action="record") as g:  # one guard in and out of the mode
        with mode():
            model(ones())
        model(ones())
    assert g.findings[0].times == 2


def test_inside_torch_func_what_is_behind_the_wrappers_is_read() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x / 0))
    with guard(model, action="record") as g:
        torch.func.vmap(model)(torch.ones(3, 4))
    assert [str(finding.site) for finding in g.findings] == ["1/div#0"]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, NAN]).to_sparse(),
        torch.tensor([1.0, NAN]).to(torch.float8_e5m2),
        torch.tensor([1.0, complex(0, NAN)]),
        torch.nested.nested_tensor([torch.ones(2), torch.tensor([NAN])], layout=torch.jagged),
        torch.tensor([1.0, NAN], dtype=torch.float16),
    ],
    ids=["sparse", "float8", "complex", "nested", "half"],
)
def test_values_of_every_kind_are_flagged(value: Tensor) -> None:
    model = nn.Sequential(Apply(lambda x: value.clone() if x is not None else x), Apply(lambda x: ones()))
    with guard(model, action="record") as g:
        model(ones())
    assert [f.site.path for f in g.findings] == ["0"]


def test_empty_and_unreadable_values_pass() -> None:
    model = nn.Sequential(
        Apply(lambda x: (x[:0], torch.empty(2, device="meta"), x.long(), None)), Apply(lambda t: t[0])
    )
    with guard(model) as g:
        model(ones())
    assert g.findings == []


def test_checkpoints_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](checkpoint(self[1], self[0](x), use_reentrant=False))

    model = Checkpointed(*at_zero(lambda x: x + 1)(True))
    with guard(model) as g:
        for _ in range(3):
            model(ones()).sum().backward()
    assert g.findings == []


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_guarded() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x / (x - x)))
    compiled = torch.compile(model, backend="eager")
    compiled(ones())
    with guard(compiled, action="record") as g:
        compiled(ones())
    assert [str(f.site) for f in g.findings] == ["1/div#0"]


def test_buffers_too_large_to_copy_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchhook._guard import runs

    monkeypatch.setattr(runs, "_MOST_BYTES", 8)
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), Apply(lambda x: x / 0))
    before = model[0].running_mean
    with guard(model, action="record") as g:
        model(torch.randn(3, 4))
    assert model[0].running_mean is before
    assert g.findings

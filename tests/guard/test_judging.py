"""The guard names what made the first NaN or Inf, and says nothing about models that make none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.guard.faults import FAULTS, Apply, around, one_zero, ones, run
from torchhook.errors import GuardError
from torchhook.guard import guard


@pytest.mark.parametrize("name", FAULTS)
def test_the_guard_names_the_producer(name: str) -> None:
    case = FAULTS[name]
    torch.manual_seed(0)
    model, inputs = case.model(True), case.inputs(True)
    with pytest.raises(GuardError) as caught:  # noqa: PT012
        with guard(model):
            output = run(model, inputs)
            case.loss(output).backward()
    finding = caught.value.finding
    assert (finding.kind, str(finding.site)) == (case.kind, case.site), finding
    assert finding.phase == ("backward" if case.backward else "forward")
    assert finding.run == 0


@pytest.mark.parametrize("name", FAULTS)
def test_its_clean_twin_raises_no_alarm(name: str) -> None:
    case = FAULTS[name]
    torch.manual_seed(0)
    model, inputs = case.model(False), case.inputs(False)
    with guard(model) as g:
        output = run(model, inputs)
        if output.requires_grad:
            case.loss(output).backward()
    assert g.findings == []
    assert torch.isfinite(output).all()  # or the twin is not clean


@pytest.mark.parametrize("name", FAULTS)
def test_recording_finds_the_same_and_lets_the_model_finish(name: str) -> None:
    case = FAULTS[name]
    torch.manual_seed(0)
    model, inputs = case.model(True), case.inputs(True)
    with guard(model, action="record") as g:
        output = run(model, inputs)
        if output.requires_grad:
            case.loss(output).backward()
    assert [(f.kind, str(f.site)) for f in g.findings] == [(case.kind, case.site)]


def test_two_producers_are_two_findings_and_repeats_are_counted() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Apply(lambda x: x.log()), Apply(lambda x: x / x)
            self.join = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.join(torch.cat([self.a(x), self.b(x)], -1))

    model = Two()
    with guard(model, action="record") as g:
        for _ in range(3):
            model(one_zero(True))
    assert [(str(f.site), f.times) for f in g.findings] == [("a/log#0", 3), ("b/div#0", 3)]


def test_the_run_is_counted_and_calls_go_on() -> None:
    model = around(lambda x: x.log())
    with guard(model, action="record") as g:
        for bad in (False, False, True):
            model(one_zero(bad))
    assert (g.findings[0].run, str(g.findings[0].site)) == (2, "1/log#2")


def test_memory_that_was_not_filled_yet_is_no_finding() -> None:
    def fill(x: Tensor) -> Tensor:
        out = torch.empty(3, 4)
        out[0] = x[0]
        out[1].copy_(x[1])
        out[2:] = 0
        return out * 2

    model = nn.Sequential(Apply(fill), nn.Linear(4, 4))
    torch.use_deterministic_algorithms(True)  # fills empty memory with NaN
    try:
        with guard(model) as g:
            model(ones())
    finally:
        torch.use_deterministic_algorithms(False)
    assert g.findings == []


def test_an_infinity_that_never_leaves_its_module_is_no_finding() -> None:
    model = nn.Sequential(Apply(lambda x: torch.where(x > 0, x.reciprocal(), 0)), nn.Linear(4, 4))
    with guard(model) as g:
        model(one_zero(True))
    assert g.findings == []

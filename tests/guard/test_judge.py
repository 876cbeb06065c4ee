"""The guard names what made the first NaN or Inf, and says nothing about models that make none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.guard.faults import FAULTS, NAN, Apply, around, one_zero, ones, run
from torchhook._guard.api import Guard, guard
from torchhook.errors import GuardError


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
        rows = torch.empty(12).view(3, 4)  # only the view is left
        rows.index_copy_(0, torch.tensor([2, 0]), x)
        rows.t().mul_(2)
        rows[1] = out[1]
        return out * 2 + rows

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


def test_an_infinity_written_to_memory_without_values_is_followed() -> None:
    def fill(x: Tensor) -> Tensor:
        out = x.new_empty(2, 4)
        out[:, :2] = x[:, :2].exp()
        out[:, 2:] = 1
        return out

    model = nn.Sequential(Apply(fill), nn.Linear(4, 4))
    with guard(model, action="record") as g:
        model(ones() * 100)
    assert [(f.kind, str(f.site)) for f in g.findings] == [("op", "0/exp#0")]


def _found(g: Guard) -> list[tuple[str, str, int]]:
    return [(f.kind, str(f.site), f.run) for f in g.findings]


def test_a_finding_hides_no_bad_loss_of_a_later_run() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with guard(model, action="record") as g:
        model(ones() * NAN)
        for _ in range(2):
            (model(ones()).mean() * NAN).backward()
    assert _found(g) == [("input", "#0:input", 0), ("loss", "#1:grad", 1)]
    assert g.findings[1].times == 2


def test_a_finding_hides_no_value_from_outside_in_a_later_run() -> None:
    extra = torch.zeros(4)
    model = nn.Sequential(Apply(lambda x: 1 / x), Apply(lambda x: x + extra))
    with guard(model, action="record") as g:
        model(ones() * 0)
        extra += NAN
        model(ones())
    assert _found(g) == [("op", "0/div#0", 0), ("outside", "1/add#1:input", 1)]


@pytest.mark.parametrize("thorough", [False, True])
def test_a_finding_hides_no_bad_gradient_of_a_later_backward_pass(thorough: bool) -> None:
    kept: list[Tensor] = []
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: kept.append(x) or x), nn.Linear(4, 4))
    with guard(model, action="record", thorough=thorough) as g:
        model(ones() * NAN)
        model(ones())
        (kept[1] * NAN).sum().backward()  # goes around the output
        model(ones()).sum().backward()
    # A gradient that goes around the output is first seen where it arrives, unless every step is listened to.
    where = "0/linear#1:grad" if thorough else "0.bias:grad"
    assert _found(g) == [("input", "#0:input", 0), ("outside", where, 1)]


def test_a_bad_gradient_that_flows_through_several_runs_is_found_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x.relu()))
    with guard(model, action="record") as g:
        state = ones()
        for _ in range(3):
            state = model(state)
        (state * 0).sum().sqrt().backward()
    assert _found(g) == [("loss", "#2:grad", 2)]


def test_a_bad_gradient_that_reaches_a_parameter_around_the_model_is_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.zeros_(model[0].weight)
    with guard(model, action="record") as g:
        (model(ones()).square().mean() + model[0].weight.square().sum().sqrt()).backward()
    assert _found(g) == [("outside", "0.weight:grad", 0)]
    assert "Look at the loss" in str(g.findings[0])
    assert not model[0].weight.grad.isfinite().all()
    with guard(model, exclude="0") as g:
        (model(ones()).square().mean() + model[0].weight.square().sum().sqrt()).backward()
    assert g.findings == []


def test_a_bad_gradient_penalty_is_found() -> None:
    critic = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    for bad in (True, False):
        nn.init.constant_(critic[0].weight, 1.0)
        nn.init.constant_(critic[2].weight, 0.0 if bad else 1.0)
        critic.zero_grad()
        x = ones().requires_grad_()
        with guard(critic, action="record") as g:
            (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            penalty = (slope.square().sum(-1).sqrt() - 1).square().mean()
            (critic(ones()).mean() + penalty).backward()
        assert [f.kind for f in g.findings] == ["outside"] * bad
        assert critic[0].weight.grad.isfinite().all() is not bad
        assert all(str(f.site) in ("0.weight:grad", "2.weight:grad") for f in g.findings)


def test_a_part_of_a_flattened_parameter_is_named_by_its_owner() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.ones(8)
            self.a, self.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
            flat[6] = NAN

        def forward(self, x: Tensor) -> Tensor:
            return x * self.a.sum() + self.b[2:].sum()

    model = Flat()
    with guard(model, action="record") as g:
        model(ones())
    assert _found(g) == [("parameter", "b", 0)]

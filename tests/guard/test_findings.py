"""What a finding says: the numbers, the place, and what was used first."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchhook as th
from tests.guard.faults import FAULTS, Apply, around, ones
from torchhook._guard.api import guard
from torchhook._recording.address import Site
from torchhook.errors import GuardError


def test_the_finding_holds_the_numbers() -> None:
    model = around(lambda x: x.log())
    with pytest.raises(GuardError) as caught:
        with guard(model):
            model(torch.tensor([[0.0, 1.0, -2.0, 4.0]]))
    finding = caught.value.finding
    (given,), (made,) = finding.inputs, finding.outputs
    numbers = torch.tensor([0.0, 1.0, -2.0, 4.0])
    assert (given.shape, given.dtype, given.min, given.max) == ((1, 4), torch.float32, -2.0, 4.0)
    assert given.mean == pytest.approx(numbers.mean().item())
    assert given.std == pytest.approx(numbers.std(correction=0).item())
    assert given.finite
    assert (made.nan, made.inf, made.neg_inf, made.min) == (1, 0, 1, 0.0)
    assert made.max == pytest.approx(math.log(4))
    assert finding.site == Site("1", "log", 0)
    assert finding.stack == ["model (Sequential)", "1 (Apply)"]
    text = str(caught.value)
    for part in (
        "'1/log#0' made 1 NaN, 1 -Inf out of finite inputs",
        "forward pass of run 0",
        "std 2.165",
        "1 (Apply)",
    ):
        assert part in text


def test_an_in_place_operation_shows_the_input_as_it_was() -> None:
    model = around(lambda x: x.log_())
    with guard(model, action="record") as g:
        model(torch.tensor([[1.0, 2.0, -3.0, 4.0]]))
    assert (g.findings[0].inputs[0].min, g.findings[0].inputs[0].max) == (-3.0, 4.0)


def test_a_weight_is_shown_with_its_first_user() -> None:
    case = FAULTS["weight"]
    model = case.model(True)
    with guard(model, action="record") as g:
        model(ones())
    (finding,) = g.findings
    assert finding.used_by == Site("1.0", "linear", 0)
    assert {s.name: s.nan for s in finding.weights} == {"1.0.weight": 1, "1.0.bias": 0}
    assert str(finding).startswith("parameter '1.0.weight' already holds 1 NaN; '1.0/linear#0' was the first to use it")


def test_sites_of_a_finding_are_strings_that_know_their_parts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    nn.init.constant_(model[0].bias, math.nan)
    with guard(model, action="record") as g:
        model(ones())
    (finding,) = g.findings
    assert finding.site == "0.bias"
    assert finding.used_by == "0/linear#0"
    assert (finding.used_by.path, finding.used_by.op, finding.used_by.call) == ("0", "linear", 0)
    assert all(type(line) is str for line in finding.stack)
    assert {finding.site: 1}["0.bias"] == 1


def test_a_finding_prints_as_a_story_and_lists_as_a_line() -> None:
    model = Apply(lambda x: x.log())
    with guard(model, action="record") as g:
        for _ in range(2):
            model(torch.tensor([0.0, 1.0]))
    assert repr(g.findings) == "[<Finding: '(model)/log#0' made 1 -Inf out of finite inputs. 2 times.>]"
    assert str(g.findings[0]).splitlines() == [
        "'(model)/log#0' made 1 -Inf out of finite inputs.",
        "  in the forward pass of run 0, inside model (Apply)",
        "  input: 0 (2,) float32: min 0, max 1, mean 0.5, std 0.5, all finite",
        "  output (2,) float32: min 0, max 0, mean 0, std 0, 1 -Inf",
        "  To see the values: th.capture(model, '(model)/log', '(model)/log:input').",
    ]
    _, rec = th.run(model, torch.tensor([2.0]), capture=["(model)/log", "(model)/log:input"])  # as it says
    assert rec["/log:input"].item() == 2.0


def grown(scale: float) -> nn.Sequential:
    """Hands a large gradient back to a layer of large weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.constant_(model[1].weight, scale)
    return model


@pytest.mark.parametrize(
    ("model", "factor", "dtype", "overflows"),
    [
        (lambda: grown(3e13), 8e27, torch.float32, True),
        (lambda: grown(3e4), 30.0, torch.float16, True),
        (lambda: Apply(lambda x: (x * 1e-30) * 1e30), 1e30, torch.float32, True),
        (lambda: Apply(lambda x: F.conv1d(x[None], torch.full((1, 1, 1), 1e20))), 1e30, torch.float32, True),
        (lambda: Apply(lambda x: (x * 0 + 1e-20).reciprocal()), 1.0, torch.float32, False),
        (lambda: Apply(lambda x: (x * 0).sqrt()), 1.0, torch.float32, False),
        (lambda: Apply(lambda x: (x - x).norm()), 1.0, torch.float32, None),
        (lambda: Apply(lambda x: torch.cat([x * 0, x * 10]).sqrt()), 1.0, torch.float16, False),
    ],
)
def test_an_overflow_is_not_taken_for_an_infinite_derivative(
    model: Callable[[], nn.Module], factor: float, dtype: torch.dtype, overflows: bool | None
) -> None:
    made = model().to(dtype)
    x = torch.ones(1, 4, dtype=dtype, requires_grad=True)
    with guard(made, action="record") as g:
        (made(x) * factor).sum().backward()
    findings = [f for f in g.findings if f.phase == "backward"]
    assert len(findings) == (overflows is not None)  # the norm at 0 has a gradient of 0
    for finding in findings:
        assert finding.inputs[0].finite
        assert ("overflow" in str(finding)) is overflows
        assert ("learning rate" in str(finding)) is overflows
        assert ("roots, norms and logs at 0" in str(finding)) is not overflows


def test_a_gradient_is_shown_with_what_came_in_and_what_was_kept() -> None:
    case = FAULTS["root at 0"]
    model = case.model(True)
    with pytest.raises(
        GuardError, match=r"'1/sqrt#0:grad_input' made .*Inf.* out of a finite gradient \(SqrtBackward0\)"
    ):
        with guard(model) as g:
            case.loss(model(ones())).backward()
    (finding,) = g.findings
    assert finding.inputs[0].finite
    assert not finding.outputs[0].finite
    assert (finding.weights[0].min, finding.weights[0].max) == (0.0, 0.0)

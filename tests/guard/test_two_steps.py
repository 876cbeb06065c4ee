"""The cheap first pass and the repetition give the answers of the thorough way, to the letter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.guard.faults import FAULTS, INF, NAN, Apply, at_zero, ones, run
from torchhook._guard import repetition
from torchhook._guard.api import guard


def found(model: nn.Module, inputs: Any, case: Any, thorough: bool) -> list[str]:
    torch.manual_seed(0)
    with guard(model, action="record", thorough=thorough) as g:
        output = run(model, inputs)
        if output.requires_grad:
            case.loss(output).backward()
    return [str(finding) for finding in g.findings]


@pytest.mark.parametrize("name", FAULTS)
def test_a_finding_reads_the_same_in_both_ways(name: str) -> None:
    case, said = FAULTS[name], []
    for thorough in (False, True):
        torch.manual_seed(0)
        said.append(found(case.model(True), case.inputs(True), case, thorough))
    assert said[0] == said[1]
    assert said[0]

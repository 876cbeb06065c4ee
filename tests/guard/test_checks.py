"""Looking at tensors: of any type, and none whose sum alone overflows is a finding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.guard.faults import Apply, ones
from torchhook._guard.api import guard


def test_integers_and_booleans_are_never_a_finding() -> None:
    model = nn.Sequential(Apply(lambda x: (x > 0, x.long() * 2**62, x.to(torch.uint8))), Apply(lambda t: t[1] // 3))
    with guard(model) as g:
        model(ones() * 3)
    assert g.findings == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_sum_that_overflows_is_no_finding(dtype: torch.dtype) -> None:
    model = nn.Sequential(Apply(lambda x: x * 1), nn.ReLU())
    with guard(model) as g:
        model(torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype))
    assert g.findings == []


def test_a_complex_tensor_is_shown_by_its_parts_even_where_its_conjugate_is_only_noted() -> None:
    model = Apply(lambda x: torch.complex(x, 2 * x).conj() / 0)
    with guard(model, action="record") as g:
        model(ones())
    (finding,) = g.findings
    assert str(finding.site) == "/div#0"
    assert (finding.inputs[0].min, finding.inputs[0].max, finding.inputs[0].mean) == (-2.0, 1.0, -0.5)

"""Looking at tensors: of any type, and none whose sum alone overflows is a finding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.guard.faults import Apply, ones
from torchhook._guard.api import guard
from torchhook._guard.checks import describe


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


def test_what_cannot_be_read_is_described_without_numbers() -> None:
    packed = torch.zeros(2, dtype=torch.uint8).view(torch.bits8)
    for tensor in (packed, torch.empty(2, device="meta"), torch.ones(2, dtype=torch.int64)):
        found = describe("0", tensor)
        assert (found.name, found.shape, found.dtype, found.min, found.finite) == ("0", (2,), tensor.dtype, None, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float64], ids=str)
def test_a_tensor_is_described_by_its_finite_values(dtype: torch.dtype) -> None:
    found = describe("x", torch.tensor([[1.0, 3.0], [math.inf, math.nan]]).to(dtype))
    assert (found.min, found.max, found.mean, found.std) == (1.0, 3.0, 2.0, 1.0)
    assert (found.nan, found.inf, found.neg_inf) == (1, 1, 0)
    assert str(found) == (f"x (2, 2) {str(dtype).removeprefix('torch.')}: min 1, max 3, mean 2, std 1, 1 NaN, 1 +Inf")


def test_a_complex_tensor_is_shown_by_its_parts_even_where_its_conjugate_is_only_noted() -> None:
    model = Apply(lambda x: torch.complex(x, 2 * x).conj() / 0)
    with guard(model, action="record") as g:
        model(ones())
    (finding,) = g.findings
    assert str(finding.site) == "/div#0"
    assert (finding.inputs[0].min, finding.inputs[0].max, finding.inputs[0].mean) == (-2.0, 1.0, -0.5)

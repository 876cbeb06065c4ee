"""Attention as a site, with the fused kernels of a CUDA device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchhook as th

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # tests.gpu runs without pytest too
    pass

OP = "scaled_dot_product_attention"


class Attends(nn.Module):
    """Notes what attention gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.right: list[Tensor] = []

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        x = x * self.weight.to(x.dtype)
        found = F.scaled_dot_product_attention(x, x.relu(), x, attn_mask=mask)
        self.right.append(found.detach().clone())
        return found.mul_(2) if not found.requires_grad else found * 2


def inputs(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, 3, 128, 64, device="cuda", dtype=dtype)


def assert_right(rec: th.Recording, model: Attends) -> None:
    found = rec.all(f"/{OP}")
    assert len(found) == len(model.right) > 0
    assert all(torch.equal(one, right.to(one.device)) for one, right in zip(found, model.right, strict=True))


def test_every_fused_kernel_is_heard_of() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        for device in (None, "cpu"):
            model = Attends().cuda()
            with sdpa_kernel(backend), torch.no_grad(), th.capture(model, f"/{OP}", device=device) as rec:
                for _ in range(4):
                    model(inputs())
            assert_right(rec, model)


def test_gradients_are_those_without_a_session() -> None:
    model, twin, x = Attends().cuda(), Attends().cuda(), inputs()
    with th.capture(model, f"/{OP}") as rec:
        for _ in range(2):
            model(x).float().square().sum().backward()
    for _ in range(2):
        twin(x).float().square().sum().backward()
    assert_right(rec, model)
    torch.testing.assert_close(model.weight.grad, twin.weight.grad, rtol=2e-2, atol=1e-2)


def test_causal_biases_that_call_kernels_of_their_own_are_heard() -> None:
    from torch.nn.attention.bias import causal_lower_right

    model = Attends().cuda()
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        for _ in range(3):
            model(inputs(), causal_lower_right(128, 128))
    assert_right(rec, model)


def test_a_model_on_a_stream_of_its_own_is_heard_of() -> None:
    model, stream = Attends().cuda(), torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream), th.capture(model, f"/{OP}") as rec:
        for _ in range(5):
            model(inputs())
    torch.cuda.synchronize()
    assert_right(rec, model)

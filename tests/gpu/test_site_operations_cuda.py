"""Attention told by the dispatcher, with the fused kernels of a CUDA device."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchhook as th
from torchhook._torch import dispatcher

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # tests.gpu runs without pytest too
    pass

OP = "scaled_dot_product_attention"


class Attends(nn.Module):
    """Notes what attention gives it, and how it was listened to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.right: list[Tensor] = []
        self.told: list[bool] = []

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        x = x * self.weight.to(x.dtype)
        found = F.scaled_dot_product_attention(x, x.relu(), x, attn_mask=mask)
        self.told.append(dispatcher._is_on(dispatcher._key))
        self.right.append(found.detach().clone())
        return found.mul_(2) if not found.requires_grad else found * 2


def inputs(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, 3, 128, 64, device="cuda", dtype=dtype)


def assert_right(rec: th.Recording, model: Attends) -> None:
    found = rec.all(f"/{OP}")
    assert len(found) == len(model.right) > 0
    assert all(torch.equal(one, right.to(one.device)) for one, right in zip(found, model.right, strict=True))


def test_every_fused_kernel_is_told_of() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sys.modules.pop("torch.nn.attention.bias", None)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        for device in (None, "cpu"):
            model = Attends().cuda()
            with sdpa_kernel(backend), torch.no_grad(), th.capture(model, f"/{OP}", device=device) as rec:
                for _ in range(4):
                    model(inputs())
            assert model.told == [False, True, True, True], (backend, model.told)
            assert_right(rec, model)


def test_gradients_are_those_without_a_session() -> None:
    sys.modules.pop("torch.nn.attention.bias", None)
    model, twin, x = Attends().cuda(), Attends().cuda(), inputs()
    with th.capture(model, f"/{OP}") as rec:
        for _ in range(2):
            model(x).float().square().sum().backward()
    for _ in range(2):
        twin(x).float().square().sum().backward()
    assert model.told == [False, True]
    assert_right(rec, model)
    torch.testing.assert_close(model.weight.grad, twin.weight.grad, rtol=2e-2, atol=1e-2)


def test_causal_biases_that_call_kernels_of_their_own_are_heard() -> None:
    sys.modules.pop("torch.nn.attention.bias", None)
    model = Attends().cuda()
    with torch.no_grad(), th.capture(model, f"/{OP}"):
        model(inputs())  # with plain tensors, so that it might be told of from now on
    from torch.nn.attention.bias import causal_lower_right

    model.right.clear()
    with torch.no_grad(), th.capture(model, f"/{OP}") as rec:
        for _ in range(3):
            model(inputs(), causal_lower_right(128, 128))
    assert_right(rec, model)


def test_a_model_on_a_stream_of_its_own_is_told_of() -> None:
    sys.modules.pop("torch.nn.attention.bias", None)
    model, stream = Attends().cuda(), torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream), th.capture(model, f"/{OP}") as rec:
        for _ in range(5):
            model(inputs())
    torch.cuda.synchronize()
    assert model.told[1:] == [True] * 4
    assert_right(rec, model)

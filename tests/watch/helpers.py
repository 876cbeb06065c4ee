"""What the tests of ``watch`` share: statistics by their definitions, and a small model that works in place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

VALUES = ("mean", "std", "min", "max", "zeros", "nans", "norm")


def by_numpy(tensors: list[Tensor]) -> dict[str, float]:
    """The statistics of several tensors taken together, by their definitions, in double precision."""
    x = np.concatenate([t.detach().double().numpy().ravel() for t in tensors])
    with np.errstate(invalid="ignore"):
        mean, std = x.mean(), x.std()
    return {
        "mean": mean,
        "std": std,
        "min": x.min(),
        "max": x.max(),
        "zeros": (x == 0).mean(),
        "nans": float(np.isnan(x).sum()),
        "norm": math.sqrt((x**2).sum()),
    }


def assert_close(found: dict[str, Any], expected: dict[str, float], where: str = "", rel: float = 1e-5) -> None:
    for name, value in expected.items():
        # Single precision: the mean, and the deviations from it, are as exact as the size of the values allows.
        size = max(abs(expected["min"]), abs(expected["max"])) if name in ("mean", "std") else 0.0
        slack = 1e-7 + 1e-6 * (size if math.isfinite(size) else 0.0)
        assert found[name] == pytest.approx(value, rel=rel, abs=slack, nan_ok=True), f"{where} {name}"


def mlp(inplace: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(inplace), nn.Conv2d(8, 4, 3), nn.ReLU(inplace), nn.Flatten(), nn.Linear(64, 5)
    )


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def hooks_on(model: nn.Module) -> int:
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return modules + sum(len(p._backward_hooks or ()) for p in model.parameters())


def square_norm(tensor: Tensor) -> float:
    return math.sqrt((tensor.detach().double() ** 2).sum().item())

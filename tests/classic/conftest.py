"""The model and the input of the tests of the classic names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.classic.toys import Net


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.rand(2, 30, generator=torch.Generator().manual_seed(1))

"""Scenarios: training without this library, which all others take for granted."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.distributed.models import WRAPPED, batch, gradients, loss, share
from tests.distributed.ranks import each


def trained(kind: str) -> Any:
    model = WRAPPED[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(share(batch()))).backward()
        optimizer.step()
    return gradients(model), "torchhook" in sys.modules


SCENARIOS = each(WRAPPED, trained)

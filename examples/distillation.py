"""Teach a small network what a large one computes inside: values of both, those of the student on the graph."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th


def distill(teacher: nn.Module, student: nn.Module, batches: Iterable[Tensor], pairs: dict[str, str]) -> list[float]:
    """Train the student's sites (keys) towards the teacher's (values), which have the same shapes; the losses."""
    optimizer, losses = torch.optim.Adam(student.parameters(), lr=1e-3), []
    above = th.capture(teacher, list(pairs.values()), stop=True)
    below = th.capture(student, list(pairs), keep="live", stop=True)
    for x in batches:
        with torch.no_grad():
            _, wanted = above.run(x)
        _, found = below.run(x)
        loss = sum((F.mse_loss(found[mine], wanted[other]) for mine, other in pairs.items()), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

"""Scenarios: watching a model that trains on several ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import distributed, nn

import torchhook as th
from tests.distributed.models import batch, ddp, fsdp1, fsdp2, loss, share


def train(model: nn.Module, steps: int, optimizer: Any = None, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if optimizer is None else optimizer
    with th.watch(model, **options) as w:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model(share(batch()))).backward()
            optimizer.step()
    return [(shot.step, shot.sites) for shot in w.history]


def with_ddp() -> Any:
    return train(ddp(), 100, every=10)


def with_fsdp1() -> Any:
    return train(fsdp1(), 100, every=10)


def with_flat_fsdp1() -> Any:
    return train(fsdp1(use_orig_params=False), 12, every=5)


def with_fsdp2() -> Any:
    return train(fsdp2(), 100, every=10)


def every_step_of_fsdp2() -> Any:
    return train(fsdp2(), 5)


def after_an_evaluation() -> Any:
    """FSDP2 leaves the root's weights put together after a forward pass without a backward pass."""
    model = fsdp2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch.no_grad():
        model(share(batch()))
    return train(model, 3, optimizer)


def one_rank_watches() -> Any:
    model = fsdp2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: list[Any] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if distributed.get_rank() == 0:
            found = train(model, 3)
        else:
            for _ in range(3):
                optimizer.zero_grad()
                loss(model(share(batch()))).backward()
                optimizer.step()
    return len(found), [str(w.message) for w in said if issubclass(w.category, th.errors.TrainingWarning)]


def one_rank_stops_watching() -> Any:
    model = fsdp2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(share(batch()))).backward()
        optimizer.step()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        w = th.watch(model).open()
        for turn in range(4):
            step()
            if turn == 1 and distributed.get_rank() == 1:
                w.close()
        w.close()
    return len(w.history), [str(s.message) for s in said if issubclass(s.category, th.errors.TrainingWarning)]


def a_parameter_as_a_site() -> Any:
    return _sites(fsdp2())


def _sites(model: nn.Module) -> Any:
    with th.watch(model, "head.weight", "blocks.0.a.weight") as w:
        loss(model(share(batch()))).backward()
    return w.last


SCENARIOS = {
    f.__name__: f
    for f in (
        with_ddp,
        with_fsdp1,
        with_flat_fsdp1,
        with_fsdp2,
        every_step_of_fsdp2,
        after_an_evaluation,
        one_rank_watches,
        one_rank_stops_watching,
        a_parameter_as_a_site,
    )
}

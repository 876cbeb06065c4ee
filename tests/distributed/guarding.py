"""Scenarios: a guard on each rank."""

from __future__ import annotations

import math
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

import torchhook as th
from tests.distributed.models import WRAPPED, Net, batch, ddp, fsdp1, fsdp2, loss, net, share


def spoilt(site: str) -> Net:
    model = net()
    with torch.no_grad():
        model.get_parameter(site)[0, 0] = math.nan
    return model


def weights() -> Any:
    found = {}
    for kind, wrap in (("ddp", nn.parallel.DistributedDataParallel), ("fsdp1", fsdp1), ("fsdp2", fsdp2)):
        for site in ("blocks.1.b.weight", "head.weight"):
            model = spoilt(site)
            wrapped: Any = fsdp1(model=model) if kind == "fsdp1" else wrap(model)
            with th.guard(wrapped, action="record") as g:
                loss(wrapped(share(batch()))).backward()
            found[kind, site] = [(f.kind, str(f.site), str(f.used_by)) for f in g.findings]
    return found


def nothing_is_found_in_sound_models() -> Any:
    found = []
    for make in WRAPPED.values():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with th.guard(model, action="record") as g:
            for _ in range(5):
                optimizer.zero_grad()
                loss(model(share(batch()))).backward()
                optimizer.step()
        found += g.findings
    return [str(finding) for finding in found]


def gradients() -> Any:
    def rooted(output: Tensor) -> Tensor:
        return (output - output.detach()).pow(2).sum().sqrt()

    found = {}
    for kind, make in WRAPPED.items():
        model = make()
        with th.guard(model, action="record") as g:
            rooted(model(share(batch()))).backward()
        found[kind] = [(f.kind, f.phase) for f in g.findings]
    return found


def a_rank_raises() -> Any:
    """Rank 0 meets a bad batch; rank 1 waits for it in the reduction, and hears of it meanwhile."""
    model = ddp()
    x = share(batch()).clone()
    x[0, 0] = math.nan if distributed.get_rank() == 0 else 1.0
    waiting = distributed.new_group(timeout=timedelta(seconds=5))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with th.guard(model):
                output = model(x)
                if distributed.get_rank() == 1:
                    distributed.barrier(waiting)  # stands for the reduction, which rank 0 never joins
                loss(output).backward()
        except th.errors.GuardError as error:
            time.sleep(6)
            return str(error)
        except RuntimeError:
            pass
    return [str(w.message) for w in said if issubclass(w.category, th.errors.GuardWarning)]


class Summed(nn.Module):
    """Needs the other ranks to run."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.detach().sum()
        distributed.all_reduce(total)
        return x + total * 0


class Bad(nn.Module):
    """Fails on one rank: in the forward pass, or in the backward pass."""

    def __init__(self, forward: bool) -> None:
        super().__init__()
        self.fails_forward = forward

    def forward(self, x: Tensor) -> Tensor:
        if distributed.get_rank() == 1:
            return x + 1
        return x / 0 if self.fails_forward else (x - x).sqrt()


def one_rank_repeats() -> Any:
    """Rank 0 meets a fault, in a model that can and in one that cannot run on one rank; rank 1 meets none."""
    found = {}
    for forward in (True, False):
        for needs_others in (True, False):
            torch.manual_seed(0)
            parts = [nn.Linear(4, 4), Summed() if needs_others else nn.Identity(), Bad(forward)]
            model = nn.parallel.DistributedDataParallel(nn.Sequential(*parts))
            with th.guard(model, action="record") as g:
                output = model(torch.ones(2, 4))
                (output * 0 if forward else output).nan_to_num(0, 0, 0).sum().backward()
            found[forward, needs_others] = [(str(f.site), f.unrepeated) for f in g.findings]
            distributed.barrier()
    return found


def operations_are_the_models_own() -> Any:
    model = fsdp2()
    with th.capture(model, "blocks.0/relu", "blocks.1/add") as rec:
        model(share(batch()))
    return {key: rec[key] for key in rec}


SCENARIOS = {
    f.__name__: f
    for f in (
        weights,
        nothing_is_found_in_sound_models,
        gradients,
        a_rank_raises,
        one_rank_repeats,
        operations_are_the_models_own,
    )
}

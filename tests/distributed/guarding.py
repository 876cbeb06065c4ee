"""Scenarios: a guard on each rank."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

import torchhook as th
from tests.distributed.models import WRAPPED, Net, batch, ddp, fsdp1, fsdp2, loss, net, share
from tests.distributed.ranks import each


def spoilt(site: str) -> Net:
    model = net()
    with torch.no_grad():
        model.get_parameter(site)[0, 0] = math.nan
    return model


def weights(kind: str) -> Any:
    wraps: dict[str, Callable[[Net], nn.Module]] = {
        "ddp": nn.parallel.DistributedDataParallel,
        "fsdp1": lambda model: fsdp1(model=model),
        "fsdp2": fsdp2,
    }
    found = {}
    for site in ("blocks.1.b.weight", "head.weight"):
        wrapped = wraps[kind](spoilt(site))
        with th.guard(wrapped, action="record") as g:
            loss(wrapped(share(batch()))).backward()
        found[site] = [(f.kind, str(f.site), str(f.used_by)) for f in g.findings]
    return found


def nothing_is_found_in_sound_models(kind: str) -> Any:
    model = WRAPPED[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with th.guard(model, action="record") as g:
        for _ in range(5):
            optimizer.zero_grad()
            loss(model(share(batch()))).backward()
            optimizer.step()
    return [str(finding) for finding in g.findings]


def gradients(kind: str) -> Any:
    def rooted(output: Tensor) -> Tensor:
        return (output - output.detach()).pow(2).sum().sqrt()

    model = WRAPPED[kind]()
    with th.guard(model, action="record") as g:
        rooted(model(share(batch()))).backward()
    return [(f.kind, f.phase) for f in g.findings]


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


def _passes(make: Callable[[], nn.Module], action: str, thorough: bool = False, inner: bool = False) -> list[Any]:
    """Three passes, of which rank 1 spoils the second: what each rank was told, and the gradients that it was left."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with th.guard(model.module if inner else model, action=action, thorough=thorough) as g:  # type: ignore
            for step in range(3):
                optimizer.zero_grad()
                output = model(share(batch()))
                bad = step == 1 and distributed.get_rank() == 1
                total = (output - output.detach()).sqrt().sum() if bad else loss(output)
                try:
                    total.backward()
                    said = ""
                except th.errors.GuardError as error:
                    said = str(error)
                    break
                finally:
                    grads = [p.grad for p in model.parameters() if p.grad is not None]
                    finite = all(
                        torch.as_tensor(getattr(grad, "_local_tensor", grad)).isfinite().all() for grad in grads
                    )
                    found.append((said, finite))
    return [found, [(f.kind, str(f.site), f.run, f.times, f.headline) for f in g.findings]]


MANNERS: dict[str, Callable[[], list[Any]]] = {
    "ddp": lambda: _passes(ddp, "record"),
    "bucket_view": lambda: _passes(lambda: ddp(gradient_as_bucket_view=True), "record"),
    "static_graph": lambda: _passes(lambda: ddp(static_graph=True), "record"),
    "unused": lambda: _passes(lambda: ddp(find_unused_parameters=True), "record"),
    "fsdp1": lambda: _passes(fsdp1, "record"),
    "fsdp1_flat": lambda: _passes(lambda: fsdp1(use_orig_params=False), "record"),
    "fsdp2": lambda: _passes(fsdp2, "record"),
    "thorough": lambda: _passes(ddp, "record", thorough=True),
    "inner": lambda: _passes(ddp, "record", inner=True),
}


def what_another_rank_brought(manner: str) -> Any:
    """Rank 1's loss spoils its gradients, and with the reduction those of rank 0."""
    return MANNERS[manner]()


def what_another_rank_brought_raises() -> Any:
    return _passes(ddp, "raise")


def what_another_rank_brought_to_a_static_graph() -> Any:
    """Spoilt in its first pass, in which DDP reduces everything at the end."""
    model = ddp(static_graph=True)
    with th.guard(model, action="record") as g:
        output = model(share(batch()))
        (output * (math.nan if distributed.get_rank() == 1 else 1)).sum().backward()
    return [(f.kind, f.phase) for f in g.findings]


def what_stays_bad_is_nobodys_fault_again() -> Any:
    """Bad on both ranks, and on rank 1 alone; the gradients are kept, and looked at after a sound pass."""
    found = []
    for spoilt_on in ((0, 1), (1,)):
        model = ddp()
        with th.guard(model, action="record") as g:
            for step in range(3):
                factor = math.nan if step == 0 and distributed.get_rank() in spoilt_on else 1
                (model(share(batch())) * factor).sum().backward()
        found.append([(f.kind, f.times) for f in g.findings])
    return found


def each_rank_accumulates_by_itself() -> Any:
    """Rank 1 spoils a pass under no_sync, which rank 0 hears of in the pass that reduces."""
    model = ddp()
    with th.guard(model, action="record") as g:
        for step in range(3):
            with contextlib.nullcontext() if step == 2 else model.no_sync():  # type: ignore[operator]
                factor = math.nan if step == 0 and distributed.get_rank() == 1 else 1
                (model(share(batch())) * factor).sum().backward()
    return [(f.kind, f.run) for f in g.findings]


def operations_are_the_models_own() -> Any:
    model = fsdp2()
    with th.capture(model, "blocks.0/relu", "blocks.1/add") as rec:
        model(share(batch()))
    return {key: rec[key] for key in rec}


SCENARIOS = {
    f.__name__: f
    for f in (
        a_rank_raises,
        one_rank_repeats,
        what_another_rank_brought_raises,
        what_another_rank_brought_to_a_static_graph,
        what_stays_bad_is_nobodys_fault_again,
        each_rank_accumulates_by_itself,
        operations_are_the_models_own,
    )
}
SCENARIOS |= each(WRAPPED, weights, nothing_is_found_in_sound_models, gradients)
SCENARIOS |= each(MANNERS, what_another_rank_brought)

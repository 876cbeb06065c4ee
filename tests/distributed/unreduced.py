"""Scenarios: parameters that some ranks do not use, and passes whose gradients are reduced with those of later ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

import torchhook as th
from tests.distributed.models import Block, Net, batch, gradients, loss, net, share
from tests.distributed.ranks import each
from torchhook import edits

NORM, VALUE, PASSES = 0.5, 0.05, 3
NAMES = [name for name, _ in net().named_parameters()]
EDITED = ["blocks.1.a.weight", "blocks.1.b.bias"]


class Skips(Net):
    """Leaves its second block out on the second rank."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks[0](x) if self.skips else self.blocks(x))
        return result


def skipping() -> Skips:
    torch.manual_seed(0)
    return Skips()


def _unused(**options: Any) -> nn.Module:
    model = skipping()
    model.skips = distributed.is_initialized() and distributed.get_rank() == 1
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True, **options)


def unused_and_limited(how: str) -> Any:
    found = []
    for buckets in (False, True):
        model = _unused(gradient_as_bucket_view=buckets)
        if how == "clipper":
            th.gradient_clipper(model, VALUE)
            loss(model(share(batch()))).backward()
        else:
            with th.clip_gradients(model, **({"norm": NORM} if how == "norm" else {"value": VALUE})):
                loss(model(share(batch()))).backward()
        found.append(gradients(model))
    return found


def unused_and_edited() -> Any:
    model = _unused()
    with th.edit(model, {f"{name}:grad": edits.scale(3.0) for name in EDITED}):
        loss(model(share(batch()))).backward()
    return gradients(model)


def unused_and_captured() -> Any:
    model = _unused()
    with th.capture(model, *(f"{name}:grad" for name in NAMES), gather="full") as rec:
        loss(model(share(batch()))).backward()
    return {name: rec[f"{name}:grad"] for name in NAMES}, gradients(model)


def unused_by_all() -> Any:
    """In a second pass no rank uses what the first one left a gradient of: that is not the gradient of this pass."""
    model = _unused()
    with th.capture(model, "blocks.1.a.weight:grad", gather="full") as rec:
        loss(model(share(batch()))).backward()
        model.module.skips = True
        loss(model(share(batch()))).backward()
    return len(rec.all("blocks.1.a.weight:grad"))


# -- no_sync ----------------------------------------------------------------------------------------------


def _fsdp1(kind: str) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        net(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params="flat" not in kind,
        sharding_strategy=ShardingStrategy.NO_SHARD if "whole" in kind else ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
    )


def _accumulate(model: Any) -> None:
    for part in range(PASSES):
        if part < PASSES - 1:
            with model.no_sync():
                loss(model((part + 1) * share(batch()))).backward()
        else:
            loss(model((part + 1) * share(batch()))).backward()


def _norm(model: nn.Module, whole: bool) -> float:
    """Over all ranks."""
    total = torch.stack([(p.grad**2).sum() for p in model.parameters() if p.grad is not None]).sum()
    if not whole:
        distributed.all_reduce(total)
    return float(total.sqrt())


def accumulated(kind: str) -> Any:
    found = {}
    for limit in ({}, {"norm": NORM}, {"value": VALUE}):
        model = _fsdp1(kind)
        if limit:
            with th.clip_gradients(model, **limit):
                _accumulate(model)
        else:
            _accumulate(model)
        largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None and p.grad.numel())
        found["".join(limit)] = _norm(model, "whole" in kind), largest
    return found


def accumulated_and_captured(kind: str) -> Any:
    model = _fsdp1(kind)
    with th.capture(model, *(f"{name}:grad" for name in NAMES), gather="full") as rec:
        _accumulate(model)
    return {name: rec.all(f"{name}:grad") for name in NAMES}


def accumulated_and_edited(kind: str) -> Any:
    model = _fsdp1(kind)
    changes = {f"{name}:grad": edits.scale(3.0) for name in EDITED}
    with th.edit(model, changes):
        _accumulate(model)
    with th.capture(model, *changes, gather="full") as rec:
        loss(model(0 * share(batch()))).backward()  # adds what does not depend on the batch
    return {name: rec[f"{name}:grad"] for name in EDITED}


SCENARIOS = {
    **each(["norm", "value", "clipper"], unused_and_limited),
    **each(["fsdp1", "fsdp1_flat", "fsdp1_whole", "fsdp1_flat_whole"], accumulated),
    **each(["fsdp1", "fsdp1_whole"], accumulated_and_captured, accumulated_and_edited),
    **{f.__name__: f for f in (unused_and_edited, unused_and_captured, unused_by_all)},
}

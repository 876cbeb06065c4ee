"""Scenarios: the gradients of parameters, captured and edited."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

import torchhook as th
from tests.distributed.models import WRAPPED, batch, ddp, fsdp2, gradients, loss, share
from tests.distributed.ranks import each
from torchhook import edits

SITES = ["blocks.0.a.weight:grad", "blocks.1.b.bias:grad", "head.weight:grad", "head.bias:grad"]


def captured(kind: str, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = WRAPPED[kind]()
    with th.capture(model, *SITES, **options) as rec:
        loss(model(share(batch()))).backward()
    return {key: rec[key] for key in rec}, gradients(model)


def full_of_ddp() -> Any:
    return captured("ddp", gather="full")


def full_of_fsdp1() -> Any:
    return captured("fsdp1", gather="full")


def full_of_fsdp2() -> Any:
    return captured("fsdp2", gather="full")


def local_of_ddp() -> Any:
    return captured("ddp")


def local_of_fsdp1() -> Any:
    return captured("fsdp1")


def local_of_fsdp2() -> Any:
    found, after = captured("fsdp2")
    return {key: (value.to_local(), value.full_tensor()) for key, value in found.items()}, after


def after_an_evaluation() -> Any:
    """FSDP2 leaves the root's weights put together after a forward pass without a backward pass."""
    model = fsdp2()
    with torch.no_grad():
        model(share(batch()))
    with th.capture(model, *SITES, gather="full") as rec:
        loss(model(share(batch()))).backward()
    return {key: rec[key] for key in rec}


def several_passes() -> Any:
    model = fsdp2()
    with th.capture(model, "head.weight:grad", gather="full") as rec:
        for _ in range(3):
            model.zero_grad()
            loss(model(share(batch()))).backward()
    return rec.all("head.weight:grad")


EDITS = {
    "head.weight:grad": edits.clamp(-0.2, 0.2),
    "head.bias:grad": edits.add(torch.tensor([1.0, 2.0, 3.0])),
    "blocks.0.a.weight:grad": edits.mean(1),
    "blocks.1.b.weight:grad": edits.zero(),
    "blocks.1.a.bias:grad": lambda grad: grad * 2,
}


def edited(kind: str, **options: Any) -> dict[str, Tensor]:
    model = WRAPPED[kind](**options)
    with th.edit(model, EDITS):
        loss(model(share(batch()))).backward()
    return gradients(model)


def edited_ddp() -> Any:
    return edited("ddp")


def edited_ddp_static_graph() -> Any:
    return edited("ddp", static_graph=True)


def edited_ddp_in_buckets() -> Any:
    return edited("ddp", gradient_as_bucket_view=True)


def edited_fsdp1() -> Any:
    return edited("fsdp1")


def edited_fsdp2() -> Any:
    return edited("fsdp2")


def captured_and_edited() -> Any:
    model = ddp()
    with th.capture(model, "head.weight:grad", edit={"head.weight:grad": edits.scale(2)}) as rec:
        loss(model(share(batch()))).backward()
    return rec["head.weight:grad"], gradients(model)["head.weight"]


def one_rank_captures_its_part(kind: str) -> Any:
    model = WRAPPED[kind]()
    if distributed.get_rank() == 1:
        loss(model(share(batch()))).backward()
        return "no session"
    with th.capture(model, *SITES, "blocks.0") as rec:
        loss(model(share(batch()))).backward()
    return len(rec)


def one_rank_wants_all() -> Any:
    model = fsdp2()
    if distributed.get_rank() == 1:
        loss(model(share(batch()))).backward()
        return "no session"
    try:
        with th.capture(model, "head.weight:grad", gather="full"):
            loss(model(share(batch()))).backward()
    except th.errors.SessionError as error:
        return str(error)
    return "no error"


def nothing_is_left_behind() -> Any:
    model = fsdp2()
    before = {name: id(p) for name, p in model.named_parameters()}
    with th.capture(model, "**.weight:grad", gather="full"):
        loss(model(share(batch()))).backward()
    weights = [model.head.weight, model.blocks[0].a.weight]
    hooks = [getattr(w, "_post_accumulate_grad_hooks", None) for w in weights]
    return before == {name: id(p) for name, p in model.named_parameters()}, [len(h or ()) for h in hooks]


SCENARIOS = {
    f.__name__: f
    for f in (
        full_of_ddp,
        full_of_fsdp1,
        full_of_fsdp2,
        local_of_ddp,
        local_of_fsdp1,
        local_of_fsdp2,
        after_an_evaluation,
        several_passes,
        edited_ddp,
        edited_ddp_in_buckets,
        edited_ddp_static_graph,
        edited_fsdp1,
        edited_fsdp2,
        captured_and_edited,
        one_rank_wants_all,
        nothing_is_left_behind,
    )
} | each(WRAPPED, one_rank_captures_its_part)

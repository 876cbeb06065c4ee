"""Scenarios: what passes between the layers, captured and edited, on ranks that each have a part of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

import torchhook as th
from tests.distributed.models import WRAPPED, batch, gradients, loss, share
from tests.distributed.ranks import each
from torchhook import edits

SITES = ["blocks.0.a", "blocks.0/relu", "blocks.1:input", "blocks.1", "head", "(model)"]
GRADIENTS = ["blocks.0.a:grad", "blocks.1:grad", "head:grad_input"]
EDITS = {
    "blocks.0.a": edits.add(torch.arange(10.0)),
    "blocks.1.b:input": edits.clamp(-1, 1),
    "blocks.1": lambda value: value * 0.5,
    "blocks.0.b:grad": edits.scale(2.0),
}


def captured(kind: str) -> Any:
    model = WRAPPED[kind]()
    with th.capture(model, *SITES, *GRADIENTS) as rec:
        loss(model(share(batch()))).backward()
    return {site: rec[site] for site in (*SITES, *GRADIENTS)}, gradients(model)


def edited(kind: str) -> Any:
    model = WRAPPED[kind]()
    with th.edit(model, EDITS):
        output = model(share(batch()))
        loss(output).backward()
    return output.detach(), gradients(model)


def one_rank_captures(kind: str) -> Any:
    """Also what the reduction waits for comes in time."""
    model = WRAPPED[kind]()
    if distributed.get_rank() == 0:
        loss(model(share(batch()))).backward()
        return {}, gradients(model)
    with th.capture(model, *SITES, *GRADIENTS) as rec, th.guard(model):
        loss(model(share(batch()))).backward()
    return {site: rec[site] for site in (*SITES, *GRADIENTS)}, gradients(model)


SCENARIOS = each(WRAPPED, captured, edited, one_rank_captures)

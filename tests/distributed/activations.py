"""Scenarios: what passes between the layers, captured and edited, on ranks that each have a part of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

import torchhook as th
from tests.distributed.models import WRAPPED, batch, gradients, loss, share
from torchhook import edits

SITES = ["blocks.0.a", "blocks.0/relu", "blocks.1:input", "blocks.1", "head", "(model)"]
GRADIENTS = ["blocks.0.a:grad", "blocks.1:grad", "head:grad_input"]
EDITS = {
    "blocks.0.a": edits.add(torch.arange(10.0)),
    "blocks.1.b:input": edits.clamp(-1, 1),
    "blocks.1": lambda value: value * 0.5,
    "blocks.0.b:grad": edits.scale(2.0),
}


def captured() -> Any:
    found = {}
    for kind, make in WRAPPED.items():
        model = make()
        with th.capture(model, *SITES, *GRADIENTS) as rec:
            loss(model(share(batch()))).backward()
        found[kind] = {site: rec[site] for site in (*SITES, *GRADIENTS)}, gradients(model)
    return found


def edited() -> Any:
    found = {}
    for kind, make in WRAPPED.items():
        model = make()
        with th.edit(model, EDITS):
            output = model(share(batch()))
            loss(output).backward()
        found[kind] = output.detach(), gradients(model)
    return found


def one_rank_captures() -> Any:
    """Also what the reduction waits for comes in time."""
    found = {}
    for kind, make in WRAPPED.items():
        model = make()
        if distributed.get_rank() == 1:
            with th.capture(model, *SITES, *GRADIENTS) as rec, th.guard(model):
                loss(model(share(batch()))).backward()
            found[kind] = {site: rec[site] for site in (*SITES, *GRADIENTS)}, gradients(model)
        else:
            loss(model(share(batch()))).backward()
            found[kind] = {}, gradients(model)
    return found


SCENARIOS = {f.__name__: f for f in (captured, edited, one_rank_captures)}

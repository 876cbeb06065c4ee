"""Scenarios: the stages of a pipeline, each a model of its own on its rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import torchhook as th
from tests.classic.toys import TORCH
from tests.distributed.models import Net, batch, loss, net
from torchhook import edits

CHUNKS = 4
NORM, VALUE = 0.5, 0.05
# In torch 2.6 the second one waits for itself on gloo, whoever looks.
KINDS = ["GPipe", "1F1B"] if TORCH >= (2, 7) else ["GPipe"]


def stage_of(whole: Net, rank: int) -> nn.Module:
    return whole.blocks[0] if rank == 0 else nn.Sequential(whole.blocks[1], whole.head)


def piped(whole: Net | None = None, kind: str = "GPipe") -> tuple[nn.Module, Callable[[], None]]:
    """This rank's stage, and a step of the whole pipeline, which leaves the gradients of a single process."""
    from torch.distributed import pipelining

    rank = distributed.get_rank()
    part = stage_of(net() if whole is None else whole, rank)
    stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"))
    made = getattr(pipelining, f"Schedule{kind}")(stage, CHUNKS, loss_fn=lambda output, target: loss(output))

    def step() -> None:
        if rank == 0:
            made.step(batch())
        else:
            made.step(target=torch.zeros(8, 3))
        if not hasattr(made, "scale_grads"):  # in torch 2.6 a schedule leaves the sum over the microbatches
            for parameter in part.parameters():
                if parameter.grad is not None:
                    parameter.grad /= CHUNKS

    step()  # the first one calls each stage once more, to learn the shapes
    part.zero_grad()
    return part, step


def grads(part: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in part.named_parameters() if p.grad is not None}


def captured() -> Any:
    found = {}
    for kind in KINDS:
        part, step = piped(kind=kind)
        sites = ["a", "a:grad", "a.weight:grad"] if distributed.get_rank() == 0 else ["1", "1:grad", "1.weight:grad"]
        with th.capture(part, *sites) as rec:
            step()
        found[kind] = [rec.all(site) for site in sites], grads(part)
    return found


def edited() -> Any:
    part, step = piped()
    if distributed.get_rank() == 0:
        changes: Any = {"a": edits.add(torch.arange(10.0)), "b:grad": edits.scale(2.0)}
    else:
        changes = {"0.a": edits.clamp(-1, 1), "1.weight:grad": edits.scale(0.5)}
    with th.capture(part, "(model)") as rec, th.edit(part, changes):
        step()
    return rec.cat("(model)"), grads(part)


def clipped() -> Any:
    found: dict[str, Any] = {}
    for name, limit in (("value", {"value": VALUE}), ("norm", {"norm": NORM})):
        part, step = piped()
        with th.clip_gradients(part, **limit):
            step()
        found[name] = grads(part)
        part.zero_grad()
        step()
        found[f"{name} afterwards"] = grads(part)
    return found


def trained() -> Any:
    """The limit comes before the optimizer's step, and the block goes on."""
    part, step = piped()
    optimizer, other = (torch.optim.SGD(some.parameters(), lr=0.1) for some in (part, nn.Linear(2, 2)))
    with th.clip_gradients(part, norm=NORM):
        for _ in range(10):
            optimizer.zero_grad()
            step()
            other.step()  # of parameters that are none of the stage's
            optimizer.step()
    return {name: p.detach() for name, p in part.named_parameters()}


def one_rank_clips() -> Any:
    part, step = piped()
    limit: Any = th.clip_gradients(part, norm=NORM) if distributed.get_rank() == 0 else contextlib.nullcontext()
    try:
        with limit:
            step()
    except th.errors.SessionError as error:
        return str(error), len(_global_optimizer_pre_hooks)
    return "no error"


def watched() -> Any:
    part, step = piped()
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    with th.watch(part, every=10, steps="manual", loss_scale=CHUNKS) as w:
        for _ in range(100):
            optimizer.zero_grad()
            step()
            optimizer.step()
            w.step()
    return [(shot.step, shot.sites) for shot in w.history]


def guarded() -> Any:
    found = {}
    for site in ("blocks.0.b.weight", "blocks.1.b.weight", "head.weight"):
        whole = net()
        part, step = piped(whole)
        with torch.no_grad():
            whole.get_parameter(site)[0, 0] = math.nan
        with th.guard(part, action="record") as g:
            step()
        found[site] = [(f.kind, str(f.site), f.phase) for f in g.findings]
    return found


def sound() -> Any:
    part, step = piped()
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    with th.guard(part, action="record") as g:
        for _ in range(5):
            optimizer.zero_grad()
            step()
            optimizer.step()
    return [str(finding) for finding in g.findings]


def one_rank_alone() -> Any:
    """Nobody waits for a rank that has nothing open."""
    found = []
    for watching in (0, 1):
        part, step = piped()
        here = distributed.get_rank() == watching
        with contextlib.ExitStack() as opened:
            if here:
                rec = opened.enter_context(th.capture(part, "**", "**:grad"))
                opened.enter_context(th.guard(part))
                opened.enter_context(th.watch(part, steps="manual"))
            step()
        found.append((len(rec.keys()) if here else 0, grads(part)))
    return found


SCENARIOS = {
    f.__name__: f for f in (captured, edited, clipped, trained, one_rank_clips, watched, guarded, sound, one_rank_alone)
}

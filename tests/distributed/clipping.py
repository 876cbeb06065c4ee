"""Scenarios: gradients that are limited while several ranks train."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn

import torchhook as th
from tests.distributed.models import WRAPPED, batch, ddp, fsdp1, gradients, loss, share
from tests.distributed.ranks import each

NORM, VALUE = 0.5, 0.2


def clipped(model: nn.Module, **limit: float) -> Any:
    with th.clip_gradients(model, **limit):
        loss(model(share(batch()))).backward()
    after = gradients(model)
    model.zero_grad()
    loss(model(share(batch()))).backward()
    return after, gradients(model)


def norms(kind: str) -> Any:
    return clipped(WRAPPED[kind](), norm=NORM)


def values(kind: str) -> Any:
    return clipped(WRAPPED[kind](), value=VALUE)


def in_buckets() -> Any:
    options = {"gradient_as_bucket_view": True}
    return clipped(ddp(**options), norm=NORM), clipped(ddp(**options), value=VALUE)


def static_graph() -> Any:
    """The first pass of such a model puts the gradients together only when it has ended."""
    return clipped(ddp(static_graph=True), norm=NORM), clipped(ddp(static_graph=True), value=VALUE)


def flat() -> Any:
    model = fsdp1(use_orig_params=False)
    with th.clip_gradients(model, norm=NORM):
        loss(model(share(batch()))).backward()
    squares = torch.stack([(p.grad**2).sum() for p in model.parameters() if p.grad is not None]).sum()
    distributed.all_reduce(squares)
    return squares.sqrt().item()


def for_good(kind: str) -> Any:
    model = th.gradient_clipper(WRAPPED[kind](), VALUE)
    for _ in range(2):
        model.zero_grad()
        loss(model(share(batch()))).backward()
    return gradients(model)


def without_sync(kind: str) -> Any:
    """Two passes, of which the first leaves each rank its own gradients."""
    model: Any = WRAPPED[kind]()
    with th.clip_gradients(model, norm=NORM):
        with no_sync(model):
            loss(model(share(batch()))).backward()
        loss(model(share(batch()))).backward()
    return gradients(model)


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def one_rank_clips(kind: str) -> Any:
    model = WRAPPED[kind]()
    limit = th.clip_gradients(model, norm=NORM) if distributed.get_rank() == 0 else contextlib.nullcontext()
    try:
        with limit:
            loss(model(share(batch()))).backward()
    except th.errors.SessionError as error:
        return str(error)
    return "no error"


def trained(kind: str) -> Any:
    """The ranks stay together over many steps."""
    model = WRAPPED[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with th.clip_gradients(model, norm=NORM):
        for _ in range(10):
            optimizer.zero_grad()
            loss(model(share(batch()))).backward()
            optimizer.step()
    optimizer.zero_grad()
    loss(model(share(batch()))).backward()
    return gradients(model)


SCENARIOS = {
    **each(WRAPPED, norms, values, for_good, without_sync, trained),
    **each(["fsdp1", "fsdp2"], one_rank_clips),
    **{f.__name__: f for f in (in_buckets, static_graph, flat)},
}

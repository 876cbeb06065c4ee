"""Scenarios: gradients that are limited while several ranks train."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn

import torchhook as th
from tests.distributed.models import WRAPPED, batch, ddp, fsdp1, fsdp2, gradients, loss, share

NORM, VALUE = 0.5, 0.2


def clipped(model: nn.Module, **limit: float) -> Any:
    with th.clip_gradients(model, **limit):
        loss(model(share(batch()))).backward()
    after = gradients(model)
    model.zero_grad()
    loss(model(share(batch()))).backward()
    return after, gradients(model)


def norms() -> Any:
    return {kind: clipped(make(), norm=NORM) for kind, make in WRAPPED.items()}


def values() -> Any:
    return {kind: clipped(make(), value=VALUE) for kind, make in WRAPPED.items()}


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


def for_good() -> Any:
    found = {}
    for kind, make in WRAPPED.items():
        model = th.gradient_clipper(make(), VALUE)
        for _ in range(2):
            model.zero_grad()
            loss(model(share(batch()))).backward()
        found[kind] = gradients(model)
    return found


def without_sync() -> Any:
    """Two passes, of which the first leaves each rank its own gradients."""
    found = {}
    for kind, make in WRAPPED.items():
        model: Any = make()
        with th.clip_gradients(model, norm=NORM):
            with no_sync(model):
                loss(model(share(batch()))).backward()
            loss(model(share(batch()))).backward()
        found[kind] = gradients(model)
    return found


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def one_rank_clips() -> Any:
    found = {}
    for kind, make in (("fsdp1", fsdp1), ("fsdp2", fsdp2)):
        model: nn.Module = make()
        limit = th.clip_gradients(model, norm=NORM) if distributed.get_rank() == 0 else contextlib.nullcontext()
        try:
            with limit:
                loss(model(share(batch()))).backward()
            found[kind] = "no error"
        except th.errors.SessionError as error:
            found[kind] = str(error)
    return found


def trained() -> Any:
    """The ranks stay together over many steps."""
    found = {}
    for kind, make in WRAPPED.items():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with th.clip_gradients(model, norm=NORM):
            for _ in range(10):
                optimizer.zero_grad()
                loss(model(share(batch()))).backward()
                optimizer.step()
        optimizer.zero_grad()
        loss(model(share(batch()))).backward()
        found[kind] = gradients(model)
    return found


SCENARIOS = {
    f.__name__: f
    for f in (norms, values, in_buckets, static_graph, flat, for_good, without_sync, one_rank_clips, trained)
}

"""``clip_gradients``: limit gradients as they are computed, for as long as a session is open."""

from __future__ import annotations

from torch import Tensor, nn

from torchhook import edits
from torchhook.hooks import Look, after_backward
from torchhook.select import Target
from torchhook.session import Session
from torchhook.sites import Site


def clip_gradients(model: nn.Module, value: float | None = None, *, norm: float | None = None) -> Session:
    """Limit every element of the parameters' gradients to ``[-value, value]``, or their total norm to ``norm``.

    >>> import torch
    >>> model = nn.Linear(1, 1)
    >>> with clip_gradients(model, 0.5):
    ...     model(torch.full((1, 1), 8.0)).sum().backward()
    >>> model.weight.grad
    tensor([[0.5000]])

    Use it as a context manager, or with ``open`` and ``close``. ``norm`` acts at the end of each backward pass, on what
    ``.grad`` holds then, as ``torch.nn.utils.clip_grad_norm_`` would.
    """
    if (value is None) == (norm is None):
        raise ValueError("clip_gradients takes a value or norm=, one of the two.")
    limit = value if norm is None else norm
    if limit is None or not limit > 0:
        raise ValueError(f"clip_gradients needs a positive limit, found {limit!r}.")
    session = Session(model, warn=False)
    found: dict[int, tuple[Target, Tensor]] = {}
    for path, (module, name) in session.index.tensors.items():
        tensor = getattr(module, name)
        if tensor is not None and tensor.requires_grad and tensor.is_leaf:
            found.setdefault(id(tensor), (Target(Site(path, port="grad"), module, name), tensor))
    clip = None if norm is None else _norm_clipper([tensor for _, tensor in found.values()], norm)
    for target, _ in found.values():
        if clip is None:
            session.edit(target, edits.clamp(-limit, limit))
        else:
            session.look(target, clip)
    return session


def _norm_clipper(parameters: list[Tensor], norm: float) -> Look:
    """A look at any parameter's gradient that clips all of them once, when the backward pass has ended."""
    queued = False

    def clip() -> None:
        nonlocal queued
        queued = False
        nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], norm)

    def look(grad: Tensor, call: int) -> None:
        nonlocal queued
        if not queued:
            queued = True
            after_backward(clip)

    return look

"""``clip_gradients``: limit gradients as they are computed, for as long as it is open."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchhook._core.hooks import TensorHandles, after_backward, on_gradient
from torchhook._core.index import Index
from torchhook._core.openable import Openable
from torchhook._core.select import Target
from torchhook._core.session import Session
from torchhook._core.taps import Look
from torchhook._recording.address import Site

Limit: TypeAlias = "Callable[[Tensor], Tensor | None]"
"""Takes a gradient, returns what takes its place, or nothing."""


def clip_gradients(model: nn.Module, value: float | None = None, *, norm: float | None = None) -> GradientClip:
    """Limit every element of the parameters' gradients to ``[-value, value]``, or their total norm to ``norm``.

    >>> import torch
    >>> model = nn.Linear(1, 1)
    >>> with clip_gradients(model, 0.5):
    ...     model(torch.full((1, 1), 8.0)).sum().backward()
    >>> model.weight.grad
    tensor([[0.5000]])

    It limits in a ``with`` block, or from ``open`` to ``close``, and does nothing before. Layers that are frozen or
    unfrozen meanwhile are treated as they are when the model runs.

    Arguments:
        model: whose parameters' gradients are limited.
        value: the largest size of an element; each gradient is clamped as it is computed.
        norm: the largest norm of all gradients together. It acts at the end of each backward pass, on what ``.grad``
            holds then, as ``torch.nn.utils.clip_grad_norm_`` would.
    """
    if (value is None) == (norm is None):
        raise ValueError("clip_gradients takes a value or norm=, one of the two.")
    bound = value if norm is None else norm
    if bound is None or not bound > 0:
        raise ValueError(f"clip_gradients needs a positive limit, found {bound!r}.")
    index = Index(model)
    return GradientClip(index, _clamp(bound) if norm is None else _norm_limit(index, bound))


class GradientClip(Openable):
    """A limit on a model's gradients, for as long as it is open: a context manager, or ``open`` and ``close``."""

    _kind = "gradient clip"

    def __init__(self, index: Index, limit: Limit) -> None:
        self._plan: tuple[Index, Limit] | None = (index, limit)
        self._session: Session | None = None
        self._made()

    def _start(self) -> None:
        assert self._plan is not None
        index, limit = self._plan
        # A parameter is the same one in every thread, and so is its gradient.
        session = Session(index.modules[""], index=index, threads="all", warn=False)
        followed = _Followed(limit, session.handles)
        for path, (module, name) in index.tensors.items():
            tensor = module._parameters.get(name)
            if tensor is not None and followed.is_new(tensor):
                session.edit(Target(Site(path, port="grad"), module, name), lambda grad, site: limit(grad))
        everything = list(index.distinct.values())
        # Before a module runs, its parameters are looked at; before the model does, all: a weight may be used without a
        # call of the module that holds it.
        for path, module in index.modules.items():
            if not path or module._parameters:
                session.look(Target(Site(path, port="input"), module), followed.look([module] if path else everything))
        self._session = session
        session.open()

    def _stop(self, error: BaseException | None) -> None:
        assert self._session is not None
        self._session.close()
        self._session = self._plan = None


class _Followed:
    """The parameters whose gradients are limited: each from the first time that it is ready to take one."""

    def __init__(self, limit: Limit, handles: TensorHandles) -> None:
        self._limit = limit
        self._handles = handles
        # By identity, with a reference that shows whether it is still the same one: an id is used again.
        self._known: dict[int, weakref.ref[Tensor]] = {}

    def is_new(self, tensor: Tensor) -> bool:
        """Whether this is a parameter in training that was not one before; from now on it is known."""
        if not tensor.requires_grad or not tensor.is_leaf or is_lazy(tensor):
            return False
        known = self._known.get(id(tensor))
        if known is not None and known() is tensor:
            return False
        self._known[id(tensor)] = weakref.ref(tensor)
        return True

    def look(self, modules: list[nn.Module]) -> Look:
        """Before these modules run: some of their parameters may have been unfrozen, or be new."""

        def look(value: Any, call: int) -> None:
            for module in modules:
                for tensor in module._parameters.values():
                    if tensor is not None and self.is_new(tensor):
                        self._handles.add(on_gradient(tensor, self._limit))

        return look


def _clamp(bound: float) -> Limit:
    # On the gradient of each backward pass, before it is added to .grad (pytorch#76464): what accumulates is a sum of
    # clamped ones.
    return lambda grad: grad.clamp(-bound, bound)


def _norm_limit(index: Index, bound: float) -> Limit:
    """Asked about any gradient, it clips all of them once, when the backward pass has ended."""
    waiting: weakref.ref[Any] | None = None

    # All parameters, also those that took no part in this pass: the norm is that of what the optimizer will see.
    def clip() -> None:
        parameters = {id(p): p for module in index.distinct.values() for p in module._parameters.values()}
        nn.utils.clip_grad_norm_([p for p in parameters.values() if p is not None and p.grad is not None], bound)

    def limit(grad: Tensor) -> None:
        nonlocal waiting
        if waiting is None or waiting() is None:
            # Autograd alone holds it, until the backward pass ends or fails; a pass inside another one waits for that.
            callback = functools.partial(clip)
            waiting = weakref.ref(callback)
            after_backward(callback)

    return limit

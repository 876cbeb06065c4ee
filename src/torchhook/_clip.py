"""``clip_gradients``: limit gradients as they are computed, for as long as it is open.

Where several ranks share the work, what one of them computes is not yet the gradient: it is limited in ``.grad``, once
all have added theirs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, nn
from torch.nn.parameter import is_lazy

from torchhook._core import hooks
from torchhook._core.hooks import TensorHandles
from torchhook._core.index import Index
from torchhook._core.openable import Openable
from torchhook._core.parameters import AfterBackward
from torchhook._core.ranks import Together
from torchhook._core.session import Session
from torchhook._core.sharding import Home, Homes
from torchhook._core.taps import Look
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._recording.tables import facts
from torchhook._torch import sharded
from torchhook._values.subclasses import full, is_distributed, is_partial, local

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
    unfrozen meanwhile are treated as they are when the model runs. Of a model in DDP or FSDP, what is limited is the
    gradient over all ranks, once it has been reduced: open it on every rank, and give it the wrapped model. Of a stage
    of a pipeline, it is the sum over the microbatches, limited when the optimizer makes its step, or the block ends;
    ``norm`` is that over all stages. A rank with several stages gives them together, in a ``ModuleList``.

    Args:
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
    return GradientClip(index, Clamped(bound, index) if norm is None else _Shortened(bound, index))


class GradientClip(Openable):
    """A limit on a model's gradients, for as long as it is open: a context manager, or ``open`` and ``close``."""

    _kind = "gradient clip"

    def __init__(self, index: Index, limits: Clamped | _Shortened) -> None:
        self._plan: tuple[Index, Clamped | _Shortened] | None = (index, limits)
        self._session: Session | None = None
        self._says = f"{'elements' if isinstance(limits, Clamped) else 'norm'} up to {limits.bound:g}"
        self._model = type(index.root).__name__
        self._made()

    def __repr__(self) -> str:
        return f"<gradient clip on {self._model}: {self._says}, {self._state}>"

    def _repr_html_(self) -> str:
        return facts("Gradient clip", {"model": self._model, "limit": self._says, "state": self._state})._repr_html_()

    def _start(self) -> None:
        assert self._plan is not None
        index, limits = self._plan
        # A parameter is the same one in every thread, and so is its gradient.
        session = Session(index.modules[""], index=index, threads="all", warn=False)
        followed = _Followed(limits, Homes(index), session.handles)
        for path, (module, name) in index.tensors.items():
            home = followed.new(module, name)
            if home is not None and home.way == "own":
                session.edit(Target(Site(path, port="grad"), module, name), lambda grad, site: limits.limit(grad))
            elif home is not None:
                followed.follow(home)
        everything = list(index.distinct.values())
        # Before a module runs, its parameters are looked at; before the model does, all: a weight may be used without a
        # call of the module that holds it.
        for path, module in index.modules.items():
            if not path or module._parameters:
                session.look(Target(Site(path, port="input"), module), followed.look([module] if path else everything))
        session.handles.before_optimizers(limits.before_step)
        self._session = session
        limits.together.open()
        session.open()

    def _stop(self, error: BaseException | None) -> None:
        assert self._session is not None
        assert self._plan is not None
        session, limits = self._session, self._plan[1]
        self._session = self._plan = None
        session.close()
        try:
            if error is None:
                limits.settle()
        finally:
            limits.together.close()


class _Followed:
    """The parameters whose gradients are limited: each from the first time that it is ready to take one."""

    def __init__(self, limits: Clamped | _Shortened, homes: Homes, handles: TensorHandles) -> None:
        self._limits = limits
        self._homes = homes
        self._handles = handles
        # By identity, with a reference that shows whether it is still the same one: an id is used again.
        self._known: dict[int, weakref.ref[Tensor]] = {}

    def new(self, module: nn.Module, name: str) -> Home | None:
        """Where a parameter is, if it is one in training that was not one before; from now on it is known."""
        live = module._parameters.get(name)
        if live is None or not live.requires_grad or is_lazy(live):
            return None
        known = self._known.get(id(live))
        if known is not None and known() is live:
            return None
        # Not the one that FSDP has put in its place meanwhile.
        home = self._homes.of(module, name)
        if home is None or not home.leaf.is_leaf:
            return None
        is_known = id(home.parameter) in self._known and self._known[id(home.parameter)]() is home.parameter
        self._known[id(live)] = weakref.ref(live)
        self._known[id(home.parameter)] = weakref.ref(home.parameter)
        return None if is_known else home

    def follow(self, home: Home) -> None:
        self._limits.follows(home)
        if home.way == "own":
            self._handles.on_gradient(home.parameter, self._limits.limit)
        elif home.way == "replicated":
            self._handles.on_gradient(home.leaf, functools.partial(_note, self._limits, home))
        else:
            self._handles.on_accumulated(home.leaf, functools.partial(_note, self._limits, home))

    def look(self, modules: list[nn.Module]) -> Look:
        """Before these modules run: some of their parameters may have been unfrozen, or be new."""

        def look(value: Any, call: int) -> None:
            self._limits.look_around()
            for module in modules:
                for name in module._parameters:
                    home = self.new(module, name)
                    if home is not None:
                        self.follow(home)

        return look


# -- limits ---------------------------------------------------------------------------------------------


class _Limits:
    """When gradients are limited: as they come, or, in a pipeline, once for all microbatches."""

    def __init__(self, index: Index | None, what: str) -> None:
        self.together: Together = Together(what)
        self._index = index
        self._stages: Any = None
        """The process group of the pipeline."""
        self._unsettled = False
        self._perhaps_unused: dict[int, Home] = {}

    def follows(self, home: Home) -> None:
        """From now on, this parameter's gradient is limited."""
        if home.may_be_unused:
            self._perhaps_unused[id(home.parameter)] = home

    def look_around(self) -> None:
        """The model runs: perhaps as a stage of a pipeline, for one microbatch of several."""
        if self._stages is None:
            self._stages = sharded.pipeline()
        self._unsettled = self._stages is not None

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._unsettled:
            own = {id(home.parameter) for home in self._homes()}
            if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                self.settle()

    def settle(self) -> None:
        """A pipeline has come to the end of its step: what ``.grad`` holds now is what the optimizer will see."""
        if self._unsettled:
            self._unsettled = False
            self._act(self._homes())

    def _homes(self) -> list[Home]:
        assert self._index is not None
        homes = Homes(self._index)
        owned = [homes.of(m, name) for m in self._index.distinct.values() for name in m._parameters]
        return list({id(home.parameter): home for home in owned if home is not None}.values())

    def _act(self, homes: list[Home]) -> None:
        raise NotImplementedError


class Clamped(_Limits):
    """Every element at most ``bound``."""

    def __init__(self, bound: float, index: Index | None = None) -> None:
        super().__init__(index, "clamped")  # nobody is asked: each rank clamps what it has
        self.bound = bound
        self._waiting: dict[int, Home] = {}
        self._end = AfterBackward()

    def limit(self, grad: Tensor) -> Tensor | None:
        # On the gradient of each backward pass, before it is added to .grad (pytorch#76464): what accumulates is a sum
        # of clamped ones.
        return grad.clamp(-self.bound, self.bound) if self._stages is None else None

    def arrived(self, home: Home) -> None:
        """A gradient came that is still to be reduced."""
        if self._stages is None:
            self._waiting[id(home.parameter)] = home
            self._end.ask(self._clamp)

    def _clamp(self) -> None:
        waiting, self._waiting = self._waiting, {}
        # A rank that did not use a parameter gets the gradient of those that did.
        units = {id(home.unit) for home in waiting.values()}
        others = {key: home for key, home in self._perhaps_unused.items() if id(home.unit) in units}
        self._act([home for home in {**others, **waiting}.values() if home.is_reduced])

    def _act(self, homes: list[Home]) -> None:
        for home in homes:
            if home.parameter.grad is not None:
                # In place: DDP's buckets and FSDP's flat gradients are views of larger memory.
                local(home.parameter.grad).clamp_(-self.bound, self.bound)


class _Shortened(_Limits):
    """All gradients together at most ``bound`` long. Asked about any of them, it acts once, when the pass has ended."""

    def __init__(self, bound: float, index: Index) -> None:
        super().__init__(index, "clipped")
        self.bound = bound
        self._waiting: dict[int, Home] = {}
        self._end = AfterBackward()

    def limit(self, grad: Tensor) -> None:
        if self._stages is None:
            self._end.ask(self._clip)

    def arrived(self, home: Home) -> None:
        if self._stages is None:
            self._waiting[id(home.parameter)] = home
            self._end.ask(self._clip)

    def _clip(self) -> None:
        waiting, self._waiting = self._waiting, {}
        # Only now: while gradients arrive, FSDP1 still has those of the last pass in their place. A pass whose
        # gradients will be reduced with those of a later one is left alone.
        if all(home.is_reduced for home in waiting.values()):
            # All parameters, also those that took no part in this pass: the norm is that of what the optimizer sees.
            self._act(self._homes())

    def _act(self, homes: list[Home]) -> None:
        if self._stages is not None or any(home.groups or is_distributed(home.parameter) for home in homes):
            self._clip_over_ranks(homes)
        else:
            nn.utils.clip_grad_norm_([h.parameter for h in homes if h.parameter.grad is not None], self.bound)

    def _clip_over_ranks(self, homes: list[Home]) -> None:
        squares: dict[tuple[Any, ...], Tensor] = {}
        for home in homes:
            grad = home.parameter.grad
            whole = grad is not None and is_partial(grad)
            part = torch.zeros(1) if grad is None else local(full(grad) if whole else grad)
            square = torch.linalg.vector_norm(part.detach(), dtype=torch.float64 if part.is_cpu else torch.float32) ** 2
            groups = () if whole else home.groups
            # A rank whose part has no elements asks with the others.
            squares[groups] = squares[groups] + square.to(squares[groups].device) if groups in squares else square
        for groups, square in squares.items():
            self._add_up(square, groups)
        total = sum(float(square) for square in squares.values())
        if self._stages is not None:
            # On the device of the gradients: not every process group can send from the host.
            device = next((square.device for square in squares.values() if not square.is_cpu), torch.device("cpu"))
            over_stages = torch.tensor(total, dtype=torch.float64, device=device)
            self._add_up(over_stages, (self._stages,))
            total = float(over_stages)
        factor = min(1.0, self.bound / (total**0.5 + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        for home in homes:
            if home.parameter.grad is not None:
                local(home.parameter.grad).mul_(factor)

    def _add_up(self, square: Tensor, groups: tuple[Any, ...]) -> None:
        self.together.need(groups, "the limit on gradients")
        for group in groups:
            distributed.all_reduce(square, group=group)


def clamp_for_good(parameters: Iterable[tuple[nn.Module, str]], homes: Homes, bound: float) -> None:
    """Clamp gradients from now on, by hooks that nobody takes away."""
    limits = Clamped(bound)
    for module, name in parameters:
        home = homes.of(module, name)
        if home is None or not home.parameter.requires_grad:
            continue
        limits.follows(home)
        if home.way == "own":
            hooks.on_gradient(home.parameter, limits.limit)
        elif home.way == "replicated":
            hooks.on_gradient(home.leaf, functools.partial(_note, limits, home))
        else:
            hooks.on_accumulated(home.leaf, functools.partial(_note, limits, home))


def _note(limits: Clamped | _Shortened, home: Home, _: Tensor) -> None:
    limits.arrived(home)

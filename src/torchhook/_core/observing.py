"""Modules whose output, and the gradient of it, are only looked at: what the taps of a site do together, on one level.

A training step that is measured looks at every module. Each would have a tap before and behind it, one for gradients,
and a chain of listeners on its output. Where nothing is out of the ordinary, which is asked each time, one hook does
the work of all. Everything else goes the way of ``taps``, ``gradients`` and ``listening``, whose parts these are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor, is_grad_enabled, nn

from torchhook._core.gradients import GradTap, OutputGradient
from torchhook._core.listening import Chain, Link, LinkHook
from torchhook._core.scope import active
from torchhook._core.session import Session
from torchhook._core.taps import Alias, InputTap, Look, OutputTap, listeners, repeated
from torchhook._core.targets import Target
from torchhook._torch import saved_tensor_hooks, torch_task
from torchhook._torch.compiler import in_trace
from torchhook._torch.hooks import Undo, is_on, knows_results, put_on_newest

_DIMS = ("1d", "2d", "3d")
_BY_DIMS = "Conv", "ConvTranspose", "BatchNorm", "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool"
_OTHERS = "Linear", "Bilinear", "LayerNorm", "GroupNorm", "RMSNorm", "Embedding", "GELU", "Sigmoid", "Tanh", "Softmax"
_NAMES = [*(kind + dims for kind in _BY_DIMS for dims in _DIMS), *_OTHERS]
_ACTIVATIONS = "ReLU", "ReLU6", "LeakyReLU", "ELU", "CELU", "SELU", "SiLU", "Mish", "Hardswish", "Hardsigmoid"


def _classes(names: Iterable[str]) -> frozenset[type[nn.Module]]:
    return frozenset(getattr(nn, name) for name in names if hasattr(nn, name))


# What these return lies in memory of its own, so that nobody need look at what they are given. These very classes:
# nobody knows what a subclass does.
_MAKE_NEW = _classes(_NAMES)
# These too, or else they return what they were given and have written to it: ``inplace=True``.
_WRITE = _classes(_ACTIVATIONS)


def can_observe(session: Session, target: Target) -> bool:
    """Whether a target is the output of a module that the session has no tap for yet."""
    site, module, tensor = target
    if tensor is not None or site.port != "output" or site.op is not None or site.call is not None:
        return False
    return knows_results and not session._taps.has(module)


def observe(session: Session, target: Target, look: Look, gradient_look: Look) -> None:
    """As ``session.look`` for a target and for its gradient."""
    (site, module, _), taps = target, session._taps
    grad_tap = GradTap(site.path, session.scope)
    grad_tap.add_look(gradient_look)
    gradient = OutputGradient(grad_tap, taps.handles, taps.aliases)
    kind, is_own = type(module), "forward" in vars(module)
    writes = kind in _WRITE and not is_own
    makes_new = writes or (kind in _MAKE_NEW and not is_own)
    leaving = _written_to(gradient) if writes else gradient.leaving
    tap = ObserveTap(site.path, taps.seen_from, look, grad_tap, gradient, leaving, makes_new, writes)
    before = None if makes_new else Entrance(site.path, taps.seen_from, gradient)
    taps.observe(target, tap, grad_tap, before)


def go_on(session: Session) -> None:
    """Make an open session that only looks, and names no calls, forget what has passed: its hooks stay where they are.

    As closing it and opening it again, with nothing noted of what ran.
    """
    session._taps.go_on()


def _written_to(gradient: OutputGradient) -> Alias:
    """As ``gradient.leaving``, behind a module that has written to what it was given, if that is what it returns."""

    def leaving(value: Any, call: int, source: Any, again: bool) -> Any:
        if type(value) is Tensor and len(source) == 1 and value is source[0] and not value.is_inference():
            gradient.was_written(value)
        return gradient.leaving(value, call, source, again)

    return leaving


class ObserveTap(OutputTap):
    """The forward hook of a module whose output and gradient are looked at by one who changes nothing."""

    _is_plain = False

    def __init__(
        self,
        label: str,
        scope: Any,
        look: Look,
        grad_tap: GradTap,
        gradient: OutputGradient,
        leaving: Alias,
        makes_new: bool,
        writes: bool,
    ) -> None:
        super().__init__(label, scope)
        self.add_look(look)
        self.add_alias(leaving)
        self._look, self._grad_tap, self._gradient, self._makes_new = look, grad_tap, gradient, makes_new
        self._writes = writes

    def attach(self, undo: Undo, module: nn.Module) -> None:
        super().attach(undo, module)
        many = len(self.looks) + len(self.aliases) + len(self._grad_tap.looks) > 3
        self._is_plain = self.scope is not None and not (many or self.edits or self._grad_tap.edits)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        scope = self.scope
        if (
            type(output) is not Tensor
            or not self._is_plain
            or scope not in active.get()
            or (scope.runs_eagerly and in_trace())
            or listeners
            or repeated
            or torch_task() != -1
            or not is_grad_enabled()
            or saved_tensor_hooks() is not None
        ):
            return super().__call__(module, args, output)
        gradient = self._gradient
        if self._makes_new:
            if args and output is args[0] and not self._writes:
                return super().__call__(module, args, output)
        elif not gradient.is_new(output, args):
            return super().__call__(module, args, output)
        handles = gradient.handles
        arrival = Arrival(gradient, self._grad_tap, handles.round)
        is_first = put_on_newest(output, arrival)
        if not is_first and (is_first is None or not _joins(arrival, handles.latest, output)):
            return super().__call__(module, args, output)
        arrival._call = call = next(self.calls)
        self.ran = call + 1
        if is_first:
            handles.results.append(arrival)
            handles.latest = arrival
            if call % 64 == 63:  # many in one round: graphs come and go
                handles.prune_results()
        self._look(output, call)
        return None


def _joins(arrival: Arrival, latest: Arrival | None, output: Tensor) -> bool:
    """What a layer returns, its container often does too: let the hook of the one hear for the other, if it can."""
    return latest is not None and is_on(output, latest) and latest.add(arrival)


class Entrance(InputTap):
    """The forward pre-hook of such a module: notes what is given to it, and which version."""

    def __init__(self, label: str, scope: Any, gradient: OutputGradient) -> None:
        super().__init__(label, scope)
        self.add_alias(gradient.entering)
        self._gradient = gradient

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        scope = self.scope
        if (
            len(args) != 1
            or kwargs
            or kwargs is None
            or self.looks
            or self.edits
            or scope is None
            or scope not in active.get()
            or (scope.runs_eagerly and in_trace())
            or torch_task() != -1
            or not is_grad_enabled()
            or saved_tensor_hooks() is not None
        ):
            return super().__call__(module, args, kwargs)
        self.ran = 1
        self._gradient.entering(args[0], 0, (), False)
        return None


class Arrival(Chain):
    """A chain of listeners that is the hook itself, while all of them are of one session.

    The gradients of nearly all tensors are heard by one.
    """

    __slots__ = ("_all", "_call", "_gradient", "_held", "_others", "_round", "_tap", "where")
    _call: int
    where: ref[Any]
    """The hooks of the tensor, of which this is one."""

    # As few objects as can be: one is made for every layer, and the collector counts them.
    def __init__(self, gradient: OutputGradient, tap: GradTap, of_round: int) -> None:
        self.done = None
        self._all: list[ref[Link]] | None = None
        self._gradient, self._tap, self._round = gradient, tap, of_round
        self._others: list[Arrival] | None = None

    def add(self, other: Arrival) -> bool:
        """Hear for another of the same session and tensor too, if nobody else has joined."""
        if self._all is not None:
            return False
        self._others = [*(self._others or ()), other]
        return True

    @property
    def links(self) -> list[ref[Link]]:  # type: ignore[override]
        """Asked for by whoever joins: from then on each has a link of its own."""
        if self._all is None:
            self._all = []
            heard = (self, *(self._others or ()))
            self._held = [Link(self, one._gradient.whose, one._heard()) for one in heard]
        return self._all

    def _heard(self) -> LinkHook:
        gradient, tap, call, of = self._gradient, self._tap, self._call, self._round

        def hear(grad: Tensor, arrived: Tensor) -> Tensor | None:
            if gradient.handles.round != of:  # taken away, but known to those who have joined
                return None
            gradient.aliases.follow_writes()
            return tap.arrived(grad, call)

        return hear

    def __call__(self, arrived: Tensor | None) -> Tensor | None:
        if arrived is None:  # torch calls hooks where no gradient comes, too (pytorch#11751)
            return None
        if self._all is None:
            gradient, tap = self._gradient, self._tap
            if gradient.handles.round == self._round:
                if gradient.aliases.waiting:
                    gradient.aliases.follow_writes()
                tap.ran += 1
                tap.looks[0](arrived, self._call)
                if self._others is not None:
                    for other in self._others:
                        other(arrived)
            return None
        links, grad = self.in_order(), arrived
        self.done = WeakSet(links)
        for link in links:
            new = link.hook(grad, arrived)
            grad = grad if new is None else new
        return None if grad is arrived else grad

"""A program on the stage: built from its source, run bare, with hooks, or with what has no gradient held still.

A finite difference knows nothing of ``detach`` and ``no_grad``. So one run writes down what came out of them, and those
that measure differences play it back.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SEED = 7


class Tape:
    """What came out of places without gradients, in order: written in one run, played back in others.

    ``mode`` is ``"off"``, or without checkpoints ``"plain"``, ``"write"`` or ``"play"``.
    """

    def __init__(self) -> None:
        self.mode = "off"
        self.kept: list[Tensor | None] = []
        self.place = 0

    @contextlib.contextmanager
    def running(self, mode: str) -> Iterator[None]:
        if mode == "write":
            self.kept.clear()
        self.mode, self.place = mode, 0
        try:
            yield
        finally:
            self.mode = "off"

    def pass_on(self, value: Tensor, constant: bool) -> Tensor:
        if self.mode in ("off", "plain"):
            return value
        if self.mode == "write":
            self.kept.append(value.detach().clone() if constant else None)
            return value
        kept = self.kept[self.place]
        self.place += 1
        return value if kept is None else kept.clone()

    # -- the names in a program -----------------------------------------------------------------------

    def detach(self, value: Tensor) -> Tensor:
        return self.pass_on(value.detach(), True)

    def frozen(self, value: Any) -> Any:
        """What came out of a block without gradients, or was kept in an attribute by someone who ran in one."""
        return mapped(lambda t: self.pass_on(t, not t.requires_grad), value)

    @contextlib.contextmanager
    def no_grad(self, *written: Tensor) -> Iterator[None]:
        """Gradients pass a write in such a block as if it had not been: the difference is a constant."""
        before = [t.detach().clone() for t in written] if self.mode != "off" else []
        with torch.no_grad():
            yield
            for tensor, was in zip(written, before, strict=False):
                change = self.pass_on(tensor - was, True)
                if self.mode == "play":
                    tensor.copy_(was + change)

    def checkpoint(self, function: Callable[..., Any], *args: Any, use_reentrant: bool) -> Any:
        """Only in plain runs: what is right does not depend on what is stored."""
        if self.mode != "off":
            return function(*args)
        return checkpoint(function, *args, use_reentrant=use_reentrant)


class Ran(NamedTuple):
    """What a run came to: the score, the tensors of the output, the gradients of inputs and parameters."""

    score: float
    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Stage:
    """One model, and the ways to run it."""

    def __init__(self, source: str) -> None:
        self.tape = Tape()
        names: dict[str, Any] = {
            "torch": torch,
            "nn": nn,
            "F": F,
            **{name: getattr(self.tape, name) for name in ("detach", "frozen", "no_grad", "checkpoint")},
        }
        exec(compile(source, "<program>", "exec"), names)
        with doubles():
            torch.manual_seed(SEED)
            self.model: nn.Module = names["Program"]().eval()
            self.given: tuple[Tensor, ...] = names["inputs"]()
        if not isinstance(self.given, tuple):
            raise TypeError("inputs() returns a tuple")
        self.built = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.modules = dict(self.model.named_modules())

    def leaves(self, args: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """What a gradient can be asked for."""
        inputs = {f"(input {i})": t for i, t in enumerate(args) if t.requires_grad}
        return {**inputs, **{name: p for name, p in self.model.named_parameters() if p.requires_grad}}

    def arguments(self) -> tuple[Tensor, ...]:
        """The inputs anew: a program may write to them."""
        return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in self.given)

    def run(self, mode: str = "off") -> Ran:
        """Forward and backward."""
        with quiet(), self.tape.running(mode):
            args = self.arguments()
            output = self.model(*args)
            tensors = [t for _, t in places_in(output)]
            values = [t.detach().clone() for t in tensors]
            loss = score(tensors)
            leaves = self.leaves(args)
            for leaf in leaves.values():
                leaf.grad = None
            if loss.requires_grad:
                loss.backward()
            gradients = {name: t.grad.clone() for name, t in leaves.items() if t.grad is not None}
            return Ran(loss.item(), values, gradients, {n: b.clone() for n, b in self.model.named_buffers()})

    @torch.no_grad()
    def score(self, change: Callable[[tuple[Tensor, ...]], None] = lambda args: None) -> float:
        """The score alone, with what has no gradient held still."""
        with quiet(), self.tape.running("play"):
            args = self.arguments()
            change(args)
            return score([t for _, t in places_in(self.model(*args))]).item()


def score(tensors: list[Tensor]) -> Tensor:
    """A number that every element has another part in."""
    total = torch.zeros((), dtype=torch.float64)
    for i, tensor in enumerate(tensors):
        weights = torch.arange(tensor.numel(), dtype=torch.float64).add(i).mul(1.7).cos().view(tensor.shape)
        total = total + (tensor * weights).sum() + (tensor * tensor * weights.roll(1)).sum() * 0.1
    return total


@contextlib.contextmanager
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with doubles():
            yield


# -- nested values, without the library ---------------------------------------------------------------------------


def mapped(change: Callable[[Tensor], Any], value: Any, known: dict[int, Any] | None = None) -> Any:
    """A nested value with its tensors changed; one that is in it twice is changed once."""
    known = {} if known is None else known
    if isinstance(value, Tensor):
        if id(value) not in known:
            known[id(value)] = change(value)
        return known[id(value)]
    if isinstance(value, dict):
        return {name: mapped(change, part, known) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [mapped(change, part, known) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nested value, each once."""
    found: list[Tensor] = []
    mapped(found.append, value)
    return found


def places_in(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nested value and where they are, as often as they are there."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from places_in(part, f"{place}[{name!r}]")
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            yield from places_in(part, f"{place}[{i}]")

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
EXACT = 1e-11


class Tape:
    """What came out of places without gradients, in order: written in one run, played back in others.

    ``mode`` is ``"off"``, or without checkpoints ``"plain"``, ``"write"`` or ``"play"``.
    """

    def __init__(self) -> None:
        self.mode = "off"
        self.kept: list[Tensor | None] = []
        self.place = 0
        self.odd = False
        """Whether a view came out of a block without gradients that says it needs one."""

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
        self.odd |= any(t.requires_grad and not on_graph(t) for _, t in places_in(value))
        return mapped(lambda t: self.pass_on(t, not on_graph(t)), value, once=False)

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
        if use_reentrant and torch.is_grad_enabled() and not any(on_graph(arg) for arg in args):
            raise RuntimeError("torch computes no gradients in a reentrant checkpoint without inputs that need one")
        return checkpoint(_flat(function) if use_reentrant else function, *args, use_reentrant=use_reentrant)


def _flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns a tensor or a tuple of tensors, each there once.

    From a reentrant checkpoint, torch gives no gradients to any other result, or all to the last of its names.
    """

    def run(*args: Any) -> Any:
        result = function(*args)
        parts = result if isinstance(result, tuple) else (result,)
        if not all(isinstance(part, Tensor) for part in parts) or len({id(part) for part in parts}) < len(parts):
            raise RuntimeError("a reentrant checkpoint of this has no gradients, or the wrong ones")
        return result

    return run


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

    @torch.no_grad()
    def restore(self) -> None:
        """The parameters as they were built."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.built[name])

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


def on_graph(tensor: Tensor) -> bool:
    """Whether a gradient can flow back from a tensor. A view from a block without gradients only says so."""
    try:
        return tensor.requires_grad and (tensor.grad_fn is not None or not tensor._is_view())
    except RuntimeError:  # autograd has given it up
        return False


# -- nested values, without the library ---------------------------------------------------------------------------


def mapped(change: Callable[[Tensor], Any], value: Any, once: bool = True, known: dict[int, Any] | None = None) -> Any:
    """A nested value with its tensors changed; one that is in it twice is changed once, unless told otherwise."""
    known = {} if known is None else known
    if isinstance(value, Tensor):
        if id(value) not in known or not once:
            known[id(value)] = change(value)
        return known[id(value)]
    if isinstance(value, dict):
        return {name: mapped(change, part, once, known) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [mapped(change, part, once, known) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def replaced(change: Callable[[str, Tensor], Any], value: Any, place: str = "") -> Any:
    """A nested value with its tensors changed, each where it is."""
    if isinstance(value, Tensor):
        return change(place, value)
    if isinstance(value, dict):
        return {name: replaced(change, part, f"{place}[{name!r}]") for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([replaced(change, part, f"{place}[{i}]") for i, part in enumerate(value)])
    return value


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


# -- numbers ------------------------------------------------------------------------------------------------------


def close(one: float, two: float) -> bool:
    return abs(one - two) <= 1e-5 * (1 + abs(one))


def first_of(tensor: Tensor) -> list[float]:
    return [round(x, 6) for x in tensor.flatten()[:4].tolist()]


def run_differences(expected: Ran, found: Ran, gradients: bool = True) -> list[str]:
    """Where two runs came to something else."""
    if len(expected.outputs) != len(found.outputs):
        return ["another output"]
    outputs = enumerate(zip(expected.outputs, found.outputs, strict=True))
    lines = [f"output {i}" for i, (a, b) in outputs if differ(a, b)]
    for name in {**expected.gradients, **found.gradients} if gradients else ():
        a, b = expected.gradients.get(name), found.gradients.get(name)
        zero = torch.zeros((), dtype=torch.float64)
        if differ(zero if a is None else a, zero if b is None else b):
            shown = [None if t is None else first_of(t) for t in (b, a)]
            lines.append(f"the gradient of {name} is {shown[0]}…, expected {shown[1]}…")
    lines += [f"buffer {name}" for name, b in expected.buffers.items() if not torch.equal(b, found.buffers[name])]
    return lines


def differ(one: Tensor, two: Tensor, by: float = EXACT) -> bool:
    one, two = torch.broadcast_tensors(one, two) if 0 in (one.dim(), two.dim()) else (one, two)
    return one.shape != two.shape or not torch.allclose(one, two, rtol=by, atol=by)

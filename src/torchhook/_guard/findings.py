"""What the guard found: the site, the tensors around it in numbers, and how it is said."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from torchhook._recording.address import Site
from torchhook._recording.tables import Table, digits
from torchhook._values.elements import dtype_name

Kind = Literal["op", "module", "parameter", "buffer", "input", "loss", "outside", "rank"]
Phase = Literal["forward", "backward"]

_ADVICE: dict[Kind, str] = {
    "parameter": "Look at what last wrote to it: a step with a bad gradient, a damaged checkpoint, a bad "
    "initialization.",
    "input": "Look at the data and what prepares it.",
    "loss": "Look at the loss: a log or division at 0, an overflow, a loss scale that is too large.",
    "outside": "Look at where that tensor was written: a plain attribute, a global, memory that was never filled.",
    "rank": "Look at what the guards of the other ranks found. A step of the optimizer would spoil the weights of "
    "all ranks.",
}
_ADVICE["buffer"] = _ADVICE["parameter"]
_DERIVATIVE = "Look at the derivative at these values: roots, norms and logs at 0, and branches that where() hides."
_OVERFLOW = (
    "It is an overflow: these numbers are finite, and what they give is too large for the dtype. Look at what made "
    "them grow: a learning rate or a loss scale that is too large, gradients that are not clipped."
)
# Steps that only multiply and add: of finite numbers they make no others, unless those are too large.
_MULTIPLIES = re.compile(
    r"(Mm|Addmm|Bmm|Baddbmm|Addbmm|Mv|Addmv|Dot|Mul|Linear|\w*Convolution|Embedding|Add|Sub|Sum|ToCopy)Backward\d*$"
)


class Statistics(NamedTuple):
    """One tensor in numbers. ``min`` to ``std`` are those of its finite values, ``None`` where it has none."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    nan: int
    inf: int
    neg_inf: int

    @property
    def finite(self) -> bool:
        return not (self.nan or self.inf or self.neg_inf)

    @property
    def bad(self) -> str:
        counts = [(self.nan, "NaN"), (self.inf, "+Inf"), (self.neg_inf, "-Inf")]
        return ", ".join(f"{n} {what}" for n, what in counts if n) or "all finite"

    def __str__(self) -> str:
        kind = f"{self.name} {self.shape} {dtype_name(self.dtype)}"
        if self.min is None:
            return f"{kind}: {self.bad}"
        numbers = f"min {self.min:.4g}, max {self.max:.4g}, mean {self.mean:.4g}, std {self.std:.4g}"
        return f"{kind}: {numbers}, {self.bad}"


@dataclass(repr=False)
class Finding:
    """Where the first NaN or Inf came from, and what it was made of.

    ``print(finding)`` tells all of it, with what to look at next.
    """

    kind: Kind
    site: Site
    """The producer: ``path/op#call``, ``path#call``, the name of a parameter or buffer; ``:input`` where an input
    already held it, ``:grad_input`` where a gradient went wrong on its way through, ``:grad`` where it came in so."""
    phase: Phase
    run: int
    """Which run of the model since the guard was opened."""
    inputs: list[Statistics]
    weights: list[Statistics]
    outputs: list[Statistics]
    stack: list[str]
    """The modules around it, outermost first, as ``path (Type)``."""
    used_by: Site | None = None
    """The first to use a parameter, buffer or input that already held it."""
    node: str | None = None
    """Autograd's name for the step of the backward pass."""
    times: int = 1
    """How often this site was found at fault; the rest of the finding is about the first time."""
    note: str = ""
    """What else there is to say where several ranks share the work."""
    held: str = ""
    """What was seen there, where the numbers are gone."""
    unrepeated: str = ""
    """Why the pass could not be repeated to find the operation: then only the module is known, or the parameter."""

    def __str__(self) -> str:
        lines = [self.headline, f"  {self._where()}"]
        lines += [f"  {s}" if s.name == label else f"  {label}: {s}" for label, s in self._tensors()]
        return "\n".join([*lines, f"  {self._advice()}", *([self.note] if self.note else [])])

    def table(self) -> Table:
        """The tensors around it in numbers."""
        rows = [
            [label, "" if s.name == label else s.name, str(s.shape), dtype_name(s.dtype), *map(digits, s[3:7]), s.bad]
            for label, s in self._tensors()
        ]
        columns = ["", "", "shape", "dtype", ">min", ">max", ">mean", ">std", "holds"] if rows else []
        notes = [self._where(), self._advice(), *([self.note] if self.note else [])]
        return Table(self.headline, columns, rows, notes)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def _where(self) -> str:
        return f"in the {self.phase} pass of run {self.run}, inside {' > '.join(self.stack)}"

    def _tensors(self) -> list[tuple[str, Statistics]]:
        """The tensors around it, each with what it was there."""
        backward = ("gradient in", "kept from the forward pass", "gradient out")
        labels = backward if self.phase == "backward" else ("input", "weight", "output")
        parts = zip(labels, (self.inputs, self.weights, self.outputs), strict=True)
        return [(label, statistics) for label, some in parts for statistics in some]

    def __repr__(self) -> str:  # a line, because findings are often looked at as a list
        times = f" {self.times} times." if self.times > 1 else ""
        return f"<Finding: {self.headline}{times}>"

    @property
    def headline(self) -> str:
        """What made it, in one sentence."""
        where = repr(self.site.shown)
        whole = repr(self.site.path) if self.site.path else "the model"
        made = _first_bad((*self.outputs, *self.weights, *self.inputs))
        bad = (self.held or "NaN or Inf") if made is None else made.bad
        given = _first_bad(self.inputs)
        held = bad if given is None else f"{given.name}: {given.bad}"
        if self.unrepeated:
            what = f"the gradient of {self.site.path!r} holds" if self.phase == "backward" else f"{where} returned"
            return f"{what} {bad}; what made it could not be found, because {self.unrepeated}."
        if self.kind in ("parameter", "buffer"):
            weight = _first_bad(self.weights)
            already = bad if weight is None else weight.bad
            used_by = None if self.used_by is None else self.used_by.shown
            return f"{self.kind} {where} already holds {already}; {used_by!r} was the first to use it."
        if self.kind == "input":
            return f"an input of {whole} already holds it ({held}): it was there before the model ran."
        if self.kind == "loss":
            return f"the gradient of the output of {whole} already holds {bad}: the loss, outside the model, made it."
        if self.kind == "outside":
            return f"{where} was given it ({held}) by something that is no part of the model's run."
        if self.kind == "rank":
            return (
                f"the gradient of {self.site.path!r} holds {bad} since the ranks have put theirs together: it came "
                "from another rank, for what this one gave was finite."
            )
        if self.phase == "backward":
            return f"{where} made {bad} out of a finite gradient ({self.node})."
        return f"{where} made {bad} out of {'finite inputs' if given is None else f'masked inputs ({held})'}."

    def _overflowed(self) -> bool:
        """Whether numbers were too large, and not a derivative infinite."""
        if not all(s.finite for s in (*self.inputs, *self.weights)):
            return False
        if _MULTIPLIES.match(self.node or ""):
            return True
        product = max(map(_size, self.inputs), default=0.0) * max([1.0, *map(_size, self.weights)])
        most = [torch.finfo(s.dtype).max for s in self.outputs if s.dtype.is_floating_point]
        return bool(most) and product > min(most)

    def _advice(self) -> str:
        if self.unrepeated:
            return "Use th.guard(model, thorough=True), which looks at every operation while it runs."
        if self.kind == "outside" and self.phase == "backward":
            return _ADVICE["loss"]
        if self.kind in _ADVICE:
            return _ADVICE[self.kind]
        if self.phase == "backward":
            return _OVERFLOW if self._overflowed() else _DERIVATIVE
        site = self.site.every_call
        return f"To see the values: th.capture(model, {site.shown!r}, {site.but(port='input').shown!r})."


def _size(statistics: Statistics) -> float:
    """The largest finite number, without its sign."""
    return max(abs(statistics.min or 0.0), abs(statistics.max or 0.0))


def _first_bad(some: Iterable[Statistics]) -> Statistics | None:
    return next((statistics for statistics in some if not statistics.finite), None)

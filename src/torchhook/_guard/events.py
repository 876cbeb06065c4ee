"""What is handed from the watcher to the judge: something that passes a place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from torchhook._guard.findings import Kind, Phase
from torchhook._guard.operations import Named
from torchhook._recording.address import Site
from torchhook._values.memory import Origin


class Place(NamedTuple):
    """Where something passes."""

    path: str
    op: str | None
    call: int | None
    run: int
    around: tuple[nn.Module, ...]
    """The modules that run there, outermost first."""
    task: int = -1
    """The backward pass that recomputes it; -1 outside of one."""

    def site(self, port: str = "output") -> Site:
        return Site(self.path, self.op, self.call, port)


class Passing(NamedTuple):
    """What goes into a place, what comes out, and what else is known."""

    place: Place
    phase: Phase
    inputs: Named
    outputs: Named
    storages: Sequence[int | None] = ()
    """Forward only: the memory of the outputs and of the inputs, which may be copies themselves by now."""
    origins: Sequence[Origin] = ()
    constants: Sequence[float] = ()
    over: Sequence[Tensor | None] = ()
    """Forward only: what was there before, for each output in memory that is blank."""
    learned: bool = False
    """Forward only: whether the outputs of a module depend on something learned."""
    saved: Sequence[tuple[str, Tensor]] = ()
    """Backward only: what the step kept from the forward pass."""
    node: str | None = None
    task: int = -1
    """Backward only: which backward pass it is."""
    arrives: Kind | None = None
    """Backward only: what is at fault for a gradient that arrives bad, if nothing that was seen made it so."""


class Crossing(NamedTuple):
    """What goes into a module, or comes out of the one that is ``left``."""

    storages: list[int | None]
    left: nn.Module | None
    values: list[Tensor] | None = None
    """Not held on to while the device is still to be asked."""

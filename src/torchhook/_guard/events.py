"""What is handed from the watcher to the judge: where something happened, what went in and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from torchhook._guard.findings import Kind, Phase
from torchhook._guard.operations import Named
from torchhook._recording.address import Site
from torchhook._values.memory import Origin


class Location(NamedTuple):
    """Where in the model, and when. Not a ``Site`` yet: which port is at fault is for the judge to say."""

    path: str
    op: str | None
    call: int | None
    run: int
    modules: tuple[nn.Module, ...]
    """The modules that run there, outermost first."""
    task: int = -1
    """The backward pass that recomputes it; -1 outside of one."""

    def site(self, port: str = "output") -> Site:
        return Site(self.path, self.op, self.call, port)


class Event(NamedTuple):
    """An operation, a module or a step of the backward pass has run: what went in, what came out."""

    location: Location
    phase: Phase
    inputs: Named
    outputs: Named
    # The judge may see an event after its tensors were overwritten, so that what it gets are copies: whose memory
    # they were is written down while it is known.
    storages: Sequence[int | None] = ()
    """Forward only: the memory of the outputs."""
    origins: Sequence[Origin] = ()
    """Forward only: the memory of the inputs."""
    constants: Sequence[float] = ()
    previous: Sequence[Tensor | None] = ()
    """Forward only: what was there before, for each output in uninitialized memory."""
    learned: bool = False
    """Forward only: whether the outputs of a module depend on something learned."""
    saved: Sequence[tuple[str, Tensor]] = ()
    """Backward only: what the step kept from the forward pass."""
    node: str | None = None
    task: int = -1
    """Backward only: which backward pass it is."""
    blame: Kind | None = None
    """Backward only: what is at fault for a gradient that arrives bad, if nothing that was seen made it so."""


class Crossing(NamedTuple):
    """Something goes into a module, or comes out of the one that is ``left``."""

    storages: list[int | None]
    left: nn.Module | None
    values: list[Tensor] | None = None
    """``None`` while the device is still to be asked: waiting must not keep the model's memory."""

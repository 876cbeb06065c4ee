"""The session of the thorough way: every module and operation is heard of, and every step of the backward pass.

``thorough=True`` has it open all the time, a repetition for one run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from torchhook import _torch
from torchhook._core.index import Index, is_callable
from torchhook._core.session import Session
from torchhook._core.taps import Look
from torchhook._core.targets import Target
from torchhook._guard.backward import BackwardWatcher
from torchhook._guard.judge import Judge
from torchhook._guard.pending import Pending
from torchhook._guard.watcher import Watcher
from torchhook._recording.address import Site


@dataclasses.dataclass(frozen=True)
class Scrutiny:
    """What is looked at, and who judges it."""

    index: Index
    excluded: Sequence[Target]
    backward: bool
    judge: Judge

    @property
    def spared(self) -> set[int]:
        """The modules, by id, that are left alone with all that they hold; an excluded operation has nothing."""
        return {id(module) for t in self.excluded if t.site.op is None for module in t.module.modules()}

    def modules(self) -> Iterator[nn.Module]:
        """Those that can run."""
        return (module for module in self.index.distinct.values() if is_callable(module))

    def parameters(self) -> Iterator[tuple[str, nn.Module, Tensor]]:
        """Those that are judged, as they are now, with their path and their module: also what is in their place."""
        spared = self.spared
        for path, (module, own) in self.index.tensors.items():
            parameter = module._parameters.get(own)
            if isinstance(parameter, Tensor) and id(module) not in spared:
                yield path, module, parameter


def thorough_session(scrutiny: Scrutiny, first_run: int = 0) -> tuple[Session, Watcher]:
    """The hooks of the thorough way, not yet on the model."""
    index, judge = scrutiny.index, scrutiny.judge
    session = Session(index.given, index=index, warn=False)
    pending = Pending(index, judge)
    gradients = BackwardWatcher(pending, session.scope, session.handles, scrutiny.parameters, enabled=scrutiny.backward)
    excluded = {(id(t.module), t.site.op) for t in scrutiny.excluded}
    watcher = Watcher(session.scope, judge, pending, gradients, excluded, first_run)
    session.listen(watcher)
    for module in scrutiny.modules():
        site = Site(index.names(module)[0])
        session.look(Target(site.but(port="input"), module), _quietly(watcher.module_called, module))
        session.look(Target(site, module), _quietly(watcher.module_returned, module))
    return session, watcher


def _quietly(function: Callable[[nn.Module, Any, int], None], module: nn.Module) -> Look:
    def look(value: Any, call: int) -> None:
        with _torch.unheard():  # or the listener would hear all of this
            function(module, value, call)

    return look

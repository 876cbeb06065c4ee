"""What other ranks brought: gradients that were finite here, and no longer are when the ranks have put theirs together.

A hook on a parameter sees what this rank's batch gave. What the optimizer will see is in ``.grad`` when the backward
pass has ended and the wrapper has, too: there it is looked at once more, all parameters together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from torchhook import _torch
from torchhook._core import hooks
from torchhook._core.scope import Scope
from torchhook._core.sharding import Home, Homes
from torchhook._guard.checks import describe
from torchhook._guard.findings import Finding
from torchhook._guard.flags import Bad, Flags
from torchhook._guard.thorough import Scrutiny
from torchhook._recording.address import Site
from torchhook._torch import foreach, graph_task, sharded
from torchhook._values.subclasses import local

# A function that is called at the end of a pass is asked for before the pass has ended. DDP asks for its own later, and
# with static_graph=True that one asks for another: asked again and again, this one comes after both.
_AGAIN = 2


class Reduced:
    """Looks at the gradients of a model that several ranks train, at the end of each backward pass."""

    def __init__(self, scope: Scope, scrutiny: Scrutiny) -> None:
        self._scope = scope
        self._judge = scrutiny.judge
        self._homes = dict(_homes(scrutiny)) if scrutiny.backward and sharded.rank_store() is not None else {}
        self._task = -1
        self._run = -1
        self._is_own = False
        self._known_good = True
        """Whether the last pass was seen to leave nothing bad."""
        self._was_there = False

    def await_end(self, run: int) -> None:
        """From inside a gradient hook: look at all gradients when this backward pass has ended."""
        if not self._homes or self._task == graph_task():
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a read would end the capture with an error
        self._task, self._run, self._is_own = graph_task(), run, False
        # Gradients that are not zeroed stay bad, and no other rank is to blame for that in this pass.
        self._was_there = not self._known_good and self._first_bad() is not None
        self._known_good = False
        hooks.after_backward(functools.partial(self._look_later, _AGAIN))

    def own_fault(self) -> None:
        """What this rank's own pass gave was bad: what comes of it is no other's fault."""
        self._is_own = True

    def _look_later(self, again: int) -> None:
        if again:
            hooks.after_backward(functools.partial(self._look_later, again - 1))
        elif not self._scope.closed:
            task, self._task = self._task, -1
            bad = self._first_bad()
            self._known_good = bad is None
            is_own = self._is_own or self._was_there or self._judge.saw_bad(task)
            # Where the ranks do not put them together yet, they are this one's alone.
            if bad is not None and not is_own and self._homes[bad.where[0]].is_reduced:
                self._tell(bad)

    def _tell(self, bad: Bad[tuple[str, Tensor]]) -> None:
        path, grad = bad.where
        found, stack = [describe("gradient", grad)], self._judge.stack_of(path.rpartition(".")[0])
        site = Site(path, port="grad")
        self._judge.found_elsewhere(Finding("rank", site, "backward", self._run, found, [], [], stack))

    def _first_bad(self) -> Bad[tuple[str, Tensor]] | None:
        with _torch.unheard(), torch.no_grad():
            found = ((path, home.parameter.grad) for path, home in self._homes.items())
            grads = [(path, local(grad)) for path, grad in found if grad is not None]
            flags: Flags[tuple[str, Tensor]] = Flags()
            for path, grad in _suspicious(grads):
                flags.note(grad, (path, grad))
            return next(iter(flags.read()), None)


def _homes(scrutiny: Scrutiny) -> Iterator[tuple[str, Home]]:
    """Where the gradients are that are judged, each once: of those that FSDP flattens, several have one."""
    homes, known = Homes(scrutiny.index), set[int]()
    spared = scrutiny.spared
    for path, (module, own) in scrutiny.index.tensors.items():
        home = None if id(module) in spared else homes.of(module, own)
        if home is not None and id(home.parameter) not in known:
            known.add(id(home.parameter))
            yield path, home


def _suspicious(grads: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Those that may not be finite, which one launch for many of them tells on a device."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for _, grad in grads:
        if grad.is_cuda and type(grad) is Tensor and grad.layout is torch.strided and grad.is_floating_point():
            alike.setdefault((grad.device, grad.dtype), []).append(grad)
    # All are asked before any is read: reading waits.
    totals = {kind: torch.stack(list(foreach.norms(some))).sum() for kind, some in alike.items()}
    good = {kind for kind, total in totals.items() if math.isfinite(total.item())}
    return [(path, g) for path, g in grads if (g.device, g.dtype) not in good or g.layout is not torch.strided]

"""Whose fault a NaN or Inf is: a producer's, a weight's, an input's, the loss's, or of one found before.

A NaN is reported at once. An Inf is reported when it leaves the module that made it, or turns into a NaN there: models
make infinities that they throw away again (the position buckets of T5, the logarithm of a mask of zeros and ones).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchhook._core.index import Index
from torchhook._guard.checks import describe
from torchhook._guard.events import Crossing, Passing, Place
from torchhook._guard.findings import Finding, Kind, Statistics
from torchhook._guard.masks import Allowed
from torchhook._guard.uninitialized import written
from torchhook._recording.address import Site
from torchhook._values.finite import may_be_bad
from torchhook._values.memory import Origin, origin, reach


class _Suspect(NamedTuple):
    """An Inf that has not left its module yet."""

    finding: Finding
    module: nn.Module
    alias: Tensor
    """Holds on to the memory, so that its address stays its own."""


class _Owner(NamedTuple):
    """The parameter or buffer that some memory belongs to."""

    kind: Kind
    name: str
    reach: range
    """The part of it that is its own."""


def _owner(owners: dict[int, list[_Owner]], its: Origin) -> _Owner | None:
    some = owners.get(its.storage, []) if its.storage is not None else []
    return next((owner for owner in some if its.offset in owner.reach), some[0] if some else None)


class Judge:
    """Is shown what may hold a NaN or Inf, in the order in which it was made, and reports what is at fault."""

    def __init__(self, index: Index, allowed: Allowed, report: Callable[[Finding], None]) -> None:
        self.findings: dict[Any, Finding] = {}
        self._index = index
        self._allowed = allowed
        self._report = report
        self._suspects: dict[int | None, _Suspect] = {}
        self._masking: set[int] = set()
        """Modules of this run, by id, that hold an infinity on purpose."""
        self._run_is_faulty = False
        self._faulty_runs: set[int] = set()
        self._faulty_passes: set[int] = set()
        """Backward passes that something bad was seen in."""

    def forget_run(self) -> None:
        """Forget what belongs to one run of the model."""
        self._suspects.clear()
        self._masking.clear()
        self._run_is_faulty = False

    def name(self, module: nn.Module) -> str:
        return next(iter(self._index.names(module)), "?")

    # -- what is shown --------------------------------------------------------------------------

    def input(self, place: Place, name: str, tensor: Tensor) -> None:
        """Judge what the model is called with."""
        if may_be_bad(tensor):
            found = describe(name, tensor)
            if not found.finite and not self._allowed.is_mask(found):
                self._found(
                    Finding("input", place.site("input"), "forward", place.run, [found], [], [], self._stack(place))
                )

    def passing(self, it: Passing) -> None:
        """Judge what a place made."""
        outputs = [
            describe(name, tensor if before is None else written(before, tensor))
            for (name, tensor), before in zip_longest(it.outputs, it.over)
        ]
        if all(s.finite for s in outputs):
            return  # the sum overflowed, not its terms
        inputs = [describe(name, tensor) for name, tensor in it.inputs]
        if it.phase == "backward":
            self._gradient(it, inputs, outputs)
        elif not self._is_propagated(it, inputs, outputs):
            around = [id(module) for module in it.place.around]
            if self._allowed.is_deliberate(it, inputs, outputs, around[-1] in self._masking):
                self._masking.update(around)
            else:
                self._value(it, inputs, outputs)

    def crossing(self, it: Crossing) -> None:
        """Report the suspects that go into another module, or leave theirs; forget those that stay behind."""
        for i, memory in enumerate(it.storages):
            suspect = self._suspects.get(memory)
            if suspect is not None and (it.values is None or may_be_bad(it.values[i])):
                self._confirm(suspect)
        self._suspects = {memory: s for memory, s in self._suspects.items() if s.module is not it.left}

    def has_suspects(self) -> bool:
        return bool(self._suspects)

    def acquit(self, storages: Iterable[int | None]) -> None:
        """This memory was written to again, and is finite now."""
        for memory in storages:
            self._suspects.pop(memory, None)

    # -- what is made of it -----------------------------------------------------------------------

    def _value(self, it: Passing, inputs: list[Statistics], outputs: list[Statistics]) -> None:
        owners = self._owners()
        owned = [(found, _owner(owners, its)) for found, its in zip(inputs, it.origins, strict=True)]
        weights = [found._replace(name=owner.name) for found, owner in owned if owner is not None]
        plain = [found for found, owner in owned if owner is None]

        def finding(kind: Kind, site: Site, used_by: Site | None = None) -> Finding:
            return Finding(kind, site, "forward", it.place.run, plain, weights, outputs, self._stack(it.place), used_by)

        for found, owner in owned:
            if owner is None or found.finite or (owner.kind == "buffer" and self._allowed.permits(found)):
                continue
            self._found(finding(owner.kind, Site(owner.name), it.place.site()))
            return
        if self._run_is_faulty and (it.place.op is None or any(not s.finite for s in plain)):
            return  # it only passes on what was found before
        if any(not s.finite and not self._allowed.permits(s) for s in plain):
            self._found(finding("outside", it.place.site("input")))
        elif it.place.op is None:
            self._found(finding("module", it.place.site()))
        elif any(s.nan for s in outputs):
            self._found(finding("op", it.place.site()))
        else:
            self._suspect(it, finding("op", it.place.site()), it.place.around[-1])

    def _gradient(self, it: Passing, inputs: list[Statistics], outputs: list[Statistics]) -> None:
        place, came_bad = it.place, any(not s.finite for s in inputs)
        passes = {it.task} if place.task == -1 else {it.task, place.task}
        passes_on = (came_bad or "Checkpoint" in str(it.node)) and not passes.isdisjoint(self._faulty_passes)
        self._faulty_passes |= passes
        if passes_on or place.run in self._faulty_runs:
            return  # of what was found before, or inside
        site = place.site("grad" if came_bad else "grad_input")
        kind: Kind = it.arrives or ("outside" if came_bad else "op" if place.op is not None else "module")
        saved = [describe(name, tensor) for name, tensor in it.saved]
        made = [] if it.arrives else outputs
        self._found(Finding(kind, site, "backward", place.run, inputs, saved, made, self._stack(place), node=it.node))

    def _is_propagated(self, it: Passing, inputs: list[Statistics], outputs: list[Statistics]) -> bool:
        """Whether it comes from an Inf under suspicion, which is then followed, or reported once it is a NaN."""
        for source, found in zip(it.origins, inputs, strict=True):
            suspect = self._suspects.get(source.storage)
            if suspect is not None and not found.finite:
                if any(s.nan for s in outputs):
                    self._confirm(suspect)
                else:
                    self._suspect(it, suspect.finding, suspect.module)
                return True
        return False

    def _suspect(self, it: Passing, finding: Finding, module: nn.Module) -> None:
        for (_, tensor), memory in zip(it.outputs, it.storages, strict=True):
            self._suspects[memory] = _Suspect(finding, module, tensor.detach())

    def _confirm(self, suspect: _Suspect) -> None:
        self._suspects = {memory: s for memory, s in self._suspects.items() if s.finding is not suspect.finding}
        self._found(suspect.finding)

    def _found(self, finding: Finding) -> None:
        self._run_is_faulty = True
        if finding.phase == "forward":
            self._faulty_runs.add(finding.run)
        key = (finding.kind, finding.site.every_call, finding.phase)
        known = self.findings.setdefault(key, finding)
        if known is not finding:
            known.times += 1
        self._report(known)

    def _owners(self) -> dict[int, list[_Owner]]:
        """Parameters and buffers by memory: cuDNN and flattened optimizers put several into one."""
        owners: dict[int, list[_Owner]] = {}
        for name, (module, own) in self._index.tensors.items():
            tensor = getattr(module, own, None)
            if isinstance(tensor, Tensor) and (its := origin(tensor)).storage is not None:
                kind: Kind = "parameter" if own in module._parameters else "buffer"
                owners.setdefault(its.storage, []).append(_Owner(kind, name, reach(tensor)))
        return owners

    def _stack(self, place: Place) -> list[str]:
        return [f"{self.name(module) or 'model'} ({type(module).__name__})" for module in place.around]

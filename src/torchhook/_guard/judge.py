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
from torchhook._guard.events import Crossing, Event, Location
from torchhook._guard.findings import Finding, Kind, Statistics
from torchhook._guard.masks import Masks
from torchhook._guard.uninitialized import only_written
from torchhook._recording.address import Site
from torchhook._values.finite import may_be_bad
from torchhook._values.memory import Origin, origin, reach

Report = Callable[[Finding], object]


class _Suspect(NamedTuple):
    """An Inf that has not left its module yet."""

    finding: Finding
    module: nn.Module
    # Suspects are known by the address of their memory, which another tensor would get if this one were freed.
    alias: Tensor


class _Owner(NamedTuple):
    """The parameter or buffer that some memory belongs to."""

    kind: Kind
    name: str
    reach: range
    """The part of it that is its own."""


def _owner(owners: dict[int, list[_Owner]], source: Origin) -> _Owner | None:
    some = owners.get(source.storage, []) if source.storage is not None else []
    return next((owner for owner in some if source.offset in owner.reach), some[0] if some else None)


def _key(finding: Finding) -> Any:
    # Without the call: a layer that fails in a loop, or at every step of a training, is one finding.
    return finding.kind, finding.site.every_call, finding.phase


class Judge:
    """Is shown what may hold a NaN or Inf, in the order in which it was made, and reports what is at fault."""

    def __init__(self, index: Index, masks: Masks, report: Report) -> None:
        self.findings: dict[Any, Finding] = {}
        self._index = index
        self._masks = masks
        self.report = report
        """Is told of each finding, as it is known: a repetition listens first."""
        self._suspects: dict[int | None, _Suspect] = {}
        self._masking: set[int] = set()
        """Modules of this run, by id, that hold an infinity on purpose."""
        self._run_is_faulty = False
        self._faulty_runs: set[int] = set()
        self._faulty_passes: set[int] = set()
        """Backward passes that something bad was seen in."""

    def forget_run(self) -> None:
        """Forget what belongs to one run of the model."""
        # Not the faulty runs: their backward pass may come after the next run has begun.
        self._suspects.clear()
        self._masking.clear()
        self._run_is_faulty = False

    def name(self, module: nn.Module) -> str:
        return next(iter(self._index.names(module)), "?")

    # -- what is shown --------------------------------------------------------------------------

    def judge_input(self, location: Location, name: str, tensor: Tensor) -> None:
        """Judge what the model is called with."""
        if may_be_bad(tensor):
            found = describe(name, tensor)
            if not found.finite and not self._masks.is_mask(found):
                site, stack = location.site("input"), self._stack(location)
                self._found(Finding("input", site, "forward", location.run, [found], [], [], stack))

    def judge_event(self, event: Event) -> None:
        """Judge what an operation, a module or a step of the backward pass made."""
        outputs = [
            describe(name, tensor if before is None else only_written(before, tensor))
            for (name, tensor), before in zip_longest(event.outputs, event.previous)
        ]
        if all(s.finite for s in outputs):
            return  # the sum overflowed, not its terms
        inputs = [describe(name, tensor) for name, tensor in event.inputs]
        if event.phase == "backward":
            self._judge_gradient(event, inputs, outputs)
        elif not self._is_propagated(event, inputs, outputs):
            running = [id(module) for module in event.location.modules]
            if self._masks.is_deliberate(event, inputs, outputs, running[-1] in self._masking):
                # All of them: a mask that was made inside may be returned by any of the modules around it.
                self._masking.update(running)
            else:
                self._judge_value(event, inputs, outputs)

    def judge_crossing(self, crossing: Crossing) -> None:
        """Report the suspects that go into another module, or leave theirs; forget those that stay behind."""
        for i, memory in enumerate(crossing.storages):
            suspect = self._suspects.get(memory)
            # Where the value is at hand, it is looked at once more: only a part of the memory may be passed on.
            if suspect is not None and (crossing.values is None or may_be_bad(crossing.values[i])):
                self._confirm(suspect)
        self._suspects = {memory: s for memory, s in self._suspects.items() if s.module is not crossing.left}

    def has_suspects(self) -> bool:
        return bool(self._suspects)

    def drop_suspects(self, storages: Iterable[int | None]) -> None:
        """This memory was written to again, and is finite now."""
        for memory in storages:
            self._suspects.pop(memory, None)

    # -- what is made of it -----------------------------------------------------------------------

    def _judge_value(self, event: Event, inputs: list[Statistics], outputs: list[Statistics]) -> None:
        location = event.location
        owners = self._owners()
        owned = [(found, _owner(owners, source)) for found, source in zip(inputs, event.origins, strict=True)]
        weights = [found._replace(name=owner.name) for found, owner in owned if owner is not None]
        plain = [found for found, owner in owned if owner is None]

        def finding(kind: Kind, site: Site, used_by: Site | None = None) -> Finding:
            stack = self._stack(location)
            return Finding(kind, site, "forward", location.run, plain, weights, outputs, stack, used_by)

        # Weights first: they were bad before the model ran, so nothing that runs is at fault.
        for found, owner in owned:
            # A buffer may be a mask that was computed once and kept; a parameter is never one.
            if owner is None or found.finite or (owner.kind == "buffer" and self._masks.permits(found)):
                continue
            self._found(finding(owner.kind, Site(owner.name), location.site()))
            return
        if self._run_is_faulty and (location.op is None or any(not s.finite for s in plain)):
            return  # it only passes on what was found before
        if any(not s.finite and not self._masks.permits(s) for s in plain):
            # Everything that the run made was seen, and this was not among it.
            self._found(finding("outside", location.site("input")))
        elif location.op is None:
            self._found(finding("module", location.site()))
        elif any(s.nan for s in outputs):
            self._found(finding("op", location.site()))
        else:
            self._suspect(event, finding("op", location.site()), location.modules[-1])

    def _judge_gradient(self, event: Event, inputs: list[Statistics], outputs: list[Statistics]) -> None:
        location, came_bad = event.location, any(not s.finite for s in inputs)
        # What is recomputed has a backward pass of its own inside the outer one (reentrant checkpointing), and the step
        # of the checkpoint itself only hands on what came out of that.
        passes = {event.task} if location.task == -1 else {event.task, location.task}
        passes_on = (came_bad or "Checkpoint" in str(event.node)) and not passes.isdisjoint(self._faulty_passes)
        self._faulty_passes |= passes
        # After a fault in the forward pass, bad gradients are its consequence and nothing new.
        if passes_on or location.run in self._faulty_runs:
            return
        site = location.site("grad" if came_bad else "grad_input")
        kind: Kind = event.blame or ("outside" if came_bad else "op" if location.op is not None else "module")
        saved = [describe(name, tensor) for name, tensor in event.saved]
        made = [] if event.blame else outputs
        stack = self._stack(location)
        self._found(Finding(kind, site, "backward", location.run, inputs, saved, made, stack, node=event.node))

    def _is_propagated(self, event: Event, inputs: list[Statistics], outputs: list[Statistics]) -> bool:
        """Whether it comes from an Inf under suspicion, which is then followed, or reported once it is a NaN."""
        for source, found in zip(event.origins, inputs, strict=True):
            suspect = self._suspects.get(source.storage)
            if suspect is not None and not found.finite:
                if any(s.nan for s in outputs):
                    self._confirm(suspect)
                else:
                    self._suspect(event, suspect.finding, suspect.module)
                return True
        return False

    def _suspect(self, event: Event, finding: Finding, module: nn.Module) -> None:
        for (_, tensor), memory in zip(event.outputs, event.storages, strict=True):
            self._suspects[memory] = _Suspect(finding, module, tensor.detach())

    def _confirm(self, suspect: _Suspect) -> None:
        # One finding may be followed through several tensors; it is reported once.
        self._suspects = {memory: s for memory, s in self._suspects.items() if s.finding is not suspect.finding}
        self._found(suspect.finding)

    def _found(self, finding: Finding) -> None:
        self._run_is_faulty = True
        if finding.phase == "forward":
            self._faulty_runs.add(finding.run)
        known = self.findings.setdefault(_key(finding), finding)
        if known is not finding:
            known.times += 1
        self.report(known)

    def is_faulty(self, run: int) -> bool:
        """Whether a fault was found in the forward pass of a run: what comes after it is its consequence."""
        return run in self._faulty_runs

    def saw_bad(self, task: int) -> bool:
        """Whether something bad was judged in a backward pass."""
        return task in self._faulty_passes

    def found_elsewhere(self, finding: Finding) -> None:
        """Take note of what was found without a look at operations."""
        self._found(finding)

    def found_again(self, findings: Iterable[Finding], run: int) -> None:
        """The same run into the same faults once more."""
        for finding in findings:
            finding.times += 1
            if finding.phase == "forward":
                self._faulty_runs.add(run)
            self.report(finding)

    def withdraw(self, findings: Iterable[Finding]) -> None:
        """Forget findings that only came after the one that is raised."""
        for finding in findings:
            finding.times -= 1
            if not finding.times:
                del self.findings[_key(finding)]

    def stack_of(self, path: str) -> list[str]:
        """The modules around a path, by their names alone."""
        parts = path.split(".") if path else []
        paths = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
        return [f"{p or 'model'} ({type(self._index.modules[p]).__name__})" for p in paths if p in self._index.modules]

    def _owners(self) -> dict[int, list[_Owner]]:
        """Parameters and buffers by memory: cuDNN and flattened optimizers put several into one."""
        # Looked up anew each time: ``module.to`` and ``parameter.data =`` give a parameter other memory.
        owners: dict[int, list[_Owner]] = {}
        for name, (module, own) in self._index.tensors.items():
            tensor = getattr(module, own, None)
            if isinstance(tensor, Tensor) and (source := origin(tensor)).storage is not None:
                kind: Kind = "parameter" if own in module._parameters else "buffer"
                owners.setdefault(source.storage, []).append(_Owner(kind, name, reach(tensor)))
        return owners

    def _stack(self, location: Location) -> list[str]:
        return [f"{self.name(module) or 'model'} ({type(module).__name__})" for module in location.modules]

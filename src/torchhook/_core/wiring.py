"""From targets to taps: which hook of which module a site is seen at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from torch import nn
from torch.nn.parameter import is_lazy

from torchhook._core import naming, offload
from torchhook._core.boundaries import AfterAllTap, LeaveTap
from torchhook._core.calling import parameter_names
from torchhook._core.functional import Listener
from torchhook._core.generators import generators
from torchhook._core.gradients import (
    Aliases,
    GradTap,
    InputGradient,
    OutputGradient,
    TotalGradient,
    Wiring,
    forget_arrived,
)
from torchhook._core.heads import HeadsAt, known_heads
from torchhook._core.hooks import TensorHandles
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.scope import Scope
from torchhook._core.site_operations import SiteListener
from torchhook._core.taps import (
    CustomTap,
    InputTap,
    Look,
    OperationTap,
    OutputTap,
    RecordTap,
    Tap,
    forget_passed,
)
from torchhook._core.targets import Outputs, Target, live_tensor
from torchhook._recording.address import Site
from torchhook._recording.records import Recording, Rows
from torchhook._torch import graph_task, runs_inside_itself
from torchhook._values.call_masks import CallPadding
from torchhook._values.call_sizes import RunningCall
from torchhook._values.heads import Where
from torchhook.errors import SelectorError, SessionError

_INWARD = ("input", "grad_input")

opened: dict[int, Taps] = {}
"""The taps of every open session, in any thread, by id."""


class Taps:
    """The taps of a session, made when a site first needs one: one for each module and direction, or operation."""

    # What most sessions never need is the class's, or made when asked for: one that is opened again makes all anew.
    parameters: Sequence[tuple[Target, GradTap]] = ()
    """Those whose gradients are wanted."""
    listener: Listener | None = None
    recorders: Sequence[RecordTap] | None = None
    """All there is, where ``record_all`` has made it, until another site is asked for, or one of these by its name."""
    _made_together: tuple[Outputs, Sequence[RecordTap]] | None = None
    """What ``recorders`` are, and where they are, also when there is more."""
    _is_asked_for = False
    """Whether any site was, by itself."""
    _is_complete = False

    def __init__(self, index: Index, scope: Scope, seen_from: Scope | None) -> None:
        self.index = index
        self.scope = scope
        self.seen_from = seen_from
        """Calls from outside this scope are not seen; ``None`` sees those from everywhere."""
        self.root: InputTap = InputTap("", seen_from)
        """Sees the model being called, whatever is asked for."""
        self._ends: Sequence[Callable[[], None]] = ()
        """What takes away what is on tensors."""
        self.leaving: Sequence[tuple[nn.Module, LeaveTap]] = ()
        """Who is told when a call of a module is over, after all others; they see no values."""
        self._customs: dict[int, tuple[nn.Module, CustomTap]] = {}
        self._gradients: dict[Site, tuple[GradTap, Tap]] = {}

    @functools.cached_property
    def targets(self) -> dict[Site, tuple[Target, Tap]]:
        """Where each site that was asked for is seen."""
        self.recorders, self._is_asked_for = None, True
        return {target.site: (target, tap) for target, tap in self._recorded()}

    @functools.cached_property
    def _inputs(self) -> dict[int, tuple[nn.Module, InputTap]]:
        return {id(self.index.root): (self.index.root, self.root)}

    @functools.cached_property
    def _outputs(self) -> dict[int, tuple[nn.Module, OutputTap]]:
        self._is_asked_for = True
        return {id(target.module): (target.module, tap) for target, tap in self._recorded()}

    def _recorded(self) -> Iterable[tuple[Target, RecordTap]]:
        return () if self._made_together is None else zip(*self._made_together, strict=True)

    @functools.cached_property
    def handles(self) -> TensorHandles:
        """Hooks on tensors."""
        made = TensorHandles()
        self._ends = (*self._ends, made.remove)
        return made

    @functools.cached_property
    def aliases(self) -> Aliases:
        made = Aliases()
        self._ends = (*self._ends, made.settle)
        return made

    # -- reading ------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[nn.Module, InputTap | OutputTap]]:
        return chain(self._inputs.values(), self._outputs.values(), self._customs.values())

    def has(self, module: nn.Module) -> bool:
        """Whether a module has a tap already, before or behind it."""
        key = id(module)
        return key in self._inputs or key in self._outputs or key in self._customs

    def all(self) -> Iterator[Tap]:
        """What values pass in the forward pass: the taps of modules, and those of operations."""
        yield from (tap for _, tap in self)
        if isinstance(self.listener, SiteListener):
            yield from self.listener.taps()

    def edit_gradients(self) -> bool:
        """Whether gradients of activations are changed."""
        return any(tap.edits for tap, _ in self._gradients.values())

    @functools.cached_property
    def by_module(self) -> dict[int, Tap]:
        """A tap of each module that has one, by the module's id; asked for when all are made."""
        return {id(module): tap for module, tap in self}

    @property
    def any_ran(self) -> bool:
        """Whether the model or any part of it was called."""
        return self.root.ran > 0 or any(tap.ran for _, tap in self)  # the root may have been left out

    def all_ran(self) -> bool:
        """Whether there is nothing to say of any site: each ran, in the forward pass and in this session's sight."""
        if self._gradients:
            return False
        for site, (_, tap) in self.targets.items():
            if not tap.ran or tap.elsewhere or tap.recomputed or site.call is not None:
                return False
        return True

    def passing(self, site: Site, tap: Tap) -> Tap:
        """The tap that the value itself passes in the forward pass: that of the site, unless it is a gradient's."""
        found = self._gradients.get(site.every_call) if self._gradients else None
        return tap if found is None else found[1]

    def edits_to_come(self) -> list[str]:
        """Sites whose edits a checkpointed part would have to repeat in a backward pass that has not come."""
        return [site.shown for site, (_, tap) in self.targets.items() if tap.edits and tap.is_waiting]

    # -- making -------------------------------------------------------------------------------------

    def of(self, target: Target) -> Tap:
        """The tap of a target."""
        site = target.site
        known = self.targets.get(site)
        if known is None:
            known = self.targets[site] = (target, self._make(target))
        return known[1]

    def record(self, target: Target, keep: Keep, rows: Rows, order: Iterator[int], task: int) -> bool:
        """Have what passes a target kept, where a tap that does nothing else will do; ``task`` is the backward pass."""
        site, module, tensor = target
        if tensor is not None or site.port != "output" or site.call is not None or site.leaf:
            return False
        if site.op is not None:
            return self._record_operation(target, keep, rows, order)
        outputs, key = self._outputs, id(module)
        if key in outputs or site in self.targets:
            return False
        tap = RecordTap(site.path, self.seen_from, keep, rows, order, task)
        outputs[key] = (module, tap)
        self.targets[site] = (target, tap)
        return True

    def _record_operation(self, target: Target, keep: Keep, rows: Rows, order: Iterator[int]) -> bool:
        if target.site in self.targets:
            return False
        tap = self._operations().record(target, keep, rows, order, naming.times(self.index.root, target.site))
        if tap is not None:
            self.targets[target.site] = (target, tap)
        return tap is not None

    def record_all(
        self, outputs: Outputs, keep: Keep, recording: Recording, limit: int | None, looks: Sequence[Look]
    ) -> None:
        """Keep what passes ``outputs``, and do nothing else; ``looks`` are shown what the model is called with."""
        scope, order, task = self.seen_from, recording.order, self.root.made_in
        rows = recording.opened_all(outputs.sites, limit)
        self.recorders = [
            RecordTap(site.path, scope, keep, of, order, task)
            for site, of in zip(outputs.sites, rows)  # noqa: B905 (as many: strict= takes as long as a tap)
        ]
        self._made_together = outputs, self.recorders
        self.root.looks = looks
        self._is_complete = True

    @property
    def is_new(self) -> bool:
        """Whether nothing was asked for yet."""
        return not (self._is_asked_for or self._is_complete or self.root.looks)

    def call_padding(self, keep: Keep) -> CallPadding | None:
        """What a transform is told of the padding of the call that runs; ``None`` if there is no transform."""
        if keep.transform is None:
            return None
        padding = CallPadding(parameter_names(self.index.root))
        is_inside = functools.partial(runs_inside_itself, self.index.root)
        self.root.add_look(lambda value, call: padding.begin(value, is_inside), first=True)
        self.leaving = [*self.leaving, (self.index.root, AfterAllTap(padding.end, self.scope))]
        return padding

    def heads_at(self, target: Target, at_once: bool = False) -> Where:
        """Asks for what is known at a target, once: of its heads, and of the call that runs.

        Who asks when values pass already says so ``at_once``: a call is seen by those who were there when it began.
        """
        index = self.index
        if not at_once:
            return HeadsAt(lambda: known_heads(index, target)._replace(call=self._call.sizes))
        call = self._call  # not by way of the taps: what is kept with a transform would keep them
        return HeadsAt(lambda: known_heads(index, target)._replace(call=call.sizes))

    @functools.cached_property
    def _call(self) -> RunningCall:
        running, is_inside = RunningCall(), functools.partial(runs_inside_itself, self.index.root)
        self.root.add_look(lambda value, call: running.begin(value, is_inside), first=True)
        self.leaving = [*self.leaving, (self.index.root, AfterAllTap(running.end, self.scope))]
        # A wrapper that hands ``generate`` on is not called itself.
        for module in generators(self.index):
            if module is not self.index.root:
                tap = self._input_tap(module, self.index.names(module)[0])
                tap.add_look(lambda value, call: running.begin_inside(value), first=True)
                self.leaving = [*self.leaving, (module, AfterAllTap(running.end_inside, self.scope))]
        return running

    def custom(self, target: Target, tap: CustomTap) -> None:
        """See a target by a tap of its own."""
        self._customs[id(target.module)] = (target.module, tap)
        self.targets[target.site] = (target, tap)

    def observe(self, target: Target, tap: OutputTap, grad_tap: GradTap, before: InputTap | None) -> None:
        """See a target and its gradient by taps that know of each other, of a module that ``has`` none."""
        site, module, _ = target
        grad_site = site.but(port="grad")
        self._outputs[id(module)] = module, tap
        if before is not None:
            self._inputs[id(module)] = module, before
        self.targets[site] = target, tap
        self.targets[grad_site] = target._replace(site=grad_site), grad_tap
        self._gradients[grad_site] = grad_tap, tap

    def forget_root_input(self) -> None:
        """The model runs already: PyTorch goes through the hooks that were there when the call began."""
        self._inputs.pop(id(self.index.root), None)
        _ = self.targets  # there is more than recorders, which stay

    def complete(self) -> None:
        """Nothing more will be asked for."""
        if self._is_complete:
            return
        if self._gradients:
            root = self._output_tap(self.index.root, "")
            root.add_alias(self.aliases.settle_after)
        for tap, ask in self._asked_for_mode():
            tap.add_look(_asking(ask), first=True)
        self._is_complete = True

    def _asked_for_mode(self) -> list[tuple[Tap, Callable[[], None]]]:
        """The taps of names that hold in eval mode only, each with what asks for it when a value passes."""
        found = [(tap, naming.eval_only(self.index, site)) for site, (_, tap) in self.targets.items() if site.role]
        return [(tap, ask) for tap, ask in found if ask is not None]

    def forget(self) -> None:
        """Begin to count anew."""
        task = graph_task()
        for _, tap in self:
            tap.forget(task)
        for grad_tap, _ in self._gradients.values():
            grad_tap.forget(task)

    def go_on(self) -> None:
        """Let go of what has passed, and count on; what is on modules stays where it is."""
        self.handles.remove()
        self.aliases.settle()
        forget_passed(self)
        forget_arrived(self._gradients.values())

    def let_go(self) -> None:
        """Take away what is on tensors, and let go of what the model was called with; the rest is on modules."""
        opened.pop(id(self), None)
        for end in self._ends:
            end()
        # A pass that was stopped has told nobody that it is over, and what it was called with would be held.
        for module, tap in self.leaving:
            tap.function(module)

    def listen(self, listener: Listener) -> None:
        """See the functional operations inside the modules."""
        if self.seen_from is None:
            raise SessionError("operations are seen in one thread only, the session's own: leave out threads='all'.")
        self.listener = listener
        _ = self.targets  # there is more than recorders, which stay

    def _operations(self) -> SiteListener:
        if self.listener is None:
            self.listen(SiteListener(self.scope))
        assert isinstance(self.listener, SiteListener)
        return self.listener

    def _operation_tap(self, target: Target, inward: bool) -> OperationTap:
        site = target.site
        return self._operations().tap(target.module, site, inward, naming.times(self.index.root, site))

    def _make(self, target: Target) -> Tap:
        if target.tensor is not None:
            return self._tensor_tap(target)
        if target.site.port == "output" and target.site.op is None:  # as most are
            return self._output_tap(target.module, target.site.path)
        return self._forward_tap(target) if target.site.port in ("output", "input") else self._gradient_tap(target)

    def _forward_tap(self, target: Target) -> Tap:
        """The tap that a value passes in the forward pass."""
        inward = target.site.port in _INWARD
        if target.site.op is None:
            return (self._input_tap if inward else self._output_tap)(target.module, target.site.path)
        return self._operation_tap(target, inward)

    def _gradient_tap(self, target: Target) -> Tap:
        site = target.site.every_call
        if site not in self._gradients:
            output, input_ = (
                self._forward_tap(target._replace(site=site.but(port=port))) for port in ("output", "input")
            )
            tap = GradTap(site.path, self.scope)
            self._wiring(site.port, tap).wire(output, input_)
            self._gradients[site] = tap, input_ if site.port in _INWARD else output
        return self._gradients[site][0]

    def _wiring(self, port: str, tap: GradTap) -> Wiring:
        if port == "grad_total":
            return TotalGradient(tap, self.handles)
        kind = InputGradient if port == "grad_input" else OutputGradient
        return kind(tap, self.handles, self.aliases)

    def _tensor_tap(self, target: Target) -> Tap:
        """The tap of a parameter or buffer: its value when its module runs, or its gradient."""
        site = target.site
        if site.port == "output":
            tap = Tap(site.path)
            self._input_tap(target.module, site.path).add_look(lambda value, call: _pass_tensor(tap, target))
            return tap
        if site.port != "grad":
            raise SelectorError(f"{site.shown!r}: {site.path!r} is a parameter or buffer, without inputs.")
        if target.tensor not in target.module._parameters:
            raise SelectorError(f"{site.shown!r}: {site.path!r} is a buffer, which has no gradient.")
        if is_lazy(live_tensor(target)):
            raise SelectorError(f"{site.shown!r}: the parameter has no shape yet. Run the model once, then capture.")
        grad_tap = GradTap(site.path, self.scope)
        if live_tensor(target).requires_grad:
            self.parameters = [*self.parameters, (target, grad_tap)]
        return grad_tap

    def _input_tap(self, module: nn.Module, path: str) -> InputTap:
        known = self._inputs.get(id(module))
        if known is None:
            known = self._inputs[id(module)] = (module, InputTap(path, self.seen_from))
        return known[1]

    def _output_tap(self, module: nn.Module, path: str) -> OutputTap:
        known = self._outputs.get(id(module))
        if known is None:
            known = self._outputs[id(module)] = (module, OutputTap(path, self.seen_from))
        return known[1]


def _asking(ask: Callable[[], None]) -> Look:
    return lambda value, call: ask()


def _pass_tensor(tap: Tap, target: Target) -> None:
    assert target.tensor is not None
    with offload.read(target.module, target.tensor) as tensor:
        tap.take(tensor)

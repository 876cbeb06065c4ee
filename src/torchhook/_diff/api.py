"""``diff``: two models, recordings or sets of arrays, and where they first part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from torchhook._core import calling
from torchhook._core.index import Index
from torchhook._core.select import Selector, resolve
from torchhook._core.targets import Target
from torchhook._diff import compiled, runs, sides
from torchhook._diff import local as feeding
from torchhook._diff.left_out import LeftOut
from torchhook._diff.origin import Origin
from torchhook._diff.sides import Side
from torchhook._recording.address import Site, readings
from torchhook._recording.counterparts import Counterparts, Names
from torchhook._recording.differences import Diff, compare
from torchhook._recording.records import Recording
from torchhook._recording.tolerances import Limits, Tolerance
from torchhook.errors import MissingRecordError, suggestion

__all__ = ["diff"]


def diff(
    a: Side,
    b: Side,
    inputs: Any = None,
    *,
    inputs_b: Any = None,
    names: Names | None = None,
    sites: Selector | None = None,
    exclude: Selector | None = None,
    rtol: Tolerance | None = None,
    atol: Tolerance | None = None,
    local: bool = False,
) -> Diff:
    """How far apart two models are on the same inputs, or two recordings, site by site, and where they first part.

    >>> import copy, torch
    >>> model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> port = copy.deepcopy(model)
    >>> _ = nn.init.zeros_(port[2].bias)
    >>> diff(model, port, torch.ones(1, 3)).first.site
    '2'

    A side is a model, a program of ``torch.export`` or its ``.pt2`` file, a recording, or what another framework
    computed: a mapping of arrays by address, an ``.npz`` or ``.safetensors`` file, or an ``.npy`` file with the model's
    output. What only B has is listed and is no difference; nor is what a program leaves out of A, layers that pass on
    what they get (``nn.Identity``). Models run in the modes they are in (nothing is set to eval mode) and from the same
    random numbers: once, and once more up to the first layer that differs, to see whether its input differs already.
    They and the process are left as they were: modes, buffers, caches, gradients.

    The layers of compiled models run eagerly, because compiled code ignores hooks. Their compiled code then runs once
    as it is, also where only parts of a model are compiled, and the row ``(compiled output)`` is what it makes.

    Args:
        a: the reference.
        b: what is compared with it.
        inputs: what the models are called with, moved to each one's device and cast to its floating-point dtype: a
            tuple is the arguments, a dict the keyword arguments, ``th.Inputs(args, kwargs)`` both, anything else the
            one argument.
        inputs_b: given to B instead, where it takes something else.
        names: what a site of A is called in B: a dict of paths (each stands for what is below it too) or addresses, or
            a function of the path; ``None`` leaves a site out.
        sites: the sites of A to compare; without them every module's output, or what is there of the arrays.
        exclude: sites of A to leave out.
        rtol: a number, or a dict by dtype that changes some of the defaults.
        atol: likewise.
        local: give each module of B the inputs that its counterpart in A got, and let the modules that it calls give
            back what those of A did, so that errors do not add up from layer to layer and each row shows what this
            module alone adds: a layer by itself, a container by the code between its layers. Of 16-bit floats, only
            what one layer makes of its rounding is tolerated then. B runs once more without any help, and the row of
            the model says how far off its output is then.
    """
    asked = _Asked(names, sites, exclude, rtol, atol)
    one, two = sides.runnable(a, "A"), sides.runnable(b, "B")
    models = [isinstance(side, nn.Module) for side in (one, two)]
    if local and not all(models):
        raise TypeError("local=True feeds the modules of B with the inputs of those of A: it needs two models.")
    if not any(models):
        return _diff_recordings(one, two, (inputs, inputs_b), asked)
    if inputs is None and (inputs_b is None or models[0]):
        raise TypeError("diff runs a model, and needs inputs for it: th.diff(a, b, inputs).")
    if all(models):
        return _diff_models(one, two, (inputs, inputs if inputs_b is None else inputs_b), asked, local)
    if models[0]:
        if inputs_b is not None:
            raise TypeError("inputs_b is for a model B, and B does not run here.")
        return _diff_against_values(one, two, inputs, asked)
    return _diff_values_against(one, two, inputs if inputs_b is None else inputs_b, asked)


class _Asked(NamedTuple):
    names: Names | None
    sites: Selector | None
    exclude: Selector | None
    rtol: Tolerance | None
    atol: Tolerance | None

    @property
    def chosen(self) -> bool:
        return self.sites is not None or self.exclude is not None

    def targets(self, index: Index) -> Sequence[Target]:
        if not self.chosen:
            return runs.every_output(index)
        return resolve(index, "**" if self.sites is None else self.sites, exclude=self.exclude)

    def limits(self, layers: Callable[[str], int] | None = None) -> Limits:
        return Limits(self.rtol, self.atol, layers)

    def compare(
        self, a: Recording, b: Recording, limits: Limits, *, extra: bool = True, notes: Sequence[str] = ()
    ) -> Diff:
        return compare(a, b, names=self.names, extra=extra, notes=notes, limits=limits)


def _diff_recordings(a: Any, b: Any, inputs: tuple[Any, Any], asked: _Asked) -> Diff:
    if inputs != (None, None) or asked.chosen:
        raise TypeError("diff of two recordings takes no inputs, inputs_b, sites or exclude: nothing runs.")
    # Twice: the names of arrays are read by what the other side has, which may be arrays too.
    two = sides.recorded(b, ())
    one = sides.recorded(a, [site.path for site in two.sites])
    return asked.compare(one, sides.recorded(b, [site.path for site in one.sites]), asked.limits())


# -- two models ---------------------------------------------------------------------------------------------


def _diff_models(a: nn.Module, b: nn.Module, inputs: tuple[Any, Any], asked: _Asked, local: bool) -> Diff:
    indices = Index(a), Index(b)
    layers = functools.partial(feeding.layers_of, indices[1]) if local else None
    limits = asked.limits(layers)
    with calling.undisturbed(a, b) as restore:
        feeds = asked.limits(layers) if local else None
        found = _diff_layers((a, b), indices, inputs, asked, (limits, feeds), restore)
        return _with_compiled(found, (a, b), inputs, limits, restore)


def _diff_layers(
    models: tuple[nn.Module, nn.Module],
    indices: tuple[Index, Index],
    inputs: tuple[Any, Any],
    asked: _Asked,
    limits: tuple[Limits, Limits | None],
    restore: Callable[[], None],
) -> Diff:
    """What sessions see of two models; ``restore`` makes them what they were before a run."""
    (a, b), (index_a, index_b), (seen, fed) = models, indices, limits
    targets_a, targets_b = asked.targets(index_a), runs.every_output(index_b)
    counterparts = Counterparts(asked.names, list(index_a.modules), list(index_b.modules))
    if asked.chosen:
        targets_b = [t for target in targets_a for t in _found(index_b, counterparts.all_of(target.site))]
        if not targets_b:
            listed = ", ".join(repr(target.site.shown) for target in targets_a[:4])
            raise MissingRecordError(
                f"B has none of the sites that were chosen in A: {listed}. Say what they are called there with names=."
            )
    feeder = feeding.Feeder(index_a, index_b, counterparts, fed) if fed else None
    left_out = LeftOut(index_a) if sides.is_program(b) else None
    beside_a = [*([feeder.taking()] if feeder else []), *([left_out.session] if left_out else [])]
    recording_a = runs.record(a, index_a, targets_a, inputs[0], *beside_a)
    # From the same random numbers, and with what both models share as it was before A ran.
    restore()
    recording_b = runs.record(b, index_b, targets_b, inputs[1], *([feeder.giving()] if feeder else []))
    notes = [] if sides.is_program(a) or sides.is_program(b) else runs.modes(index_a, index_b)
    # Where sites were chosen in A, all else in B was left out on purpose.
    found = asked.compare(recording_a, recording_b, seen, extra=not asked.chosen, notes=notes)
    found = found if left_out is None else left_out.told(found)
    if asked.chosen:
        return found if feeder is None else feeder.annotated(found)
    if feeder is not None:
        restore()
        return _on_its_own(feeder.annotated(found), recording_a, index_b, inputs[1], asked, seen)
    if found.first is None or found.first.status == "only in A" or not Origin.can_be_asked(a, b):
        return found
    origin = Origin(found.first, index_a, index_b, counterparts)
    restore()
    seen_a = origin.seen(True, inputs[0])
    restore()
    return origin.told(found, seen_a, origin.seen(False, inputs[1]))


def _with_compiled(
    found: Diff, given: tuple[Any, Any], inputs: tuple[Any, Any], limits: Limits, restore: Callable[[], None]
) -> Diff:
    """The result with what compiled code makes when no session is open, against the other side's output."""
    if not any(map(compiled.is_compiled, given)):
        return found
    if (reason := compiled.reason_not_to_run(found)) is not None:
        return compiled.not_run(found, reason)
    made = []
    for side, one in zip(given, inputs, strict=True):
        # A model that is not compiled runs once more too: with local=True, what was recorded is not its own.
        restore()
        made.append(compiled.output(side, one) if isinstance(side, nn.Module) else side)
    return compiled.told(found, made[0], made[1], limits)


def _on_its_own(
    found: Diff, recording_a: Recording, index_b: Index, inputs: Any, asked: _Asked, limits: Limits
) -> Diff:
    """The result with what the whole of B makes when nothing is put into it."""
    row = next((row for row in found if row.site == "" and row.other in index_b.modules), None)
    if row is None or row.status == "only in B":
        return found
    whole = runs.record(index_b.modules[""], index_b, resolve(index_b, Site(row.other)), inputs)
    # Which dtypes are met on the way is not seen here: the limits have seen it.
    there = asked.compare(recording_a, whole, limits.of_all_layers(), extra=False)
    return feeding.on_its_own(found, there[""])


def _found(index: Index, sites: list[Site]) -> Sequence[Target]:
    # What B does not have shows as a site that only A has.
    here = [site for site in sites if site.path in index.modules or site.path in index.tensors]
    return resolve(index, here) if here else []


# -- a model and values -------------------------------------------------------------------------------------


def _diff_against_values(a: nn.Module, b: Any, inputs: Any, asked: _Asked) -> Diff:
    """A model as the reference for values: these say which sites are compared, unless sites were chosen."""
    index = Index(a)
    recording_b = sides.recorded(b, index.modules)
    targets = asked.targets(index) if asked.chosen else _meant(index, recording_b, asked.names)
    if not targets:
        some = ", ".join(repr(site.shown) for site in recording_b.sites[:4])
        close = suggestion(recording_b.keys()[0], index.modules) if len(recording_b) else ""
        raise MissingRecordError(f"none of B's names is a site of A: {some}. Say with names= what is what. {close}")
    limits = asked.limits()
    with calling.undisturbed(a) as restore:
        recording_a = runs.record(a, index, targets, inputs)
        found = asked.compare(recording_a, recording_b, limits, extra=not asked.chosen)
        return _with_compiled(found, (a, recording_b), (inputs, None), limits, restore)


def _meant(index: Index, values: Recording, names: Names | None) -> list[Target]:
    """The sites of a model that have a counterpart among values: outputs, and what either side's names address."""
    here = {target.site: target for target in runs.every_output(index)}
    for key in (*values.keys(), *(names if isinstance(names, dict) else ())):
        addressed = (site.every_call for site in readings(key))
        here |= {target.site: target for site in addressed for target in _found(index, [site])[:1]}
    counterparts = Counterparts(names, list(index.modules), [site.path for site in values.sites])
    return [t for t in here.values() if any(site in values for site in counterparts.all_of(t.site))]


def _diff_values_against(a: Any, b: nn.Module, inputs: Any, asked: _Asked) -> Diff:
    """Values as the reference for a model."""
    if asked.chosen:
        raise TypeError("sites and exclude choose sites of A, and A holds values only: give only those to be compared.")
    index = Index(b)
    recording_a = sides.recorded(a, index.modules)
    counterparts = Counterparts(asked.names, [site.path for site in recording_a.sites], list(index.modules))
    wanted = [other for site in recording_a.sites for other in counterparts.all_of(site)]
    targets = _found(index, list(dict.fromkeys(wanted)))
    if not targets:
        some = ", ".join(repr(site.shown) for site in wanted[:4])
        close = suggestion(wanted[0], index.modules) if wanted else ""
        raise MissingRecordError(f"B has no site {some}. Say with names= what A's names are called there. {close}")
    limits = asked.limits()
    with calling.undisturbed(b) as restore:
        found = asked.compare(recording_a, runs.record(b, index, targets, inputs), limits)
        return _with_compiled(found, (recording_a, b), (None, inputs), limits, restore)

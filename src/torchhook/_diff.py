"""``diff``: two recordings, or two models on one input, and where they first part."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchhook._core import calling
from torchhook._core.index import Index, is_callable
from torchhook._core.keep import Keep
from torchhook._core.select import Selector, Target, resolve
from torchhook._core.session import Session
from torchhook._recording.address import Site
from torchhook._recording.counterparts import Counterparts, Names
from torchhook._recording.differences import Diff, Tolerance, compare
from torchhook._recording.records import Recording
from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook.errors import MissingRecordError


def diff(
    a: Recording | nn.Module,
    b: Recording | nn.Module,
    inputs: Any = None,
    *,
    inputs_b: Any = None,
    names: Names | None = None,
    sites: Selector | None = None,
    exclude: Selector | None = None,
    rtol: Tolerance | None = None,
    atol: Tolerance | None = None,
) -> Diff:
    """How far apart two recordings are, or two models on the same inputs, site by site, and where they first part.

    >>> import copy, torch
    >>> model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> port = copy.deepcopy(model)
    >>> _ = nn.init.zeros_(port[2].bias)
    >>> diff(model, port, torch.ones(1, 3)).first.site
    '2'

    ``inputs`` are moved to each model's device and cast to its floating-point dtype: a tuple is the arguments, a dict
    the keyword arguments, ``th.Inputs(args, kwargs)`` both, anything else the one argument. ``inputs_b`` is given to B
    instead where it takes something else. Both models run once, in the modes they are in (nothing is set to eval mode)
    and from the same random numbers. They and the process are left as they were: modes, buffers, caches, gradients.

    ``names`` says what a site of A is called in B: a dict of paths (each stands for what is below it too) or addresses,
    or a function of the path; ``None`` leaves a site out. ``sites`` and ``exclude`` choose sites of A; without them
    every module's output counts. ``rtol`` and ``atol`` are numbers, or dicts by dtype that change some of the defaults.
    """
    if isinstance(a, Recording) and isinstance(b, Recording):
        if inputs is not None or inputs_b is not None or sites is not None or exclude is not None:
            raise TypeError("diff of two recordings takes no inputs, inputs_b, sites or exclude: nothing runs.")
        return compare(a, b, names=names, rtol=rtol, atol=atol)
    if not (isinstance(a, nn.Module) and isinstance(b, nn.Module)):
        kinds = f"{type(a).__name__} and {type(b).__name__}"
        raise TypeError(
            f"diff compares two recordings or two models, found {kinds}. Record the model first: th.capture."
        )
    if inputs is None:
        raise TypeError("diff of two models needs inputs: th.diff(model_a, model_b, inputs).")
    both = inputs, inputs if inputs_b is None else inputs_b
    return _diff_models(a, b, both, names, sites, exclude, rtol, atol)


def _diff_models(
    a: nn.Module,
    b: nn.Module,
    inputs: tuple[Any, Any],
    names: Names | None,
    sites: Selector | None,
    exclude: Selector | None,
    rtol: Tolerance | None,
    atol: Tolerance | None,
) -> Diff:
    index_a, index_b = Index(a), Index(b)
    chosen = sites is not None or exclude is not None
    targets_a = (
        resolve(index_a, "**" if sites is None else sites, exclude=exclude) if chosen else _every_output(index_a)
    )
    targets_b = _every_output(index_b)
    if chosen:
        counterparts = Counterparts(names, list(index_a.modules), list(index_b.modules))
        targets_b = [t for target in targets_a for t in _found(index_b, counterparts.all_of(target.site))]
        if not targets_b:
            listed = ", ".join(repr(target.site.shown) for target in targets_a[:4])
            raise MissingRecordError(
                f"B has none of the sites that were chosen in A: {listed}. Say what they are called there with names=."
            )
    with calling.undisturbed(a, b) as restore:
        recording_a = _record(a, index_a, targets_a, _fitting(a, inputs[0]))
        restore()
        recording_b = _record(b, index_b, targets_b, _fitting(b, inputs[1]))
    notes = _modes(index_a, index_b)
    return compare(recording_a, recording_b, names=names, rtol=rtol, atol=atol, extra=not chosen, notes=notes)


def _every_output(index: Index) -> list[Target]:
    # By identity: a shared module comes once, under its first name.
    found: dict[int, Target] = {}
    for path, module in index.modules.items():
        if is_callable(module):
            found.setdefault(id(module), Target(Site(path), module))
    return list(found.values())


def _found(index: Index, sites: list[Site]) -> list[Target]:
    # What B does not have shows as a site that only A has.
    here = [site for site in sites if site.path in index.modules or site.path in index.tensors]
    return resolve(index, here) if here else []


def _record(model: nn.Module, index: Index, targets: list[Target], inputs: Inputs) -> Recording:
    session = Session(model, index=index, warn=False)
    session.record(targets, Keep())
    with session as recording:
        calling.call(model, inputs)
    return recording


def _fitting(model: nn.Module, inputs: Any) -> Inputs:
    """The inputs on the model's device and in its floating-point dtype, where it has only one."""
    parameters = [p for p in model.parameters() if not isinstance(p, nn.parameter.UninitializedParameter)]
    devices = {p.device for p in parameters}
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    device = devices.pop() if len(devices) == 1 else None
    dtype = dtypes.pop() if len(dtypes) == 1 else None

    def fit(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    fitted: Inputs = tree.map_tensors(fit, calling.arguments(inputs))
    return fitted


def _modes(a: Index, b: Index) -> list[str]:
    """What a train-against-eval comparison should say by itself."""
    odd = [path for path, m in a.modules.items() if path in b.modules and b.modules[path].training != m.training]
    if not odd:
        return []
    side = "A" if a.modules[odd[0]].training else "B"
    some = ", ".join(repr(path) for path in odd[:3] if path) or "the model itself"
    return [f"in training mode in {side} only: {some}{f' and {len(odd) - 3} more' if len(odd) > 3 else ''}"]

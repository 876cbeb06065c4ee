"""A sweep at the price of a gradient: what a patch would do, to first order, for all places at once.

The effect of a patch is estimated by the gradient of the metric at the place, times what the patch would change there.
Each place gets a zero added to it, and the gradient is that of the zeros: whatever writes in place after it, and
whether or not the model's own weights require gradients, which get none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._core import calling
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.session import Session
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._recording.records import Recording
from torchhook._sweep.places import Patch, Place
from torchhook._sweep.running import Metric, measured, never_patched, same_shape
from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook.errors import EditError, NeverRanError

Key = tuple[int, str]
"""A place by its row, and a leaf of its value."""


@dataclass(frozen=True)
class Task:
    """What is estimated."""

    model: nn.Module
    index: Index
    clean: Inputs
    corrupted: Inputs
    metric: Metric
    places: list[Place]
    through: list[Target]
    restore: Callable[[], None]


def estimate(task: Task, patches: list[Patch], steps: int) -> tuple[list[float], float, list[str]]:
    """The metric that each patch would lead to, the corrupted run's, and what there is to say about it."""
    # Whatever the user's block says: without a graph there is no gradient.
    with torch.inference_mode(False), torch.enable_grad():
        if steps == 1:
            corrupted, values, gradients = _gradients(task, task.corrupted, {})
        else:
            corrupted, values, _ = _gradients(task, task.corrupted, {}, backward=False)
            gradients = _along_the_way(task, steps)
    effects = {
        key: _wide(gradient) * (_wide(_clean(task, key, values[key])) - _wide(values[key]))
        for key, gradient in gradients.items()
    }
    found = [
        corrupted
        + sum(
            float(place.cut.part(effects[patch.row, leaf], patch.position).sum(dtype=torch.float64))
            for leaf in place.clean
            if (patch.row, leaf) in effects
        )
        for patch in patches
        for place in (task.places[patch.row],)
    ]
    silent = [place for row, place in enumerate(task.places) if not any((row, leaf) in effects for leaf in place.clean)]
    notes = []
    if silent:
        names = ", ".join(repr(str(place.target.site)) for place in silent[:3])
        notes.append(f"no gradient of the metric reaches {len(silent)} of {len(task.places)} sites ({names}): 0 there")
    return found, corrupted, notes


def _wide(tensor: Tensor) -> Tensor:
    # In half precision, the product of two small numbers is zero, and the difference of two large ones infinite.
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _clean(task: Task, key: Key, like: Tensor) -> Tensor:
    row, leaf = key
    return task.places[row].clean[leaf].to(like.device, like.dtype)


# -- gradients at the places ----------------------------------------------------------------------


def _gradients(
    task: Task, inputs: Inputs, entries: dict[Site, Tensor], backward: bool = True
) -> tuple[float, dict[Key, Tensor], dict[Key, Tensor]]:
    """The metric, the values at the places and the metric's gradients there.

    ``entries`` are values to put in on the way, where an input cannot be mixed itself.
    """
    values: dict[Key, Tensor] = {}
    zeros: dict[Key, Tensor] = {}
    live: dict[Key, Tensor] = {}
    # First what the metric makes of each of those sites alone; then how each place reaches them.
    receiving = _at_receivers(task, inputs, entries) if backward and task.through else None
    session = _entering(task, entries)
    for row, place in enumerate(task.places):
        session.edit(place.target, _lifted(row, place, values, zeros))
    for row, target in enumerate(task.through if backward else ()):
        session.edit(target, _noted(row, live))
    task.restore()
    gradients: dict[Key, Tensor] = {}
    with session:
        output = calling.call(task.model, inputs)
        for row, place in enumerate(task.places):
            if place.clean and not any((row, leaf) in values for leaf in place.clean):
                raise never_patched(place.target)
        metric = measured(task.metric, output)
        if backward:
            end = _on_the_graph(metric)
            ends, weights = ([end], [torch.ones_like(end)]) if receiving is None else _paired(live, receiving)
            gradients = _grads(ends, weights, zeros)
    return _plain(metric), values, gradients


def _plain(metric: Tensor | float) -> float:
    return float(metric.detach()) if isinstance(metric, Tensor) else float(metric)


def _on_the_graph(metric: Tensor | float) -> Tensor:
    if isinstance(metric, Tensor) and metric.requires_grad:
        return metric
    found = tree.describe(metric) if isinstance(metric, Tensor) else repr(metric)
    raise TypeError(
        f"estimate='gradient' needs a metric on the autograd graph, and this one is {found} without one: return a "
        "tensor that is computed from the model's output, without float(), item() or detach()."
    )


def _grads(ends: list[Tensor], weights: list[Tensor], zeros: dict[Key, Tensor]) -> dict[Key, Tensor]:
    """The gradients of those zeros that the ends depend on."""
    if not ends or not zeros:
        return {}
    found = torch.autograd.grad(ends, list(zeros.values()), weights, allow_unused=True)
    return {key: gradient for key, gradient in zip(zeros, found, strict=True) if gradient is not None}


def _entering(task: Task, entries: dict[Site, Tensor]) -> Session:
    session = Session(task.model, index=task.index, warn=False)
    for target in _embeddings(task.index) if entries else ():
        session.edit(target, functools.partial(_entered, entries))
    return session


def _entered(entries: dict[Site, Tensor], value: Any, site: Site) -> Any:
    return entries.get(site, value)


def _lifted(row: int, place: Place, values: dict[Key, Tensor], zeros: dict[Key, Tensor]) -> Callable[[Any, Site], Any]:
    def edit(value: Any, site: Site) -> Any:
        for leaf, clean in place.clean.items():
            value = tree.put(value, leaf, functools.partial(lift, leaf, clean, site))
        return value

    def lift(leaf: str, clean: Tensor, site: Site, tensor: Tensor) -> Tensor:
        same_shape(clean, tensor, site)
        values[row, leaf] = tensor.detach().clone()  # the model may write to it
        if not tensor.is_floating_point():
            return tensor  # no gradient: said in the notes, unless another leaf has one
        zero = zeros[row, leaf] = torch.zeros_like(tensor, requires_grad=True)
        return tensor + zero

    return edit


# -- through other sites --------------------------------------------------------------------------


def _noted(row: int, live: dict[Key, Tensor]) -> Callable[[Any, Site], Any]:
    """Remembers what passes, on the graph and safe from what the model does to it next."""

    def edit(value: Any, site: Site) -> Any:
        for leaf, tensor in _floats(value):
            live[row, f"{site} {leaf}"] = tensor.clone()
        return value

    return edit


def _at_receivers(task: Task, inputs: Inputs, entries: dict[Site, Tensor]) -> dict[Key, Tensor]:
    """The metric's gradient at each of the ``through`` sites, the others of them held still."""
    zeros: dict[Key, Tensor] = {}
    ran: set[int] = set()

    def cut(row: int, value: Any, site: Site) -> Any:
        ran.add(row)  # of whole numbers there are no zeros

        def still(leaf: str, tensor: Tensor) -> Tensor:
            zero = zeros[row, f"{site} {leaf}"] = torch.zeros_like(tensor, requires_grad=True)
            return tensor.detach() + zero

        for leaf, _ in _floats(value):
            value = tree.put(value, leaf, functools.partial(still, leaf))
        return value

    session = _entering(task, entries)
    for row, target in enumerate(task.through):
        session.edit(target, functools.partial(cut, row))
    task.restore()
    gradients: dict[Key, Tensor] = {}
    with session:
        metric = measured(task.metric, calling.call(task.model, inputs))
        for row, target in enumerate(task.through):
            if row not in ran:
                raise NeverRanError(f"through={str(target.site)!r} never ran, so that nothing goes through it.")
        # Where the metric hangs on none of them, it may be on no graph, and that is no fault.
        if isinstance(metric, Tensor) and metric.requires_grad:
            gradients = _grads([metric], [torch.ones_like(metric)], zeros)
    return gradients


def _paired(live: dict[Key, Tensor], weights: dict[Key, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    keys = [key for key in weights if key in live and live[key].requires_grad]
    return [live[key] for key in keys], [weights[key] for key in keys]


def _floats(value: Any) -> list[tuple[str, Tensor]]:
    return [(leaf, part) for leaf, part in tree.leaves(value) if isinstance(part, Tensor) and part.is_floating_point()]


# -- from the corrupted input to the clean one ----------------------------------------------------


def _along_the_way(task: Task, steps: int) -> dict[Key, Tensor]:
    """The mean of the gradients at the middles of ``steps`` steps from the corrupted input to the clean one."""
    before, after = _entries(task, task.clean), _entries(task, task.corrupted)
    differing = {site for site in before.keys() & after.keys() if not _is_same(before[site], after[site])}
    if not differing and not any(map(_can_mix, *_both(task))):
        raise ValueError(
            f"steps={steps} goes from the corrupted input to the clean one, and these have no numbers between them: "
            "they differ neither in a floating-point tensor nor in the output of an nn.Embedding. Use steps=1."
        )
    total: dict[Key, Tensor] = {}
    for step in range(steps):
        share = (step + 0.5) / steps
        entries = {site: torch.lerp(after[site], before[site], share) for site in differing}
        _, _, gradients = _gradients(task, _mixed(task, share), entries)
        for key, gradient in gradients.items():
            share_of = _wide(gradient) / steps
            total[key] = total[key] + share_of if key in total else share_of
    return total


def _embeddings(index: Index) -> list[Target]:
    return [
        Target(Site(index.names(module)[0]), module)
        for module in index.distinct.values()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]


def _entries(task: Task, inputs: Inputs) -> dict[Site, Tensor]:
    """What each call of an embedding makes of the inputs."""
    targets = _embeddings(task.index)
    if not targets:
        return {}
    session = Session(task.model, index=task.index, warn=False)
    session.record(targets, Keep())
    task.restore()
    with torch.no_grad(), session as recording:
        calling.call(task.model, inputs)
    return {record.site.but(call=record.call): record.value for record in _records(recording)}


def _records(recording: Recording) -> list[Any]:
    return [record for record in recording.records() if isinstance(record.value, Tensor)]


def _both(task: Task) -> tuple[list[Tensor], list[Tensor]]:
    return list(tree.tensors(task.clean)), list(tree.tensors(task.corrupted))


def _can_mix(clean: Tensor, corrupted: Tensor) -> bool:
    return clean.is_floating_point() and corrupted.is_floating_point() and not _is_same(clean, corrupted)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _mixed(task: Task, share: float) -> Inputs:
    """The corrupted input with ``share`` of the way to the clean one behind it."""
    clean = iter(_both(task)[0])

    def mix(tensor: Tensor) -> Tensor:
        other = next(clean, tensor)
        if not _can_mix(other, tensor):
            return tensor
        if other.shape != tensor.shape:
            raise EditError(
                f"the clean input has {tree.describe(other)} where the corrupted one has {tree.describe(tensor)}. Give "
                "inputs of the same shape: pad them, or cut them to the same length."
            )
        return torch.lerp(tensor, other.to(tensor.device, tensor.dtype), share)

    mixed: Inputs = tree.map_tensors(mix, task.corrupted)
    return mixed

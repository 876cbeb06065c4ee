"""``sweep``: activation patching over sites and positions, many patches in one forward pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from torchhook import edits
from torchhook._core import calling
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.select import Selector, Target, resolve
from torchhook._core.session import Session
from torchhook._recording.address import Site, shown
from torchhook._recording.records import Recording
from torchhook._recording.sweeps import Sweep, nothing_between
from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook.errors import EditError, NeverRanError, SelectorError, suggestion, warn

Metric = Callable[[Any], "Tensor | float"]


def sweep(
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    metric: Metric,
    *,
    sites: Selector,
    positions: Sequence[int] | None = None,
    dim: int | None = 1,
    leaf: str | None = None,
    batch: int | None = None,
    progress: bool = True,
) -> Sweep:
    """Run ``corrupted`` with one site at a time set to what it was for ``clean``, and see what becomes of the metric.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    >>> result = sweep(model, torch.ones(1, 5, 2), torch.zeros(1, 5, 2), torch.sum, sites="*", progress=False)
    >>> result.values.shape
    torch.Size([3, 5])

    Each of ``sites`` is patched at each of ``positions`` of ``dim`` (the tokens of a batch-first sequence; all of them
    unless said otherwise), or as a whole with ``dim=None``. ``metric`` takes the model's output and returns one number;
    higher or lower is the same to it. ``clean`` and ``corrupted`` are what the model is called with: a tuple of
    arguments, a dict of keyword arguments, ``th.Inputs(args, kwargs)`` for both, or else the one argument. ``leaf``
    names the tensor where a site's value has several. A site that runs more than once has a row for each call.

    ``batch`` patches share a forward pass, stacked along dim 0: as many as make 32 examples, unless said otherwise; 1
    is one by one. The first and last of them are checked against passes of their own. A model that mixes the examples
    of a batch, or draws random numbers for each, is found out there; the sweep then goes one by one and says so in
    ``notes``. The model runs without gradients, in the mode it is in, each time from the same random numbers. It and
    the process are left as they were: modes, buffers, caches, gradients.
    """
    if batch is not None and batch < 1:
        raise ValueError(f"batch={batch}: give the number of patches in one forward pass, at least 1.")
    index = Index(model)
    targets = [_patchable(target) for target in resolve(index, sites)]
    before, after = calling.arguments(clean), calling.arguments(corrupted)
    with torch.no_grad(), calling.undisturbed(model) as restore:
        session = Session(model, index=index, warn=False)
        session.record(targets, Keep())
        with session as recording:
            clean_value = _number(metric, calling.call(model, before))
        restore()
        corrupted_value = _number(metric, calling.call(model, after))
        places = [place for target in targets for place in _places(target, recording, leaf, dim)]
        columns = _columns(places, positions, dim)
        patches = [_Patch(i, j, p) for i, place in enumerate(places) for j, p in _indices(place, columns, dim)]
        if why := nothing_between(clean_value, corrupted_value):
            warn(why, UserWarning)
        runner = _Runner(model, index, after, metric, places, dim, restore)
        # What rounding is measured by: a patched metric may itself be near zero.
        scale = max(abs(clean_value), abs(corrupted_value), abs(clean_value - corrupted_value))
        found, notes = _all_patches(runner, patches, batch, scale, progress)
    values = torch.full((len(places), len(columns)), math.nan)
    for patch, value in zip(patches, found, strict=True):
        values[patch.row, patch.column] = value
    names = [str(place.target.site) for place in places]
    return Sweep(values, names, None if dim is None else columns, clean_value, corrupted_value, notes)


# -- what is patched ------------------------------------------------------------------------------


class _Place(NamedTuple):
    """One call of one site: the leaves to patch there, and what they were in the clean run."""

    target: Target
    clean: dict[str, Tensor]


class _Patch(NamedTuple):
    row: int
    column: int
    position: int


def _patchable(target: Target) -> Target:
    if target.tensor is not None or target.site.port not in ("output", "input"):
        raise SelectorError(
            f"{str(target.site)!r} cannot be patched in the forward pass: sweep over outputs or inputs."
        )
    return target


def _places(target: Target, recording: Recording, leaf: str | None, dim: int | None) -> list[_Place]:
    site = target.site
    records = recording.records(site)
    if site.call is not None:
        records = [record for record in records if record.call == site.call]
    several = len(records) > 1 or site.call is not None
    return [
        _Place(
            target._replace(site=site.but(call=record.call if several else None)),
            _leaves(record.value, str(site), leaf, dim),
        )
        for record in records
    ]


def _leaves(value: Any, site: str, leaf: str | None, dim: int | None) -> dict[str, Tensor]:
    found = {address: part for address, part in tree.leaves(value) if isinstance(part, Tensor)}
    if leaf is not None:
        if leaf not in found:
            # The leaf of a bare tensor is the tensor, and has no name to suggest.
            bare = f"The value is one tensor of shape {tuple(value.shape)}: leave leaf= out." if "" in found else ""
            there = bare or suggestion(leaf, found) or f"There is none in it: {tree.describe(value)}."
            raise EditError(f"{shown(site)}: no tensor at leaf={leaf!r}. {there}")
        found = {leaf: found[leaf]}
    if dim is None:
        return found
    if len(found) != 1:
        listed = ", ".join(map(repr, found)) or "none"
        raise EditError(
            f"{site}: a position belongs to one tensor, and this value has {len(found)}: {listed}. Use leaf=."
        )
    (tensor,) = found.values()
    if not -tensor.dim() <= dim < tensor.dim():
        raise EditError(f"{site}: dim={dim} was asked for, and the value is {tree.describe(tensor)}. Use dim=None.")
    return found


def _columns(places: list[_Place], positions: Sequence[int] | None, dim: int | None) -> list[int]:
    if dim is None:
        if positions is not None:
            raise ValueError("positions= are indices of a dimension: leave them out, or say which with dim=.")
        return [0]
    length = max(tensor.shape[dim] for place in places for tensor in place.clean.values())
    if positions is None:
        return list(range(length))
    if wrong := [p for p in positions if not -length <= p < length]:
        raise ValueError(f"positions {wrong} are out of range: dim {dim} has {length}.")
    return list(positions)


def _indices(place: _Place, columns: list[int], dim: int | None) -> list[tuple[int, int]]:
    if dim is None:
        return [(0, 0)]
    (tensor,) = place.clean.values()
    return [(j, p) for j, p in enumerate(columns) if -tensor.shape[dim] <= p < tensor.shape[dim]]


# -- how it runs ----------------------------------------------------------------------------------


class _NoBatch(Exception):
    """Several patches cannot share a forward pass, and why; ``row`` is the site that is in the way, if it is one."""

    def __init__(self, why: str, row: int | None = None) -> None:
        super().__init__(why)
        self.row = row


class _Runner:
    """Runs the corrupted input with patches; several share a forward pass, each with its own copy of the input."""

    def __init__(
        self,
        model: nn.Module,
        index: Index,
        inputs: Inputs,
        metric: Metric,
        places: list[_Place],
        dim: int | None,
        restore: Callable[[], None],
    ) -> None:
        self.model, self.index, self.inputs, self.metric = model, index, inputs, metric
        self.places, self.dim, self.restore = places, dim, restore
        # A guess: dim 0 of the first tensor is the batch. ``_is_batched`` and ``_check`` find out where it is not.
        self.examples = next((t.shape[0] for t in tree.tensors(inputs) if t.dim()), 0)
        clean = [tensor for place in places for tensor in place.clean.values() if tensor.is_floating_point()]
        self.tolerance = math.sqrt(max((torch.finfo(tensor.dtype).eps for tensor in clean), default=1e-7))
        """How much rounding may differ between a batch and a pass of its own."""

    def run(self, patches: Sequence[_Patch]) -> list[float]:
        copies = len(patches)
        rows: dict[int, list[tuple[int, int]]] = {}
        for copy, patch in enumerate(patches):
            rows.setdefault(patch.row, []).append((copy, patch.position))
        session = Session(self.model, index=self.index, warn=False)
        fired: set[int] = set()
        for row, where in rows.items():
            session.edit(self.places[row].target, self._edit(row, where, copies, fired))
        self.restore()
        with session:
            output = calling.call(self.model, self._repeated(copies))
        # Such a row would show the metric of the corrupted run, as if its patch had no effect.
        for row in rows.keys() - fired:
            raise NeverRanError(
                f"{str(self.places[row].target.site)!r} ran for the clean input and never for the corrupted one, "
                "so there is nothing to patch. Leave it out of the sweep."
            )
        if copies == 1:
            return [_number(self.metric, output)]
        return [_number(self.metric, self._part(output, copy, copies)) for copy in range(copies)]

    def _repeated(self, copies: int) -> Inputs:
        if copies == 1:
            return self.inputs

        def repeat(tensor: Tensor) -> Tensor:
            # What has another length is one for all examples (positions, a causal mask), and so for all copies.
            batched = tensor.dim() and tensor.shape[0] == self.examples
            return tensor.repeat(copies, *[1] * (tensor.dim() - 1)) if batched else tensor

        repeated: Inputs = tree.map_tensors(repeat, self.inputs)
        return repeated

    def _part(self, output: Any, copy: int, copies: int) -> Any:
        """One copy's share of a batched output."""

        def share(tensor: Tensor) -> Tensor:
            if tensor.dim() and tensor.shape[0] == copies * self.examples:
                return tensor[copy * self.examples : (copy + 1) * self.examples]
            # A loss over the batch, say. A metric that uses it comes to NaN, which the check finds.
            return torch.full_like(tensor, math.nan) if tensor.is_floating_point() else tensor

        return tree.map_tensors(share, output)

    def _edit(self, row: int, where: list[tuple[int, int]], copies: int, fired: set[int]) -> edits.Edit:
        place = self.places[row]
        chosen, positions = [copy for copy, _ in where], [position for _, position in where]

        def edit(value: Any, site: Site) -> Any:
            fired.add(row)
            for address, clean in place.clean.items():
                value = tree.put(value, address, functools.partial(patched, clean, site))
            return value

        def patched(clean: Tensor, site: Site, tensor: Tensor) -> Tensor:
            if copies > 1 and not self._is_batched(tensor, clean, copies):
                shapes = (
                    f"{tree.describe(clean)} for {self.examples} examples, {tree.describe(tensor)} for {copies} times"
                )
                raise _NoBatch(f"{place.target.site} is {shapes} as many", row)
            if copies == 1 and tensor.shape != clean.shape:
                raise EditError(
                    f"{site}: {tree.describe(clean)} for the clean input and {tree.describe(tensor)} for the corrupted "
                    "one. Give inputs of the same shape: pad them, or cut them to the same length."
                )
            return _put(tensor, clean.to(tensor.device, tensor.dtype), chosen, positions, copies, self.dim)

        return edit

    def _is_batched(self, tensor: Tensor, clean: Tensor, copies: int) -> bool:
        # Twice the batch would not do: two inputs laid end to end, and a copy's share is in two places.
        shape = (copies * self.examples, *clean.shape[1:])
        return clean.dim() > 0 and clean.shape[0] == self.examples and tensor.shape == shape


def _put(
    tensor: Tensor, clean: Tensor, chosen: list[int], positions: list[int], copies: int, dim: int | None
) -> Tensor:
    """``tensor`` with the clean value in the chosen copies, each at its own position."""
    # Never the recorded tensor itself: a layer that works in place would spoil it for the patches to come.
    if copies == 1 and dim is None:
        return clean.clone()
    result = tensor.clone()
    if copies == 1:
        assert dim is not None
        result.select(dim, positions[0]).copy_(clean.select(dim, positions[0]))
        return result
    # Splitting a dim is always a view, so that what is written here lands in the result.
    stacked = result.unflatten(0, (copies, clean.shape[0]))
    for copy, position in zip(chosen, positions, strict=True):
        if dim is None:
            stacked[copy].copy_(clean)
        else:
            stacked[copy].select(dim, position).copy_(clean.select(dim, position))
    return result


def _number(metric: Metric, output: Any) -> float:
    value = metric(output)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TypeError(f"the metric must return one number, found a tensor {tree.describe(value)}: take its mean.")
    return float(value)


def _all_patches(
    runner: _Runner, patches: list[_Patch], batch: int | None, scale: float, progress: bool
) -> tuple[list[float], list[str]]:
    """The metric for every patch, and what there is to say about how it was found."""
    size = batch if batch is not None else max(1, 32 // max(runner.examples, 1))
    found: dict[_Patch, float] = {}
    alone: dict[int, str] = {}
    notes: list[str] = []
    checked = False
    with tqdm(total=len(patches), desc="sweep", unit="patch", disable=not progress, leave=False) as bar:
        while waiting := [patch for patch in patches if patch not in found]:
            together = [patch for patch in waiting if patch.row not in alone]
            chunk = together[:size] or waiting[:1]
            try:
                values = runner.run(chunk)
                if len(chunk) > 1:
                    # At once, so that little is lost where batches are wrong; and the last, which is often smaller.
                    last = len(chunk) == len(together)
                    _check(
                        runner, chunk, values, ([] if checked else [0]) + ([] if checked and not last else [-1]), scale
                    )
                    checked = True
            except torch.OutOfMemoryError:
                if len(chunk) == 1:
                    raise
                # What was found stays right: only so many do not fit at a time.
                size = len(chunk) // 2
                continue
            except Exception as error:
                if len(chunk) == 1:
                    raise
                if isinstance(error, _NoBatch) and error.row is not None:
                    alone[error.row] = str(error)
                    continue
                # A fault of the user's model or metric, and not of batching, comes again one by one.
                notes = [f"run one by one: {error if isinstance(error, _NoBatch) else repr(error)}"]
                size = 1
                # What batches gave so far is not to be trusted either.
                found.clear()
                bar.reset()
                continue
            found |= zip(chunk, values, strict=True)
            bar.update(len(values))
    if alone and not notes:
        sites = f"{len(alone)} sites" if len(alone) > 1 else "1 site"
        notes = [f"{sites} run one by one: {next(iter(alone.values()))}"]
    return [found[patch] for patch in patches], notes


def _check(runner: _Runner, chunk: list[_Patch], values: list[float], which: list[int], scale: float) -> None:
    """Compare some patches of a batch with passes of their own."""
    for i in which:
        (alone,) = runner.run([chunk[i]])
        near = abs(alone - values[i]) <= runner.tolerance * max(scale, abs(alone))
        if not near and not (math.isnan(alone) and math.isnan(values[i])):
            raise _NoBatch(f"in a batch the metric came to {values[i]:.6g}, alone to {alone:.6g}")

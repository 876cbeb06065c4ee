"""How a sweep runs: the corrupted input with patches, as many of them in one forward pass as the model allows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from torchhook import edits
from torchhook._core import calling
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.session import Session
from torchhook._core.targets import Target
from torchhook._recording.address import Site
from torchhook._recording.records import Recording
from torchhook._sweep.places import Cut, Patch, Place, Tokens, Whole
from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook._words import plural
from torchhook.errors import EditError, NeverRanError

Metric = Callable[[Any], "Tensor | float"]


class _NoBatch(Exception):
    """Several patches cannot share a forward pass, and why; ``row`` is the site that is in the way, if it is one."""

    def __init__(self, why: str, row: int | None = None) -> None:
        super().__init__(why)
        self.row = row


class Runner:
    """Runs the corrupted input with patches; several share a forward pass, each with its own copy of the input."""

    def __init__(
        self,
        model: nn.Module,
        index: Index,
        inputs: Inputs,
        metric: Metric,
        places: list[Place],
        through: list[Target],
        restore: Callable[[], None],
    ) -> None:
        self.model, self.index, self.inputs, self.metric = model, index, inputs, metric
        self.places, self.through, self.restore = places, through, restore
        # A guess: dim 0 of the first tensor is the batch. ``_is_batched`` and ``check`` find out where it is not.
        self.examples = next((t.shape[0] for t in tree.tensors(inputs) if t.dim()), 0)
        clean = [tensor for place in places for tensor in place.clean.values() if tensor.is_floating_point()]
        self.tolerance = math.sqrt(max((torch.finfo(tensor.dtype).eps for tensor in clean), default=1e-7))
        """How much rounding may differ between a batch and a pass of its own."""

    def run(self, patches: Sequence[Patch]) -> list[float]:
        copies = len(patches)
        rows: dict[int, list[tuple[int, int]]] = {}
        for copy, patch in enumerate(patches):
            rows.setdefault(patch.row, []).append((copy, patch.position))
        session = Session(self.model, index=self.index, warn=False)
        fired: set[int] = set()
        for row, where in rows.items():
            session.edit(self.places[row].target, self._edit(row, where, copies, fired))
        if self.through:
            session.record(self.through, Keep())
        self.restore()
        inputs = self._repeated(copies)
        with session as recording:
            output = calling.call(self.model, inputs)
        # Such a row would show the metric of the corrupted run, as if its patch had no effect.
        for row in rows.keys() - fired:
            raise never_patched(self.places[row].target)
        if self.through:
            output = self._by_way_of(recording, inputs)
        if copies == 1:
            return [number(self.metric, output)]
        return [number(self.metric, self._part(output, copy, copies)) for copy in range(copies)]

    def _by_way_of(self, recording: Recording, inputs: Inputs) -> Any:
        """The corrupted run again: not with the patch, but with what it made of the sites that it goes through."""
        session = Session(self.model, index=self.index, warn=False)
        for target in self.through:
            if target.site not in recording:
                raise NeverRanError(f"through={str(target.site)!r} never ran, so that nothing goes through it.")
            session.edit(target, edits.patch(recording))
        self.restore()
        with session:
            return calling.call(self.model, inputs)

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
            if copies > 1 and not self._is_batched(tensor, clean, copies, place.cut):
                shapes = (
                    f"{tree.describe(clean)} for {self.examples} examples, {tree.describe(tensor)} for {copies} times"
                )
                raise _NoBatch(f"{place.target.site} is {shapes} as many", row)
            if copies == 1:
                same_shape(clean, tensor, site)
            return _put(tensor, clean.to(tensor.device, tensor.dtype), chosen, positions, copies, place.cut)

        return edit

    def _is_batched(self, tensor: Tensor, clean: Tensor, copies: int, cut: Cut) -> bool:
        if clean.dim() == 0:
            return False
        # Twice the batch would not do: two inputs laid end to end, and a copy's share is in two places.
        rows = cut.rows if isinstance(cut, Tokens) else clean.shape[0]
        return rows == self.examples and tensor.shape == (copies * clean.shape[0], *clean.shape[1:])


def _put(tensor: Tensor, clean: Tensor, chosen: list[int], positions: list[int], copies: int, cut: Cut) -> Tensor:
    """``tensor`` with the clean value in the chosen copies, each at its own position."""
    # Never the recorded tensor itself: a layer that works in place would spoil it for the patches to come.
    if copies == 1 and isinstance(cut, Whole):
        return clean.clone()
    result = tensor.clone()
    # Splitting a dim is always a view, so that what is written here lands in the result.
    stacked = result[None] if copies == 1 else result.unflatten(0, (copies, clean.shape[0]))
    for copy, position in zip(chosen, positions, strict=True):
        cut.part(stacked[copy], position).copy_(cut.part(clean, position))
    return result


def never_patched(target: Target) -> NeverRanError:
    """A site that only the clean input reaches."""
    return NeverRanError(
        f"{str(target.site)!r} ran for the clean input and never for the corrupted one, so there is nothing to patch. "
        "Leave it out of the sweep."
    )


def same_shape(clean: Tensor, tensor: Tensor, site: Site) -> None:
    """Refuse inputs of two sizes."""
    if tensor.shape != clean.shape:
        raise EditError(
            f"{site}: {tree.describe(clean)} for the clean input and {tree.describe(tensor)} for the corrupted "
            "one. Give inputs of the same shape: pad them, or cut them to the same length."
        )


def number(metric: Metric, output: Any) -> float:
    """The metric of an output."""
    return float(measured(metric, output))


def measured(metric: Metric, output: Any) -> Tensor | float:
    """The metric of an output as it came, a tensor of one number it may be."""
    value = metric(output)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TypeError(f"the metric must return one number, found a tensor {tree.describe(value)}: take its mean.")
    return value


def all_patches(
    runner: Runner, patches: list[Patch], batch: int | None, scale: float, progress: bool
) -> tuple[list[float], list[str]]:
    """The metric for every patch, and what there is to say about how it was found."""
    size = batch if batch is not None else max(1, 32 // max(runner.examples, 1))
    found: dict[Patch, float] = {}
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
        notes = [f"{len(alone)} {plural(len(alone), 'site')} run one by one: {next(iter(alone.values()))}"]
    return [found[patch] for patch in patches], notes


def _check(runner: Runner, chunk: list[Patch], values: list[float], which: list[int], scale: float) -> None:
    """Compare some patches of a batch with passes of their own."""
    for i in which:
        (alone,) = runner.run([chunk[i]])
        near = abs(alone - values[i]) <= runner.tolerance * max(scale, abs(alone))
        if not near and not (math.isnan(alone) and math.isnan(values[i])):
            raise _NoBatch(f"in a batch the metric came to {values[i]:.6g}, alone to {alone:.6g}")

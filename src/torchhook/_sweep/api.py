"""``sweep``: activation patching over sites and positions, many patches in one forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from torchhook._core import calling
from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.select import Selector, resolve
from torchhook._core.session import Session
from torchhook._core.targets import Target
from torchhook._recording.sweeps import Sweep, nothing_between
from torchhook._sweep.estimate import Task
from torchhook._sweep.estimate import estimate as estimated
from torchhook._sweep.places import Way, along, by_head, by_token, columns, patchable, patches, places, too_late
from torchhook._sweep.running import Metric, Runner, all_patches, number
from torchhook._values.tree import Inputs
from torchhook.errors import warn


def sweep(
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    metric: Metric,
    *,
    sites: Selector,
    positions: Sequence[int] | None = None,
    dim: int | Literal["token"] | None = "token",
    over: Literal["position", "head"] = "position",
    heads: tuple[int, int] | None = None,
    leaf: str | None = None,
    through: Selector | None = None,
    estimate: Literal["gradient"] | None = None,
    steps: int = 1,
    batch: int | None = None,
    progress: bool = True,
) -> Sweep:
    """Run ``corrupted`` with one site at a time set to what it was for ``clean``, and see what becomes of the metric.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    >>> result = sweep(model, torch.ones(1, 5, 2), torch.zeros(1, 5, 2), torch.sum, sites="*", progress=False)
    >>> result.values.shape
    torch.Size([3, 5])

    Each of ``sites`` is patched at each of ``positions``: at every token, unless said otherwise. Tokens are dim 1, and
    where the modules around say that heads are there (``@q``, ``@k``, ``@v``, what attention takes and gives), dim 2;
    ``dim`` names another one, and with ``dim=None`` sites are patched as a whole. ``metric`` takes the model's output
    and returns one number; higher or lower is the same to it. ``clean`` and ``corrupted`` are what the model is called
    with: a tuple of arguments, a dict of keyword arguments, ``th.Inputs(args, kwargs)`` for both, or else the one
    argument. ``leaf`` names the tensor where a site's value has several. A site that runs more than once has a row for
    each call.

    ``over="head"`` patches one attention head at a time instead: in the values of operations, in the output of the
    projections that make heads and in the input of the one that joins them; ``positions`` are then numbers of heads.
    Where they lie is found from what the modules around say of themselves, or named by ``heads=(dim, count)``.

    ``through`` lets a patch act by way of these sites alone: they are set to what they become when it is made, and
    everything else stays as it is in the corrupted run. Of sites that come after all of them, ``notes`` tell.

    ``estimate="gradient"`` runs no patch at all: two forward passes and one backward give the effect of every one to
    first order, exact where the model is linear between the two inputs. ``steps`` gradients instead, on the way from
    the corrupted input to the clean one (of token ids, from embedding to embedding), see more of what is not.

    ``batch`` patches share a forward pass, stacked along dim 0: as many as make 32 examples, unless said otherwise; 1
    is one by one. The first and last of them are checked against passes of their own. A model that mixes the examples
    of a batch, or draws random numbers for each, is found out there; the sweep then goes one by one and says so in
    ``notes``. The model runs without gradients, but for an estimate, in the mode it is in, each time from the same
    random numbers. It and the process are left as they were: modes, buffers, caches, gradients.
    """
    if batch is not None and batch < 1:
        raise ValueError(f"batch={batch}: give the number of patches in one forward pass, at least 1.")
    if estimate not in (None, "gradient"):
        raise ValueError(f"estimate={estimate!r}: use 'gradient', or leave it out to run every patch.")
    if steps < 1 or (estimate is None and steps != 1):
        raise ValueError(f"steps={steps}: a number of gradients, at least 1, for estimate='gradient'.")
    if over not in ("position", "head") or (heads is not None and over != "head"):
        raise ValueError(f"over={over!r}: use 'position', or 'head', which heads= says more of.")
    if isinstance(dim, str) and dim != "token":
        raise ValueError(f"dim={dim!r}: use 'token', the number of a dim, or None to patch sites as a whole.")
    index = Index(model)
    targets = [patchable(target) for target in resolve(index, sites)]
    receivers = [] if through is None else [patchable(target) for target in resolve(index, through)]
    before, after = calling.arguments(clean), calling.arguments(corrupted)
    way = by_head(index, heads, before) if over == "head" else _by_position(index, dim, before)
    with torch.no_grad(), calling.undisturbed(model) as restore:
        session = Session(model, index=index, warn=False)
        session.record(targets, Keep())
        passed = _watched(session, receivers)
        with session as recording:
            clean_value = number(metric, calling.call(model, before))
        found = [place for target in targets for place in places(target, recording, leaf, way)]
        at = columns(found, positions, _what(over, dim))
        cells = patches(found, at)
        if estimate is not None:
            task = Task(model, index, before, after, metric, found, receivers, restore)
            results, corrupted_value, notes = estimated(task, cells, steps)
        else:
            restore()
            corrupted_value = number(metric, calling.call(model, after))
            runner = Runner(model, index, after, metric, found, receivers, restore)
            # What rounding is measured by: a patched metric may itself be near zero.
            scale = max(abs(clean_value), abs(corrupted_value), abs(clean_value - corrupted_value))
            results, notes = all_patches(runner, cells, batch, scale, progress)
    notes = [*notes, *too_late(found, passed)]
    if why := nothing_between(clean_value, corrupted_value):
        warn(why, UserWarning)
    # In double, whatever the default is: the effect of a patch may be small beside the metric.
    values = torch.full((len(found), len(at)), math.nan, dtype=torch.float64)
    for patch, value in zip(cells, results, strict=True):
        values[patch.row, patch.column] = value
    names = [str(place.target.site) for place in found]
    return Sweep(values, names, None if way is None else at, clean_value, corrupted_value, notes, estimate, over)


def _watched(session: Session, receivers: list[Target]) -> list[int]:
    """When each of these sites passes, in the order in which the session keeps values; filled as it runs."""
    passed: list[int] = []
    order = session.recording.order
    for target in receivers:
        session.look(target, lambda value, call: passed.append(next(order)))
    return passed


def _by_position(index: Index, dim: int | Literal["token"] | None, inputs: Inputs) -> Way | None:
    if dim is None:
        return None
    return by_token(index, inputs) if isinstance(dim, str) else along(dim)


def _what(over: str, dim: int | Literal["token"] | None) -> str | None:
    """What the columns are, for errors; nothing, where sites are patched as a whole."""
    if over == "head":
        return over
    return None if dim is None else "the dim of tokens" if isinstance(dim, str) else f"dim {dim}"

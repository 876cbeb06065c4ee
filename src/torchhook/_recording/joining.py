"""Values of several calls as one: batches joined on their rows, the calls of a generation by their positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from torchhook._recording.address import Calls, Site
from torchhook._recording.steps import Pass
from torchhook._recording.tables import counted
from torchhook._values import tree

Joined = tuple[int, Any, Pass | None]
"""The call, its value, and the pass of a generation that it was in."""


def join(key: str, site: Site, rows: Sequence[Joined], dim: int, beams: Tensor | None = None) -> Any:
    """The values of a site, which was asked for by ``key``, joined on ``dim``, leaf by leaf."""
    if beams is not None:
        rows = _new(key, _along(key, site, rows, beams), dim)
    elif dim != 0:
        rows = _in_sequence(key, site, rows, dim)
    values = [value for _, value, _ in rows]
    columns = [list(tree.tensors(value)) for value in values]
    if len(values) > 1 and not columns[0]:
        raise ValueError(f"{key}: there are no tensors to concatenate; use rec.all({key!r}).")
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"{key}: the calls have different numbers of tensors; use rec.all({key!r}).")
    try:
        joined = [torch.cat(parts, dim) for parts in zip(*columns, strict=True)]
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(tree.describe(value) for value in values[:4])
        # Of a generation, one wants the tokens one after the other.
        way = f"rec.cat({key!r}, dim=1) joins the tokens of a generation" if dim == 0 and rows[0][2] else ""
        way = way or f"use rec.all({key!r})"
        raise ValueError(f"{key}: cannot concatenate {shapes} on dim {dim}; {way}.") from error
    return tree.with_tensors(values[0], joined)


# -- a generation ---------------------------------------------------------------------------------


def _in_sequence(key: str, site: Site, rows: Sequence[Joined], dim: int) -> Sequence[Joined]:
    """The calls of one sequence, each with those of its tokens that no later call has overwritten."""
    if not any(passed for _, _, passed in rows):
        return rows
    if any(passed is None for _, _, passed in rows):
        outside = [call for call, _, passed in rows if passed is None]
        raise ValueError(
            f"{key}: call{'s' * (len(outside) > 1)} {_listed(outside)} passed outside of the generation. Name those "
            f"to join: {_ranges(site, rows)}."
        )
    if len({passed.sequence for _, _, passed in rows if passed}) > 1:
        raise ValueError(
            f"{key}: the calls belong to several sequences, which are not joined to one. Take one of them at a time: "
            f"{_ranges(site, rows)}."
        )
    if len({passed for _, _, passed in rows}) < len(rows):
        raise ValueError(
            f"{key}: it ran several times in one call of the model, so that its values are not one sequence; "
            f"use rec.records({key!r}), each with its position."
        )
    if len(rows) > 1 and any(passed.beams for _, _, passed in rows if passed):
        raise ValueError(
            f"{key}: in beam search a row is another beam at each step, so that its values are not one sequence. "
            f"rec.cat({key!r}, dim={dim}, beams=out.beam_indices) follows the beams that were returned, with "
            "out = model.generate(…, return_dict_in_generate=True); rec.records() has the rows of every step."
        )
    if len(rows) > 1:
        _refuse_caches(key, rows, dim)
    return _not_overwritten(key, rows, dim)


def _refuse_caches(key: str, rows: Sequence[Joined], dim: int) -> None:
    """Keys and values as attention takes them are those of all tokens so far, and would come again with each call."""
    for _, value, passed in rows:
        for tensor in tree.tensors(value):
            size = tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else 0
            if passed is not None and passed.tokens is not None and size > passed.tokens:
                raise ValueError(
                    f"{key}: a call with {counted(passed.tokens, 'token')} has a value of shape "
                    f"{tuple(tensor.shape)}, so that dim {dim} holds more than its own tokens: those of a cache, say. "
                    f"The last call has them all: rec[{key + '#-1'!r}]."
                )


def _not_overwritten(key: str, rows: Sequence[Joined], dim: int) -> Sequence[Joined]:
    """Assisted decoding takes tokens back that it had tried: the last call that has a position has its value."""
    left, limit = list[Joined](), None
    for call, value, passed in reversed(rows):
        position, tokens = (None, None) if passed is None else (passed.position, passed.tokens)
        if position is None or tokens is None or passed is None:
            left.append((call, value, passed))
            continue
        ends = [end for end in (position + tokens, passed.end, limit) if end is not None]
        length = max(min(ends) - position, 0)
        if length:
            left.append((call, value if length == tokens else _cut(key, value, dim, tokens, slice(0, length)), passed))
        limit = position if limit is None else min(limit, position)
    return left[::-1]


def _new(key: str, rows: Sequence[Joined], dim: int) -> Sequence[Joined]:
    """The calls of one sequence, each with those of its tokens that no call before it had."""
    left, end = list[Joined](), 0
    for call, value, passed in rows:
        position, tokens = (None, None) if passed is None else (passed.position, passed.tokens)
        if position is None or tokens is None or position >= end:
            left.append((call, value, passed))
        elif position + tokens > end:
            left.append((call, _cut(key, value, dim, tokens, slice(end - position, tokens)), passed))
        end = end if position is None or tokens is None else max(end, position + tokens)
    return left


def _cut(key: str, value: Any, dim: int, tokens: int, wanted: slice) -> Any:
    """Some of the tokens of a value."""

    def cut(tensor: Tensor) -> Tensor:
        if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != tokens:
            raise ValueError(
                f"{key}: some of its tokens were computed more than once, and which ones cannot be told: a call with "
                f"{tokens} tokens has a value of shape {tuple(tensor.shape)}, so dim {dim} does not hold them. "
                f"rec.records({key!r}) has every call with its position."
            )
        return tensor.narrow(dim, wanted.start, wanted.stop - wanted.start)

    return tree.map_tensors(cut, value)


def _along(key: str, site: Site, rows: Sequence[Joined], beams: Tensor) -> Sequence[Joined]:
    """The rows that the beams were in, step by step: ``beams[r, t]`` is the row of step t, -1 after its end."""
    if not isinstance(beams, Tensor) or beams.dim() != 2 or beams.is_floating_point():
        given = tree.describe(beams) if isinstance(beams, Tensor) else type(beams).__name__
        raise ValueError(f"{key}: beams= takes the beam_indices that generate returns (rows × steps), found {given}.")
    if any(passed is None for _, _, passed in rows):
        raise ValueError(f"{key}: beams= is for the calls of a generation: {_ranges(site, rows)}.")
    if len({passed.sequence for _, _, passed in rows if passed}) > 1:
        raise ValueError(f"{key}: the calls belong to several sequences; take one of them: {_ranges(site, rows)}.")
    # The search may go on for longer than what it returns.
    steps = [(row, row[2].step) for row in rows if row[2] and row[2].step is not None]
    return [
        (call, tree.map_tensors(partial(_rows, key, beams[:, step]), value), passed)
        for (call, value, passed), step in steps
        if step < beams.shape[1]
    ]


def _rows(key: str, chosen: Tensor, tensor: Tensor) -> Tensor:
    if int(chosen.max()) >= tensor.shape[0]:
        raise ValueError(f"{key}: beams= names row {int(chosen.max())}, and a value there has {tensor.shape[0]} rows.")
    chosen = chosen.to(tensor.device)
    taken = tensor.index_select(0, chosen.clamp(min=0).long())
    ended = (chosen < 0).view(-1, *[1] * (tensor.dim() - 1))
    return taken.masked_fill(ended, 0)


def _ranges(site: Site, rows: Sequence[Joined]) -> str:
    """How to name the calls of each sequence."""
    runs = groupby(rows, lambda row: None if row[2] is None else row[2].sequence)
    calls = [[row[0] for row in run] for sequence, run in runs if sequence is not None]
    named = ", ".join(repr(str(site.but(call=Calls(run[0], run[-1] + 1)))) for run in calls[:4])
    return named + (", …" if len(calls) > 4 else "")


def _listed(calls: Sequence[int]) -> str:
    return ", ".join(map(str, calls[:8])) + (", …" if len(calls) > 8 else "")

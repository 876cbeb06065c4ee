"""Values of several calls as one: batches joined on their rows, the calls of a generation by their positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from torchhook._recording.address import Calls, Site, Which
from torchhook._recording.layouts import Joined, Layout, layout_of
from torchhook._recording.steps import Pass
from torchhook._values import tree
from torchhook._values.heads import unpacked
from torchhook._words import counted, plural
from torchhook.errors import AmbiguousCallError


def join(
    key: str, site: Site, rows: Sequence[Joined], dim: int, beams: Tensor | None = None, layout: Layout | None = None
) -> Any:
    """The values of a site, which was asked for by ``key``, joined on ``dim``, leaf by leaf."""
    if layout is None or (layout.flat and dim not in (0, 1)):
        return _join(key, site, rows, dim, beams, dim)
    if not layout.flat and dim != 0:
        tokens = next((passed.tokens for _, _, passed in rows if passed), 0) or 0
        raise AmbiguousCallError(
            f"{key}: a call with {counted(tokens, 'token')} has {tree.describe(rows[0][1])}, of which dim 0 holds the "
            f"tokens: rec.cat({key!r})."
        )
    joined = _join(key, site, layout.rows_first(rows), 1, beams, dim)
    return tree.map_tensors(layout.back, joined) if dim == 0 else joined


def _join(key: str, site: Site, rows: Sequence[Joined], dim: int, beams: Tensor | None, said: int) -> Any:
    """The same of rows that come first; ``said`` is the dim that the user knows."""
    rows = _with_heads(site, rows)
    if beams is not None:
        rows = _along(key, site, rows, beams)
        _refuse_other_dims(key, site, rows, dim)
        rows = _new(key, rows, dim)
    elif dim != 0:
        rows = _in_sequence(key, site, rows, dim, said)
    values = [value for _, value, _ in rows]
    columns = [list(tree.tensors(value)) for value in values]
    if len(values) > 1 and not columns[0]:
        raise AmbiguousCallError(f"{key}: there are no tensors to concatenate; use rec.all({key!r}).")
    if len({len(column) for column in columns}) > 1:
        raise AmbiguousCallError(f"{key}: the calls have different numbers of tensors; use rec.all({key!r}).")
    try:
        joined = [torch.cat(parts, dim) for parts in zip(*columns, strict=True)]
    except (RuntimeError, IndexError) as error:
        shapes = ", ".join(tree.describe(value) for value in values[:4])
        # Of a generation, one wants the tokens one after the other.
        call = how(key, site, rows) if dim == 0 and rows[0][2] else ""
        way = f"{call} joins the tokens of a generation" if call else f"use rec.all({key!r})"
        raise AmbiguousCallError(f"{key}: cannot concatenate {shapes} on dim {dim}; {way}.") from error
    return tree.with_tensors(values[0], joined)


def several(site: Site, which: Which, rows: Sequence[Joined]) -> str:
    """That a site has more than one value, and what names one of them or takes all."""
    calls = [call for call, _, _ in rows]
    asked = str(site if which is None else site.but(call=which))
    if which is not None and len(set(calls)) == 1:
        return (
            f"call {calls[0]} of {str(site)!r} has {len(rows)} records, one for each backward pass through it: "
            f"take rec.all({str(site.but(call=calls[0]))!r})."
        )
    ways = " or ".join(filter(None, (f"rec.all({asked!r})", how(asked, site, rows))))
    if which is not None:
        return f"{asked!r} has {len(rows)} records, and rec[…] is one value: take {ways}."
    return (
        f"{asked!r} ran more than once: {len(rows)} records, calls {_listed(calls)}. Pick one with "
        f"rec[{asked!r}, {calls[0]}], or take {ways}."
    )


# -- a generation ---------------------------------------------------------------------------------


def _in_sequence(key: str, site: Site, rows: Sequence[Joined], dim: int, said: int) -> Sequence[Joined]:
    """The calls of one sequence, each with those of its tokens that no later call has overwritten."""
    if not any(passed for _, _, passed in rows):
        return rows
    if any(passed is None for _, _, passed in rows):
        outside = [call for call, _, passed in rows if passed is None]
        raise AmbiguousCallError(
            f"{key}: {plural(len(outside), 'call')} {_listed(outside)} passed outside of the generation. Name those "
            f"to join: {_ranges(site, rows)}."
        )
    if len({passed.sequence for _, _, passed in rows if passed}) > 1:
        raise AmbiguousCallError(
            f"{key}: the calls belong to several sequences, which are not joined to one. Take one of them at a time: "
            f"{_ranges(site, rows)}."
        )
    if len({passed for _, _, passed in rows}) < len(rows):
        raise AmbiguousCallError(
            f"{key}: it ran several times in one call of the model, so that its values are not one sequence; "
            f"use rec.records({key!r}), each with its position."
        )
    if len(rows) > 1:
        _refuse_other_dims(key, site, rows, dim)
    if any(passed.position is None and passed.step and passed.tokens != 1 for _, _, passed in rows if passed):
        raise AmbiguousCallError(
            f"{key}: where in the sequence the tokens of each call are is not known, and some may have been given more "
            f"than once; use rec.records({key!r})."
        )
    if len(rows) > 1 and any(passed.beams for _, _, passed in rows if passed):
        raise AmbiguousCallError(
            f"{key}: in beam search a row is another beam at each step, so that its values are not one sequence. "
            f"rec.cat({key!r}, dim={said}, beams=out.beam_indices) follows the beams that were returned, with "
            "out = model.generate(…, return_dict_in_generate=True); rec.records() has the rows of every step."
        )
    return _not_overwritten(key, rows, dim)


def _refuse_other_dims(key: str, site: Site, rows: Sequence[Joined], dim: int) -> None:
    """Other dims than that of a call's own tokens: that of the heads, or one with the tokens of a whole cache."""
    for _, value, passed in rows:
        for leaf, tensor in enumerate(tree.tensors(value)):
            if passed is None or passed.tokens is None or tensor.is_nested or not -tensor.dim() <= dim < tensor.dim():
                continue
            at, size = dim % tensor.dim(), tensor.shape[dim]
            named = _named(site, tensor)
            # Where a name says which dim it is, a size that is the same by chance says nothing.
            other = named not in (None, at) and (size != passed.tokens or tensor.shape[named or 0] == size)
            if at == 0 or other:
                raise AmbiguousCallError(f"{key}: {_not_here(key, site, rows, tensor, at, passed.tokens)}")
            if size > passed.tokens and (at == named or _has_grown(rows, leaf, at)):
                raise AmbiguousCallError(
                    f"{key}: {_of_a_cache(tensor, at, passed)} {_in_the_last(key, site, rows, leaf, at)}"
                )
            if size > passed.tokens:
                raise AmbiguousCallError(f"{key}: {_not_here(key, site, rows, tensor, at, passed.tokens)}")


def _of_a_cache(tensor: Tensor, at: int, passed: Pass) -> str:
    return (
        f"a call with {counted(passed.tokens or 0, 'token')} has a value of shape {tuple(tensor.shape)}, so that dim "
        f"{at} holds more than its own tokens: those of a cache."
    )


def _in_the_last(key: str, site: Site, rows: Sequence[Joined], leaf: int, at: int) -> str:
    """Where the tokens of a cache are found together."""
    call, value, passed = rows[-1]
    last = site.but(call=-1 if key == site else call)
    size = list(tree.tensors(value))[leaf].shape[at]
    # A sliding window lets go of the first ones.
    if passed is not None and passed.position is not None and size < passed.position + (passed.tokens or 0):
        return (
            f"The last call has the last {size}: rec[{str(last)!r}]; rec.records({key!r}) has each with its position."
        )
    return f"The last call has them all: rec[{str(last)!r}]."


def _not_here(key: str, site: Site, rows: Sequence[Joined], tensor: Tensor, at: int, tokens: int) -> str:
    """Which dim the tokens are, if that is not the one that was asked for, and how to get them."""
    given = f"a call with {counted(tokens, 'token')} has a value of shape {tuple(tensor.shape)}"
    right = _dim_of_tokens(site, rows)
    if right is None or right == at:
        return f"{given}, and dim {at} of it does not hold its tokens; use rec.all({key!r})."
    said = f"{given}, of which dim {right} holds the tokens, not dim {at}"
    if call := how(key, site, rows):
        return f"{said}: {call}."
    cached = next((i for i, _ in enumerate(tree.tensors(rows[0][1])) if _has_cache(rows, i, right)), None)
    if cached is not None:
        return f"{said}; those of a cache are among them. {_in_the_last(key, site, rows, cached, right)}"
    return f"{said}, and other dims differ from call to call; use rec.all({key!r})."


# -- which dim the tokens are ---------------------------------------------------------------------


def _with_heads(site: Site, rows: Sequence[Joined]) -> Sequence[Joined]:
    """Queries of one token that a kernel was given by the heads of their keys, with their own heads again."""
    if not site.is_asked:
        return rows

    def whole(tokens: int | None, tensor: Tensor) -> Tensor:
        return unpacked(tensor) if tokens == 1 and tensor.dim() == 4 and tensor.shape[2] > 1 else tensor

    tokens = [None if passed is None else passed.tokens for _, _, passed in rows]
    return [(c, tree.map_tensors(partial(whole, n), value), p) for n, (c, value, p) in zip(tokens, rows, strict=True)]


def _dim_of_tokens(site: Site, rows: Sequence[Joined]) -> int | None:
    """The dim of the tokens in the values of a generation: by the name of the site, else by sizes that follow them."""
    # Logits may have been asked for of the last ones alone.
    calls = [(list(tree.tensors(value)), (p.tokens, p.kept)) for _, value, p in rows if p is not None]
    if any(tensor.is_nested for tensors, _ in calls for tensor in tensors):
        return None
    found: set[int | None] = set()
    for tensors, _ in calls:
        found |= {_named(site, tensor) for tensor in tensors}
    if len(found) == 1 and (named := found.pop()) is not None:
        return named
    dims = min((tensor.dim() for tensors, _ in calls for tensor in tensors), default=0)
    fitting = [d for d in range(1, dims) if all(t.shape[d] in own for tensors, own in calls for t in tensors)]
    return fitting[0] if len(fitting) == 1 or fitting[:1] == [1] else None


def _named(site: Site, tensor: Tensor) -> int | None:
    """The dim of the tokens where heads have a dim of their own, which the site tells; of three, sizes tell more."""
    return site.token_dim(tensor.shape) if not tensor.is_nested and tensor.dim() == 4 else None


def _has_grown(rows: Sequence[Joined], leaf: int, at: int) -> bool:
    """Whether a dim has, in every call, all tokens so far: those of the calls before, too."""
    sizes = [(_size(value, leaf, at), passed) for _, value, passed in rows]
    known = [(size, p.position, p.tokens) for size, p in sizes if p and p.position is not None and p.tokens is not None]
    return len(known) == len(rows) and all(s == p + n for s, p, n in known) and any(p for _, p, _ in known)


def _has_cache(rows: Sequence[Joined], leaf: int, at: int) -> bool:
    """Whether the dim of the tokens has more than a call's own; a static cache has memory for them from the start."""
    sizes = [(_size(value, leaf, at), passed) for _, value, passed in rows]
    return _has_grown(rows, leaf, at) or any(s and p and p.tokens is not None and s > p.tokens for s, p in sizes)


def _size(value: Any, leaf: int, at: int) -> int | None:
    tensors = list(tree.tensors(value))
    return tensors[leaf].shape[at] if leaf < len(tensors) and at < tensors[leaf].dim() else None


def how(key: str, site: Site, rows: Sequence[Joined]) -> str:
    """The whole call of ``rec.cat`` that joins these values; empty where none does."""
    if not any(passed for _, _, passed in rows):
        return f"rec.cat({key!r})" if _fit(rows, 0) else ""
    runs = [list(run) for _, run in groupby(rows, lambda row: None if row[2] is None else row[2].sequence)]
    if len(runs) > 1:  # the first that is a sequence: others are named when they are asked for
        run = next((run for run in runs if len(run) > 1 and run[0][2] is not None), None)
        return how(str(site.but(call=Calls(run[0][0], run[-1][0] + 1))), site, run) if run else ""
    passes = [passed for _, _, passed in rows if passed]
    if (layout := layout_of(site, rows)) is not None:
        found = how(key, site, layout.rows_first(rows))
        return found.replace(", dim=1", "")
    dim = _dim_of_tokens(site, rows)
    if dim is None or len(set(passes)) < len(rows) or not _fit(rows, dim) or not _own(rows, dim):
        return ""
    beams = ", beams=out.beam_indices" if any(passed.beams for passed in passes) else ""
    return f"rec.cat({key!r}, dim={dim}{beams})"


def _own(rows: Sequence[Joined], dim: int) -> bool:
    """Whether each call has no more than its own tokens there."""
    return all(
        passed is None or passed.tokens is None or tensor.shape[dim] <= passed.tokens
        for _, value, passed in rows
        for tensor in tree.tensors(value)
    )


def _fit(rows: Sequence[Joined], dim: int) -> bool:
    """Whether the values can be put together on a dim."""
    columns = [list(tree.tensors(value)) for _, value, _ in rows]
    if not columns[0] or len({len(column) for column in columns}) > 1:
        return False
    if any(tensor.is_nested or tensor.dim() <= dim for column in columns for tensor in column):
        return False
    others = [[(t.shape[:dim], t.shape[dim + 1 :]) for t in column] for column in columns]
    return all(shapes == others[0] for shapes in others)


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
            raise AmbiguousCallError(
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
        raise AmbiguousCallError(
            f"{key}: beams= takes the beam_indices that generate returns (rows × steps), found {given}."
        )
    if any(passed is None for _, _, passed in rows):
        raise AmbiguousCallError(f"{key}: beams= is for the calls of a generation: {_ranges(site, rows)}.")
    if len({passed.sequence for _, _, passed in rows if passed}) > 1:
        raise AmbiguousCallError(
            f"{key}: the calls belong to several sequences; take one of them: {_ranges(site, rows)}."
        )
    # The search may go on for longer than what it returns.
    steps = [(row, row[2].step) for row in rows if row[2] and row[2].step is not None]
    return [
        (call, tree.map_tensors(partial(_rows, key, beams[:, step]), value), passed)
        for (call, value, passed), step in steps
        if step < beams.shape[1]
    ]


def _rows(key: str, chosen: Tensor, tensor: Tensor) -> Tensor:
    if int(chosen.max()) >= tensor.shape[0]:
        raise AmbiguousCallError(
            f"{key}: beams= names row {int(chosen.max())}, and a value there has {tensor.shape[0]} rows."
        )
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

"""Edits that know where: rows, positions, heads and generation steps of a passing value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from torchhook._recording import steps as passes
from torchhook._recording.address import Site
from torchhook._values import parts
from torchhook._values.choices import Along, Which, choice
from torchhook._values.heads import UNKNOWN, KnownHeads, NoPart
from torchhook._values.parts import Part
from torchhook._words import plural
from torchhook.edits.adapting import Steps, adapt, changes_call, within
from torchhook.edits.by_step import by_step, in_one_call, of_step, refuse_rows_of_beams, steps_of
from torchhook.edits.catalogue import At
from torchhook.edits.changing import change_one, check, refuse_nested
from torchhook.edits.protocol import CataloguedEdit, Edit, StepsToCome, asks_step, placed, steps_to_come
from torchhook.errors import EditError


def only(
    edit: Any, positions: Which = None, rows: Which = None, heads: Which = None, steps: Which = None
) -> CataloguedEdit:
    """Apply an edit, or several in order, to a part of the value; the rest stays as it is, bit for bit.

    >>> import torch
    >>> from torchhook import edits
    >>> edits.only(edits.add(1.0), positions=-1)(torch.zeros(1, 3, 2), Site("h.3"))
    tensor([[[0., 0.],
             [0., 0.],
             [1., 1.]]])

    The edit sees the part alone, with all of its dims: ``positions=[1, 4]`` of a value ``x`` is
    ``x[:, [1, 4]] = edit(x[:, [1, 4]])``. A tensor in the edit may be as large as the part, or as the whole value, of
    which the same part is taken; so is a recording's. Choices are an integer, a slice, a list of integers or a boolean
    mask; negative ones count from the end. Where their dim cannot be told, name it with ``along``.

    Args:
        edit: One of the catalogue, a function of a value, or a list of these.
        positions: Which tokens of this call: dim 1 of ``(N, T, D)``, dim 2 where heads come first; of ``(N·T, D)``, as
            experts give it, the edit sees ``(N, T, D)``. Tokens that come before rows, ``(T, N, D)``, are found where
            the model's call, or a ``batch_first`` of torch's own modules, tells them apart. A table
            with a line for each row of the batch chooses other ones in each: ``[[5], [3]]``, or a mask of ``(N, T)``,
            for which the edit sees ``x[mask]``. While a model generates, a call after the first holds the new token
            alone: add ``steps=0`` for positions of the prompt.
        rows: Which rows of the batch, dim 0; of ``(N·T, D)`` and ``(T, N, D)`` those that the model is called with.
        heads: Which heads, counted as the value has them: keys and values of grouped queries have fewer. At ``@k`` and
            ``@v`` they are counted as keys and values have them, also where a kernel is given each of them once for
            every head of queries: the edit sees it once, and all of its copies are changed alike. In the output of a
            projection that makes heads, and in the input of the one that joins them, they are split off the last dim,
            and the edit sees ``(N, T, heads, size)``; where query, key and value are in one,
            ``(N, T, 3, heads, size)``. In values of four dims they are the dim that has as many; of
            ``(N·heads, T, D)``, as some products are taken, the edit sees ``(N, heads, T, D)``.
        steps: Which steps of a generation: 0 is the prompt, 1 the first token after it. A pass outside of one is
            step 0. Without a cache, where a call is given the tokens of earlier steps again, each token belongs to the
            step that it came with, and the edit sees one step at a time, as with a cache. Steps that never come are
            told of when the block ends (``NeverRanWarning``).
    """
    chosen = {
        "positions": choice(positions, "positions", lines=True),
        "rows": choice(rows, "rows"),
        "heads": choice(heads, "heads"),
        "steps": _checked_steps(choice(steps, "steps")),
    }
    if all(which is None for which in chosen.values()):
        raise ValueError("edits.only needs positions=, rows=, heads= or steps=.")
    inner = adapt(edit)
    if changes_call(inner) and any(chosen[name] is not None for name in ("positions", "rows", "heads")):
        raise ValueError(f"{inner!r} takes its own queries, keys, heads and rows: only(…, steps=) may be around it.")
    return Only(inner, **chosen)


def along(which: Which, dim: int, count: int | None = None) -> Along:
    """Choose along a dim that is named, where it cannot be told: ``heads=along(3, dim=-1, count=12)``.

    >>> import torch
    >>> from torchhook import edits
    >>> first = edits.only(edits.zero(), positions=edits.along(0, dim=0))
    >>> first(torch.ones(2, 1, 3), Site("sequence_first"))
    tensor([[[0., 0., 0.]],
    <BLANKLINE>
            [[1., 1., 1.]]])

    ``count`` says how many heads lie side by side in the dim; without it, the dim is theirs alone.
    """
    return Along(which, int(dim), None if count is None else int(count))


@dataclass(frozen=True, eq=False, repr=False)
class Only(CataloguedEdit):
    edit: Edit
    positions: Any = field(default=None, kw_only=True)
    rows: Any = field(default=None, kw_only=True)
    heads: Any = field(default=None, kw_only=True)
    steps: Any = field(default=None, kw_only=True)

    def __call__(self, value: Any, site: Site) -> Any:
        return self.apply(value, site, UNKNOWN)

    def placed(self, site: Site, known: Callable[[], KnownHeads]) -> Edit:
        known = of_step(known)
        return _Placed(replace(self, edit=placed(self.edit, site, known)), known(), set())

    @property
    def changes_call(self) -> bool:  # type: ignore[override]
        return changes_call(self.edit)

    @property
    def asks_step(self) -> bool:  # type: ignore[override]
        return self.steps is not None or asks_step(self.edit)

    @property
    def _is_of_parts(self) -> bool:
        return any(which is not None for which in (self.positions, self.rows, self.heads))

    def apply(self, value: Any, site: Site, known: KnownHeads) -> Any:
        """Edit a value at a site where this much is known of the heads."""
        # Only who asks for steps looks for one: compiled code cannot.
        now = passes.current() if self.asks_step else None
        if now is not None and now.begins is not None:
            return self._by_step(now, value, site, known)
        if self.steps is not None and not self._means(_step()):
            return None
        if now is not None and now.whole is not None and changes_call(self.edit):  # the call itself cannot be divided
            return in_one_call(self.edit, value, site, known, now)
        return self._now(value, site, known)

    def _means(self, step: int) -> bool:
        return self.steps is None or _is_chosen(self.steps, step)

    def _now(self, value: Any, site: Site, known: KnownHeads) -> Any:
        return self._edited(self.edit, value, site, known) if self._is_of_parts else self.edit(value, site)

    def _by_step(self, now: passes.Pass, value: Any, site: Site, known: KnownHeads) -> Any:
        """Edit the tokens of the chosen steps as with a cache, where a call is given those of several."""
        if not any(map(self._means, range((now.step or 0) + 1))):
            return None
        refuse_rows_of_beams(now, self.rows, site)
        chosen = [one for one in steps_of(now, site) if self._means(one.step or 0)]
        if changes_call(self.edit):
            for one in chosen:
                value = in_one_call(self.edit, value, site, known, one)
            return value
        dim = self.positions.dim if isinstance(self.positions, Along) else None
        return by_step(lambda part, site: self._now(part, site, known), value, site, known, chosen, dim)

    def _edited(self, edit: Edit, value: Any, site: Site, known: KnownHeads) -> Any:
        # Leaves are found first: parts are those of one tensor.
        if isinstance(edit, At):
            return At(edit.leaf, lambda leaf, site: self._edited(edit.edit, leaf, site, known))(value, site)
        if isinstance(edit, Steps):
            steps = tuple(_Here(self, step, known) for step in edit.steps)
            return Steps(steps)(value, site)
        return change_one(lambda tensor: self._changed(edit, tensor, site, known), value, site, "only")

    def _changed(self, edit: Edit, tensor: Tensor, site: Site, known: KnownHeads) -> Tensor:
        refuse_nested(tensor, site, "only")
        part = self._part(tensor, site, known)
        seen = part.of(tensor)
        if not seen.numel():  # no edit has to make sense of nothing
            return tensor
        new = within(edit, part, tensor)(seen, site)
        if new is None:  # a function may have written to what it was given
            new = seen
        check(seen, new, site)
        return part.put(tensor, new)

    def _part(self, tensor: Tensor, site: Site, known: KnownHeads) -> Part:
        try:
            return parts.part(tensor, self.rows, self.positions, self.heads, known)
        except NoPart as error:
            later = self.steps is None and self.positions is not None and _step() > 0
            hint = f" This is step {_step()} of a generation: say steps=0 for the prompt." if later else ""
            raise EditError(f"{site.shown}: edits.only: {error}{hint}") from None


@dataclass(frozen=True, eq=False, repr=False)
class _Placed(CataloguedEdit):
    """The edit of a part in a session, where the modules around are known."""

    edit: Only
    known: KnownHeads
    seen: set[int]
    """The steps in which it was called."""

    def __call__(self, value: Any, site: Site) -> Any:
        if self.edit.steps is not None:
            self.seen.add(_step())
        return self.edit.apply(value, site, self.known)

    @property
    def changes_call(self) -> bool:  # type: ignore[override]
        return self.edit.changes_call

    @property
    def asks_step(self) -> bool:  # type: ignore[override]
        return self.edit.asks_step

    def steps_to_come(self) -> Iterator[StepsToCome]:
        if self.edit.steps is not None and (left := _never_came(self.edit.steps, self.seen)):
            yield StepsToCome(left, max(self.seen, default=None))
        else:
            yield from steps_to_come(self.edit.edit)

    def __repr__(self) -> str:
        return repr(self.edit)


@dataclass(frozen=True, eq=False, repr=False)
class _Here(CataloguedEdit):
    """One of several edits of the same part."""

    where: Only
    edit: Edit
    known: KnownHeads

    def __call__(self, value: Any, site: Site) -> Any:
        return self.where._edited(self.edit, value, site, self.known)


def _step() -> int:
    now = passes.current()
    return 0 if now is None else now.step or 0


def _checked_steps(steps: Any) -> Any:
    ends = (steps.start, steps.stop) if isinstance(steps, slice) else steps if isinstance(steps, list) else (steps,)
    if isinstance(steps, (np.ndarray, Along)):
        raise TypeError("steps=: give an integer, a slice or a list of integers.")
    if any(end is not None and end < 0 for end in ends) or (isinstance(steps, slice) and (steps.step or 1) < 1):
        raise ValueError(f"steps={steps!r}: the last step is not known while a model generates; count from 0.")
    return steps


def _never_came(steps: int | slice | list[int], seen: set[int]) -> str:
    """The steps that were waited for, as one would name them; nothing, if they came. Of a slice, one is enough."""
    if isinstance(steps, slice):
        ends = ":".join("" if end is None else str(end) for end in (steps.start, steps.stop))
        return "" if any(_is_chosen(steps, step) for step in seen) else f"steps {ends}"
    left = [step for step in (steps if isinstance(steps, list) else [steps]) if step not in seen]
    return f"{plural(len(left), 'step')} {', '.join(map(str, left))}" if left else ""


def _is_chosen(steps: int | slice | list[int], step: int) -> bool:
    if isinstance(steps, slice):
        start, stop = steps.start or 0, steps.stop
        return step >= start and (stop is None or step < stop) and (step - start) % (steps.step or 1) == 0
    return step in steps if isinstance(steps, list) else step == steps

"""Values of a generation in which rows are not the first dim, or not alone in it: told by what each call was given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from torchhook._recording.address import Site
from torchhook._recording.steps import Pass
from torchhook._values import tree

Joined = tuple[int, Any, Pass | None]
"""The call, its value, and the pass of a generation that it was in."""

_OF_EXPERTS = ("router", "experts")


class Layout(NamedTuple):
    """How rows and tokens lie in the first dims: ``(N·T, D)``, if ``flat``, or ``(T, N, D)``."""

    flat: bool

    def rows_first(self, rows: Sequence[Joined]) -> list[Joined]:
        """The same calls with ``(N, T, D)``; those outside of a generation as they are."""
        return [(c, v if p is None else tree.map_tensors(partial(self._rows_first, p), v), p) for c, v, p in rows]

    def _rows_first(self, passed: Pass, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (passed.rows or 1, -1)) if self.flat else tensor.transpose(0, 1)

    def back(self, tensor: Tensor) -> Tensor:
        """The other way round."""
        return tensor.flatten(0, 1) if self.flat else tensor.transpose(0, 1)


def layout_of(site: Site, rows: Sequence[Joined]) -> Layout | None:
    """How the values of a generation lie, if not rows first; one call with as many tokens as rows tells nothing."""
    calls = [(tensor, p) for _, value, p in rows if p is not None for tensor in tree.tensors(value)]
    if not calls or any(tensor.is_nested or not p.rows or not p.tokens for tensor, p in calls):
        return None
    if all(tensor.dim() == 2 and tensor.shape[0] == p.rows * p.tokens for tensor, p in calls):  # type: ignore[operator]
        several = any(p.tokens != 1 for _, p in calls)
        return Layout(flat=True) if several or site.kind in _OF_EXPERTS else None
    first = all(tensor.dim() == 3 and tensor.shape[:2] == (p.tokens, p.rows) for tensor, p in calls)
    return Layout(flat=False) if first and any(p.tokens != p.rows for _, p in calls) else None

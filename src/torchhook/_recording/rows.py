"""What was kept of each call of a site, and which calls a reader means."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchhook._recording import tensor_codecs
from torchhook._recording.address import Calls, Site, Which
from torchhook._recording.steps import Pass
from torchhook._recording.tables import facts, size
from torchhook._values import tree


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Record:
    """One kept value: where and when it passed, and the value."""

    site: Site
    call: int
    order: int
    """Its place in the order in which the session kept values."""
    value: Any
    step: int | None = None
    """While a model generates: 0 in the prefill, 1 for the first token after it; ``None`` elsewhere."""
    position: int | None = None
    """While a model generates: where the first token of the value is in the sequence, padding included. That is the
    call's first token; of logits that only the last ones have, and of keys and values with a cache, it is another.
    ``None`` where it cannot be told."""

    @property
    def shape(self) -> Any:
        """The shape of the tensor, as a tuple; of a value with several, a dict of theirs by leaf, as in addresses.

        >>> Record(Site("fc"), 0, 0, torch.zeros(2, 3)).shape == torch.Size([2, 3])
        True
        >>> Record(Site("lstm"), 0, 0, (torch.zeros(5, 4), {"h": torch.zeros(2), "c": None})).shape
        {'0': (5, 4), '1.h': (2,)}

        A dim of a nested tensor that has no one size is ``None``.
        """
        if isinstance(self.value, (Tensor, np.ndarray)):
            return _shape(self.value)
        return {leaf: _shape(t) for leaf, t in tree.leaves(self.value) if isinstance(t, (Tensor, np.ndarray))}

    @property
    def text(self) -> str:
        """The shapes of the value in a few characters, as tables show them."""
        return tree.describe(self.value)

    @property
    def dtype(self) -> str:
        """In words, as ``float32``, which several tensors may have in common; else ``float32/int64``."""
        return _common(str(t.dtype).removeprefix("torch.") for t in tree.tensors(self.value))

    @property
    def device(self) -> str:
        """In words, as ``cpu``, which several tensors may have in common; else ``cpu/cuda:0``."""
        return _common(str(t.device) for t in tree.tensors(self.value))

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(t) for t in tree.tensors(self.value))

    def __repr__(self) -> str:  # without the numbers, which are most of it and seldom meant
        step = "" if self.step is None else f", step {self.step}"
        return f"<Record of {self.site.shown!r}, call {self.call}{step}: {self.text} {self.dtype} on {self.device}>"

    def _repr_html_(self) -> str:
        told = {"call": self.call, "step": self.step, "position": self.position, "value": self.text}
        told |= {"dtype": self.dtype, "device": self.device, "memory": size(self.nbytes)}
        return facts(self.site.shown, {name: value for name, value in told.items() if value is not None})._repr_html_()


def _shape(value: Tensor | np.ndarray[Any, Any]) -> tuple[int | None, ...]:
    if isinstance(value, Tensor) and value.is_nested:
        return tuple(_size(value, dim) for dim in range(value.dim()))
    return tuple(value.shape)


def _size(nested: Tensor, dim: int) -> int | None:
    try:
        found = nested.size(dim)
    except RuntimeError:  # as the strided ones say it
        return None
    return found if type(found) is int else None  # and the jagged ones, by a symbol


def _common(texts: Iterator[str]) -> str:
    return "/".join(dict.fromkeys(texts)) or "-"


def _nbytes(tensor: Tensor) -> int:
    if tensor.layout == torch.strided and not tensor.is_nested:
        return tensor.nbytes
    # Sparse tensors have no nbytes, or those of a dense one.
    return sum(_nbytes(part) for part in tensor_codecs.parts(tensor))


def first_position(site: Site, value: Any, passed: Pass) -> int | None:
    """Where in the sequence the first token of a value is, which passed in a call of a model that generates."""
    first, given = passed.position, passed.tokens
    name = site.kind
    own = _tokens_in(value, site) if isinstance(value, Tensor) and not value.is_nested else None
    if own is not None and value.dim() == 3 and value.shape[:2] == (given, passed.rows):  # tokens come before rows
        own = given
    if first is None or given is None or own is None or own == given:
        return first
    # Logits are made of the last tokens; what attention looks at ends with the last one, and begins in the cache.
    if (own < given and (name == "logits" or own == passed.kept)) or (own > given and name in ("k", "v")):
        return max(0, first + given - own)
    return first if own > given else None


def _tokens_in(value: Tensor, site: Site) -> int | None:
    """How many tokens a value has, by the standard name of its site; ``None`` where its shape does not tell."""
    dim = site.token_dim(value.shape)
    if dim is None:
        return 1 if value.dim() == 2 and site.kind == "logits" else None
    return value.shape[dim]


Row = tuple[int, int, Any]
"""Call index, place in the order of the session, value."""


class Window(list[Row]):
    """Rows of calls some of which are counted from the last one: what no later call can bring back goes at once."""

    def __init__(
        self, which: Iterable[Which], limit: int | None = None, ran: int = 0, rows: Iterable[Row] = ()
    ) -> None:
        super().__init__(rows)
        self._which = tuple(which)
        self._limit = limit
        self.ran = ran
        """How many calls there were, whether they were kept or not: the last one is counted from."""

    def append(self, row: Row) -> None:
        self.ran = max(self.ran, row[0] + 1)
        super().append(row)
        # Not from the front alone: gradients come in from the last call to the first.
        self[:] = [row for row in self if any(_may_mean(which, row[0], self.ran) for which in self._which)]

    def read(self) -> list[Row]:
        """The rows that are meant if no more calls come."""
        ran = self.ran
        found = [row for row in list(self) if any(_means(which, row[0], ran) for which in self._which)]
        return found if self._limit is None else found[-self._limit :]

    def clear(self) -> None:
        super().clear()
        self.ran = 0

    def __reduce__(self) -> Any:
        return Window, (self._which, self._limit, self.ran, self.read())


def _may_mean(which: Which, call: int, ran: int) -> bool:
    """Whether a call is meant after some have run, or may be when more have."""
    start, stop = (which.start, which.stop) if isinstance(which, Calls) else (which, None)
    if isinstance(which, int) and which >= 0:
        return call == which
    begins = (start or 0) if start is None or start >= 0 else ran + start
    return call >= begins and (stop is None or stop < 0 or call < stop)


def _means(which: Which, call: int, ran: int) -> bool:
    """Whether a call is meant when so many have run."""
    if isinstance(which, Calls):
        return call in range(ran)[which.start : which.stop]
    return which is None or call == (which if which >= 0 else ran + which)


Rows = list[Row] | deque[Row]
"""The records of one site; with a limit, a ring buffer of the newest."""


def made(limit: int | None, sites: Sequence[Site] = ()) -> Rows:
    """Rows for what ``sites`` name, which are one site with different calls; the newest ``limit`` of them."""
    if limit is None and not sites:
        return []
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"max_records={limit!r}: give a positive number, or None to keep every record.")
    if any(site.counts_back for site in sites):
        return Window((site.call for site in sites), limit)
    return [] if limit is None else deque(maxlen=limit)


def has_rows(rows: Rows) -> bool:
    """Whether there are any to be read."""
    return bool(rows.read() if isinstance(rows, Window) else rows)


def in_order(rows: Rows) -> list[Row]:
    """A copy in the order of the calls: others may append meanwhile, and gradients come in from the last one."""
    return sorted(rows.read() if isinstance(rows, Window) else rows.copy(), key=lambda row: row[:2])


def chosen(rows: list[Row], which: Which, ran: int | None = None) -> list[Row]:
    """The rows of some calls; negative numbers count from the last of ``ran`` calls, or of those that were kept."""
    if which is None:
        return rows
    if ran is not None:
        return [row for row in rows if _means(which, row[0], ran)]
    kept = list(dict.fromkeys(row[0] for row in rows))
    if not isinstance(which, Calls):
        wanted = kept[which] if -len(kept) <= which < 0 else which
        return [row for row in rows if row[0] == wanted]
    ends = Calls(_from_front(kept, which.start), _from_front(kept, which.stop))
    return [row for row in rows if row[0] in ends]


def ran(rows: Rows | None) -> int | None:
    """How many calls there were, where the last of them count."""
    return rows.ran if isinstance(rows, Window) else None


def _from_front(kept: list[int], end: int | None) -> int | None:
    return end if end is None or end >= 0 else kept[max(len(kept) + end, 0)]

"""What was kept of each call of a site, and which calls a reader means."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchhook._recording import tensor_codecs
from torchhook._recording.address import Calls, Site, Which
from torchhook._values import tree


@dataclasses.dataclass(frozen=True, slots=True)
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
    """While a model generates: the index of the call's first token in the sequence, padding included."""

    @property
    def shape(self) -> str:
        return tree.describe(self.value)

    @property
    def dtype(self) -> str:
        return _common(str(t.dtype).removeprefix("torch.") for t in tree.tensors(self.value))

    @property
    def device(self) -> str:
        return _common(str(t.device) for t in tree.tensors(self.value))

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(t) for t in tree.tensors(self.value))


def _common(texts: Iterator[str]) -> str:
    return "/".join(dict.fromkeys(texts)) or "-"


def _nbytes(tensor: Tensor) -> int:
    if tensor.layout == torch.strided and not tensor.is_nested:
        return tensor.nbytes
    # Sparse tensors have no nbytes, or those of a dense one.
    return sum(_nbytes(part) for part in tensor_codecs.parts(tensor))


Row = tuple[int, int, Any]
"""Call index, place in the order of the session, value."""


class Window(list[Row]):
    """Rows of the last calls, and of those that are named by their number: what falls out of it is released at once."""

    def __init__(self, rows: Iterable[Row] = (), back: int = 1, also: Iterable[Site] = ()) -> None:
        super().__init__(rows)
        self.back, self.also = back, tuple(also)
        self.ran = 0

    def append(self, row: Row) -> None:
        # Not from the front alone: gradients come in from the last call to the first.
        self.ran = max(self.ran, row[0] + 1)
        super().append(row)
        first = self.ran - self.back
        self[:] = [row for row in self if row[0] >= first or any(site.means(row[0]) for site in self.also)]

    def clear(self) -> None:
        super().clear()
        self.ran = 0

    def __reduce__(self) -> Any:
        return list, (list(self),)  # nothing more will be appended to a copy that must fall out


class Newest(Window):
    """The same, and never more than ``limit`` rows."""

    limit = 1

    def append(self, row: Row) -> None:
        super().append(row)
        del self[: -self.limit]


Rows = list[Row] | deque[Row]
"""The records of one site; with a limit, a ring buffer of the newest."""


def made(limit: int | None, sites: Iterable[Site] = ()) -> Rows:
    """Rows for what ``sites`` name, which are one site with different calls; the newest ``limit`` of them."""
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"max_records={limit!r}: give a positive number, or None to keep every record.")
    sites = list(sites)
    back = max((length_back(site) for site in sites), default=0)
    if not back:
        return [] if limit is None else deque(maxlen=limit)
    also = [site for site in sites if not site.counts_back]
    if limit is None:
        return Window(back=back, also=also)
    newest = Newest(back=back, also=also)
    newest.limit = limit
    return newest


def length_back(site: Site) -> int:
    """How many of the last calls a site may mean, if it counts from the last one.

    >>> length_back(Site("relu", call=-1)), length_back(Site("relu", call=Calls(-3, None))), length_back(Site("relu"))
    (1, 3, 0)
    """
    start = site.call.start if isinstance(site.call, Calls) else site.call
    return -start if start is not None and start < 0 else 0


def in_order(rows: Rows) -> list[Row]:
    """A copy in the order of the calls: others may append meanwhile, and gradients come in from the last one."""
    return sorted(rows.copy(), key=lambda row: row[:2])


def chosen(rows: list[Row], which: Which) -> list[Row]:
    """The rows of some calls; negative numbers count from the last call that was kept."""
    if which is None:
        return rows
    kept = list(dict.fromkeys(row[0] for row in rows))
    if not isinstance(which, Calls):
        wanted = kept[which] if -len(kept) <= which < 0 else which
        return [row for row in rows if row[0] == wanted]
    ends = Calls(_from_front(kept, which.start), _from_front(kept, which.stop))
    return [row for row in rows if row[0] in ends]


def _from_front(kept: list[int], end: int | None) -> int | None:
    return end if end is None or end >= 0 else kept[max(len(kept) + end, 0)]

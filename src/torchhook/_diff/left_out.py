"""Layers that an exported program has no operation for, since they pass on what they get."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.session import Session
from torchhook._diff import runs
from torchhook._recording.address import Site, parse
from torchhook._recording.differences import Diff, Row
from torchhook._recording.distances import measure, shape
from torchhook._values import tree
from torchhook._values.elements import readable

_NOTE = "left out: the program has no operation for layers that pass on what they get"


class LeftOut:
    """Sees what comes in and goes out at every layer of A, and so which of them B need not have."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.session = Session(index.modules[""], index=index, warn=False)
        outputs = runs.every_output(index)
        inputs = [target._replace(site=target.site.but(port="input")) for target in outputs]
        self.session.record([*inputs, *outputs], Keep())
        self._seen = self.session.recording

    def told(self, found: Diff) -> Diff:
        """The result, with what B left out told from what it lacks."""
        rows = [dataclasses.replace(row, status="left out") if self._is_left_out(row) else row for row in found]
        notes = [*found.notes, _NOTE] if any(row.status == "left out" for row in rows) else found.notes
        return Diff(rows, found.title, notes)

    def _is_left_out(self, row: Row) -> bool:
        if row.status != "only in A":
            return False
        site = parse(row.site, self._index.modules)
        return site.op is None and site.port in ("input", "output") and self._passes_on(site)

    def _passes_on(self, site: Site) -> bool:
        """Whether all that a call returned is what it was given, or a tensor that its module holds."""
        # By numbers, not by identity: the program would have an operation that works in place.
        here = Site(site.path, call=site.first_call)
        if here not in self._seen:
            return False
        given, made = (self._seen[here.but(port=port)] for port in ("input", "output"))
        module = self._index.modules[site.path]
        sources = [*tree.tensors(given), *module.parameters(), *module.buffers()]
        return all(any(_same(tensor, source) for source in sources) for tensor in tree.tensors(made))


def _same(one: Tensor, two: Tensor) -> bool:
    if shape(one) != shape(two) or one.dtype != two.dtype or not (readable(one) and readable(two)):
        return False
    return measure(one, two, 0, 0).mismatches == 0

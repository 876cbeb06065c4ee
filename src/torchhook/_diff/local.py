"""``local=True``: each module of B gets the inputs that its counterpart in A got."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.session import Session
from torchhook._diff import runs
from torchhook._recording.address import Site
from torchhook._recording.counterparts import Counterparts
from torchhook._recording.differences import Diff
from torchhook._recording.records import Recording
from torchhook._values import tree
from torchhook._values.subclasses import shape
from torchhook._values.wrappers import like


class Feeder:
    """Takes the inputs of every module in A, and gives them to the modules of B call by call."""

    def __init__(self, index_a: Index, index_b: Index, counterparts: Counterparts) -> None:
        self._a, self._b = index_a, index_b
        self._counterparts = counterparts
        self._inputs = Recording()
        self._own: dict[str, str] = {}
        """Calls of B that went on with their own inputs, each with the reason."""

    def taking(self) -> Session:
        """A session on A that keeps what its modules are called with."""
        session = Session(self._a.modules[""], index=self._a, warn=False)
        targets = [target._replace(site=target.site.but(port="input")) for target in runs.every_output(self._a)]
        session.record(targets, Keep())
        self._inputs = session.recording
        return session

    def giving(self) -> Session:
        """A session on B that puts them in."""
        session = Session(self._b.modules[""], index=self._b, warn=False)
        given = self._by_call_in_b()
        for target in runs.every_output(self._b):
            path = target.site.path

            def feed(value: Any, site: Site, path: str = path) -> Any:
                key = path, site.first_call
                return self._fed(value, given[key], site.but(port="output")) if key in given else value

            session.edit(target._replace(site=target.site.but(port="input")), feed)
        return session

    def _by_call_in_b(self) -> dict[tuple[str, int], Any]:
        found = {}
        for record in self._inputs.records():
            other = self._counterparts.of(record.site.but(port="output", call=record.call))
            module = None if other is None else self._b.modules.get(other.path)
            if other is not None and module is not None:
                # Under its first name there, by which it is asked.
                found[self._b.names(module)[0], other.first_call] = record.value
        return found

    def _fed(self, value: Any, given: Any, site: Site) -> Any:
        mine, other = _tensors(value), _tensors(given)
        if [shape(t) for t in mine] != [shape(t) for t in other]:
            self._own[str(site)] = f"on its own input: {tree.describe(given)} in A, {tree.describe(value)} in B"
            return value
        new = iter(other)
        return _map(lambda tensor: like(next(new), tensor), value)

    def annotated(self, found: Diff) -> Diff:
        """The result, saying where a module of B could not be given the inputs of A."""
        rows = []
        for row in found:
            why = self._own.get(row.other) or self._own.get(f"{row.other}#0")
            note = "; ".join(part for part in (row.note, why) if part)
            rows.append(dataclasses.replace(row, note=note))
        notes = ["local: each module of B ran on the inputs of its counterpart in A", *found.notes]
        return Diff(rows, found.title, notes)


# What else is passed along (a cache of keys and values) is written to by the modules that get it: B's stay B's own.


def _map(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Rebuild a value with a function applied to the tensors that lie in it openly."""

    def change(part: Any) -> Any:
        return function(part) if isinstance(part, Tensor) else part

    return tree.map_parts(change, value, where=lambda part: not isinstance(part, (tuple, list, dict)))


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(found.append, value)
    return found

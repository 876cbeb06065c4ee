"""``local=True``: each module of B alone. It gets the inputs that its counterpart in A got, and the modules that it
calls give back what those of A did, so that what its own code makes of them is its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torchhook._core.index import Index
from torchhook._core.keep import Keep
from torchhook._core.session import Session
from torchhook._diff import runs
from torchhook._recording.address import Site, shown
from torchhook._recording.counterparts import Counterparts
from torchhook._recording.differences import Diff, Row
from torchhook._recording.distances import Numbers, measure, severity
from torchhook._recording.records import Recording
from torchhook._recording.tolerances import Limit, Limits
from torchhook._values import tree
from torchhook._values.elements import readable
from torchhook._values.subclasses import shape
from torchhook._values.wrappers import like

Call = tuple[str, int]
"""A module of B, under its first name there, and the number of its call."""


@dataclasses.dataclass
class _Running:
    """A call of B that is not over."""

    call: Call
    has_foreign: bool = False
    """Whether a module that it called gave back what could not be replaced by what A's did."""


class _Handed(NamedTuple):
    """What the code of a module gave to one that it called, where that is not what A's gave."""

    to: str
    numbers: Numbers
    elements: int
    limit: Limit


def layers_of(index: Index, path: str) -> int:
    """How many layers the code of a module stands for by itself: as many as it has matrices, which no layer holds."""
    module = index.modules.get(path)
    own = () if module is None else module.parameters(recurse=False)
    return max(1, sum(parameter.dim() > 1 for parameter in own if not is_lazy(parameter)))


class Feeder:
    """Takes what goes in and out of every module in A, and puts it in for the modules of B call by call."""

    def __init__(self, index_a: Index, index_b: Index, counterparts: Counterparts, limits: Limits) -> None:
        self._a, self._b = index_a, index_b
        self._counterparts = counterparts
        self._limits = limits
        self._taken = Recording()
        self._own: dict[str, str] = {}
        """Calls of B that went on with their own inputs, each with the reason."""
        self._running: list[_Running] = []
        self._returned: dict[Call, Any] = {}
        """What the calls of B that have a counterpart are to give back."""
        self._handed: dict[str, _Handed] = {}
        """The worst that a call of B gave to others."""

    def taking(self) -> Session:
        """A session on A that keeps what its modules are called with and what they give back."""
        session = Session(self._a.modules[""], index=self._a, warn=False)
        outputs = runs.every_output(self._a)
        session.record([*(target._replace(site=target.site.but(port="input")) for target in outputs), *outputs], Keep())
        self._taken = session.recording
        return session

    def giving(self) -> Session:
        """A session on B that puts them in."""
        session = Session(self._b.modules[""], index=self._b, warn=False)
        given, self._returned = self._by_call_in_b("input"), self._by_call_in_b("output")

        def enter(value: Any, site: Site) -> Any:
            call = site.path, site.first_call
            fed = self._fed(value, given[call], site.but(port="output")) if call in given else value
            self._running.append(_Running(call))
            return fed

        def leave(value: Any, site: Site) -> Any:
            call = site.path, site.first_call
            while self._running and self._running.pop().call != call:
                pass  # calls that an error ended, which whoever called them has caught
            return self._given_back(value, self._returned[call]) if call in self._returned else value

        for target in runs.every_output(self._b):
            session.edit(target._replace(site=target.site.but(port="input")), enter)
            session.edit(target, leave)
        return session

    def _by_call_in_b(self, port: str) -> dict[Call, Any]:
        found = {}
        for record in self._taken.records():
            if record.site.port != port:
                continue
            other = self._counterparts.of(record.site.but(port="output", call=record.call))
            module = None if other is None else self._b.modules.get(other.path)
            if other is not None and module is not None:
                # Under its first name there, by which it is asked.
                found[self._b.names(module)[0], other.first_call] = record.value
        return found

    def _caller(self) -> _Running | None:
        """The innermost call that has a row: what runs in a module that A does not have is a part of its code."""
        return next((running for running in reversed(self._running) if running.call in self._returned), None)

    def _fed(self, value: Any, given: Any, site: Site) -> Any:
        mine, other = _tensors(value), _tensors(given)
        if not _fit(mine, other):
            self._own[str(site)] = f"on its own input: {tree.describe(given)} in A, {tree.describe(value)} in B"
            return value
        new = [_held(theirs, tensor) for theirs, tensor in zip(other, mine, strict=True)]
        caller = self._caller()
        if caller is not None and not caller.has_foreign:
            self._judge(caller.call, site, new, mine)
        return _replaced(value, mine, new)

    def _judge(self, caller: Call, site: Site, given: list[Tensor], mine: list[Tensor]) -> None:
        # Against what B can hold of A's: a rounding to its dtype is no doing of the code that hands it on.
        limit = self._limits.meet(caller[0], *given, *mine)
        for one, two in zip(given, mine, strict=True):
            if not (readable(one) and readable(two)):
                continue
            numbers = measure(one, two, *limit)
            address = str(Site(caller[0], call=caller[1]))
            worst = self._handed.get(address)
            if numbers.differs and (worst is None or severity(numbers) > severity(worst.numbers)):
                self._handed[address] = _Handed(site.path, numbers, one.numel(), limit)

    def _given_back(self, value: Any, returned: Any) -> Any:
        mine, other = _tensors(value), _tensors(returned)
        fits, caller = _fit(mine, other), self._caller()
        if caller is not None and not (fits and len(mine) >= len(list(tree.tensors(value)))):
            caller.has_foreign = True
        if not fits:
            return value
        return _replaced(value, mine, [_held(theirs, tensor) for theirs, tensor in zip(other, mine, strict=True)])

    def annotated(self, found: Diff) -> Diff:
        """The result, saying which module's own code differs, and where one could not be given the inputs of A."""
        rows = [self._told(row) for row in found]
        notes = ["local: each module of B ran on the inputs of its counterpart in A, and got what A's layers gave back"]
        return Diff(rows, found.title, [*notes, *found.notes])

    def _told(self, row: Row) -> Row:
        first = f"{row.other}#0"
        own = self._own.get(row.other) or self._own.get(first)
        handed = self._handed.get(row.other) or self._handed.get(first)
        if handed is not None and row.status in ("same", "differs"):
            row = _with_handed(row, handed)
        return row if own is None else _noted(row, own)


def _held(theirs: Tensor, mine: Tensor) -> Tensor:
    """What B can hold of a tensor of A."""
    new: Tensor = like(theirs, mine)
    if type(new) is not Tensor or not (new.is_floating_point() and theirs.is_floating_point()):
        return new
    limits = torch.finfo(new.dtype)
    if torch.finfo(theirs.dtype).max <= limits.max:
        return new
    # Masks hold the least number of their dtype: rounded to a narrower one it would be infinite, and B makes its own.
    return torch.where(new.isinf() & theirs.isfinite().to(new.device), new.clamp(limits.min, limits.max), new)


def _with_handed(row: Row, handed: _Handed) -> Row:
    where = f"what its own code gives to {shown(handed.to)!r} differs"
    if row.status == "differs":
        return _noted(row, where)
    numbers = {name: number for name, number in handed.numbers._asdict().items() if name != "is_off"}
    row = dataclasses.replace(row, **numbers, elements=handed.elements, **handed.limit._asdict())
    return _noted(dataclasses.replace(row, status="differs", leaf=""), where)


def on_its_own(found: Diff, whole: Row) -> Diff:
    """The result with what B makes without any help: ``whole`` is the row of the model's output then."""
    if whole.ok:
        return found
    told = f"B by itself: max error {whole.max_abs:.2e}" if whole.max_abs == whole.max_abs else "B by itself differs"
    # Where nothing at all shows in the single modules, small errors that add up are no explanation.
    unexplained = found.ok and not any(row.max_abs > 0 for row in found)
    row = dataclasses.replace(whole, note=f"{told}, by nothing that one module shows") if unexplained else None
    return Diff([(row or _noted(r, told)) if r.site == whole.site else r for r in found], found.title, found.notes)


def _noted(row: Row, note: str) -> Row:
    return dataclasses.replace(row, note="; ".join(part for part in (row.note, note) if part))


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


def _fit(mine: list[Tensor], other: list[Tensor]) -> bool:
    return [shape(t) for t in mine] == [shape(t) for t in other]


def _replaced(value: Any, mine: list[Tensor], new: list[Tensor]) -> Any:
    """The value with other tensors in it, but for those that are the same: what is written to them is seen outside."""
    kept: Iterator[Tensor] = iter([one if _same(one, two) else two for one, two in zip(mine, new, strict=True)])
    return _map(lambda _: next(kept), value)


def _same(one: Tensor, two: Tensor) -> bool:
    plain = type(one) is type(two) and readable(one) and readable(two) and not one.is_nested
    return plain and bool(torch.equal(one, two))

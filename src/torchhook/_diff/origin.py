"""Where two models part before a layer: its input differs already, made by the code of a module around it."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import distributed, nn

from torchhook._core.index import Index, is_callable
from torchhook._core.keep import Keep
from torchhook._core.select import resolve
from torchhook._core.session import Session
from torchhook._diff import runs, sides
from torchhook._recording.address import Site, parse
from torchhook._recording.counterparts import Counterparts
from torchhook._recording.differences import Diff, Row
from torchhook._recording.distances import measure, paired, shape
from torchhook._recording.records import Recording
from torchhook._values.elements import readable


class Origin:
    """The input of the first layer that differs, and those of the modules around it, in both models."""

    @staticmethod
    def can_be_asked(*models: nn.Module) -> bool:
        """Whether models can run once more, up to a layer: ranks would have to agree on which one."""
        alone = not (distributed.is_available() and distributed.is_initialized())
        return alone and not any(sides.is_program(model) for model in models)

    def __init__(self, row: Row, index_a: Index, index_b: Index, counterparts: Counterparts) -> None:
        self._row, self._a, self._b = row, index_a, index_b
        site = parse(row.site, index_a.modules)
        around = [Site(path) for path in _around(site.path) if is_callable(index_a.modules.get(path, nn.ModuleList()))]
        pairs = [(one, counterparts.of(one)) for one in around]
        self._sites_a = [site, *(one for one, two in pairs if two is not None and two.path in index_b.modules)]
        others = [two for _, two in pairs if two is not None and two.path in index_b.modules]
        self._sites_b = [parse(row.other, index_b.modules), *others]

    def seen(self, a: bool, inputs: Any) -> list[Any]:
        """Run one of the models up to the layer; what it and the modules around it were called with."""
        index, sites = (self._a, self._sites_a) if a else (self._b, self._sites_b)
        first, *around = (site.but(port="input") for site in sites)
        session = Session(index.modules[""], index=index, warn=False)
        last = first.but(call=first.first_call)
        session.record(resolve(index, [first.every_call, *around]), Keep())
        session.stop_when_seen(resolve(index, [last]))
        given = runs.fitting(index.modules[""], inputs)
        _, recording = session.run(*given.args, **given.kwargs)
        return [_latest(recording, site.every_call) for site in (first, *around)]

    def told(self, found: Diff, seen_a: list[Any], seen_b: list[Any]) -> Diff:
        """The result, saying of the first row that its input differs already, and whose code made it so."""
        same = [self._is_same(one, two) for one, two in zip(seen_a, seen_b, strict=True)]
        if same[0]:
            return found
        maker = next((site for site, is_same in zip(self._sites_a, same, strict=True) if is_same), None)
        told = "its input differs already" + ("" if maker is None else f": made in {maker.shown!r}")
        note = "; ".join(part for part in (self._row.note, told) if part)
        rows = [dataclasses.replace(row, note=note) if row is self._row else row for row in found]
        return Diff(rows, found.title, found.notes)

    def _is_same(self, one: Any, two: Any) -> bool:
        pairs, odd = paired(one, two)
        if odd is not None and not pairs:
            return False
        for _, a, b in pairs:
            if shape(a) != shape(b):
                return False
            row = self._row
            if readable(a) and readable(b) and measure(a, b, row.rtol, row.atol, row.whole).differs:
                return False
        return True


def _around(path: str) -> list[str]:
    """The paths that a path lies in, from the nearest to the model itself."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)]


def _latest(recording: Recording, site: Site) -> Any:
    records = recording.records(site) if site in recording else []
    return records[-1].value if records else None

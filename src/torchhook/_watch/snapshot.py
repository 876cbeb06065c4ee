"""The numbers of one step, as they are handed out."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchhook._recording.address import shown
from torchhook._recording.tables import Table
from torchhook._watch.statistics import STATISTICS
from torchhook._words import counted


class Snapshot(NamedTuple):
    """The statistics of one step: ``snapshot.sites["layer1.0.conv1"]["mean"]``."""

    step: int
    sites: dict[str, dict[str, Any]]

    def __repr__(self) -> str:
        return f"<snapshot of step {self.step}: {counted(len(self.sites), 'site')}>"

    def table(self) -> Table:
        """Its statistics, one line for each site."""
        known = {name for values in self.sites.values() for name in values} - {"histogram"}  # which fits no cell
        names = [name for name in STATISTICS if name in known]
        rows = [[shown(site), *(_cell(values.get(name)) for name in names)] for site, values in self.sites.items()]
        return Table(f"step {self.step}", ["site", *(f">{name}" for name in names)], rows)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"

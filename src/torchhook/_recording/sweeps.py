"""What is left of a sweep: a matrix that prints itself and plots, without the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchhook._recording.address import meant, shown
from torchhook._recording.tables import Table, fixed
from torchhook._words import plural
from torchhook.errors import MissingRecordError, suggestion

# Columns of 7 characters: with the names of the sites, about what a wide terminal shows.
_WIDE = 16


class Sweep:
    """What a metric became when each site was patched at each position: a matrix that prints itself.

    ``values`` is sites by positions; where a site has no such position it holds NaN. ``clean`` and ``corrupted`` are
    the metric of the two runs without a patch.
    """

    def __init__(
        self,
        values: Tensor,
        sites: Sequence[str],
        positions: Sequence[int] | None,
        clean: float,
        corrupted: float,
        notes: Sequence[str] = (),
        estimate: str | None = None,
        over: str = "position",
    ) -> None:
        self.values = values
        self.sites: list[str] = list(sites)
        self.positions: list[int] | None = None if positions is None else list(positions)
        """The index on the swept dimension of each column; ``None`` where the whole value was patched."""
        self.over = over
        """What the columns are: ``"position"`` or ``"head"``."""
        self.clean = clean
        self.corrupted = corrupted
        self.notes: list[str] = list(notes)
        self.estimate = estimate
        """By what the values are estimated; ``None`` where every patch was run."""

    @property
    def normalized(self) -> Tensor:
        """0 where a patch changes nothing, 1 where it brings the clean run's metric back."""
        return (self.values - self.corrupted) / (self.clean - self.corrupted)

    @property
    def best(self) -> tuple[str, int | None]:
        """The site and position whose patch moves the metric furthest towards the clean run's."""
        column_count = self.values.shape[1]
        towards = (self.values - self.corrupted) * math.copysign(1.0, self.clean - self.corrupted)
        # argmax takes a NaN for the greatest of all.
        row, column = divmod(int(towards.nan_to_num(-math.inf).argmax()), column_count)
        return self.sites[row], None if self.positions is None else self.positions[column]

    def __getitem__(self, key: str | tuple[str, int]) -> Tensor:
        """The values of one site, or of one site at one position."""
        site, position = key if isinstance(key, tuple) else (key, None)
        # First as it is: a module may really be called "(model)".
        site = site if site in self.sites else meant(site)
        if site not in self.sites:
            raise MissingRecordError(f"no site {site!r} in this sweep. {suggestion(site, self.sites)}")
        row = self.values[self.sites.index(site)]
        if position is None:
            return row
        if self.positions is None or position not in self.positions:
            there = "the whole value was patched" if self.positions is None else f"there are {self.positions}"
            raise MissingRecordError(f"no {self.over} {position!r} in this sweep: {there}.")
        return row[self.positions.index(position)]

    def data(self) -> dict[str, list[Any]]:
        """One entry for each patch as columns, for a plot or a data frame."""
        positions = [None] if self.positions is None else self.positions
        pairs = [(site, position) for site in self.sites for position in positions]
        return {
            "site": [site for site, _ in pairs],
            self.over: [position for _, position in pairs],
            "value": self.values.flatten().tolist(),
            "normalized": self.normalized.flatten().tolist(),
        }

    def table(self, *, normalized: bool = True) -> Table:
        """The matrix as text; of many positions, those where a patch does most."""
        # Without two ends there is no scale: every cell would be NaN or infinite.
        scaled = normalized and nothing_between(self.clean, self.corrupted) is None
        numbers = self.normalized if scaled else self.values
        labels = ["whole"] if self.positions is None else [str(position) for position in self.positions]
        columns = list(range(len(labels)))
        notes = list(self.notes)
        if why := nothing_between(self.clean, self.corrupted):
            notes.append(why)
        if len(columns) > _WIDE:
            effect = (self.values - self.corrupted).abs().nan_to_num(0.0).amax(dim=0)
            columns = sorted(effect.topk(_WIDE).indices.tolist())
            notes.append(f"{_WIDE} of {len(labels)} {self.over}s shown: those where a patch does most")
        cells = numbers.tolist()
        rows = [[shown(site), *(_cell(cells[i][j]) for j in columns)] for i, site in enumerate(self.sites)]
        by = " by head" if self.over == "head" else ""
        kind = "0 is corrupted, 1 is clean" if scaled else "the metric itself"
        sites = f"{len(self.sites)} {plural(len(self.sites), 'site')}"
        how = f", estimated by {self.estimate}" if self.estimate else ""
        title = f"Sweep of {sites}{by}{how}: clean {self.clean:.4g}, corrupted {self.corrupted:.4g}; {kind}"
        return Table(title, ["site", *(f">{labels[j]}" for j in columns)], rows, notes)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def nothing_between(clean: float, corrupted: float) -> str | None:
    """Why the metrics of the two runs give no scale from 0 to 1, if they do not."""
    if math.isfinite(clean) and math.isfinite(corrupted) and clean != corrupted:
        return None
    if clean == corrupted:
        found = f"the metric is {clean:.6g} for the clean and for the corrupted input"
    else:
        found = f"the metric is {clean:.6g} for the clean input and {corrupted:.6g} for the corrupted one"
    return (
        f"{found}: nothing lies between them, so the share that a patch brings back is NaN. Take inputs that the "
        "metric tells apart, or another metric."
    )


def _cell(number: float) -> str:
    return "-" if math.isnan(number) else fixed(number, 3)

"""What is left of ``statistics``: numbers of each site, which merge, print themselves and are saved, without model."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchhook._recording import saving, tensor_file
from torchhook._recording.address import meant, shown
from torchhook._recording.tables import Table, facts
from torchhook._values.running import Running, Top
from torchhook._version import __version__
from torchhook._words import counted
from torchhook.errors import MissingRecordError, RecordingFileError, suggestion

FORMAT = "torchhook.statistics"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for: statistics of other kinds do not merge."""

    per: str = "channel"
    covariance: bool = False
    quantiles: tuple[float, ...] = ()
    top: int = 0
    resolution: int = 0

    def running(self) -> Running:
        """Statistics that have seen nothing yet."""
        return Running(self.per, covariance=self.covariance, top=self.top, resolution=self.resolution)


class SiteStatistics:
    """The statistics of one site: a number for each channel, for each position, or one of all values."""

    def __init__(self, running: Running, quantiles: Sequence[float] = ()) -> None:
        self._running, self._quantiles = running, tuple(quantiles)

    @property
    def count(self) -> int | Tensor:
        """How many values each number is made of; with ``per="token"``, one for each position."""
        assert self._running.moments is not None
        return self._running.moments.size  # type: ignore[no-any-return]

    @property
    def mean(self) -> Tensor:
        """The mean, in double precision."""
        return self._running.mean

    @property
    def variance(self) -> Tensor:
        """The variance, divided by one less than the count, as ``Tensor.var`` and ``numpy.cov`` have it."""
        return self._running.variance()

    @property
    def std(self) -> Tensor:
        """The root of the variance, as ``Tensor.std`` has it; ``th.watch`` and transforms divide by the count."""
        return self.variance.sqrt()

    @property
    def min(self) -> Tensor:
        """The least value, as ``MinMaxObserver`` has it."""
        found: Tensor = self._running.min
        return found

    @property
    def max(self) -> Tensor:
        """The greatest value."""
        found: Tensor = self._running.max
        return found

    @property
    def absmax(self) -> Tensor:
        """The greatest absolute value."""
        return torch.maximum(self.min.abs(), self.max.abs())

    @property
    def kurtosis(self) -> Tensor:
        """The mean fourth power of ``(value - mean) / std``: 3 for a normal distribution, more with outliers."""
        return self._running.kurtosis()

    @property
    def covariance(self) -> Tensor | None:
        """Channels by channels, as ``numpy.cov`` has it, if it was asked for."""
        return self._running.matrix()

    @property
    def quantiles(self) -> dict[float, Tensor]:
        """Those that were asked for."""
        return {q: self.quantile(q) for q in self._quantiles}

    def quantile(self, q: float) -> Tensor:
        """Any quantile, if some were asked for: exact for few values, else as ``rank_error`` says."""
        if not self._running.sketches:
            raise ValueError("no quantiles are known: say quantiles=[0.5, …] where the statistics are taken.")
        if not 0 <= q <= 1:
            raise ValueError(f"quantile({q!r}): a quantile is a share of the values, from 0 to 1.")
        return self._running.quantile(q)

    @property
    def rank_error(self) -> float:
        """By such a share of the count the rank of a quantile may be off at most; 0 if quantiles are exact."""
        return self._running.rank_error

    @property
    def top_values(self) -> Tensor | None:
        """The largest values, one of each row, best first: ``(channels, k)``."""
        return self._top("values")

    @property
    def top_rows(self) -> Tensor | None:
        """The rows that they are in; -1 where a position has fewer rows."""
        return self._top("rows")

    @property
    def top_positions(self) -> Tensor | None:
        """The positions that they are at, counted without padding."""
        return self._top("positions")

    def _top(self, part: str) -> Tensor | None:
        top: Top | None = self._running.top
        return None if top is None else getattr(top, part)

    def merged(self, other: SiteStatistics, options: Options) -> SiteStatistics:
        """Those of both together."""
        both = options.running()
        for one in (self, other):
            both.merge(one._running)
        return SiteStatistics(both, self._quantiles)

    def tensors(self) -> dict[str, Tensor]:
        """All that is known, for a file."""
        return self._running.tensors()

    def cells(self) -> list[str]:
        """The row of a table: of many channels, the ends of their numbers."""
        count = int(torch.as_tensor(self.count).sum())
        return [str(len(self.mean)), f"{count:,}", *(_range(getattr(self, name)) for name in _SHOWN)]

    def __repr__(self) -> str:
        return f"<statistics of {self.cells()[1]} values, {counted(len(self.mean), 'number')} of each kind>"

    def _repr_html_(self) -> str:
        told = dict(zip(_SHOWN, self.cells()[2:], strict=True))
        return facts(repr(self)[1:-1], told)._repr_html_()


class Statistics(Mapping[str, SiteStatistics]):
    """Statistics by site. Those of parts of the data add up: ``one + other``, or ``one.merge(*others)``.

    ``save`` writes them as one file, ``Statistics.load`` reads it; the model is not needed.
    """

    def __init__(self, sites: Mapping[str, SiteStatistics], options: Options, rows: int) -> None:
        self._sites = dict(sites)
        self.options: Options = options
        self.rows: int = rows
        """How many rows of the data were seen."""

    def __getitem__(self, site: str) -> SiteStatistics:
        for name in (site, meant(site)):
            if name in self._sites:
                return self._sites[name]
        raise MissingRecordError(f"no statistics of {site!r}. {suggestion(site, map(shown, self._sites))}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __contains__(self, site: object) -> bool:
        return isinstance(site, str) and (site in self._sites or meant(site) in self._sites)

    # -- parts of the data -------------------------------------------------------------------------------

    def merge(self, *others: Statistics) -> Statistics:
        """The statistics of all rows that these have seen: as one pass over all would give them, up to rounding."""
        whole = self
        for other in others:
            whole = whole + other
        return whole

    def __add__(self, other: Statistics) -> Statistics:
        if not isinstance(other, Statistics):
            return NotImplemented
        _check_alike(self, other)
        sites = {name: one.merged(other._sites[name], self.options) for name, one in self._sites.items()}
        return Statistics(sites, self.options, self.rows + other.rows)

    def __radd__(self, other: Any) -> Statistics:
        # sum() begins with a zero.
        return self if type(other) is int and other == 0 else NotImplemented

    # -- files ---------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file, and return its path."""
        about = {**dataclasses.asdict(self.options), "rows": self.rows, "sites": list(self._sites)}
        tensors = {f"{name}|{key}": t for name, one in self._sites.items() for key, t in one.tensors().items()}
        metadata = {"format": FORMAT, "version": str(VERSION), "statistics": json.dumps(about)}
        return tensor_file.write(saving.named(path), tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Read what ``save`` wrote."""
        tensors, metadata = tensor_file.read(path)
        if metadata.get("format") != FORMAT:
            raise RecordingFileError(
                f"{path} holds no statistics: its format is {metadata.get('format')!r}. th.load opens recordings."
            )
        with saving.understood(path):
            if int(metadata["version"]) > VERSION:
                raise RecordingFileError(f"{path} was written by a newer TorchHook than this one ({__version__}).")
            about = json.loads(metadata["statistics"])
            options = Options(**{field.name: about[field.name] for field in dataclasses.fields(Options)})
            options = dataclasses.replace(options, quantiles=tuple(options.quantiles))
            sites = {}
            for name in about["sites"]:
                own = {key.rpartition("|")[2]: t for key, t in tensors.items() if key.rpartition("|")[0] == name}
                sites[name] = SiteStatistics(options.running().load(own), options.quantiles)
            return cls(sites, options, about["rows"])

    # -- showing -------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """One line for each site; of several channels, the least and the greatest of their numbers."""
        columns = ["site", f">{_PLURAL[self.options.per]}", ">count", *(f">{name}" for name in _SHOWN)]
        rows = [[shown(name), *one.cells()] for name, one in self._sites.items()]
        notes = [f"{counted(self.rows, 'row')}, per {self.options.per}"]
        error = max((one.rank_error for one in self._sites.values()), default=0.0)
        if self.options.quantiles:
            exact = "exact" if not error else f"ranks right to {error:.2%}"
            notes.append(f"quantiles {', '.join(f'{q:g}' for q in self.options.quantiles)}: {exact}")
        return Table("Statistics", columns, rows, notes)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


_SHOWN = ("mean", "std", "min", "max", "absmax", "kurtosis")
_PLURAL = {"channel": "channels", "tensor": "tensors", "token": "positions"}


def _range(numbers: Tensor) -> str:
    low, high = float(numbers.min()), float(numbers.max())
    return f"{low:.4g}" if low == high or len(numbers) == 1 else f"{low:.4g} … {high:.4g}"


def _check_alike(one: Statistics, other: Statistics) -> None:
    if one.options != other.options:
        raise ValueError(f"statistics of two kinds do not merge: {one.options} and {other.options}.")
    if list(one) != list(other):
        raise ValueError(
            f"statistics of other sites do not merge: {', '.join(map(shown, one))}; and {', '.join(map(shown, other))}."
        )
    for name in one if one.options.per == "channel" else ():
        sizes = len(one[name].mean), len(other[name].mean)
        if sizes[0] != sizes[1]:
            raise ValueError(f"{shown(name)!r}: {sizes[0]} channels and {sizes[1]} do not merge.")

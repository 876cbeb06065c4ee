"""What is left of a session: records by site. A recording reads, prints, saves and loads without its model."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchhook._recording import saving, tensor_codecs
from torchhook._recording.address import Site, readings, shown
from torchhook._recording.tables import Table, size
from torchhook._values import tree
from torchhook._values.loaded import Opaque
from torchhook.errors import AmbiguousCallError, MissingRecordError, NeverRanError, suggestion


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One kept value: where and when it passed, and the value."""

    site: Site
    call: int
    order: int
    """Its place in the order in which the session kept values."""
    value: Any

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


Rows = list[Row] | deque[Row]
"""The records of one site; with a limit, a ring buffer of the newest."""


def _in_order(rows: Rows) -> list[Row]:
    # A copy: other threads may append meanwhile. Sorted: gradients come in from the last call to the first.
    return sorted(rows.copy(), key=lambda row: row[:2])


class Recording:
    """Values by site, in the order in which the sites first ran.

    ``rec["layer4"]`` is the value; where a site ran more than once, say which call
    (``rec["relu", 1]`` or ``rec["relu#1"]``), or take ``rec.all("relu")`` or ``rec.cat("relu")``.
    """

    def __init__(self, model_name: str = "") -> None:
        self.model_name = model_name
        self.missing: dict[str, str] = {}
        """Sites that were selected and never ran, each with the likely cause."""
        self.elsewhere: dict[str, int] = {}
        """Sites that ran in other threads or tasks too, with the number of calls that were not recorded."""
        self.recomputed: dict[str, int] = {}
        """Sites that ran again in the backward pass (activation checkpointing): once more each, not recorded twice."""
        self.replaced: dict[str, str] = {}
        """Sites whose module or parameter was replaced while the session was open: what came later was not seen."""
        self.stopped = ""
        """Where ``stop=True`` ended what was recorded, and what that left out; empty if nothing did."""
        self.order: count[int] = count()
        self._rows: dict[Site, Rows] = {}
        # Pairs and not a dict: of one name, different ports may have been recorded under different others.
        self._aliases: set[tuple[str, str]] = set()
        self.other_names: Callable[[], Iterable[tuple[str, str]]] = tuple
        """Finds more of them: other names of shared modules, each with the one that was recorded."""
        self._waits: list[Callable[[], None]] = []

    # A copy or a pickle holds what was kept so far, and its own counter goes on from there.

    def __getstate__(self) -> dict[str, Any]:
        self.wait()
        self._find_other_names()
        return {**self.__dict__, "order": None, "_waits": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.order = count(1 + max((row[1] for rows in self._rows.values() for row in rows), default=-1))

    # -- filling ------------------------------------------------------------------------------

    def opened(self, site: Site, limit: int | None = None) -> Rows:
        """The rows of a site, to be appended to; made on the first request."""
        if site.call is not None:
            site = site.every_call
        rows = self._rows.get(site)
        if rows is None:
            if limit is not None and (not isinstance(limit, int) or limit < 1):
                raise ValueError(f"max_records={limit!r}: give a positive number, or None to keep every record.")
            rows = self._rows[site] = [] if limit is None else deque(maxlen=limit)
        return rows

    def _find_other_names(self) -> None:
        """Let shared modules be read under each of their names."""
        find, self.other_names = self.other_names, tuple
        self._aliases.update(find())

    def wait_with(self, wait: Callable[[], None]) -> None:
        """Call ``wait`` before anything is read: values may still be on their way."""
        self._waits.append(wait)

    def wait(self) -> None:
        """Return when every value can be read. Reading does this by itself."""
        for wait in self._waits:
            wait()

    def clear(self) -> None:
        """Forget every record; the sites stay open."""
        for rows in self._rows.values():
            rows.clear()

    # -- reading ------------------------------------------------------------------------------

    def __getitem__(self, key: str | Site | tuple[str | Site, int]) -> Any:
        site, call = self._find(key)
        rows = self._calls(site, call)
        if call is None:
            calls = [row[0] for row in rows]
            if len(rows) > 1:
                listed = ", ".join(map(str, calls[:8])) + (", …" if len(calls) > 8 else "")
                raise AmbiguousCallError(
                    f"{str(site)!r} ran more than once: {len(rows)} records, calls {listed}. Pick one with "
                    f"rec[{str(site)!r}, {calls[0]}], or take rec.all({str(site)!r}) or rec.cat({str(site)!r})."
                )
            return rows[0][2]
        if len(rows) > 1:
            wanted = rows[0][0]
            raise AmbiguousCallError(
                f"call {wanted} of {str(site)!r} has {len(rows)} records, one for each backward pass through it: "
                f"take rec.all({str(site.but(call=wanted))!r})."
            )
        return rows[0][2]

    def all(self, key: str | Site) -> list[Any]:
        """Every value of a site, in call order."""
        site, call = self._find(key)
        return [row[2] for row in self._calls(site, call)]

    def cat(self, key: str | Site) -> Any:
        """The values of a site concatenated over calls on dim 0, leaf by leaf."""
        values = self.all(key)
        columns = [list(tree.tensors(value)) for value in values]
        if len(values) > 1 and not columns[0]:
            raise ValueError(f"{key!s}: there are no tensors to concatenate; use rec.all({str(key)!r}).")
        if len({len(column) for column in columns}) > 1:
            raise ValueError(f"{key!s}: the calls have different numbers of tensors; use rec.all({str(key)!r}).")
        try:
            joined = [torch.cat(parts) for parts in zip(*columns, strict=True)]
        except RuntimeError as error:
            shapes = ", ".join(tree.describe(value) for value in values[:4])
            raise ValueError(f"{key!s}: cannot concatenate {shapes} on dim 0; use rec.all({str(key)!r}).") from error
        return tree.with_tensors(values[0], joined)

    def records(self, key: str | Site | None = None) -> list[Record]:
        """The records of one site, or of all of them in the order in which they were kept."""
        if key is not None:
            site, call = self._find(key)
            return [Record(site, *row) for row in self._calls(site, call)]
        self.wait()
        every = [Record(site, *row) for site, rows in self._rows.items() for row in _in_order(rows)]
        return sorted(every, key=lambda record: record.order)

    @property
    def sites(self) -> list[Site]:
        """The sites that have records, in the order in which they first ran."""
        first = {site: _in_order(rows)[0][1] for site, rows in self._rows.items() if rows}
        return sorted(first, key=first.__getitem__)

    def keys(self) -> list[str]:
        """The addresses of the sites that have records, in the order in which they first ran."""
        return [str(site) for site in self.sites]

    def items(self) -> Iterator[tuple[str, Any]]:
        """Address and value of every record; a site that ran more than once comes call by call (``relu#0``)."""
        for site in self.sites:
            rows = self._read(site)
            for call, _, value in rows:
                yield str(site if len(rows) == 1 else site.but(call=call)), value

    def values(self) -> Iterator[Any]:
        """The value of every record, as in ``items``."""
        return (value for _, value in self.items())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return sum(1 for rows in self._rows.values() if rows)

    def __contains__(self, key: object) -> bool:
        try:
            return bool(self._calls(*self._find(key)))  # type: ignore[arg-type]
        except (KeyError, TypeError):
            return False

    def _find(self, key: str | Site | tuple[str | Site, int]) -> tuple[Site, int | None]:
        call: int | None = None
        if isinstance(key, tuple):
            if len(key) != 2:
                raise TypeError(f"rec[site, call] takes two parts, found {len(key)}.")
            address, call = key
            if not isinstance(call, int):
                raise TypeError(f"rec[site, call]: the call must be an integer, found {call!r}.")
        else:
            address = key
        if isinstance(address, Site):
            options = [address]
        elif isinstance(address, str):
            options = list(readings(address))
        else:
            raise TypeError(f"a recording is read by address, found {type(address).__name__}.")
        sites = [self._recorded(option.every_call) for option in options]
        # A name may look like an address ("a:input"): the first reading that was recorded is meant.
        chosen = next((i for i, site in enumerate(sites) if site in self._rows), len(sites) - 1)
        return sites[chosen], options[chosen].call if call is None else call

    def _recorded(self, site: Site) -> Site:
        """The site under the name that it was recorded by. Its ports may have been asked for by different names."""
        if site in self._rows:
            return site
        self._find_other_names()
        here = (site.but(path=path) for name, path in self._aliases if name == site.path)
        return next((known for known in here if known in self._rows), site)

    def _calls(self, site: Site, call: int | None) -> list[Row]:
        """The rows of one call, or of all of them."""
        rows = self._read(site, call)
        if call is None:
            return rows
        calls = [row[0] for row in rows]
        wanted = calls[call] if -len(calls) <= call < 0 else call
        if wanted not in calls:
            raise MissingRecordError(
                f"{str(site)!r} has no record of call {call}; kept are calls {', '.join(map(str, calls))}."
            )
        return [row for row in rows if row[0] == wanted]

    def _read(self, site: Site, call: int | None = None) -> list[Row]:
        self.wait()
        if rows := _in_order(self._rows.get(site, [])):
            return rows
        address = str(site if call is None else site.but(call=call))
        if address not in self.missing:
            address = str(site)
        if address in self.missing:
            raise NeverRanError(f"{address!r} was selected and never ran: {self.missing[address]}")
        if site in self._rows:
            raise NeverRanError(f"{address!r} has not run yet: call the model inside the session, then read.")
        known = [str(s) for s in self._rows]
        raise MissingRecordError(f"nothing was recorded at {address!r}. {suggestion(address, known)}".rstrip())

    # -- showing ------------------------------------------------------------------------------

    def table(self) -> Table:
        """A table of the sites: calls, shape, dtype, device, size."""
        self.wait()
        rows, total = [], 0
        for site in self.sites:
            records = self.records(site)
            nbytes = sum(record.nbytes for record in records)
            total += nbytes
            shapes = list(dict.fromkeys(record.shape for record in records))
            shape = shapes[0] if len(shapes) == 1 else f"{shapes[0]} and {len(shapes) - 1} more"
            last = records[-1]
            rows.append([site.shown, str(len(records)), shape, last.dtype, last.device, size(nbytes)])
        of = f" of {self.model_name}" if self.model_name else ""
        title = f"Recording{of}: {len(rows)} site{'s' * (len(rows) != 1)}, {size(total)}"
        notes = [f"not recorded, in other threads: {shown(s)} ({_times(n)})" for s, n in self.elsewhere.items()]
        notes += [f"recomputed in the backward pass: {shown(s)} ({_times(n)})" for s, n in self.recomputed.items()]
        notes += [f"replaced: {shown(address)} ({what})" for address, what in self.replaced.items()]
        notes += [f"never ran: {shown(address)} ({cause})" for address, cause in self.missing.items()]
        notes += [f"not saved, only as text: {kind} in {_listed(sites)}" for kind, sites in self._unsaved().items()]
        notes += [self.stopped] if self.stopped else []
        return Table(title, ["site", ">calls", "shape", "dtype", "device", ">size"], rows, notes)

    def _unsaved(self) -> dict[str, list[Site]]:
        """What a file could not hold, by its type, and the sites that it was part of."""
        found: dict[str, list[Site]] = {}
        for record in self.records():
            for kind in sorted({leaf.kind for leaf in _opaque(record.value)}):
                found.setdefault(kind, []).append(record.site)
        return found

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    # -- saving -------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the recording as one safetensors file: the tensors by their sites, the rest as JSON in its metadata."""
        records = self.records()
        self._find_other_names()
        return saving.save(
            path,
            [record.value for record in records],
            {
                "model": self.model_name,
                "records": [[_plain(record.site), record.call] for record in records],
                # Sorted, as the order of a set changes from run to run: the same recording gives the same file.
                "aliases": sorted(self._aliases),
                "missing": self.missing,
                "elsewhere": self.elsewhere,
                "recomputed": self.recomputed,
                "stopped": self.stopped,
            },
            [_name(record, len(self._rows[record.site])) for record in records],
        )


def _name(record: Record, records: int) -> str:
    """What other readers of the file find its tensors by: the address, with the call where there are several."""
    return record.site.shown if records == 1 else record.site.but(call=record.call).shown


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _opaque(value: Any) -> Iterator[Opaque]:
    for _, leaf in tree.leaves(value):
        # A set without tensors is not opened, so that what was lost may be inside of this leaf.
        parts = leaf if isinstance(leaf, (set, frozenset)) else (leaf,)
        yield from (part for part in parts if isinstance(part, Opaque))


def _listed(sites: list[Site]) -> str:
    names = list(dict.fromkeys(site.shown for site in sites))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _plain(site: Site) -> list[Any]:
    # Its parts, not its text: a module's name may look like an address. A standard name needs no model to be read by.
    if site.role:
        return [
            site.role,
            None,
            "grad" if site.port == "grad_input" else site.port if "grad" in site.port else "output",
        ]
    return [site.path, site.op, f"{site.port}.{site.leaf}" if site.leaf else site.port]


def load(path: str | os.PathLike[str]) -> Recording:
    """Open a recording that ``Recording.save`` wrote. No pickle, no model, nothing of the user's code is run.

    Dataclasses, model outputs and other objects come back as ``Loaded`` objects with the same fields, and what a file
    cannot hold as an ``Opaque`` that names it.
    """
    values, about = saving.load(path)
    recording = Recording()
    with saving.understood(path):
        recording.model_name = about["model"]
        recording._aliases = {(name, path) for name, path in about["aliases"]}
        recording.missing = dict(about["missing"])
        recording.elsewhere = dict(about["elsewhere"])
        recording.recomputed = dict(about["recomputed"])
        recording.stopped = about.get("stopped", "")  # older files do not say
        for ((place, op, port), call), value in zip(about["records"], values, strict=True):
            # They were saved in their order, and are counted anew.
            port, _, leaf = port.partition(".")
            recording.opened(Site(place, op, None, port, leaf)).append((call, next(recording.order), value))
    return recording

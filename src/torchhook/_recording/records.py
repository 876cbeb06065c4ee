"""What is left of a session: records by site. A recording reads, prints, saves and loads without its model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from torchhook._recording import joining, saving
from torchhook._recording.address import Site, Which, call_hint, readings, shown
from torchhook._recording.layouts import Joined, layout_of
from torchhook._recording.rows import Record as Record
from torchhook._recording.rows import Row, Window, chosen, first_position, has_rows, in_order, made, ran
from torchhook._recording.rows import Rows as Rows
from torchhook._recording.steps import Pass, Passes
from torchhook._recording.tables import Table, size
from torchhook._words import listed, plural, times
from torchhook.errors import AmbiguousCallError, MissingRecordError, NeverRanError, suggestion


class Recording:
    """Values by site, in the order in which the sites first ran.

    ``rec["layer4"]`` is the value; where a site ran more than once, say which call
    (``rec["relu", 1]`` or ``rec["relu#1"]``), or take ``rec.all("relu")`` or ``rec.cat("relu")``.
    """

    # What most never need is the class's: one is made whenever a session opens.
    stopped = ""
    """Where ``stop=True`` ended what was recorded, and what that left out; empty if nothing did."""
    other_names: Callable[[], Iterable[tuple[str, str]]] = tuple
    """Finds more other names of shared modules, each with the one that was recorded."""
    find_layouts: Callable[[], Iterable[tuple[str, tuple[str, bool]]]] = tuple
    """Finds how the modules that were recorded lay out their maps, by path, as ``own_kind`` says it."""
    # Pairs and not a dict: of one name, different ports may have been recorded under different others.
    _aliases: frozenset[tuple[str, str]] = frozenset()
    _layouts: Mapping[str, tuple[str, bool]] = {}
    _passes: Passes | None = None
    _waits: tuple[Callable[[], None], ...] = ()

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
        self.order: count[int] = count()
        self._rows: dict[Site, Rows] = {}

    # A copy or a pickle holds what was kept so far, and its own counter goes on from there.

    def __getstate__(self) -> dict[str, Any]:
        self.wait()
        self._find_other_names()
        self._find_layouts()
        return {**self.__dict__, "order": None, "_waits": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.order = count(1 + max((row[1] for rows in self._rows.values() for row in rows), default=-1))

    # -- filling ------------------------------------------------------------------------------

    def opened(self, site: Site, limit: int | None = None, calls: Sequence[Site] = ()) -> Rows:
        """The rows of a site, to be appended to; made on the first request, for the ``calls`` of it that are named."""
        if site.call is not None:
            site = site.every_call
        return self._rows[site] if site in self._rows else self._rows.setdefault(site, made(limit, calls))

    def opened_all(self, sites: Sequence[Site], limit: int | None = None) -> list[Rows]:
        """The rows of sites that nobody has asked for yet, and that name no calls."""
        opened: list[Rows] = []
        for site in sites:
            self._rows[site] = rows = [] if limit is None else made(limit)
            opened.append(rows)
        return opened

    @property
    def passes(self) -> Passes:
        """The calls of the model in which something was generated."""
        if self._passes is None:
            self._passes = Passes()
        return self._passes

    @property
    def has_sites(self) -> bool:
        """Whether something is to be recorded."""
        return bool(self._rows)

    def trim_passes(self) -> None:
        """Forget the passes of which nothing is left."""
        orders = (row[1] for rows in self._rows.values() for row in rows.copy())
        self.passes.forget_before(min(orders, default=float("inf")))

    def _find_other_names(self) -> None:
        """Let shared modules be read under each of their names."""
        find, self.other_names = self.other_names, tuple
        self._aliases = self._aliases.union(find())

    def layout_of(self, site: Site) -> tuple[str, bool] | None:
        """How maps are laid out at a site, as far as its module says it: see ``own_kind``."""
        self._find_layouts()
        outwards = site.op is None and site.port in ("output", "grad", "grad_total")
        return self._layouts.get(site.path) if outwards else None

    def _find_layouts(self) -> None:
        find, self.find_layouts = self.find_layouts, tuple
        self._layouts = {**self._layouts, **dict(find())}

    def wait_with(self, wait: Callable[[], None]) -> None:
        """Call ``wait`` before anything is read: values may still be on their way."""
        self._waits = (*self._waits, wait)

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
        if len(rows) > 1:
            raise AmbiguousCallError(joining.several(site, call, self._passed(site, rows)))
        return rows[0][2]

    def all(self, key: str | Site) -> list[Any]:
        """Every value of a site, in call order."""
        site, call = self._find(key)
        return [row[2] for row in self._calls(site, call)]

    def cat(self, key: str | Site, dim: int = 0, *, beams: Tensor | None = None) -> Any:
        """The values of a site concatenated over calls, leaf by leaf: batches on dim 0, a generation on its tokens.

        Args:
            key: The site, or some of its calls (``"h.3#1:"``).
            dim: Where to join them. The calls of a generation are joined on that of their tokens, by position: where a
                token was computed again, the last value counts. It is 1, and 2 of what is split into heads (``@q``); of
                ``(T, N, D)`` it is 0, and of ``(N·T, D)``, as experts give it, too; there, 1 makes ``(N, T, D)`` of it.
            beams: The ``beam_indices`` that a beam search returns: the rows are then those of its sequences, with zeros
                after the end of one.
        """
        site, call = self._find(key)
        rows = self._passed(site, self._calls(site, call))
        every = rows if call is None or not len(self.passes) else self._passed(site, self._calls(site, None))
        return joining.join(str(key), site, rows, dim, beams, layout_of(site, every))

    def _passed(self, site: Site, rows: list[Row]) -> list[Joined]:
        return [(row[0], row[2], self._pass(site, row)) for row in rows]

    def records(self, key: str | Site | None = None) -> list[Record]:
        """The records of one site, or of all of them in the order in which they were kept."""
        if key is not None:
            site, call = self._find(key)
            return [self._record(site, row) for row in self._calls(site, call)]
        self.wait()
        every = [self._record(site, row) for site, rows in self._rows.items() for row in in_order(rows)]
        return sorted(every, key=lambda record: record.order)

    def _pass(self, site: Site, row: Row) -> Pass | None:
        # A gradient comes in when its forward pass is long over.
        return None if not len(self.passes) or site.port.startswith("grad") else self.passes.of(row[1])

    def _record(self, site: Site, row: Row) -> Record:
        passed = self._pass(site, row)
        if passed is None:
            return Record(site, *row)
        return Record(site, *row, passed.step, first_position(site, row[2], passed))

    @property
    def sites(self) -> list[Site]:
        """The sites that have records, in the order in which they first ran."""
        first = {site: in_order(rows)[0][1] for site, rows in self._rows.items() if has_rows(rows)}
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
        return sum(1 for rows in self._rows.values() if has_rows(rows))

    def __contains__(self, key: object) -> bool:
        try:
            return bool(self._calls(*self._find(key)))  # type: ignore[arg-type]
        except (KeyError, TypeError):
            return False

    def _find(self, key: str | Site | tuple[str | Site, int]) -> tuple[Site, Which]:
        call: Which = None
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

    def _calls(self, site: Site, call: Which) -> list[Row]:
        """The rows of one call, of some, or of all of them."""
        rows = self._read(site, call)
        if not (found := chosen(rows, call, ran(self._rows.get(site)))):
            calls = [str(number) for number in dict.fromkeys(row[0] for row in rows)]
            what = f"call {call}" if isinstance(call, int) else f"calls {call}"
            kept = f"kept {plural(len(calls), 'is call', 'are calls')} {', '.join(calls)}"
            raise MissingRecordError(f"{str(site)!r} has no record of {what}; {kept}.")
        return found

    def _read(self, site: Site, call: Which = None) -> list[Row]:
        self.wait()
        if rows := in_order(self._rows.get(site, [])):
            return rows
        address = str(site if call is None else site.but(call=call))
        if address not in self.missing:
            address = str(site)
        if address in self.missing:
            raise NeverRanError(f"{address!r} was selected and never ran: {self.missing[address]}")
        if site in self._rows:
            raise NeverRanError(f"{address!r} has not run yet: call the model inside the session, then read.")
        # Not what was selected only: whoever takes the advice must find something there.
        known = call_hint(address, self.keys()) or suggestion(address, [site.shown for site in self.sites])
        raise MissingRecordError(f"nothing was recorded at {shown(address)!r}. {known}".rstrip())

    # -- showing ------------------------------------------------------------------------------

    def table(self) -> Table:
        """A table of the sites: calls, shape, dtype, device, size."""
        self.wait()
        rows, total = [], 0
        for site in self.sites:
            records = self.records(site)
            nbytes = sum(record.nbytes for record in records)
            total += nbytes
            shape = listed(list(dict.fromkeys(record.text for record in records)), most=1)
            last = records[-1]
            generated = _generated(records) if self.passes else []
            rows.append([site.shown, str(len(records)), *generated, shape, last.dtype, last.device, size(nbytes)])
        of = f" of {self.model_name}" if self.model_name else ""
        title = f"Recording{of}: {len(rows)} {plural(len(rows), 'site')}, {size(total)}"
        notes = [f"not recorded, in other threads: {shown(s)} ({times(n)})" for s, n in self.elsewhere.items()]
        notes += [f"recomputed in the backward pass: {shown(s)} ({times(n)})" for s, n in self.recomputed.items()]
        notes += [f"replaced: {shown(address)} ({what})" for address, what in self.replaced.items()]
        notes += [f"never ran: {shown(address)} ({cause})" for address, cause in self.missing.items()]
        notes += [f"not saved, only as text: {kind} in {_listed(sites)}" for kind, sites in self._unsaved().items()]
        notes += [self.stopped] if self.stopped else []
        of_steps = [">steps", ">positions"] if self.passes else []
        return Table(title, ["site", ">calls", *of_steps, "shape", "dtype", "device", ">size"], rows, notes)

    def _unsaved(self) -> dict[str, list[Site]]:
        """What a file could not hold, by its type, and the sites that it was part of."""
        found: dict[str, list[Site]] = {}
        for record in self.records():
            for kind in sorted({leaf.kind for leaf in saving.opaque(record.value)}):
                found.setdefault(kind, []).append(record.site)
        return found

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    # -- saving -------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the recording as one safetensors file: the tensors by their sites, the rest as JSON in its metadata."""
        return saving.save(path, *self.plain())

    def plain(self) -> tuple[list[Any], dict[str, Any], list[str]]:
        """What a file holds: the values, what JSON can say of them, and a name for each."""
        records = self.records()
        windows = [[_plain(site), rows.ran] for site, rows in self._rows.items() if isinstance(rows, Window)]
        passed = [self._pass(record.site, (record.call, record.order, None)) for record in records]
        several = Counter(record.site for record in records)
        self._find_other_names()
        places = {record.site for record in records if isinstance(record.value, Tensor) and record.value.dim() > 3}
        layouts = {site.path: kind for site in places if (kind := self.layout_of(site)) is not None}
        about = {
            "model": self.model_name,
            "records": [[_plain(record.site), record.call] for record in records],
            # Sorted, as the order of a set changes from run to run: the same recording gives the same file.
            "aliases": sorted(self._aliases),
            "missing": self.missing,
            "elsewhere": self.elsewhere,
            "recomputed": self.recomputed,
            "stopped": self.stopped,
            # Where there are any: a file of one forward pass has no more than it had.
            **({"replaced": self.replaced} if self.replaced else {}),
            **({"windows": windows} if windows else {}),
            **({"layouts": dict(sorted(layouts.items()))} if layouts else {}),
            **({"steps": self.passes.plain(passed)} if self.passes else {}),
        }
        names = [_name(record, several[record.site]) for record in records]
        return [record.value for record in records], about, names

    @classmethod
    def of_plain(cls, values: Iterable[Any], about: dict[str, Any]) -> Recording:
        """The other way round."""
        recording = cls(about["model"])
        recording._aliases = frozenset((name, path) for name, path in about["aliases"])
        recording.missing = dict(about["missing"])
        recording.elsewhere = dict(about["elsewhere"])
        recording.recomputed = dict(about["recomputed"])
        # Older files do not say these.
        recording.replaced, recording.stopped = dict(about.get("replaced", {})), about.get("stopped", "")
        recording._layouts = {path: (kind, sure) for path, (kind, sure) in about.get("layouts", {}).items()}
        for (place, op, port), calls in about.get("windows", ()):
            recording._rows[_site(place, op, port)] = Window([None], ran=calls)
        for ((place, op, port), call), value in zip(about["records"], values, strict=True):
            # They were saved in their order, and are counted anew.
            recording.opened(_site(place, op, port)).append((call, next(recording.order), value))
        recording.passes.read(**about.get("steps", {"passes": [], "runs": []}))  # older files have none
        return recording


def _name(record: Record, records: int) -> str:
    """What other readers of the file find its tensors by: the address, with the call where there are several."""
    return record.site.shown if records == 1 else record.site.but(call=record.call).shown


def _generated(records: list[Record]) -> list[str]:
    """The steps of a site and the positions that they begin at, for a table."""
    steps = [record.step for record in records if record.step is not None]
    positions = [record.position for record in records if record.position is not None]
    return [f"{min(found)}-{max(found)}" if found else "-" for found in (steps, positions)]


def _listed(sites: list[Site]) -> str:
    return listed(list(dict.fromkeys(site.shown for site in sites)))


def _plain(site: Site) -> list[Any]:
    # Its parts, not its text: a module's name may look like an address. A standard name needs no model to be read by.
    if site.role:
        return [site.role, None, str(site.every_call).removeprefix(site.role).removeprefix(":") or "output"]
    return [site.path, site.op, f"{site.port}.{site.leaf}" if site.leaf else site.port]


def _site(path: str, op: str | None, port: str) -> Site:
    port, _, leaf = port.partition(".")
    return Site(path, op, None, port, leaf)


def load(path: str | os.PathLike[str]) -> Recording:
    """Open a recording that ``Recording.save`` wrote. No pickle, no model, nothing of the user's code is run.

    Dataclasses, model outputs and other objects come back as ``Loaded`` objects with the same fields, and what a file
    cannot hold as an ``Opaque`` that names it.
    """
    values, about = saving.load(path)
    with saving.understood(path):
        return Recording.of_plain(values, about)

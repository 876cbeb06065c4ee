"""Two recordings side by side: how far apart each site is, and where they first part. No model is needed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from torchhook._recording.address import Site, meant, shown
from torchhook._recording.counterparts import Counterparts, Names
from torchhook._recording.distances import measure, paired, severity, shape
from torchhook._recording.records import Record, Recording
from torchhook._recording.tables import Table, fixed
from torchhook._recording.tolerances import Limits, Tolerance, coarsest
from torchhook._values import tree
from torchhook._values.elements import readable
from torchhook._values.subclasses import is_part
from torchhook._words import and_more, plural
from torchhook.errors import MissingRecordError, suggestion

Status = Literal["same", "differs", "shape", "structure", "only in A", "only in B", "left out"]


@dataclasses.dataclass(frozen=True, repr=False)
class Row:
    """One call of one site in A against its counterpart in B."""

    site: str
    """The address in A, or in B where A has none."""
    other: str
    """The address in B."""
    status: Status
    max_abs: float = math.nan
    relative: float = math.nan
    """The norm of the difference over the norm of the value in A."""
    cosine: float = math.nan
    mismatches: int = 0
    elements: int = 0
    nans: tuple[int, int] = (0, 0)
    dtype: str = "-"
    rtol: float = 0.0
    atol: float = 0.0
    whole: float = math.inf
    """The most that ``relative`` may be, where errors that are as large everywhere are told from rounding."""
    leaf: str = ""
    """Where in a nested value the largest error is."""
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing of A is amiss: what only B has is no difference, nor what B, a program, has no need of."""
        return self.status in ("same", "only in B", "left out")

    @property
    def sqnr(self) -> float:
        """The signal-to-noise ratio in decibels, with A as the signal and the difference as the noise.

        >>> Row("fc", "fc", "differs", relative=0.01).sqnr
        40.0
        """
        if self.relative == 0 or math.isinf(self.relative):
            return math.copysign(math.inf, 1 - self.relative)
        return -20 * math.log10(self.relative) if self.relative == self.relative else math.nan

    def __repr__(self) -> str:  # what one asks first; the rest is there by name
        off = f" by {self.max_abs:.4g} at most, relative {self.relative:.3g}" if self.status == "differs" else ""
        other = "" if self.other == self.site else f" and {self.other!r}"
        return f"<{self.site!r}{other}: {self.status}{off}{f' ({self.note})' * bool(self.note)}>"


class Diff:
    """The rows of a comparison in the order in which A ran. Iterate it, index it by address, print it."""

    def __init__(self, rows: Sequence[Row], title: str = "", notes: Sequence[str] = ()) -> None:
        self.rows: list[Row] = list(rows)
        self.title = title
        self.notes: list[str] = list(notes)

    @property
    def first(self) -> Row | None:
        """The first divergence: of what ran on both sides, or else the first that ran in A only."""
        # What B does not have is often a matter of names, and never shows where values part.
        wrong = [row for row in self.rows if not row.ok]
        return next((row for row in wrong if row.status in ("differs", "shape", "structure")), next(iter(wrong), None))

    @property
    def ok(self) -> bool:
        """Whether every site of A ran in B too and is the same there, but for what a program leaves out."""
        return all(row.ok for row in self.rows)

    @property
    def missing(self) -> list[Row]:
        """What ran on one side only."""
        return [row for row in self.rows if row.status in ("only in A", "only in B", "left out")]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: str | int) -> Row:
        if isinstance(key, int):
            return self.rows[key]
        for row in self.rows:
            if row.site in (key, meant(key)):
                return row
        raise MissingRecordError(f"no site {key!r} in this diff. {suggestion(key, [row.site for row in self])}")

    def data(self) -> dict[str, list[Any]]:
        """The rows as columns, for a plot or a data frame."""
        names = [*(field.name for field in dataclasses.fields(Row)), "sqnr"]
        return {name: [getattr(row, name) for row in self] for name in names}

    def table(self) -> Table:
        first, names = self.first, any(row.other != row.site for row in self)
        rows = []
        for row in self:
            other = [shown(row.other) if row.other != row.site else ""] if names else []
            status = [] if row.status == "same" else [row.status]
            notes = status + ["the first"] * (row is first) + [row.note] * bool(row.note)
            counted = f"{row.mismatches:,} of {row.elements:,}" if row.mismatches else "-"
            numbers = [_short(row.max_abs), _short(row.relative), _decibels(row.sqnr), _cosine(row.cosine), counted]
            rows.append([shown(row.site), *other, *numbers, row.dtype, "; ".join(notes)])
        numbered = [">max error", ">relative", ">SQNR dB", ">cosine", ">mismatches"]
        title = f"{self.title or 'Diff'}: {len(rows)} {plural(len(rows), 'site')}, {self._verdict()}"
        notes = [*self.notes, *self._tolerances()]
        return Table(title, ["site", *["in B"] * names, *numbered, "dtype", ""], rows, notes)

    def _verdict(self) -> str:
        first, wrong = self.first, sum(not row.ok for row in self)
        counts = [(sum(row.status == status for row in self), status) for status in ("only in B", "left out")]
        differ = plural(wrong, "differs", "differ")
        found = f"{wrong} {differ}, the first at {shown(first.site)}" if first else agreement(self) + _largest(self)
        return "; ".join([found, *(f"{count} {status}" for count, status in counts if count)])

    def _tolerances(self) -> list[str]:
        """What was let pass. It grows where values come to a coarser dtype, or where one module has many layers."""
        compared = [row for row in self if row.elements]
        along = [(row.rtol, row.atol, row.whole) for row in compared]
        met = dict.fromkeys(along)
        once = sum(one != two for one, two in itertools.pairwise(along)) < len(met)
        lines = []
        for place, (rtol, atol, whole) in enumerate(met):
            there = [row.site for row, limit in zip(compared, along, strict=True) if limit == (rtol, atol, whole)]
            where = f" from {shown(there[0])} on" if once else f" at {shown(there[0])}{and_more(len(there) - 1)}"
            norm = f", and |a - b| <= {whole:.2g} * |a| in the norm" * (whole < math.inf)
            lines.append(f"tolerated{where * bool(place)}: |a - b| <= {atol:g} + {rtol:g} * max(|a|, rms of a){norm}")
        return lines

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def agreement(rows: Iterable[Row]) -> str:
    """What it means that no row differs: that nothing does, or no more than is tolerated.

    >>> agreement([Row("fc", "fc", "same", 0.01, 0.02, dtype="float32 / bfloat16", rtol=0.2)])
    'all within the tolerance of bfloat16 (0.2)'
    """
    compared = [row for row in rows if row.max_abs > 0]
    if not compared:
        return "all the same"
    dtype = coarsest([name for row in compared for name in re.findall(r"\w+", row.dtype)])
    return f"all within the tolerance{' of ' * bool(dtype)}{dtype} ({max(row.rtol for row in compared):g})"


def _largest(rows: Iterable[Row]) -> str:
    largest = max((row for row in rows if row.relative > 0), key=lambda row: row.relative, default=None)
    return f", the largest error {_short(largest.relative)} at {shown(largest.site)}" if largest else ""


def _short(number: float) -> str:
    return "-" if math.isnan(number) else "0" if number == 0 else f"{number:.2e}"


def _decibels(number: float) -> str:
    return "-" if math.isnan(number) else fixed(number, 1)


def _cosine(number: float) -> str:
    return "-" if math.isnan(number) else fixed(number, 6)


def compare(
    a: Recording,
    b: Recording,
    *,
    names: Names | None = None,
    rtol: Tolerance | None = None,
    atol: Tolerance | None = None,
    extra: bool = True,
    notes: Sequence[str] = (),
    limits: Limits | None = None,
) -> Diff:
    """Compare two recordings call by call; ``extra=False`` passes over what only B has, ``limits`` are in place of
    tolerances by dtype."""
    _refuse_empty("A", a)
    _refuse_empty("B", b)
    counterparts = Counterparts(names, [site.path for site in a.sites], [site.path for site in b.sites])
    counterparts.check_used([Site(r.site.path, r.site.op, r.call, r.site.port) for r in a.records()])
    limits = Limits(rtol, atol) if limits is None else limits
    found = {(record.site, record.call): record for record in b.records()}
    seen: set[tuple[Site, int]] = set()
    rows: list[tuple[tuple[int, int], Row]] = []
    # Where the records of B stand in the order of A: what only B has comes behind the last of them before it.
    reached = {-1: -1}
    for record in a.records():
        wanted = counterparts.of(record.site.but(call=record.call))
        if wanted is None:
            # Left out on both sides: B's site of this name is not to be listed as its own.
            seen.add((record.site, record.call))
            continue
        site, call = _canonical(b, wanted), wanted.first_call
        other = found.get((site, call))
        if other is None:
            row = Row(_address(a, record), str(wanted.every_call), "only in A", dtype=record.dtype)
        else:
            seen.add((site, call))
            reached[other.order] = record.order
            row = _row(_address(a, record), _address(b, other), record, other, limits)
        rows.append(((record.order, -1), row))
    if extra:
        after = -1
        for record in b.records():
            after = reached.get(record.order, after)
            if (record.site, record.call) not in seen:
                address = _address(b, record)
                rows.append(((after, record.order), Row(address, address, "only in B", dtype=record.dtype)))
    if not any(row.status != "only in B" for _, row in rows):
        # Of nothing, everything would be the same.
        raise MissingRecordError("names leaves every site of A out: nothing is left to compare.")
    rows.sort(key=lambda row: row[0])
    if any(_PART in row.note for _, row in rows):
        notes = [
            *notes,
            f"{_PART}: of a DTensor, what lies on this rank was compared; record with gather='full' for all",
        ]
    return Diff([row for _, row in rows], f"Diff of {a.model_name or 'A'} and {b.model_name or 'B'}", notes)


def _refuse_empty(side: str, recording: Recording) -> None:
    # As with names that leave everything out.
    if len(recording):
        return
    of = f" of {recording.model_name}" if recording.model_name else ""
    for address, cause in recording.missing.items():
        raise MissingRecordError(f"recording {side}{of} is empty: {shown(address)!r} never ran: {cause}")
    raise MissingRecordError(
        f"recording {side}{of} is empty: nothing that it records ran while it was open. Call the model inside the "
        "with block of th.capture, or take the recording that th.run returns, and compare afterwards."
    )


def _canonical(recording: Recording, site: Site) -> Site:
    """The site under the name that the recording uses: a shared module has several."""
    return recording.records(site.every_call)[0].site if site.every_call in recording else site.every_call


def _address(recording: Recording, record: Record) -> str:
    several = len(recording.records(record.site)) > 1
    return str(record.site.but(call=record.call) if several else record.site)


_PART = "this rank's part"

# -- one row --------------------------------------------------------------------------------------


def _row(site: str, other: str, a: Record, b: Record, limits: Limits) -> Row:
    limit = limits.meet(b.site.path, *tree.tensors(a.value), *tree.tensors(b.value))
    dtype = a.dtype if a.dtype == b.dtype else f"{a.dtype} / {b.dtype}"
    pairs, structure = paired(a.value, b.value)
    status: Status = "structure" if structure is not None and not pairs else "same"
    notes = [] if structure is None else [structure]
    worst, leaf, mismatches, is_off, elements, nans = None, "", 0, False, 0, (0, 0)
    for address, one, two in pairs:
        if shape(one) != shape(two):
            status = "shape"
            notes.append(f"{address + ': ' if address else ''}{tree.describe(one)} in A, {tree.describe(two)} in B")
            continue
        if not (readable(one) and readable(two)):
            notes.append(f"{address + ': ' if address else ''}without numbers: only the shape was compared")
            continue
        numbers = measure(one, two, *limit)
        is_off |= numbers.is_off
        mismatches, elements = mismatches + numbers.mismatches, elements + one.numel()
        nans = (nans[0] + numbers.nans[0], nans[1] + numbers.nans[1])
        if worst is None or severity(numbers) > severity(worst):
            worst, leaf = numbers, address
    if (mismatches or is_off) and status == "same":
        status = "differs"
        notes += ["as a whole, more than rounding makes"] * (not mismatches)
    if any(is_part(tensor) for value in (a.value, b.value) for tensor in tree.tensors(value)):
        notes.append(_PART)
    if nans != (0, 0):
        notes.append(f"NaN: {nans[0]} in A, {nans[1]} in B")
    if status == "differs" and leaf:
        notes.append(f"at {leaf!r}")
    about = {} if worst is None else {"max_abs": worst.max_abs, "relative": worst.relative, "cosine": worst.cosine}
    return Row(
        site,
        other,
        status,
        **about,
        mismatches=mismatches,
        elements=elements,
        nans=nans,
        dtype=dtype,
        **limit._asdict(),
        leaf=leaf,
        note="; ".join(notes),
    )

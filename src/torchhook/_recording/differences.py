"""Two recordings side by side: how far apart each site is, and where they first part. No model is needed.

An element differs when it is further away than ``atol + rtol * max(|a|, rms)``, where ``rms`` is the root mean square
of the value in A: rounding errors grow with the terms of a sum, not with what is left of them when they cancel. The
tolerances are those of the coarsest dtype seen so far on either side, since precision once lost does not come back;
the defaults are what eighteen to hundred layers of sound models make of their rounding errors, and little more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torchhook._recording.address import Site, meant, shown
from torchhook._recording.counterparts import Counterparts, Names
from torchhook._recording.records import Record, Recording
from torchhook._recording.tables import Table
from torchhook._values import tree
from torchhook._values.subclasses import local
from torchhook.errors import MissingRecordError, suggestion

Status = Literal["same", "differs", "shape", "structure", "only in A", "only in B"]
Tolerance: TypeAlias = "float | Mapping[torch.dtype, float]"

RTOL: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2.5e-2,
    torch.bfloat16: 2e-1,
    torch.qint8: 2e-1,
    torch.quint8: 2e-1,
}
ATOL: dict[torch.dtype, float] = {
    torch.float64: 1e-14,
    torch.float32: 1e-8,
    torch.float16: 1e-5,
    torch.bfloat16: 1e-5,
    torch.qint8: 1e-5,
    torch.quint8: 1e-5,
}
_COMPLEX = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}


@dataclasses.dataclass(frozen=True)
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
    leaf: str = ""
    """Where in a nested value the largest error is."""
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "same"


class Diff:
    """The rows of a comparison in the order in which A ran. Iterate it, index it by address, print it."""

    def __init__(self, rows: Sequence[Row], title: str = "", notes: Sequence[str] = ()) -> None:
        self.rows = list(rows)
        self.title = title
        self.notes = list(notes)

    @property
    def first(self) -> Row | None:
        """The first divergence: of what ran on both sides, or else the first that ran on one side only."""
        # What only one side has is often a matter of names, and never shows where values part.
        wrong = [row for row in self.rows if not row.ok]
        return next((row for row in wrong if row.status in ("differs", "shape", "structure")), next(iter(wrong), None))

    @property
    def ok(self) -> bool:
        """Whether every site ran on both sides and is the same there."""
        return all(row.ok for row in self.rows)

    @property
    def missing(self) -> list[Row]:
        """What ran on one side only."""
        return [row for row in self.rows if row.status in ("only in A", "only in B")]

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
        return {field.name: [getattr(row, field.name) for row in self] for field in dataclasses.fields(Row)}

    def table(self) -> Table:
        first, names = self.first, any(row.other != row.site for row in self)
        rows = []
        for row in self:
            other = [shown(row.other) if row.other != row.site else ""] if names else []
            notes = [row.status] * (not row.ok) + ["the first"] * (row is first) + [row.note] * bool(row.note)
            counted = f"{row.mismatches:,} of {row.elements:,}" if row.mismatches else "-"
            numbers = [_short(row.max_abs), _short(row.relative), _cosine(row.cosine), counted, row.dtype]
            rows.append([shown(row.site), *other, *numbers, "; ".join(notes)])
        wrong = sum(not row.ok for row in self)
        verdict = (
            "all the same" if first is None else f"{wrong} differ{'s' * (wrong == 1)}, the first at {shown(first.site)}"
        )
        columns = ["site", *["in B"] * names, ">max error", ">relative", ">cosine", ">mismatches", "dtype", ""]
        title = f"{self.title or 'Diff'}: {len(rows)} site{'s' * (len(rows) != 1)}, {verdict}"
        return Table(title, columns, rows, self.notes)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _short(number: float) -> str:
    return "-" if math.isnan(number) else "0" if number == 0 else f"{number:.2e}"


def _cosine(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.6f}"


def compare(
    a: Recording,
    b: Recording,
    *,
    names: Names | None = None,
    rtol: Tolerance | None = None,
    atol: Tolerance | None = None,
    extra: bool = True,
    notes: Sequence[str] = (),
) -> Diff:
    """Compare two recordings call by call; ``extra=False`` passes over what only B has."""
    _refuse_empty("A", a)
    _refuse_empty("B", b)
    counterparts = Counterparts(names, [site.path for site in a.sites], [site.path for site in b.sites])
    counterparts.check_used([Site(r.site.path, r.site.op, r.call, r.site.port) for r in a.records()])
    limits = _Limits(rtol, atol)
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
        site, call = _canonical(b, wanted), wanted.call or 0
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
    rows.sort(key=lambda row: row[0])
    return Diff([row for _, row in rows], f"Diff of {a.model_name or 'A'} and {b.model_name or 'B'}", notes)


def _refuse_empty(side: str, recording: Recording) -> None:
    # Of nothing, everything would be the same.
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


# -- one row --------------------------------------------------------------------------------------


class _Limits:
    """Tolerances by dtype, of the coarsest dtype so far."""

    def __init__(self, rtol: Tolerance | None, atol: Tolerance | None) -> None:
        self._rtol, self._atol = _table(RTOL, rtol, "rtol"), _table(ATOL, atol, "atol")
        self._coarsest = torch.float64

    def meet(self, *tensors: Tensor) -> tuple[float, float]:
        for tensor in tensors:
            dtype = _COMPLEX.get(tensor.dtype, tensor.dtype)
            if (dtype.is_floating_point or tensor.is_quantized) and _grain(dtype) > _grain(self._coarsest):
                self._coarsest = dtype
        return self._of(self._rtol), self._of(self._atol)

    def _of(self, table: Mapping[torch.dtype, float]) -> float:
        return table.get(self._coarsest, max(table.values()) * 2.5)  # the 8-bit floats


def _table(known: dict[torch.dtype, float], asked: Tolerance | None, name: str) -> dict[torch.dtype, float]:
    if asked is None:
        return known
    if isinstance(asked, Mapping):
        return {**known, **asked}
    if not asked >= 0:
        raise ValueError(f"{name}={asked!r}: a tolerance is a number that is not negative, or a dict of them by dtype.")
    # Also for the 8-bit floats, which would get more than was asked for: they are not in the tables.
    return dict.fromkeys(known, float(asked)) | {torch.float8_e4m3fn: float(asked), torch.float8_e5m2: float(asked)}


def _grain(dtype: torch.dtype) -> float:
    # Quantized: coarser than bfloat16 (2**-7), finer than the 8-bit floats (2**-3, 2**-2).
    return torch.finfo(dtype).eps if dtype.is_floating_point else 2.0**-6


class _Numbers(NamedTuple):
    max_abs: float
    relative: float
    cosine: float
    mismatches: int
    nans: tuple[int, int]


def _row(site: str, other: str, a: Record, b: Record, limits: _Limits) -> Row:
    rtol, atol = limits.meet(*tree.tensors(a.value), *tree.tensors(b.value))
    dtype = a.dtype if a.dtype == b.dtype else f"{a.dtype} / {b.dtype}"
    pairs, structure = _pairs(a.value, b.value)
    status: Status = "structure" if structure is not None and not pairs else "same"
    notes = [] if structure is None else [structure]
    worst, leaf, mismatches, elements, nans = None, "", 0, 0, (0, 0)
    for address, one, two in pairs:
        if _shape(one) != _shape(two):
            status = "shape"
            notes.append(f"{address + ': ' if address else ''}{tree.describe(one)} in A, {tree.describe(two)} in B")
            continue
        numbers = _measure(one, two, rtol, atol)
        mismatches, elements = mismatches + numbers.mismatches, elements + one.numel()
        nans = (nans[0] + numbers.nans[0], nans[1] + numbers.nans[1])
        if worst is None or _severity(numbers) > _severity(worst):
            worst, leaf = numbers, address
    if mismatches and status == "same":
        status = "differs"
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
        rtol=rtol,
        atol=atol,
        leaf=leaf,
        note="; ".join(notes),
    )


def _severity(numbers: _Numbers) -> tuple[bool, bool, float]:
    # A NaN is worse than any number, but no comparison would say so.
    return numbers.mismatches > 0, math.isnan(numbers.max_abs), numbers.relative


def _pairs(a: Any, b: Any) -> tuple[list[tuple[str, Tensor, Tensor]], str | None]:
    """The tensors of two values, pair by pair, and a sentence where the values are not built alike.

    A tuple against a named output is no divergence when the tensors in them pair up: ports do that.
    """
    ones, twos = ({address: _as_tensor(leaf) for address, leaf in tree.leaves(value)} for value in (a, b))
    tensors_a = {address: t for address, t in ones.items() if isinstance(t, Tensor)}
    tensors_b = {address: t for address, t in twos.items() if isinstance(t, Tensor)}
    if tensors_a.keys() == tensors_b.keys():
        if not tensors_a and (odd := _plain_difference(ones, twos)):
            return [], odd
        return [(address, t, tensors_b[address]) for address, t in tensors_a.items()], None
    sentence = f"{tree.describe(a)} in A, {tree.describe(b)} in B"
    if len(tensors_a) != len(tensors_b):
        return [], sentence
    both = zip(tensors_a.items(), tensors_b.values(), strict=True)
    pairs = [(address, one, two) for (address, one), two in both]
    return (pairs if all(_shape(one) == _shape(two) for _, one, two in pairs) else []), sentence


_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def _plain_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Where values without any tensor differ, as far as they can be compared."""
    for address in a.keys() | b.keys():
        one, two = a.get(address), b.get(address)
        nan = isinstance(one, float) and isinstance(two, float) and one != one and two != two
        if isinstance(one, _PLAIN) and isinstance(two, _PLAIN) and one != two and not nan:
            return f"{one!r} in A, {two!r} in B"
    return None


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub":
        return torch.from_numpy(np.ascontiguousarray(leaf))
    return local(leaf) if isinstance(leaf, Tensor) else leaf


def _shape(tensor: Tensor) -> Any:
    return [part.shape for part in tensor.unbind()] if tensor.is_nested else tensor.shape


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_nested:
        return torch.cat([_flat(part) for part in tensor.unbind()])
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        # view_as_real refuses a conjugate that is only marked as one.
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1)


def _measure(a: Tensor, b: Tensor, rtol: float, atol: float) -> _Numbers:
    if a.device.type == "meta" or b.device.type == "meta" or not a.numel():
        return _Numbers(0.0, 0.0, 1.0, 0, (0, 0))
    one, two = _flat(a), _flat(b)
    home = torch.device("cpu") if one.device.type == "mps" else one.device  # which has no double precision
    one, two = one.to(home), two.to(home)
    # Before they are doubles, in which integers beyond 2**53 fall together.
    same = one == two
    exact = not (one.is_floating_point() or two.is_floating_point())
    one, two = one.double(), two.double()
    same |= one.isnan() & two.isnan()
    delta = torch.where(same, 0.0, (one - two).abs())
    finite = one.isfinite()
    rms = torch.where(finite, one, 0.0).square().sum().div(finite.sum().clamp(min=1)).sqrt()
    # An infinity makes its own limit infinite, and anything would be near it.
    near = (delta <= atol + rtol * torch.maximum(one.abs(), rms)) & finite & two.isfinite()
    wrong = ~same if exact else ~same & ~near
    agreed = same & ~finite  # the same infinities and NaNs on both sides say nothing about an angle
    left, right = one.masked_fill(agreed, 0.0), two.masked_fill(agreed, 0.0)
    sizes = left.norm(), right.norm()
    # One wait for the device, not five.
    numbers = torch.stack([delta.max(), delta.norm(), *sizes, left @ right]).tolist()
    largest, gap, norm_a, norm_b, product = numbers
    relative = gap / norm_a if norm_a else 0.0 if gap == 0 else math.inf
    lengths = norm_a * norm_b
    cosine = product / lengths if lengths else float(norm_a == norm_b)
    cosine = cosine if math.isnan(cosine) else min(1.0, max(-1.0, cosine))
    nans = int(one.isnan().sum()), int(two.isnan().sum())
    return _Numbers(largest, relative, cosine, int(wrong.sum()), nans)

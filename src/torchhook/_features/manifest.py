"""The manifest of a store, ``store.json``: what was run, on what, and how rows are cut into shards."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import platform
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from torchhook._features import differences, formats
from torchhook._recording.address import MODEL
from torchhook._recording.tensor_file import BY_NAME, DTYPES
from torchhook._version import __version__
from torchhook.errors import ExtractError

NAME = "store.json"
IDS, LABELS = ":ids", ":labels"  # no addresses of sites: these are no ports
# Not row_bytes and about: they may differ between runs that write the same bytes.
_COMPARED = {
    "sites": "sites",
    "model": "model",
    "code": "code",
    "transform": "transform",
    "input_fn": "input_fn",
    "lengths": "lengths",
    "dtype": "dtype",
    "autocast": "autocast",
    "columns": "columns",
    "rows": "rows",
    "rows_per_shard": "rows per shard",
    "source": "kind of data",
    "data": "data",
}
_OF_CODE = ("transform", "input_fn", "lengths")


def shown(name: str) -> str:
    """The name of a column for people: ids and labels without their mark, the model itself with a name.

    >>> shown("layer4"), shown(":ids"), shown(""), shown("[values]")
    ('layer4', 'ids', '(model)', '(model)[values]')
    """
    if name in (IDS, LABELS):
        return name[1:]
    return MODEL + name if not name or name[0] in "/#:[" else name


def stored(name: str) -> str:
    """The name that a column has in the shards, however the model itself was written.

    >>> stored("(model)"), stored("(model):input"), stored("layer4")
    ('', ':input', 'layer4')
    """
    return re.sub(r"^\(model\)(?=$|[/#:\[])", "", name)


@dataclasses.dataclass(frozen=True)
class ColumnSpec:
    """What a column holds, one value per row: the features of a site, ids, or labels."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one row; of one item of a row where rows have different lengths."""
    ragged: bool = False
    """Rows of different lengths: stored end to end, with offsets."""
    text: bool = False
    """The rows are strings, as UTF-8 bytes."""

    @property
    def offsets(self) -> str:
        return f"{self.name}:offsets"

    @property
    def item_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "dtype": DTYPES[self.dtype], "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ColumnSpec:
        return cls(**{**data, "dtype": BY_NAME[data["dtype"]], "shape": tuple(data["shape"])})

    @property
    def row(self) -> str:
        """Dtype and shape of a row, for people; an ellipsis where rows have different lengths."""
        if self.text:
            return "text"
        sizes = ["…"] * self.ragged + [str(size) for size in self.shape]
        return f"{DTYPES[self.dtype]}({', '.join(sizes)})"

    def __str__(self) -> str:
        return f"{shown(self.name)} {self.row}"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything that decides the bytes of a store."""

    columns: tuple[ColumnSpec, ...]
    rows: int | None
    """``None`` until an iterable without a length has come to its end."""
    rows_per_shard: int
    sites: tuple[str, ...]
    model: str
    transform: str
    input_fn: str = "None"
    lengths: str = "None"
    dtype: str | None = None
    autocast: str | None = None
    source: str = "rows"
    """``rows`` (can be reached by number) or ``stream`` (only in order)."""
    row_bytes: int = 0
    """Measured on the first batch: an estimate where rows have different lengths."""
    code: dict[str, str] = dataclasses.field(default_factory=dict)
    """What the model's classes and the functions are made of, and the plain values that they use, by name."""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What is known of the rows: digests of files, ids and contents, and how they are prepared."""
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For people: batch size, versions. Not compared."""
    version: int = dataclasses.field(default=formats.VERSION, compare=False)
    """Of the format; the shards of the first one do not say which run they belong to."""

    def __getitem__(self, name: str) -> ColumnSpec:
        return next(column for column in self.columns if column.name == name)

    @functools.cached_property
    def parts(self) -> dict[str, str]:
        """A digest of each thing that is compared, by its word: what shards of two runs differ in."""
        found = {}
        for field, word in _COMPARED.items():
            value = getattr(self, field)
            if field == "rows" and self.source == "stream":
                value = None  # known at the end of a stream, when its shards are written
            if field == "columns":
                value = [column.to_json() for column in self.columns]
            found[word] = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
        return found

    @functools.cached_property
    def plan(self) -> str | None:
        """The digest that every shard of this run has in its header; ``None`` for a store of the first format."""
        if self.version == 1:
            return None
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def shards(self) -> int | None:
        return None if self.rows is None else -(-self.rows // self.rows_per_shard)

    def span(self, shard: int) -> tuple[int, int]:
        """First row of a shard, and the one after its last."""
        first = shard * self.rows_per_shard
        last = first + self.rows_per_shard
        return first, last if self.rows is None else min(last, self.rows)

    def missing(self, there: Collection[int]) -> list[int] | None:
        """The shards that are not ``there``; ``None`` while nobody knows how many there will be."""
        return None if self.shards is None else [shard for shard in range(self.shards) if shard not in there]

    def rows_in(self, shards: Iterable[int]) -> int:
        """How many rows some shards have."""
        return sum(last - first for first, last in map(self.span, shards))

    def to_json(self) -> str:
        # Not asdict: it would take the columns apart too, and JSON knows no dtypes.
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["columns"] = [column.to_json() for column in self.columns]
        return json.dumps(formats.sealed({"format": formats.FORMAT, **data}), indent=1)

    @classmethod
    def from_json(cls, text: bytes | str, where: str) -> Manifest:
        try:
            data = formats.current(json.loads(text))
            data["columns"] = tuple(ColumnSpec.from_json(column) for column in data["columns"])
            return cls(**{**data, "sites": tuple(data["sites"])})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ExtractError(
                f"{where}/{NAME} is not the manifest of a feature store: {error}. Take it from a backup, update "
                "TorchHook if a later one wrote it, or begin again with resume=False."
            ) from error

    def differences(self, other: Manifest) -> list[str]:
        """What differs from ``other``, as sentences; empty when both would write the same bytes."""
        return list(self._differences(other))

    def _differences(self, other: Manifest) -> Iterator[str]:
        same_python = self._python == other._python
        for field, word in _COMPARED.items():
            mine, theirs = getattr(self, field), getattr(other, field)
            if field == "code":
                yield from differences.code(mine, theirs, same_python)
                continue
            if field == "data":
                yield from differences.data(mine, theirs, other.about.get("repaired", {}))
                continue
            if field == "model":
                yield from differences.model(
                    mine, theirs, self.about.get("tensors", {}), other.about.get("tensors", {})
                )
                continue
            if field == "columns":
                mine, theirs = [str(column) for column in mine], [str(column) for column in theirs]
            if field == "sites":
                mine, theirs = [shown(site) for site in mine], [shown(site) for site in theirs]
            # Where a stream ends is known at its end: check_rows compares it then.
            if field == "rows" and None in (mine, theirs) and self.source == other.source == "stream":
                continue
            yield from differences.texts(word, mine, theirs, same_python or field not in _OF_CODE)

    @property
    def _python(self) -> str:
        """The version of Python, as far as it decides what code looks like."""
        return ".".join(str(self.about.get("versions", {}).get("python", "")).split(".")[:2])

    def accepting(self, data: Mapping[str, Any], rows: Collection[int]) -> Manifest:
        """The same, where the data of some rows may have been repaired since; the plan stays, and so do the shards."""
        found = differences.repaired(data, self.data, rows)
        before = self.about.get("repaired", {})
        merged = {name: {**before.get(name, {}), **found.get(name, {})} for name in {**before, **found}}
        return self if merged == before else dataclasses.replace(self, about={**self.about, "repaired": merged})

    # -- shards ---------------------------------------------------------------------------------

    @property
    def marks(self) -> dict[str, str]:
        """What the header of a shard says of the run that it belongs to."""
        return {} if self.plan is None else {"plan": self.plan, "parts": json.dumps(self.parts)}

    def is_own(self, plan: str | None) -> bool:
        """Whether a shard with this plan belongs to the same run; those of the first format do not say."""
        return self.plan is None or plan == self.plan

    def strangeness(self, metadata: Mapping[str, str]) -> str | None:
        """Why a shard with this in its header does not belong to the run, or ``None`` if it does."""
        if self.is_own(metadata.get("plan")):
            return None
        try:
            theirs = dict(json.loads(metadata.get("parts", "{}")))
        except (ValueError, TypeError):
            theirs = {}
        words = [word for word, digest in self.parts.items() if theirs.get(word, digest) != digest]
        return f"of another run ({'another ' + ', '.join(words) if words else 'which it does not say'})"


def versions() -> dict[str, str]:
    return {"torchhook": __version__, "torch": str(torch.__version__), "python": platform.python_version()}

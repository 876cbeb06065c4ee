"""The plan of a store, ``store.json``: what was run, on what, and how rows are cut into shards.

The first writer creates it; everyone who comes later must have the same one, or is told the difference.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterator
from typing import Any

import torch

from torchhook._features import shards
from torchhook._features.storage import Place
from torchhook._recording.tensor_file import DTYPES
from torchhook._version import __version__
from torchhook.errors import ExtractError, StoreMismatchError

NAME = "store.json"
IDS, LABELS = ":ids", ":labels"  # no address of a layer: these are no ports
_FORMAT = "torchhook-features"
_COMPARED = {
    "layers": "layers",
    "model": "model",
    "transform": "transform",
    "input_fn": "input_fn",
    "lengths": "lengths",
    "dtype": "dtype",
    "autocast": "autocast",
    "columns": "columns",
    "rows": "rows",
    "rows_per_shard": "rows per shard",
    "source": "data",
}


@dataclasses.dataclass(frozen=True)
class Column:
    """One value per row: features of a layer, ids, or labels."""

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
    def from_json(cls, data: dict[str, Any]) -> Column:
        return cls(**{**data, "dtype": shards.BY_NAME[data["dtype"]], "shape": tuple(data["shape"])})

    def __str__(self) -> str:
        if self.text:
            return f"{self.name} text"
        sizes = ["…"] * self.ragged + [str(size) for size in self.shape]
        return f"{self.name} {DTYPES[self.dtype]}({', '.join(sizes)})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that decides the bytes of a store."""

    columns: tuple[Column, ...]
    rows: int | None
    """``None`` until an iterable without a length has come to its end."""
    rows_per_shard: int
    layers: tuple[str, ...]
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
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For people: batch size, versions. Not compared."""

    def __getitem__(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    @property
    def shards(self) -> int | None:
        return None if self.rows is None else -(-self.rows // self.rows_per_shard)

    def span(self, shard: int) -> tuple[int, int]:
        """First row of a shard, and the one after its last."""
        first = shard * self.rows_per_shard
        last = first + self.rows_per_shard
        return first, last if self.rows is None else min(last, self.rows)

    def to_json(self) -> str:
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["columns"] = [column.to_json() for column in self.columns]
        return json.dumps({"format": _FORMAT, "version": 1, **data}, indent=1)

    @classmethod
    def from_json(cls, text: bytes | str, where: str) -> Plan:
        try:
            data = json.loads(text)
            if data.pop("format") != _FORMAT or data.pop("version") != 1:
                raise ValueError("another format or version")
            data["columns"] = tuple(Column.from_json(column) for column in data["columns"])
            return cls(**{**data, "layers": tuple(data["layers"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ExtractError(f"{where}/{NAME} is not the plan of a feature store: {error}.") from error

    def differences(self, other: Plan) -> list[str]:
        """What differs from ``other``, as sentences; empty when both would write the same bytes."""
        return list(self._differences(other))

    def _differences(self, other: Plan) -> Iterator[str]:
        for field, word in _COMPARED.items():
            mine, theirs = getattr(self, field), getattr(other, field)
            if field == "columns":
                mine, theirs = [str(c) for c in mine], [str(c) for c in theirs]
            if field == "rows" and None in (mine, theirs) and self.source == other.source == "stream":
                continue
            if mine != theirs:
                yield f"{word}: the store has {_short(theirs)}, this run {_short(mine)}"


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
    return text if len(text) <= 300 else text[:297] + "…"


def load(place: Place) -> Plan | None:
    """The plan of the store, if there is one."""
    try:
        return Plan.from_json(place.read(NAME), place.url)
    except FileNotFoundError:
        return None


def agree(place: Place, plan: Plan) -> Plan:
    """Make ``plan`` the store's own, or find out that the store has the same one already."""
    if place.create(NAME, [plan.to_json().encode()]):
        return plan
    there = load(place)
    assert there is not None
    differences = plan.differences(there)
    if differences:
        raise StoreMismatchError(
            f"{place.url} holds the features of another run:\n  "
            + "\n  ".join(differences)
            + "\nExtract to another path, or pass resume=False to begin again there."
        )
    return there


def versions() -> dict[str, str]:
    return {"torchhook": __version__, "torch": str(torch.__version__), "python": platform.python_version()}

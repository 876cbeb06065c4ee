"""How many rows a value has: one entry for each row of its batch, or it is refused."""

from __future__ import annotations

from torch import Tensor

from torchhook._features.api import shown
from torchhook._words import counted
from torchhook.errors import ExtractError
from torchhook.transforms import Rows

# What to do is the same for all who ask: a store, a stream, statistics.
_ROWS_HINT = "Dim 0 must be the rows; a transform can choose or reorder what is kept."


def check_number_of_rows(name: str, value: Tensor | Rows, rows: int, where: str = "") -> None:
    """Refuse a value that has not one entry for each row."""
    if isinstance(value, Tensor) and not value.dim():
        raise ExtractError(
            f"{shown(name)!r} is a single number for a batch of {rows} rows, as a loss is. {where} Choose another "
            "site, or of several values those that have rows, with transforms.pick."
        )
    if len(value) != rows:
        raise ExtractError(f"{shown(name)!r}: {counted(len(value), 'row')} for a batch of {rows}. {where} {_ROWS_HINT}")

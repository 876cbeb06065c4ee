"""How the programs of a kernel share the elements of a tensor: worked out once for all tensors that are alike."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

_COLUMNS = (64, 256, 1024)  # each is compiled by itself
_ALIGNED, _ALIGNED_FLAGS = 2, 16  # norms and flags in 16 bytes: for other addresses, Triton would compile once more


class Layout(NamedTuple):
    """How programs share the elements of a tensor."""

    rows: int
    rows_each: int
    length: int
    """The elements of a row."""
    channels: int
    tile: tuple[int, int]
    units: int
    """Whether they are not asked for (0), or one or several rows are a unit's (1), or a column is (2)."""

    @property
    def programs(self) -> int:
        return -(-self.rows // self.rows_each)


def flat_layout(numel: int, most: int, tile: int) -> Layout:
    """One row for each program.

    >>> flat_layout(5000, 100, 2048)
    Layout(rows=3, rows_each=1, length=2048, channels=1, tile=(1, 2048), units=0)
    """
    each = -(-numel // min(most, -(-numel // tile)))
    length = -(-each // tile) * tile
    return Layout(-(-numel // length), 1, length, 1, (1, tile), 0)


def unit_layout(shape: tuple[int, ...], unit: int, most: int, tile: int) -> Layout:
    """Rows or columns that belong to units, where dim ``unit`` of a tensor without gaps tells them apart.

    >>> unit_layout((2, 3, 100), 1, 100, 2048)
    Layout(rows=6, rows_each=6, length=100, channels=3, tile=(8, 256), units=1)
    """
    channels, inner, outer = shape[unit], math.prod(shape[unit + 1 :]), math.prod(shape[:unit])
    rows, length, units = (outer * channels, inner, 1) if inner > 1 else (outer, channels, 2)
    columns = next((size for size in _COLUMNS if size >= length), _COLUMNS[-1])
    together = tile // columns
    each = -(-rows // min(most, max(1, rows * length // tile)))
    each = -(-each // together) * together if each > together else each
    return Layout(rows, each, length, channels, (together, columns), units)


class Plan:
    """How tensors of one dtype, shape and order are looked at: worked out once, for all steps."""

    __slots__ = ("aligned", "arguments", "constants", "flags", "launch", "programs", "size", "slots", "units", "whole")

    def __init__(self, layout: Layout, size: int, whole: bool) -> None:
        self.size, self.programs, self.whole = size, layout.programs, whole
        self.units = layout.channels if layout.units else 0
        # What is taken of the buffers.
        self.slots, self.flags = _aligned(self.programs, 1 if whole else _ALIGNED), _aligned(self.units, _ALIGNED_FLAGS)
        rows, columns = layout.tile
        self.arguments = size, layout.rows, layout.rows_each, layout.length, layout.channels
        self.constants = {"ROWS": rows, "COLUMNS": columns, "WHOLE": whole, "UNITS": layout.units}
        self.launch: Any = None
        """The compiled kernel, once it was launched, for tensors whose address is aligned as that one's was."""
        self.aligned = True


def _aligned(number: int, by: int) -> int:
    return -(-number // by) * by


Plans = dict[Any, Plan | None]
"""By dtype, shape, strides and dim of the units; ``None`` where the elements have to be copied first."""

"""Statistics of many tensors in rows of one buffer on their device, filled by one kernel launch for each tensor.

Where Triton is missing or does not give the right answer for a small tensor, there are no such rows, and statistics are
taken by torch's own operations.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchhook import _torch
from torchhook._values.elements import flatten
from torchhook._values.subclasses import local

READ = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})  # by the kernel, as they are
_FIELDS = 8
_MOST = 1 << 29  # elements: what a thread counts of them fits into 16 bits
_FEWEST = 64  # programs, for a large tensor
_COLUMNS = (64, 256, 1024)  # each is compiled by itself
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}  # the second said, because Triton warns where it is not
FIELDS = ("mean", "variance", "least", "greatest", "nonzeros", "nans")


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


class Row(NamedTuple):
    """Where the slots of a tensor are, how many there are, and where the flags of its units are."""

    slot: int
    slots: int
    live: int = 0
    units: int = 0

    def flags(self, live: Tensor) -> Tensor:
        """Which of its units live, of the flags of all."""
        return live[self.live : self.live + self.units]


class Rows:
    """What is noted of the tensors of one device in one step."""

    def __init__(self, device: torch.device, room: tuple[int, int, int] = (0, 0, 0)) -> None:
        from torchhook._watch import kernels

        self._kernels: Any = kernels
        self._device = device
        # As many programs as run at once: 46 registers of a thread for a tensor without units, up to 80 for one with.
        processors = _processors(device)
        self._flat, self._by_unit = max(5 * processors, _FEWEST), max(3 * processors, _FEWEST)
        self._whole = _Buffer(_FIELDS, 1, torch.float64, device, room[0])
        self._norms = _Buffer(1, 2, torch.float64, device, room[1])
        self._live = _Buffer(1, 16, torch.uint8, device, room[2])
        self._turn = threading.Lock()  # gradients are noted from autograd's threads

    @property
    def room(self) -> tuple[int, int, int]:
        """How much was needed, for the next step to ask for at once."""
        return self._whole.used, self._norms.used, self._live.used

    def norm(self, tensor: Tensor) -> Row:
        """Look at a tensor's size only."""
        dense, _ = in_memory(tensor)
        return self._look(dense, flat_layout(dense.numel(), self._flat, self._kernels.TILE), self._norms)

    def statistics(self, tensor: Tensor, unit: int | None = None) -> Row:
        """Look at all of a tensor, and at which units of a dim are anything but zero somewhere."""
        dense, order = in_memory(tensor)
        tile = self._kernels.TILE
        if unit is None or order is None:
            return self._look(dense, flat_layout(dense.numel(), self._flat, tile), self._whole)
        shape = tuple(tensor.shape[dim] for dim in order)
        layout = unit_layout(shape, order.index(unit), self._by_unit, tile)
        if 4 * layout.programs < min(self._by_unit, dense.numel() // tile):  # few long rows
            layout = flat_layout(dense.numel(), self._flat, tile)
        return self._look(dense, layout, self._whole)

    def _look(self, dense: Tensor, layout: Layout, buffer: _Buffer) -> Row:
        with self._turn:
            slots, slot = buffer.take(layout.programs)
            live, flag = self._live.take(layout.channels) if layout.units else (slots, 0)
        arguments = (dense, slots, live, dense.numel(), layout.rows, layout.rows_each, layout.length, layout.channels)
        rows, columns = layout.tile
        constants = {"ROWS": rows, "COLUMNS": columns, "WHOLE": buffer is self._whole, "UNITS": layout.units}
        with _current(self._device):
            self._kernels.look[(layout.programs,)](*arguments, **constants, **_OPTIONS)
        return Row(slot, layout.programs, flag, layout.channels if layout.units else 0)

    def sent(self) -> list[Tensor]:
        """The buffers as bytes, each to be given to ``read`` again: of statistics, norms and units."""
        return [buffer.bytes() for buffer in (self._whole, self._norms, self._live)]

    @staticmethod
    def read(found: list[Tensor]) -> tuple[NDArray[Any], NDArray[Any], Tensor]:
        """What came over: slots of statistics, slots of norms, and a flag for each unit."""
        whole, norms = (part.view(torch.float64).numpy() for part in found[:2])
        return whole.reshape(-1, _FIELDS), norms, found[2].bool()


class _Buffer:
    """Memory that grows; what was handed out stays where it is."""

    # Every address is a multiple of 16 bytes: for others, Triton would compile the kernel once more.
    def __init__(self, width: int, aligned: int, dtype: torch.dtype, device: torch.device, room: int) -> None:
        self._width, self._aligned, self._dtype, self._device = width, aligned, dtype, device
        self._full: list[Tensor] = []
        self._now = self._new(room)
        self._start = self.used = 0

    def _new(self, room: int) -> Tensor:
        # Flags are only ever set, and gaps between norms are added to them.
        return torch.zeros(room * self._width, dtype=self._dtype, device=self._device)

    def take(self, number: int) -> tuple[Tensor, int]:
        """Room for so many entries, and the number of the first."""
        at, number = self.used - self._start, -(-number // self._aligned) * self._aligned
        if (at + number) * self._width > self._now.numel():
            self._full.append(self._now[: at * self._width])
            self._now, self._start, at = self._new(max(number, 2 * self.used, 1024)), self.used, 0
        self.used += number
        return self._now[at * self._width :], self.used - number

    def bytes(self) -> Tensor:
        parts = [*self._full, self._now[: (self.used - self._start) * self._width]]
        return torch.cat([part.view(torch.uint8) for part in parts])


# -- on the host --------------------------------------------------------------------------------------


def merged(slots: NDArray[Any], rows: list[Row]) -> NDArray[Any]:
    """For each row, what its slots amount to: the columns are ``FIELDS``.

    By the parallel formula of Chan et al.; rows lie one behind the other.
    """
    starts, numbers = [row.slot for row in rows], [row.slots for row in rows]
    sizes, pivots, totals, squares, least, greatest, nans, zeros = slots.T
    # Values that are not finite have no mean or spread, which is said by NaN and Inf and needs no warning.
    with np.errstate(invalid="ignore", over="ignore"):
        means = pivots + totals / sizes
        spreads = np.maximum(squares - totals * (totals / sizes), 0.0)
        size = np.add.reduceat(sizes, starts)
        share = sizes / np.repeat(size, numbers)
        mean = np.add.reduceat(means * share, starts)
        gaps = means - np.repeat(mean, numbers)
        variance = np.add.reduceat(spreads / np.repeat(size, numbers) + gaps * gaps * share, starts)
    bad = np.add.reduceat(nans, starts)
    low, high = np.minimum.reduceat(least, starts), np.maximum.reduceat(greatest, starts)
    low[bad > 0] = high[bad > 0] = math.nan
    found = mean, variance, low, high, size - np.add.reduceat(zeros, starts), bad
    return np.stack(found, axis=1)


def merged_norms(slots: NDArray[Any], rows: list[Row]) -> NDArray[Any]:
    """The Euclidean norm of each row."""
    found: NDArray[Any] = np.sqrt(np.add.reduceat(slots, [row.slot for row in rows]))
    return found


# -- which tensors ------------------------------------------------------------------------------------


def in_memory(tensor: Tensor) -> tuple[Tensor, list[int] | None]:
    """A tensor whose memory holds the elements without gaps, and the dims in the order in which they lie there.

    No order where the elements had to be turned into others first.
    """
    plain = local(tensor)
    if plain.is_neg():  # a view of a conjugate: the memory holds the opposite
        plain = plain.detach().resolve_neg()
    if plain.dtype not in READ:
        return flatten(tensor), None
    if plain.is_contiguous():
        return plain, list(range(plain.dim()))
    order = sorted(range(plain.dim()), key=plain.stride, reverse=True)
    if plain.detach().permute(order).is_contiguous():
        return plain, order
    return plain.detach().contiguous(), list(range(plain.dim()))


def has_rows(tensor: Tensor) -> bool:
    """Whether a measurable tensor can be given a row: it is on a device whose kernels were tried and are right."""
    if not tensor.is_cuda or tensor.numel() >= _MOST or _torch.in_transform():
        return False
    dtype = tensor.dtype if tensor.dtype in READ else torch.float64
    return works(tensor.device, dtype) and (dtype is tensor.dtype or works(tensor.device, torch.float32))


@functools.cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel gives the right answers there, tried once on a small tensor."""
    values = [0.0, -2.5, 0.0, 0.0, 4.0, 1.5, 0.0, 0.0]
    try:
        x = torch.tensor(values, dtype=dtype, device=device).view(2, 2, 2)
        rows = Rows(device)
        looks = [rows.statistics(x, 1), rows.statistics(x, 2), rows.statistics(x)]
        norm = rows.norm(x)
        whole, norms, live = rows.read([part.cpu() for part in rows.sent()])
        found = merged(whole, looks)
        expected = [float(np.mean(values)), float(np.var(values)), -2.5, 4.0, 3.0, 0.0]
        right = np.allclose(found, [expected] * 3) and np.allclose(merged_norms(norms, [norm]), np.linalg.norm(values))
        return bool(right) and [row.flags(live).tolist() for row in looks[:2]] == [[True, False], [True, True]]
    # Whatever is wrong with Triton, its compiler or its cache: statistics can be taken without it.
    except Exception:
        return False


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _current(device: torch.device) -> Any:
    # A launch goes to the current device; mostly it is the right one.
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _NO_MATTER
    return torch.cuda.device(device)


_NO_MATTER = contextlib.nullcontext()

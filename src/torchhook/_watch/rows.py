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

from torchhook import _torch, _triton
from torchhook._values.elements import flatten
from torchhook._values.subclasses import local

READ = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})  # by the kernel, as they are
_FIELDS = 8
MOST = 1 << 29  # elements: what a thread counts of them fits into 16 bits
_FEWEST = 64  # programs, for a large tensor
_COLUMNS = (64, 256, 1024)  # each is compiled by itself
_PLANS = 4096  # the most that are kept
_NORM = -1  # in the place of a dim of units: only the norm is wanted
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
    size: int = 0
    """The number of its elements."""

    def flags(self, live: Tensor) -> Tensor:
        """Which of its units live, of the flags of all."""
        return live[self.live : self.live + self.units]


class Plan:
    """How tensors of one dtype, shape and order are looked at: worked out once, for all steps."""

    __slots__ = ("aligned", "arguments", "constants", "launch", "layout", "programs", "size")

    def __init__(self, layout: Layout, size: int, whole: bool) -> None:
        self.layout, self.size, self.programs = layout, size, layout.programs
        rows, columns = layout.tile
        self.arguments = size, layout.rows, layout.rows_each, layout.length, layout.channels
        self.constants = {"ROWS": rows, "COLUMNS": columns, "WHOLE": whole, "UNITS": layout.units}
        self.launch: Any = None
        """The compiled kernel, once it was launched, for tensors whose address is aligned as that one's was."""
        self.aligned = True


Plans = dict[Any, Plan | None]
"""By dtype, shape, strides and dim of the units; ``None`` where the elements have to be copied first."""


class Rows:
    """What is noted of the tensors of one device in one step."""

    def __init__(
        self, device: torch.device, room: tuple[int, int, int] = (0, 0, 0), plans: Plans | None = None
    ) -> None:
        from torchhook._watch import kernels

        self._kernels: Any = kernels
        self._device = device
        self.plans: Plans = {} if plans is None else plans
        self._is_alone = device.type != "cuda" or torch.cuda.device_count() == 1
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
        plan = self._plan(tensor, _NORM)
        if plan is not None:
            return self._look(tensor, plan, self._norms)
        dense, _ = in_memory(tensor)
        return self._look(dense, self._flat_plan(dense.numel(), False), self._norms)

    def statistics(self, tensor: Tensor, unit: int | None = None) -> Row:
        """Look at all of a tensor, and at which units of a dim are anything but zero somewhere."""
        plan = self._plan(tensor, unit)
        if plan is not None:
            return self._look(tensor, plan, self._whole)
        dense, order = in_memory(tensor)
        if unit is None or order is None:
            return self._look(dense, self._flat_plan(dense.numel(), True), self._whole)
        return self._look(dense, self._unit_plan(tensor, unit, order), self._whole)

    def _plan(self, tensor: Tensor, unit: int | None) -> Plan | None:
        """How to look at a tensor that can be read where it is."""
        if type(tensor) is not Tensor or tensor.is_neg():
            return None
        key = tensor.dtype, tensor.shape, tensor.stride(), unit
        if key not in self.plans:
            if len(self.plans) > _PLANS:  # shapes that change with every batch
                self.plans.clear()
            dense, order = in_memory(tensor)
            if dense is not tensor or order is None:
                self.plans[key] = None
            elif unit is None or unit == _NORM:
                self.plans[key] = self._flat_plan(tensor.numel(), unit is None)
            else:
                self.plans[key] = self._unit_plan(tensor, unit, order)
        return self.plans[key]

    def _flat_plan(self, numel: int, whole: bool) -> Plan:
        return Plan(flat_layout(numel, self._flat, self._kernels.TILE), numel, whole)

    def _unit_plan(self, tensor: Tensor, unit: int, order: list[int]) -> Plan:
        numel, tile = tensor.numel(), self._kernels.TILE
        layout = unit_layout(tuple(tensor.shape[dim] for dim in order), order.index(unit), self._by_unit, tile)
        if 4 * layout.programs < min(self._by_unit, numel // tile):  # few long rows
            return self._flat_plan(numel, True)
        return Plan(layout, numel, True)

    def _look(self, dense: Tensor, plan: Plan, buffer: _Buffer) -> Row:
        programs, units = plan.programs, plan.layout.channels if plan.layout.units else 0
        pointer = dense.data_ptr()
        aligned = pointer % 16 == 0
        slots: Any
        live: Any
        with self._turn:
            slot = buffer.take(programs)
            flag = self._live.take(units) if units else 0
            direct = plan.launch is not None and plan.aligned == aligned
            if direct:
                slots = buffer.address(slot)
                live = self._live.address(flag) if units else slots
            else:
                slots = buffer.place(slot)
                live = self._live.place(flag) if units else slots
        if direct and self._is_alone:
            plan.launch(programs, pointer, slots, live)
        elif direct:
            with _current(self._device):
                plan.launch(programs, pointer, slots, live)
        else:
            with _current(self._device):
                look = self._kernels.look[(programs,)]
                made = look(dense, slots, live, *plan.arguments, **plan.constants, **_OPTIONS)
            if plan.launch is None:
                known = (*plan.arguments, *plan.constants.values())
                plan.aligned, plan.launch = aligned, self._kernels.launcher(made, self._device.index, known)
        return Row(slot, programs, flag, units, plan.size)

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
        self._first, self._bytes = self._now.data_ptr(), width * dtype.itemsize

    def _new(self, room: int) -> Tensor:
        # Flags are only ever set, and gaps between norms are added to them.
        return torch.zeros(room * self._width, dtype=self._dtype, device=self._device)

    def take(self, number: int) -> int:
        """Keep room for so many entries: the number of the first, whose place is asked for before the next is taken."""
        at, number = self.used - self._start, -(-number // self._aligned) * self._aligned
        if (at + number) * self._width > self._now.numel():
            self._full.append(self._now[: at * self._width])
            self._now, self._start = self._new(max(number, 2 * self.used, 1024)), self.used
            self._first = self._now.data_ptr()
        self.used += number
        return self.used - number

    def place(self, entry: int) -> Tensor:
        return self._now[(entry - self._start) * self._width :]

    def address(self, entry: int) -> int:
        return self._first + (entry - self._start) * self._bytes

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
    if not tensor.is_cuda or tensor.numel() >= MOST or _torch.in_transform():
        return False
    dtype = tensor.dtype if tensor.dtype in READ else torch.float64
    return works(tensor.device, dtype) and (dtype is tensor.dtype or works(tensor.device, torch.float32))


@functools.cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel gives the right answers there, tried once on a small tensor."""
    if not _is_right(device, dtype):
        _triton.trusted[0] = False
        return _is_right(device, dtype)
    return True


def _is_right(device: torch.device, dtype: torch.dtype) -> bool:
    values = [0.0, -2.5, 0.0, 0.0, 4.0, 1.5, 0.0, 0.0]
    try:
        x = torch.tensor(values, dtype=dtype, device=device).view(2, 2, 2)
        rows, again = Rows(device), range(2)  # the second time by what the first has compiled
        looks = [rows.statistics(x, unit) for _ in again for unit in (1, 2, None)]
        sizes = [rows.norm(x) for _ in again]
        whole, norms, live = rows.read([part.cpu() for part in rows.sent()])
        found = merged(whole, looks)
        expected = [float(np.mean(values)), float(np.var(values)), -2.5, 4.0, 3.0, 0.0]
        right = np.allclose(found, [expected] * 6) and np.allclose(merged_norms(norms, sizes), np.linalg.norm(values))
        units = [row.flags(live).tolist() for row in (*looks[:2], *looks[3:5])]
        return bool(right) and units == 2 * [[True, False], [True, True]]
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

"""Statistics of many tensors in rows of one buffer on their device, filled by one kernel launch for each tensor.

Where Triton is missing or does not give the right answer for a small tensor, there are no such rows, and statistics are
taken by torch's own operations.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchhook import _torch
from torchhook._torch import launching
from torchhook._values.elements import flatten
from torchhook._values.subclasses import local
from torchhook._watch.places import Arrangement, KnownRow
from torchhook._watch.places import Row as Row
from torchhook._watch.plans import Plan, Plans, flat_layout, unit_layout
from torchhook._watch.tables import FIELDS

READ = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})  # by the kernel, as they are
_SEEN = 8  # numbers in a slot
MOST = 1 << 29  # elements: what a thread counts of them fits into 16 bits
_FEWEST = 64  # programs, for a large tensor
_PLANS = 4096  # the most that are kept
NORM = -1
"""In the place of a dim of units: only the norm is wanted."""
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}  # the second said, because Triton warns where it is not


class Rows:
    """What is noted of the tensors of one device in one step."""

    def __init__(
        self,
        device: torch.device,
        room: tuple[int, int, int] = (0, 0, 0),
        plans: Plans | None = None,
        again: Arrangement | None = None,
    ) -> None:
        from torchhook._watch import kernels

        self._kernels: Any = kernels
        self._device = device
        self.plans: Plans = {} if plans is None else plans
        self.is_alone: bool = device.type != "cuda" or torch.cuda.device_count() == 1
        # As many programs as run at once: 46 registers of a thread for a tensor without units, up to 80 for one with.
        processors = _processors(device)
        self._flat, self._by_unit = max(5 * processors, _FEWEST), max(3 * processors, _FEWEST)
        self.is_arranging: bool = again is None
        """Whether this is the step whose rows the next ones are to fill again."""
        self.arrangement: Arrangement = Arrangement() if again is None else again
        self.free: set[int] = self.arrangement.keys()
        """The rows of the arrangement that nobody has filled in this step."""
        self._is_like_before = True
        used = self.arrangement.room
        self._whole = _Buffer(_SEEN, torch.float64, device, room[0], used[0])
        self._norms = _Buffer(1, torch.float64, device, room[1], used[1])
        self._live = _Buffer(1, torch.uint8, device, room[2], used[2])
        # Where the arrangement begins, wherever the buffers grow to.
        self.first_slot, self.first_norm, self.first_flag = self._whole.origin, self._norms.origin, self._live.origin
        self._turn = threading.RLock()  # gradients are noted from autograd's threads
        self.number: int = -1 if device.index is None else device.index
        self.looked: list[Row] = self.arrangement.looked.copy()
        """What was looked at as a whole, in the order of the slots."""
        self.sized: list[Row] = self.arrangement.sized.copy()
        """Whose norm was taken."""

    @property
    def room(self) -> tuple[int, int, int]:
        """How much was needed, for the next step to ask for at once."""
        return self._whole.used, self._norms.used, self._live.used

    @property
    def used(self) -> bool:
        """Whether anything was looked at."""
        again = self.arrangement
        known = 0 if self.is_arranging else len(again.looked) + len(again.sized)
        return len(self.free) < known or len(self.looked) + len(self.sized) > known

    def arranged(self) -> Arrangement | None:
        """What the next step can fill again; none where this one has shown something else than was to be expected."""
        if self.is_arranging:
            arrangement = self.arrangement
            arrangement.looked, arrangement.sized, arrangement.room = self.looked, self.sized, self.room
        return self.arrangement if self._is_like_before else None

    def known_row(self, row: Row, tensor: Tensor, unit: int | None) -> KnownRow:
        """Where a tensor like one that was just looked at goes in the next steps."""
        buffer = self._norms if unit == NORM else self._whole
        return KnownRow(self.arrangement, row, tensor, unit, self._plan(tensor, unit), buffer.bytes_each)

    def norm(self, tensor: Tensor) -> Row:
        """Look at a tensor's size only."""
        plan = self._plan(tensor, NORM)
        if plan is not None:
            return self._look(tensor, plan)
        dense, _ = in_memory(tensor)
        return self._look(dense, self._flat_plan(dense.numel(), False))

    def statistics(self, tensor: Tensor, unit: int | None = None) -> Row:
        """Look at all of a tensor, and at which units of a dim are anything but zero somewhere."""
        plan = self._plan(tensor, unit)
        if plan is not None:
            return self._look(tensor, plan)
        dense, order = in_memory(tensor)
        if unit is None or order is None:
            return self._look(dense, self._flat_plan(dense.numel(), True))
        return self._look(dense, self._unit_plan(tensor, unit, order))

    def again(self, tensor: Tensor, unit: int | None) -> Row | None:
        """As ``statistics`` or, for ``NORM``, ``norm`` of a tensor like those before; ``None`` where it is not.

        Which is found out in few steps: this is called for every layer, twice.
        """
        try:
            plan = self.plans[tensor.dtype, tensor.shape, tensor.stride(), unit]
            pointer = tensor.data_ptr()
        except (KeyError, RuntimeError):  # wrappers have no memory, and other layouts no strides
            return None
        # Memory that was given back has no address.
        if plan is None or not pointer or plan.launch is None or plan.aligned is not (pointer % 16 == 0):
            return None
        if tensor.is_neg():
            return None
        # Seldom after the first steps: rows are taken for what is unlike the step before.
        self._is_like_before = self.is_arranging
        row, slots, live = self._take(plan)
        self.run(plan.launch, plan.programs, pointer, slots, live)
        return row

    def run(self, launch: Any, programs: int, pointer: int, slots: int, live: int) -> None:
        """Launch a compiled kernel on the right device."""
        if self.is_alone:
            launch(programs, pointer, slots, live)
        else:
            with _current(self._device):
                launch(programs, pointer, slots, live)

    def _take(self, plan: Plan) -> tuple[Row, int, int]:
        """Keep room for what is looked at: the row, and the addresses of its slots and flags."""
        buffer, known = (self._whole, self.looked) if plan.whole else (self._norms, self.sized)
        units, flag, flags = plan.units, 0 if plan.whole else -1, self._live
        with self._turn:
            # The first two lines of ``_Buffer.take``, without the call.
            slot, end = buffer.used, buffer.used + plan.slots
            if end > buffer.end:
                slot, end = buffer.take(plan.slots)
            buffer.used, slots = end, buffer.origin + slot * buffer.bytes_each
            live = slots
            if units:
                flag, end = flags.used, flags.used + plan.flags
                if end > flags.end:
                    flag, end = flags.take(plan.flags)
                flags.used, live = end, flags.origin + flag
            row = _row(Row, (slot, plan.programs, flag, units, plan.size, self.number, len(known)))
            known.append(row)
        return row, slots, live

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
            elif unit is None or unit == NORM:
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

    def _look(self, dense: Tensor, plan: Plan) -> Row:
        pointer = dense.data_ptr()
        if plan.launch is not None and plan.aligned is (pointer % 16 == 0):
            row, slot, flag = self._take(plan)
            self.run(plan.launch, plan.programs, pointer, slot, flag)
            return row
        with self._turn:
            row, slot, flag = self._take(plan)
            slots = (self._whole if plan.whole else self._norms).at(slot)
            live = self._live.at(flag) if plan.units else slots
        with _current(self._device):
            look = self._kernels.look[(plan.programs,)]
            made = look(dense, slots, live, *plan.arguments, **plan.constants, **_OPTIONS)
        if plan.launch is None:
            known = (*plan.arguments, *plan.constants.values())
            plan.aligned, plan.launch = pointer % 16 == 0, self._kernels.launcher(made, self._device.index, known)
        return row

    def sent(self) -> list[Tensor]:
        """What is known of each tensor, as bytes to be given to ``read`` again: statistics, norms and units."""
        whole = self._merged(self._whole, self.looked, len(FIELDS))
        return [whole, self._merged(self._norms, self.sized, 1), self._live.entries()]

    def _merged(self, buffer: _Buffer, rows: list[Row], width: int) -> Tensor:
        found = torch.empty(len(rows) * width, dtype=torch.float64, device=self._device)
        if rows:
            with _current(self._device):
                merge, places = self._kernels.merge[(len(rows),)], self._places(rows, width > 1)
                merge(buffer.entries(), places, found, WHOLE=width > 1, BLOCK=self._kernels.MERGED)
        return found.view(torch.uint8)

    def _places(self, rows: list[Row], whole: bool) -> Tensor:
        """Where the slots of rows are, on the device; brought there once for steps that are alike."""
        known = self.arrangement.places
        if whole in known and len(known[whole]) == len(rows):  # those that are arranged come first
            return known[whole]
        places = torch.tensor([(row.slot, row.slots) for row in rows])
        if self._device.type == "cuda":
            places = places.pin_memory().to(self._device, non_blocking=True)
        if self.is_arranging:
            known[whole] = places
        return places

    @staticmethod
    def read(found: list[Tensor]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """What came over: the ``FIELDS`` of each tensor, the norms, and a flag for each unit."""
        whole, squares = (part.view(torch.float64).numpy() for part in found[:2])
        return whole.reshape(-1, len(FIELDS)), np.sqrt(squares), found[2].numpy().astype(bool)


class _Buffer:
    """Memory that grows; what was handed out stays where it is."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, room: int, taken: int = 0) -> None:
        self._width, self._dtype, self._device = width, dtype, device
        self.bytes_each: int = width * dtype.itemsize
        self._full: list[Tensor] = []
        self.used = self.end = 0
        self._start = 0
        self._grow(max(room, taken))
        self.used = taken

    def _grow(self, room: int) -> None:
        # Flags are only ever set, and gaps between norms are added to them.
        self._now = torch.zeros(room * self._width, dtype=self._dtype, device=self._device)
        self._start, self.end = self.used, self.used + room
        self.origin: int = self._now.data_ptr() - self.used * self.bytes_each
        """Where the entry 0 would be."""

    def take(self, number: int) -> tuple[int, int]:
        """Where so many entries can begin, and where they end; whoever takes them says so by ``used``."""
        if self.used + number > self.end:
            self._full.append(self._now[: (self.used - self._start) * self._width])
            self._grow(max(number, 2 * self.used, 1024))
        return self.used, self.used + number

    def at(self, address: int) -> Tensor:
        """The memory from an address in what was taken last."""
        return self._now[(address - self.origin) // self._dtype.itemsize - self._start * self._width :]

    def entries(self) -> Tensor:
        """All that was taken, one behind the other."""
        newest = self._now[: (self.used - self._start) * self._width]
        return torch.cat([*self._full, newest]) if self._full else newest


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
        launching.trusted[0] = False
        return _is_right(device, dtype)
    return True


def _is_right(device: torch.device, dtype: torch.dtype) -> bool:
    values = [0.0, -2.5, 0.0, 0.0, 4.0, 1.5, 0.0, 0.0]
    try:
        x = torch.tensor(values, dtype=dtype, device=device).view(2, 2, 2)
        rows, again = Rows(device), range(2)  # the second time by what the first has compiled
        looks = [rows.statistics(x, unit) for _ in again for unit in (1, 2, None)]
        for _ in again:
            rows.norm(x)
        whole, norms, live = rows.read([part.cpu() for part in rows.sent()])
        expected = [float(np.mean(values)), float(np.var(values)), -2.5, 4.0, 3.0, 0.0]
        right = np.allclose(whole, [expected] * len(looks)) and np.allclose(
            norms, [np.linalg.norm(values)] * len(again)
        )
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
_row = tuple.__new__

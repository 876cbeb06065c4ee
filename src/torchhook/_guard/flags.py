"""Whether many tensors are finite, asked once for all of them: the numbers stay on the device until they are read.

On the CPU, where nobody has to wait, a tensor is looked at when it comes: one sum, because a finite sum has finite
terms. On a device its smallest and its largest number are written down by one kernel. Neither can overflow, both pass
on a NaN, and together they tell masks (``-inf``) from overflows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import isfinite
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from torchhook._values.elements import UNREADABLE, floats

_PLAIN = (Tensor, nn.Parameter)
_COMMON = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_FIRST_SLOTS = 256
_NAN, _HIGH, _LOW = "NaN", "+Inf", "-Inf"

Where = TypeVar("Where")


class Bad(NamedTuple, Generic[Where]):
    """A tensor that is not finite."""

    where: Where
    what: str
    """``NaN``, or which infinities."""


class Flags(Generic[Where]):
    """Takes note of tensors, and tells in the same order which of them were not finite."""

    def __init__(self) -> None:
        self._noted: list[tuple[Where, _Slots | None, int, str]] = []
        self._slots: dict[tuple[torch.device, torch.dtype], _Slots] = {}

    def note(self, tensor: Tensor, where: Where) -> None:
        """Look at a tensor, as it is now."""
        try:
            if type(tensor) in _PLAIN and (dtype := tensor.dtype) in _COMMON:
                # What nearly all tensors come to, written out: this runs once for every module.
                if tensor.is_cpu and dtype is not torch.float16 and isfinite(tensor.detach().sum().item()):
                    return
                self._note(tensor.detach(), where)
                return
        except UNREADABLE:
            pass  # another layout, empty, inside torch.func
        try:
            plain = floats(tensor)
            if plain is not None and plain.numel():
                self._note(torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain, where)
        except UNREADABLE:
            pass

    def _note(self, plain: Tensor, where: Where) -> None:
        dtype = plain.dtype
        if plain.is_cpu:
            total = plain.sum(dtype=torch.float32) if dtype is torch.float16 else plain.sum()
            if not isfinite(total.item()):
                what = _what(*(bound.item() for bound in torch.aminmax(plain)))
                if what:  # else the sum overflowed, not its terms
                    self._noted.append((where, None, 0, what))
        else:
            self.write_down(plain, where)

    def write_down(self, plain: Tensor, where: Where) -> None:
        """Have the device write down what tells whether a tensor is finite."""
        slots = self._slots.get((plain.device, plain.dtype))
        if slots is None:
            slots = self._slots[plain.device, plain.dtype] = _Slots(plain.device, plain.dtype)
        torch.aminmax(plain, out=slots.next())
        self._noted.append((where, slots, slots.used, ""))
        slots.used += 1

    def read(self) -> list[Bad[Where]]:
        """What was not finite since the last reading. The one wait, where a device is to be asked."""
        noted, self._noted = self._noted, []
        if not noted:
            return []
        numbers = {id(slots): slots.read() for slots in self._slots.values() if slots.used}
        if all(_are_finite(lows) and _are_finite(highs) for lows, highs in numbers.values()):
            numbers.clear()  # as nearly always
        return list(_bad(noted, numbers))

    def forget(self) -> None:
        """Never mind what was noted."""
        self._noted = []
        for slots in self._slots.values():
            slots.used = 0


class _Slots:
    """Where a device writes down the smallest and the largest number of each tensor."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type == "meta":
            raise NotImplementedError("nothing can be read there")
        self._options: dict[str, Any] = {"device": device, "dtype": dtype}
        self._blocks: list[Tensor] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.used = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Two places that hold nothing yet; they are taken when ``used`` is raised."""
        if self.used == len(self._pairs):
            self._add(max(_FIRST_SLOTS, len(self._pairs)))
        return self._pairs[self.used]

    def _add(self, count: int) -> None:
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            block = torch.empty(2, count, **self._options)
            self._blocks.append(block)
            lows, highs = block
            self._pairs += zip(lows.unbind(), highs.unbind(), strict=True)

    def read(self) -> tuple[list[float], list[float]]:
        with torch.no_grad():
            blocks = self._blocks if len(self._blocks) == 1 else [torch.cat(self._blocks, dim=1)]
            lows, highs = blocks[0][:, : self.used].tolist()
        if len(self._blocks) > 1:  # the next run is like this one, and shall have one block
            count, self._blocks, self._pairs = len(self._pairs), [], []
            self._add(count)
        self.used = 0
        return lows, highs


def _are_finite(numbers: list[float]) -> bool:
    # In double precision the sum of what is finite in single precision is finite.
    return math.isfinite(sum(numbers)) or all(map(math.isfinite, numbers))


def _what(low: float, high: float) -> str:
    if math.isnan(low) or math.isnan(high):
        return _NAN
    return ", ".join([_HIGH] * (high == math.inf) + [_LOW] * (low == -math.inf))


def _bad(
    noted: list[tuple[Where, _Slots | None, int, str]], numbers: dict[int, tuple[list[float], list[float]]]
) -> Iterator[Bad[Where]]:
    for where, slots, index, what in noted:
        if slots is not None and id(slots) in numbers:
            lows, highs = numbers[id(slots)]
            what = _what(lows[index], highs[index])
        if what:
            yield Bad(where, what)

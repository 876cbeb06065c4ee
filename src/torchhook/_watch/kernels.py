"""One pass over a tensor by a Triton kernel: all its statistics, or only its norm, in one launch and without a wait.

Imported when it is first needed, because Triton takes a while. A tensor lies in memory as ``rows`` of ``length``
elements. Each program takes some of the rows and writes what it saw to a slot of its own. When a step is over, one more
launch puts the slots of all tensors together, always in one order, so that the same values give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchhook._torch import launching

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TILE = 1024
"""The elements that a program looks at together: four for each of its threads, so that five programs run at once."""


def _compiled(function: Callable[..., Any]) -> Any:
    """A kernel. Without Triton a function that cannot be launched: whoever tries it then knows."""
    if triton is None:
        return function
    return triton.jit(function, do_not_specialize=["rows", "rows_each", "channels"])


launcher = launching.launcher


# Sums are in double precision: of squares, the largest numbers of single precision have some, and the smallest too.
# They are of distances from the program's first element. As that is one of them, the cancellation in the variance
# loses at most a factor of their number, however large the mean is.
@_compiled
def look(  # type: ignore[no-untyped-def]  # Triton takes annotations for types of its own
    x,
    slots,
    live,
    numel,
    rows,
    rows_each,
    length,
    channels,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Fill one slot; ``WHOLE`` wants all statistics, ``UNITS`` says whether units are rows (1) or columns (2)."""
    program = tl.program_id(0).to(tl.int64)
    first = program * rows_each
    last = tl.minimum(first + rows_each, rows)
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    near = r[:, None] * length + c[None, :]
    kind = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    squares = tl.zeros([ROWS, COLUMNS], tl.float64)
    if WHOLE:
        begin = tl.load(x + first * length).to(tl.float64)
        pivot = tl.where(tl.abs(begin) < float("inf"), begin, 0.0)
        total = tl.zeros([ROWS, COLUMNS], tl.float64)
        least = tl.full([ROWS, COLUMNS], float("inf"), kind)
        greatest = tl.full([ROWS, COLUMNS], float("-inf"), kind)
        counts = tl.zeros([ROWS, COLUMNS], tl.int32)
    for row in range(first, last, ROWS):
        # Only the last row of all may be shorter than the others, and then there is one in each program.
        end = tl.minimum(length, numel - row * length)
        for column in range(0, end, COLUMNS):
            inside = (r < last - row)[:, None] & (c < end - column)[None, :]
            value = tl.load(x + (row * length + column) + near, mask=inside, other=0.0).to(kind)
            if WHOLE:
                distance = tl.where(inside, value.to(tl.float64) - pivot, 0.0)
                total += distance
                squares += distance * distance
                least = tl.minimum(least, tl.where(inside, value, float("inf")))
                greatest = tl.maximum(greatest, tl.where(inside, value, float("-inf")))
                # Two counts in one register: a thread sees no more than 65,535 tiles.
                counts += (value != value).to(tl.int32) * 65536 + ((value == 0.0) & inside).to(tl.int32)
                # Nobody but these stores to the flags, and they all store the same.
                if UNITS == 1:
                    alive = tl.max((value != 0.0).to(tl.int32), axis=1)
                    tl.store(live + (row + r) % channels, alive.to(tl.uint8), mask=alive > 0)
                if UNITS == 2:
                    alive = tl.max((value != 0.0).to(tl.int32), axis=0)
                    tl.store(live + column + c, alive.to(tl.uint8), mask=alive > 0)
            else:
                wide = value.to(tl.float64)
                squares += wide * wide
    if WHOLE:
        slot = slots + program * 8
        tl.store(slot, (tl.minimum(last * length, numel) - first * length).to(tl.float64))
        tl.store(slot + 1, pivot)
        tl.store(slot + 2, tl.sum(tl.sum(total, axis=1), axis=0))
        tl.store(slot + 3, tl.sum(tl.sum(squares, axis=1), axis=0))
        tl.store(slot + 4, tl.min(tl.min(least, axis=1), axis=0).to(tl.float64))
        tl.store(slot + 5, tl.max(tl.max(greatest, axis=1), axis=0).to(tl.float64))
        tl.store(slot + 6, tl.sum(tl.sum(counts >> 16, axis=1), axis=0).to(tl.float64))
        tl.store(slot + 7, tl.sum(tl.sum(counts & 65535, axis=1), axis=0).to(tl.float64))
    else:
        tl.store(slots + program, tl.sum(tl.sum(squares, axis=1), axis=0))


MERGED = 256
"""The slots that a program puts together at once."""


# By the parallel formula of Chan et al. On the host, the slots of a ResNet-50 are six megabytes and take four
# milliseconds, in which nobody tells the device what to do next.
@_compiled
def merge(slots, places, found, WHOLE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the slots of one tensor amount to: as ``tables.FIELDS`` if ``WHOLE``, or else the square of its norm.

    ``places`` has the first of its slots and their number.
    """
    tensor = tl.program_id(0).to(tl.int64)
    first = tl.load(places + 2 * tensor)
    number = tl.load(places + 2 * tensor + 1)
    at = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float64)
    if WHOLE:
        sizes = tl.zeros([BLOCK], tl.float64)
        nans = tl.zeros([BLOCK], tl.float64)
        zeros = tl.zeros([BLOCK], tl.float64)
        means = tl.zeros([BLOCK], tl.float64)
        least = tl.full([BLOCK], float("inf"), tl.float64)
        greatest = tl.full([BLOCK], float("-inf"), tl.float64)
        for begin in range(0, number, BLOCK):
            inside = begin + at < number
            slot = slots + (first + begin + at) * 8
            sizes += tl.load(slot, mask=inside, other=0.0)
            least = tl.minimum(least, tl.load(slot + 4, mask=inside, other=float("inf")))
            greatest = tl.maximum(greatest, tl.load(slot + 5, mask=inside, other=float("-inf")))
            nans += tl.load(slot + 6, mask=inside, other=0.0)
            zeros += tl.load(slot + 7, mask=inside, other=0.0)
        size = tl.sum(sizes, axis=0)
        for begin in range(0, number, BLOCK):
            inside = begin + at < number
            slot = slots + (first + begin + at) * 8
            own = tl.load(slot, mask=inside, other=1.0)
            mean = tl.load(slot + 1, mask=inside, other=0.0) + tl.load(slot + 2, mask=inside, other=0.0) / own
            means += tl.where(inside, mean * (own / size), 0.0)
        middle = tl.sum(means, axis=0)
        for begin in range(0, number, BLOCK):
            inside = begin + at < number
            slot = slots + (first + begin + at) * 8
            own = tl.load(slot, mask=inside, other=1.0)
            total = tl.load(slot + 2, mask=inside, other=0.0)
            gap = tl.load(slot + 1, mask=inside, other=0.0) + total / own - middle
            spread = tl.load(slot + 3, mask=inside, other=0.0) - total * (total / own)
            spread = tl.where(spread < 0.0, 0.0, spread)  # and NaN stays
            squares += tl.where(inside, spread / size + gap * gap * (own / size), 0.0)
        bad = tl.sum(nans, axis=0)
        row = found + tensor * 6
        tl.store(row, middle)
        tl.store(row + 1, tl.sum(squares, axis=0))
        tl.store(row + 2, tl.where(bad > 0.0, float("nan"), tl.min(least, axis=0)))
        tl.store(row + 3, tl.where(bad > 0.0, float("nan"), tl.max(greatest, axis=0)))
        tl.store(row + 4, size - tl.sum(zeros, axis=0))
        tl.store(row + 5, bad)
    else:
        for begin in range(0, number, BLOCK):
            squares += tl.load(slots + first + begin + at, mask=begin + at < number, other=0.0)
        tl.store(found + tensor, tl.sum(squares, axis=0))

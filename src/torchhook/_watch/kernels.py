"""One pass over a tensor by a Triton kernel: all its statistics, or only its norm, in one launch and without a wait.

Imported when it is first needed, because Triton takes a while. A tensor lies in memory as ``rows`` of ``length``
elements. Each program takes some of the rows and writes what it saw to a slot of its own; ``rows.merged`` puts the
slots together on the host, always in one order, so that the same values give the same numbers.
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

"""Where the numbers of a tensor are: the same place in every step, as long as a site shows tensors that are alike.

In a training run nearly every step shows what the one before has shown. The first step takes a row for each tensor, one
after the other. Those after it fill the same rows, and what is asked of a tensor is only whether it is like that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from torchhook._watch.rows import Rows


class Row(NamedTuple):
    """Where the slots of a tensor are, how many there are, and where the flags of its units are.

    No two of a step are alike, on whatever devices.
    """

    slot: int
    slots: int
    live: int
    """Negative for a row of norms."""
    units: int
    size: int
    """The number of its elements."""
    device: int
    at: int
    """Its place among those of its kind."""

    def flags(self, live: NDArray[Any]) -> NDArray[Any]:
        """Which of its units live, of the flags of all."""
        return live[self.live : self.live + self.units]


class Arrangement:
    """The rows of one step on one device, for the next steps to fill again."""

    __slots__ = ("looked", "places", "room", "sized")

    def __init__(self) -> None:
        self.looked: list[Row] = []
        self.sized: list[Row] = []
        self.places: dict[bool, Tensor] = {}
        """On the device, where the slots of each of them are: of what was looked at as a whole, and of norms."""
        self.room: tuple[int, int, int] = (0, 0, 0)

    def keys(self) -> set[int]:
        """One for each row: those of norms are negative."""
        return {*range(len(self.looked)), *range(-len(self.sized), 0)}


class KnownRow:
    """One row, and what a tensor has to be like to go there."""

    __slots__ = (
        "aligned",
        "dtype",
        "key",
        "launch",
        "live",
        "of",
        "programs",
        "row",
        "shape",
        "slots",
        "stride",
        "unit",
    )

    def __init__(self, of: Arrangement, row: Row, tensor: Tensor, unit: int | None, plan: Any, bytes_each: int) -> None:
        self.of, self.row, self.unit = of, row, unit
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.launch, self.programs, self.aligned = plan.launch, plan.programs, plan.aligned
        self.key = row.at if plan.whole else -1 - row.at
        self.slots = row.slot * bytes_each
        self.live = row.live if row.units else -1
        """From the beginning of the flags; negative where there are none."""


class Places:
    """Where what one site shows goes, by how often it has shown something in the step."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: list[Any] = []
        """A ``KnownRow`` for each turn, or none where nothing of its own was shown."""

    def fill(self, by_device: Mapping[Any, Rows], tensor: Tensor, unit: int | None, turn: int) -> Row | None:
        """Look at a tensor like those before, as ``Rows.again`` does; ``None`` where it is not."""
        rows = by_device.get(tensor.device)
        if rows is None:
            return None
        try:
            known = self._known[turn]
            fits = (
                known is not None
                and known.of is rows.arrangement
                and tensor.shape == known.shape
                and tensor.dtype is known.dtype
                and tensor.stride() == known.stride
                and unit == known.unit
                and not tensor.is_neg()
                and (pointer := tensor.data_ptr()) != 0  # memory that was given back has no address
                and known.aligned is (pointer % 16 == 0)
            )
            if fits:
                rows.free.remove(known.key)
        except RuntimeError:  # wrappers have no memory, and other layouts no strides
            return None
        except LookupError:  # not known yet, or another thread was here
            fits = False
        if not fits:
            return self._take(rows, tensor, unit, turn)
        slots = (rows.first_norm if known.key < 0 else rows.first_slot) + known.slots
        live = slots if known.live < 0 else rows.first_flag + known.live
        if rows.is_alone:
            known.launch(known.programs, pointer, slots, live)
        else:
            rows.run(known.launch, known.programs, pointer, slots, live)
        row: Row = known.row
        return row

    def _take(self, rows: Rows, tensor: Tensor, unit: int | None, turn: int) -> Row | None:
        row = rows.again(tensor, unit)
        if row is not None and rows.is_arranging:
            known = self._known
            known.extend([None] * (turn + 1 - len(known)))
            known[turn] = rows.known_row(row, tensor, unit)
        return row

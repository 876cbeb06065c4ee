"""Which dim of a value are the rows, where sizes do not tell: one row, run by itself, does."""

from __future__ import annotations

from typing import Any

import torch

from torchhook._extract.batches import Batch
from torchhook._extract.fill import Extras, site_columns
from torchhook._extract.forward import Forward
from torchhook._values import tree
from torchhook.errors import DataWarning, ExtractError, TransformError, warn


class Square:
    """Whether a batch has as many positions as rows, or gives values whose second dim is as long as their first.

    Values ``(N, C)`` are left alone: they have no time, and the width of many a layer is the size of a batch. Values
    ``(N,)`` may be a vector that has no rows at all, and is as long as the batch by chance.
    """

    def __init__(self, batch: Any, rows: int) -> None:
        self.rows, self.found = rows, False
        if rows > 1:  # one row tells nothing that the batch does not
            ids = (t for t in tree.tensors(batch) if t.dim() == 2 and not t.is_floating_point() and not t.is_nested)
            self.found = any(tensor.shape[1] == rows for tensor in ids)
            self.see("", batch)

    def see(self, site: str, value: Any) -> None:
        """Called with what passes a site: a transform may reduce the dim that shows it."""
        if self.rows > 1 and not self.found:
            # Nested ones have no common shape.
            plain = [tensor for tensor in tree.tensors(value) if not tensor.is_nested]
            self.found = any(tensor.shape[1] == self.rows for tensor in plain if tensor.dim() > 2)
            self.found |= bool(site) and any(tensor.dim() == 1 and len(tensor) == self.rows for tensor in plain)


def try_one_row(forward: Forward, batch: Batch, extras: Extras, device: torch.device) -> None:
    """Run one row of a batch, and refuse sites whose values have more or fewer rows than that."""
    one = next((one for one in batch.singles() if one.value is not None), None)
    if one is None:
        return

    def look(site: str, value: Any) -> None:
        try:
            site_columns(site, value, 1, None if forward.takes_tokens else said, None)
        except ExtractError as error:
            raise ExtractError(f"tried with one row, since another dim may be as long as the batch: {error}") from error

    said = extras.padding(one.value, one.start, one.good)
    try:
        forward(one.value, device, look, said=said)
    except (ExtractError, TransformError):
        raise
    except Exception as error:  # the user's own model, for which one row may be too few
        warn(
            f"a dim of the values is as long as the batch of {len(batch.good)} rows, and one row alone, which would "
            f"tell them apart, cannot be run ({type(error).__name__}: {error}). Check the rows, or choose another "
            "batch_size.",
            DataWarning,
        )

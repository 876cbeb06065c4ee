"""The buffer of a stream: tokens in slots, which are handed out in a random order."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from torchhook._features.api import shown
from torchhook.errors import ExtractError


class Pool:
    """Tokens in slots. Half of them are handed out, in a random order, and their slots filled again.

    >>> pool = Pool(4, 2, torch.Generator())
    >>> pool.put({"a": torch.arange(5.0)[:, None]})["a"].tolist()
    [[4.0]]
    >>> [batch["a"].shape for batch in pool.hand_out()]
    [torch.Size([2, 1])]
    """

    def __init__(self, size: int, batch: int, order: torch.Generator | None) -> None:
        self.size, self.batch, self.order = size, batch, order
        self.columns: dict[str, Tensor] = {}
        self.taken = torch.empty(0, dtype=torch.int64)
        """The slots that hold tokens, in the order in which these came."""
        self.free = torch.arange(size)
        self.begun: bool = False
        """Whether any tokens were noted: from then on the columns are known."""

    @property
    def is_full(self) -> bool:
        return not len(self.free)

    def put(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take as many tokens as there is room for, and return the others."""
        count = len(next(iter(columns.values())))
        rest = {name: self.write(name, tokens) for name, tokens in columns.items()}
        self.note(columns, count)
        return rest if any(map(len, rest.values())) else {}

    def write(self, name: str, tokens: Tensor) -> Tensor:
        """Put tokens of one column into the next free slots, and return the others; they count when they are noted."""
        into, slots = self._column(name, tokens), self.free[: len(tokens)]
        target, source = _wide(into, tokens[: len(slots)])
        target.index_copy_(0, slots.to(into.device, non_blocking=True), source)
        return tokens[len(slots) :]

    def written(self, name: str, count: int, rest: Tensor) -> Tensor:
        """The tokens of one column that ``write`` was given, of which it has returned ``rest``."""
        return torch.cat([self.columns[name].index_select(0, self.free[:count]), rest])

    def note(self, names: Collection[str], count: int) -> None:
        """So many tokens were written to the columns."""
        if other := self.columns.keys() ^ names:
            raise _not_always(min(other))
        slots, self.free = self.free[:count], self.free[count:]
        self.taken = torch.cat([self.taken, slots])
        self.begun = True

    def _column(self, name: str, tokens: Tensor) -> Tensor:
        held = self.columns.get(name)
        if held is None:
            if self.begun:
                raise _not_always(name)
            # The model may run in inference mode by itself: who fills the buffer later does not.
            with torch.inference_mode(False):
                held = self.columns[name] = tokens.new_empty(self.size, *tokens.shape[1:])
        elif tokens.shape[1:] != held.shape[1:] or tokens.dtype != held.dtype or tokens.device != held.device:
            raise ExtractError(
                f"{shown(name)!r}: tokens of {held.dtype} {tuple(held.shape[1:])} on {held.device} at first, of "
                f"{tokens.dtype} {tuple(tokens.shape[1:])} on {tokens.device} now. Cast them with dtype=, or "
                "reduce them to one shape in a transform."
            )
        return held

    def hand_out(self, everything: bool = False) -> Iterator[dict[str, Tensor]]:
        """Full batches of half of the tokens, or of all of them."""
        if self.order is not None:
            self.taken = self.taken[torch.randperm(len(self.taken), generator=self.order)]
        keep = 0 if everything else min(self.size // 2, self.size - self.batch)
        while len(self.taken) - keep >= self.batch:
            yield self._handed_out(self.batch)

    def rest(self) -> dict[str, Tensor] | None:
        """What is less than a batch, at the end."""
        return self._handed_out(len(self.taken)) if len(self.taken) else None

    def _handed_out(self, count: int) -> dict[str, Tensor]:
        slots, self.taken = self.taken[:count], self.taken[count:]
        self.free = torch.cat([self.free, slots])
        return {
            name: tokens.index_select(0, slots.to(tokens.device, non_blocking=True))
            for name, tokens in self.columns.items()
        }


def _not_always(name: str) -> ExtractError:
    return ExtractError(f"{shown(name)!r} is not there in every batch of the data.")


_WIDE = torch.complex128


def _wide(into: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The same rows as few wide numbers, where they can be: on the host, torch copies rows to slots number by number.

    >>> [part.shape for part in _wide(torch.empty(9, 8), torch.empty(3, 8))]
    [torch.Size([9, 2]), torch.Size([3, 2])]
    """
    fits = (
        tokens.is_floating_point()
        and tokens.device.type == "cpu"
        and tokens.is_contiguous()
        and not tokens.is_neg()
        and tokens.dim() == 2
        and tokens.shape[1] * tokens.itemsize % _WIDE.itemsize == 0
        and tokens.storage_offset() * tokens.itemsize % _WIDE.itemsize == 0
    )
    return (into.view(_WIDE), tokens.view(_WIDE)) if fits else (into, tokens)

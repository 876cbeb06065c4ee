"""From a passing value to the buffer: what is done with the tokens of one call of the model, in its hooks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchhook._features.api import shown
from torchhook._stream.pool import Pool
from torchhook._values.host_copies import HostCopies
from torchhook._values.running import Block
from torchhook.errors import ExtractError


class Staged(NamedTuple):
    """The tokens of one call of the model, by column, and what is over when they have arrived."""

    columns: dict[str, Tensor]
    events: list[torch.cuda.Event]


class Staging:
    """Copies the tokens of one call of the model, in the hooks, to where the buffer is.

    On the host, straight into the buffer: a copy of all of a call in between is as large as the activations of several
    layers, and to have the system's pages for it anew in each call costs more than to fill them.
    """

    def __init__(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        self.device, self.dtype = device, dtype
        self.copies = HostCopies()
        self.found: dict[str, Tensor] = {}
        """The tokens of each column; where they go straight into a pool, those that it has no room for."""
        self.pool: Pool | None = None
        self.where: tuple[str, Block] | None = None
        self.on_host: bool = device is None or device.type == "cpu"
        """Whether the values seen so far, and the buffer, are plain tensors on the host."""
        self.behind: int = 0

    @property
    def count(self) -> int:
        """The tokens of this call."""
        return 0 if self.where is None else len(self.where[1].tokens)

    def begin(self, pool: Pool | None) -> None:
        """The next call of the model comes, whose tokens may go into the pool at once, if there is one."""
        self.found, self.where = {}, None
        self.pool = pool if self.on_host else None

    def take(self, name: str, block: Block) -> None:
        """Called in the hook of a site."""
        self._check_same(name, block)
        tokens = block.tokens.detach()
        dtype = self.dtype if self.dtype is not None and tokens.is_floating_point() else tokens.dtype
        if type(tokens) is not Tensor or tokens.device.type != "cpu":
            self._not_at_once()
        if self.pool is not None:
            self.found[name] = self.pool.write(name, tokens.to(dtype)).clone(memory_format=torch.contiguous_format)
            return
        # A copy even where all tokens are taken: the next layer may write to the value.
        safe = tokens.to(dtype, copy=True, memory_format=torch.contiguous_format)
        if self.device is None or self.device == safe.device:
            self.found[name] = safe
        elif self.device.type == "cpu" and safe.is_cuda:
            self.behind = 1
            self.found[name] = self.copies.copy(safe)
        else:
            self.found[name] = safe.to(self.device)

    def _not_at_once(self) -> None:
        """Some columns are elsewhere: those of this call that are in the pool already wait for them."""
        if self.pool is not None:
            count = self.count
            self.found = {name: self.pool.written(name, count, rest) for name, rest in self.found.items()}
        self.pool, self.on_host = None, False

    def _check_same(self, name: str, block: Block) -> None:
        if self.where is None:
            self.where = name, block
            return
        first, other = self.where
        same = all(a is b or torch.equal(a, b) for a, b in zip(block[1:], other[1:], strict=True))
        if not same:
            raise ExtractError(
                f"{shown(first)!r} has {len(other.rows)} tokens in a batch and {shown(name)!r} {len(block.rows)}, or "
                "they are at other positions: only sites with the same tokens can be in one stream. Make two."
            )

    def end(self) -> list[Staged]:
        """What is still to be stored, when the call is over."""
        if self.pool is None:
            return [Staged(self.found, self.copies.events() if self.behind else [])]
        self.pool.note(self.found, self.count)
        return [Staged(self.found, [])] if any(map(len, self.found.values())) else []

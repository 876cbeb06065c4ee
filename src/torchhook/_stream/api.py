"""``stream``: the tokens of a data set's activations in shuffled batches, made while they are used."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchhook._core import calling
from torchhook._core.per_site import Transforms
from torchhook._core.select import Selector
from torchhook._extract.api import Drop, Part, Passes, evaluating_on
from torchhook._features.api import shown
from torchhook._recording.tables import Table
from torchhook._values import devices
from torchhook._values.host_copies import HostCopies
from torchhook._values.running import Block
from torchhook.errors import ExtractError

BUFFER = 1 << 16
BATCH = 4096


def stream(
    model: nn.Module,
    data: Any,
    sites: Selector,
    *,
    buffer: int = BUFFER,
    batch: int = BATCH,
    shuffle: bool = True,
    seed: int = 0,
    transform: Transforms = None,
    lengths: Part = None,
    drop_special: Drop = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    drop_last: bool = False,
    batch_size: int | None = None,
    input_fn: Callable[[Any], Any] | None = None,
    workers: int | None = None,
    autocast: torch.dtype | bool | None = None,
) -> TokenStream:
    """Batches of tokens out of a buffer that is shuffled and refilled while the model runs: what an autoencoder eats.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    >>> ids = torch.arange(90).reshape(15, 6) % 9
    >>> [tuple(tokens.shape) for tokens in stream(model, ids, "1", buffer=60, batch=40)]
    [(40, 4), (40, 4), (10, 4)]

    Each ``for`` over it is an epoch, in another order, and gives every token exactly once. Of several sites come
    dicts, in which the same place is the same token. The model runs where it is, in evaluation mode and without
    gradients, each call as far as the last site, and only while the buffer is refilled: whenever a batch is handed out,
    and when the loop is left in whatever way, it has no hooks and its modes, buffers and random numbers are its own.

    Args:
        model: The model; it may be in any mode and on any device.
        data: As ``extract`` takes it; a ``DataLoader`` may shuffle.
        sites: What to keep. A single name gives tensors; a list, or what means several, dicts.
        buffer: Tokens that are held and shuffled together; when it is full, half of them are handed out. As large as
            the data, it shuffles all of it.
        batch: Tokens in each batch.
        shuffle: Whether tokens are shuffled; if not, they come in the order of the data.
        seed: The order of the tokens is the same for the same seed and epoch, that of a loader that shuffles too.
        transform: Changes what is kept, as in ``extract``: values ``(N, T, D)``, or ``(N, D)`` for one token of a row.
        lengths: What is padding, as in ``extract``, and left out. By default what the model's own attention mask says;
            with ``False`` all positions are taken.
        drop_special: Special tokens to leave out, by their ids (``tokenizer.all_special_ids``); ``True`` for those that
            the model's configuration names. Transforms see those that are left, and count positions among them.
        device: Where the buffer is and batches come; by default where the values are.
        dtype: Floating-point values are kept as this; by default as they are.
        drop_last: Whether to leave out the last batch of an epoch if it is not full.
        batch_size: Rows for each call of the model; by default the loader's, or 32.
        input_fn: From a batch of the data to what the model is called with, as in ``extract``.
        workers: Processes that load the data; by default the loader's, or none.
        autocast: Run under ``torch.autocast`` with this dtype, or with its own choice for ``True``.
    """
    for name, number in (("batch", batch), ("buffer", buffer)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r}: give a number of tokens, 1 or more.")
    if buffer < batch:
        raise ValueError(f"buffer={buffer}: it must hold one batch at least, and batch={batch}.")
    if seed < 0:
        raise ValueError(f"seed={seed}: give a whole number, 0 or more.")
    passes = Passes(
        model,
        data,
        sites,
        transform=transform,
        batch_size=batch_size,
        lengths=lengths,
        drop_special=drop_special,
        input_fn=input_fn,
        workers=workers,
        autocast=autocast,
    )
    there = None if device is None else devices.named(device, "device")
    single = isinstance(sites, str) and len(passes.columns) == 1
    return TokenStream(passes, single, buffer, batch, shuffle, seed, there, dtype, drop_last)


class TokenStream:
    """What ``stream`` returns: each ``for`` over it is one epoch."""

    def __init__(
        self,
        passes: Passes,
        single: bool,
        buffer: int,
        batch: int,
        shuffle: bool,
        seed: int,
        device: torch.device | None,
        dtype: torch.dtype | None,
        drop_last: bool,
    ) -> None:
        self._passes, self._single, self._drop_last = passes, single, drop_last
        self._buffer, self._batch, self._shuffle, self._seed = buffer, batch, shuffle, seed
        self._device, self._dtype = device, dtype
        self.epoch: int = 0
        """The number of the epoch that comes next, which decides its order."""

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next: to go on where another process ended, or to repeat one."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        # At once, not at the first batch: two loops that are begun one after the other are two epochs.
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._batches(epoch)

    def _batches(self, epoch: int) -> Iterator[Any]:
        order = torch.Generator().manual_seed(_mixed(self._seed, epoch))
        pool = _Pool(self._buffer, self._batch, order if self._shuffle else None)
        refill = _Refill(self._passes, _Staging(self._device, self._dtype), _mixed(self._seed, epoch))
        more = True
        with contextlib.closing(refill):
            while more:
                more = refill(pool)
                yield from map(self._shaped, pool.hand_out(everything=not more))
        if not refill.tokens:
            raise ExtractError(
                f"{', '.join(map(shown, self._passes.columns[:4]))}: the data has no token that is neither padding nor "
                "special, so that there is nothing to hand out. See drop_special= and lengths=."
            )
        left = pool.rest()
        if left is not None and not self._drop_last:
            yield self._shaped(left)

    def _shaped(self, columns: dict[str, Tensor]) -> Any:
        if self._single and len(columns) == 1:
            return next(iter(columns.values()))
        return {name: columns[name] for name in self._passes.ordered(columns)}

    def __repr__(self) -> str:
        sites = ", ".join(map(shown, self._passes.columns[:4])) + (", …" if len(self._passes.columns) > 4 else "")
        return f"<tokens of {sites}: batches of {self._batch} out of {self._buffer}, epoch {self.epoch} comes next>"

    def _repr_html_(self) -> str:
        return Table(repr(self)[1:-1], [], [])._repr_html_()


def _mixed(seed: int, epoch: int) -> int:
    # Not the sum: epoch 1 of seed 0 would be epoch 0 of seed 1.
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> np.uint64(1))


# -- running the model ---------------------------------------------------------------------------------


class _Refill:
    """Runs the model until a pool is full, and leaves it and the process alone in between."""

    def __init__(self, passes: Passes, staging: _Staging, seed: int) -> None:
        self.passes, self.staging, self.seed = passes, staging, seed
        self.batches: Generator[Any, None, None] | None = None
        self.waiting: list[_Staged] = []
        self.tokens = 0
        """How many there were so far."""
        self._numbers: Callable[[], None] | None = None

    def __call__(self, pool: _Pool) -> bool:
        """Fill the pool; false if the data has come to its end."""
        self._store(pool, last=False)
        if pool.is_full:  # the model gave more at once than the buffer holds
            return True
        more = True
        with self._own_random_numbers(), evaluating_on(self.passes.model, None, attributes=False) as device:
            if self.batches is None:
                self.batches = self.passes.epoch(pin=device.type == "cuda")
            while more and not pool.is_full:
                more = self._one(self.batches, device)
                self._store(pool, last=not more)
        return more or bool(self.waiting)

    def close(self) -> None:
        """Let the workers of a loader go."""
        if self.batches is not None:
            self.batches.close()

    def _one(self, batches: Iterator[Any], device: torch.device) -> bool:
        batch = next(batches, None)
        if batch is None:
            return False
        self.staging.begin()
        self.passes.run(batch, device, self.staging.take)
        self.waiting.append(self.staging.end())
        self.tokens += max(map(len, self.waiting[-1].columns.values()), default=0)
        return True

    def _store(self, pool: _Pool, last: bool) -> None:
        # What is on its way from a GPU is one call of the model behind: nobody waits for it.
        while len(self.waiting) > (0 if last else self.staging.behind) and not pool.is_full:
            staged = self.waiting[0]
            for event in staged.events:
                event.synchronize()
            rest = pool.put(staged.columns)
            self.waiting[:1] = [_Staged(rest, [])] if rest else []

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Those of an epoch go on from refill to refill, whatever the caller draws in between, who keeps his own."""
        # In another thread, going back would hand out numbers again that the main thread has used since.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        restore = calling.random_numbers()
        try:
            if self._numbers is None:
                _seed_all(self.seed)
            else:
                self._numbers()
            yield
            self._numbers = calling.random_numbers()
        finally:
            restore()


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


class _Staged(NamedTuple):
    """The tokens of one call of the model, by column, and what is over when they have arrived."""

    columns: dict[str, Tensor]
    events: list[torch.cuda.Event]


class _Staging:
    """Copies the tokens of one call of the model, in the hooks, to where the buffer is."""

    def __init__(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        self.device, self.dtype = device, dtype
        self.copies = HostCopies()
        self.found: dict[str, Tensor] = {}
        self.where: tuple[str, Block] | None = None
        self.behind = 0

    def begin(self) -> None:
        self.found, self.where = {}, None

    def take(self, name: str, block: Block) -> None:
        """Called in the hook of a site."""
        self._check_same(name, block)
        tokens = block.tokens.detach()
        dtype = self.dtype if self.dtype is not None and tokens.is_floating_point() else tokens.dtype
        # A copy even where all tokens are taken: the next layer may write to the value.
        safe = tokens.to(dtype, copy=True, memory_format=torch.contiguous_format)
        if self.device is None or self.device == safe.device:
            self.found[name] = safe
        elif self.device.type == "cpu" and safe.is_cuda:
            self.behind = 1
            self.found[name] = self.copies.copy(safe)
        else:
            self.found[name] = safe.to(self.device)

    def _check_same(self, name: str, block: Block) -> None:
        if self.where is None:
            self.where = name, block
            return
        first, other = self.where
        same = torch.equal(block.rows, other.rows) and torch.equal(block.positions, other.positions)
        if not same:
            raise ExtractError(
                f"{shown(first)!r} has {len(other.rows)} tokens in a batch and {shown(name)!r} {len(block.rows)}, or "
                "they are at other positions: only sites with the same tokens can be in one stream. Make two."
            )

    def end(self) -> _Staged:
        return _Staged(self.found, self.copies.events() if self.behind else [])


# -- the buffer ----------------------------------------------------------------------------------------


class _Pool:
    """Tokens in slots. Half of them are handed out, in a random order, and their slots filled again.

    >>> pool = _Pool(4, 2, torch.Generator())
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

    @property
    def is_full(self) -> bool:
        return not len(self.free)

    def put(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take as many tokens as there is room for, and return the others."""
        count = len(next(iter(columns.values())))
        self._check(columns)
        slots, self.free = self.free[:count], self.free[count:]
        for name, tokens in columns.items():
            into = self.columns[name]
            into.index_copy_(0, slots.to(into.device, non_blocking=True), tokens[: len(slots)])
        self.taken = torch.cat([self.taken, slots])
        return {} if len(slots) == count else {name: tokens[len(slots) :] for name, tokens in columns.items()}

    def _check(self, columns: dict[str, Tensor]) -> None:
        if not self.columns:
            self.columns = {name: tokens.new_empty(self.size, *tokens.shape[1:]) for name, tokens in columns.items()}
        if columns.keys() != self.columns.keys():
            other = sorted(columns.keys() ^ self.columns.keys())
            raise ExtractError(f"{shown(other[0])!r} is not there in every batch of the data.")
        for name, tokens in columns.items():
            held = self.columns[name]
            if tokens.shape[1:] != held.shape[1:] or tokens.dtype != held.dtype or tokens.device != held.device:
                raise ExtractError(
                    f"{shown(name)!r}: tokens of {held.dtype} {tuple(held.shape[1:])} on {held.device} at first, of "
                    f"{tokens.dtype} {tuple(tokens.shape[1:])} on {tokens.device} now. Cast them with dtype=, or "
                    "reduce them to one shape in a transform."
                )

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

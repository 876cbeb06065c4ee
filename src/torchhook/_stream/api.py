"""``stream``: the tokens of a data set's activations in shuffled batches, made while they are used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchhook._core.per_site import Transforms
from torchhook._core.select import Selector
from torchhook._extract.api import Drop, Part, Passes
from torchhook._features.api import shown
from torchhook._recording.tables import Table
from torchhook._stream.pool import Pool
from torchhook._stream.refill import Refill
from torchhook._stream.staging import Staging
from torchhook._values import devices
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
        pool = Pool(self._buffer, self._batch, order if self._shuffle else None)
        refill = Refill(self._passes, Staging(self._device, self._dtype), _mixed(self._seed, epoch))
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

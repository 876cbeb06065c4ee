"""The model runs until the buffer is full, and is left alone in between."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import torch

from torchhook._core import calling
from torchhook._extract.api import Passes, evaluating_on
from torchhook._stream.pool import Pool
from torchhook._stream.staging import Staged, Staging


class Refill:
    """Runs the model until a pool is full, and leaves it and the process alone in between."""

    def __init__(self, passes: Passes, staging: Staging, seed: int) -> None:
        self.passes, self.staging, self.seed = passes, staging, seed
        self.batches: Generator[Any, None, None] | None = None
        self.waiting: list[Staged] = []
        self.tokens: int = 0
        """How many there were so far."""
        self._numbers: Callable[[], None] | None = None

    def __call__(self, pool: Pool) -> bool:
        """Fill the pool; false if the data has come to its end."""
        self._store(pool, last=False)
        if pool.is_full:  # the model gave more at once than the buffer holds
            return True
        more = True
        with self._own_random_numbers(), evaluating_on(self.passes.model, None, attributes=False) as device:
            if self.batches is None:
                self.batches = self.passes.epoch(pin=device.type == "cuda")
            while more and not pool.is_full:
                more = self._one(self.batches, device, pool)
                self._store(pool, last=not more)
        return more or bool(self.waiting)

    def close(self) -> None:
        """Let the workers of a loader go."""
        if self.batches is not None:
            self.batches.close()

    def _one(self, batches: Iterator[Any], device: torch.device, pool: Pool) -> bool:
        batch = next(batches, None)
        if batch is None:
            return False
        # What waits has the first right to the slots that are free.
        self.staging.begin(None if self.waiting else pool)
        self.passes.run(batch, device, self.staging.take)
        self.waiting += self.staging.end()
        self.tokens += self.staging.count
        return True

    def _store(self, pool: Pool, last: bool) -> None:
        # What is on its way from a GPU is one call of the model behind: nobody waits for it.
        while len(self.waiting) > (0 if last else self.staging.behind) and not pool.is_full:
            staged = self.waiting[0]
            for event in staged.events:
                event.synchronize()
            rest = pool.put(staged.columns)
            self.waiting[:1] = [Staged(rest, [])] if rest else []

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
    # Not torch.manual_seed: a GPU that nobody has used yet would begin with this seed when somebody does.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))

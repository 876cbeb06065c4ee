"""A watch whose steps are those of a trainer's optimizer."""

from __future__ import annotations

from torchhook._callbacks import Fit
from torchhook._core.openable import Openable
from torchhook._watch.engine import Engine


class WatchedFit(Fit):
    """Begins a step with its first batch and ends it with the optimizer's step, so that validation is in none."""

    def __init__(self, watch: Openable, engine: Engine) -> None:
        super().__init__(watch)
        self._engine = engine

    def step_began(self, number: int) -> None:
        if not self._tool.is_open:  # closed by hand before the trainer was done
            return
        # The trainer's own count, which goes on where a checkpoint was loaded.
        self._engine.next = self._engine.started + number
        self._engine.advance()

    def step_ended(self) -> None:
        self._engine.finish(now=False)

    def paused(self) -> None:
        self._engine.hide()

    def resumed(self) -> None:
        self._engine.show()

"""Callbacks for the trainers of Lightning and Hugging Face, by which a tool hears of their steps.

Neither package is imported here: a callback is made for those that the program has imported itself.
"""

from __future__ import annotations

import sys
from typing import Any

from torchhook._core.openable import Openable
from torchhook.errors import SessionError


class Fit:
    """What a tool does in the course of a training run. This one is open from its beginning to its end."""

    def __init__(self, tool: Openable) -> None:
        self._tool = tool
        self._opened = False

    def began(self) -> None:
        # Whoever opened the tool before closes it, too.
        if not self._tool.is_open:
            self._tool.open()
            self._opened = True

    def step_began(self, number: int) -> None:
        """The first batch of a step begins; several may be gathered before the optimizer makes its own."""

    def step_ended(self) -> None:
        """The optimizer has made its step."""

    def paused(self) -> None:
        """What runs from here on is no training, until ``resumed``."""

    def resumed(self) -> None:
        """Training goes on."""

    def ended(self, error: BaseException | None) -> None:
        if self._opened:
            self._opened = False
            self._tool.__exit__(type(error) if error else None, error, None)


_TRAINERS = (
    ("lightning.pytorch", "Callback"),
    ("pytorch_lightning", "Callback"),
    ("transformers", "TrainerCallback"),
)


def callback(fit: Fit) -> Any:
    """A callback for every trainer that the program knows of, which tells ``fit`` what happens."""
    found = [getattr(sys.modules[module], name) for module, name in _TRAINERS if module in sys.modules]
    if not found:
        raise SessionError(
            "callback() is for the trainers of Lightning (lightning.pytorch or pytorch_lightning) and Hugging Face "
            "(transformers), and none of them is imported. Import yours first; in a loop of your own use "
            "steps='manual' and step()."
        )
    # A class of its own each time: Hugging Face warns of two callbacks of one class.
    return type("TorchHookCallback", (_Events, *found), {})(fit)


class _Events:
    """The events of both trainers. Their names differ, but for one that means the same."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._running = False
        """Whether a step has begun that the optimizer has not ended."""
        self._steps = 0

    def _began(self) -> None:
        # Hugging Face tells nobody of an exception: the step in which the last training ended is no part of this one.
        self._running = False
        self._fit.began()

    def _begin(self, number: int) -> None:
        if not self._running:
            self._running, self._steps = True, number
            self._fit.step_began(number)

    def _end(self) -> None:
        if self._running:
            self._running = False
            self._fit.step_ended()

    def __del__(self) -> None:
        # With the trainer that held this, its training is over, however it ended. What is left at the end of the
        # process needs no end of its own.
        if not self._is_shutting_down():
            self._fit.ended(SessionError("the trainer was dropped before it said that its training has ended."))

    _is_shutting_down = staticmethod(sys.is_finalizing)

    def on_train_end(self, *told: Any, **more: Any) -> None:
        self._end()
        self._fit.ended(None)

    # -- Lightning ---------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._began()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._begin(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # It counts the optimizer's steps: while gradients are accumulated, it stands still.
        if trainer.global_step != self._steps:
            self._end()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._fit.paused()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._fit.resumed()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._running = False
        self._fit.ended(exception)

    # -- Hugging Face ------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._began()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._begin(state.global_step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._end()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._end()  # of a version that does not tell of the optimizer

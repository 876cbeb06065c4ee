"""Taps that see no values: they say when a call of a module begins, and when it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from torchhook._core.hooks import after_call_always
from torchhook._core.scope import Scope, was_seen
from torchhook._core.taps import Tap
from torchhook._torch.hooks import Undo, put_before


class EnterTap(Tap):
    """Says when a module begins to run."""

    def __init__(self, function: Callable[[nn.Module], None]) -> None:
        super().__init__("enter")
        self.function = function

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.function(module)

    def attach(self, undo: Undo, module: nn.Module) -> None:
        put_before(undo, module, self, kwargs=False)


class LeaveTap(EnterTap):
    """Says when a module has run, also when it raised; first of all hooks, so that the others run outside of it."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        self.function(module)

    def attach(self, undo: Undo, module: nn.Module) -> None:
        after_call_always(undo, module, self)


class AfterAllTap(LeaveTap):
    """As that, after all other hooks: what leaves the model belongs to its call, and so does a repetition of it."""

    def __init__(self, function: Callable[[nn.Module], None], of: Scope) -> None:
        super().__init__(function)
        self.of = of

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if not was_seen(self.of):
            self.function(module)

    def attach(self, undo: Undo, module: nn.Module) -> None:
        after_call_always(undo, module, self, first=False)

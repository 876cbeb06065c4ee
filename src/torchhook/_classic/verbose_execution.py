"""``VerboseExecution``, as the tutorials have it: a model that prints what its layers give."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchhook._classic.facade import Facade
from torchhook._core.index import Index
from torchhook._core.session import Session
from torchhook._core.taps import Look
from torchhook._core.targets import Target
from torchhook._layers.api import layers
from torchhook._recording.address import Site
from torchhook._values import tree


class VerboseExecution(Facade):
    """A model that prints the shape of every direct child's output as it runs.

    >>> verbose = VerboseExecution(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    >>> output = verbose(torch.ones(1, 2))
    0: torch.Size([1, 3])
    1: torch.Size([1, 3])

    Args:
        model: called as it is; its output is returned.
        depth: how many levels of layers to print.
        dtype: add the types of the tensors.
        time: add the milliseconds that each layer took.
        print: takes each line instead.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        depth: int = 1,
        dtype: bool = False,
        time: bool = False,
        print: Callable[[str], Any] = print,
    ) -> None:
        """Say what to print; hooks are on the model only while it runs."""
        super().__init__(model)
        self.depth = depth
        self.dtype = dtype
        self.time = time
        self.print = print

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and print a line whenever a layer returns."""
        index = Index(self.model)
        session = Session(self.model, index=index, warn=False)
        found = layers(self.model, depth=self.depth)
        # A module with two names is one hook, and prints under its first.
        for name in (layer.name for layer in found if layer.name and not layer.shared_with):
            module, started = index.modules[name], list[float]()  # a stack, for a layer that calls itself
            if self.time:
                session.look(Target(Site(name, port="input"), module), _starter(started))
            session.look(Target(Site(name), module), self._printer(name, started))
        with session:
            return self.model(*args, **kwargs)

    def _printer(self, name: str, started: list[float]) -> Look:
        # As each layer returns and not at the end: the lines before an error tell where it happened.
        def show(value: Any, call: int) -> None:
            text = _sizes(value)
            if self.dtype:
                text += " " + "/".join(dict.fromkeys(str(t.dtype) for t in tree.tensors(value)))
            if started:  # as Python sees it: on a GPU, the time to launch and not to compute
                text += f" {(time.perf_counter() - started.pop()) * 1e3:.2f} ms"
            self.print(f"{name}: {text}")

        return show


def _starter(started: list[float]) -> Look:
    return lambda value, call: started.append(time.perf_counter())


def _sizes(value: Any) -> str:
    return str(value.shape) if isinstance(value, torch.Tensor) else tree.describe(value)

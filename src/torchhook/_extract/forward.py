"""One batch through the model: a session whose hooks hand each value on, and which stops at the last one needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchhook._core.index import Index
from torchhook._core.select import Selector, resolve
from torchhook._core.session import Session
from torchhook._core.taps import Look
from torchhook._extract import inputs
from torchhook._values import tree
from torchhook.errors import ExtractError, suggestion
from torchhook.transforms import Rows

Put = Callable[[str, Any], None]
"""Takes the address of a layer and what is kept of its value."""
Transforms = Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None


class Forward:
    """The model and the layers that are wanted of it."""

    def __init__(
        self,
        model: nn.Module,
        layers: Selector,
        *,
        transform: Transforms = None,
        input_fn: Callable[[Any], Any] | None = None,
        autocast: torch.dtype | bool | None = None,
    ) -> None:
        self.model, self.input_fn, self.autocast = model, input_fn, autocast
        self.index = Index(model)
        self.targets = resolve(self.index, layers)
        self.layers = [str(target.site) for target in self.targets]
        for target in self.targets:
            if target.tensor is not None or target.site.port.startswith("grad"):
                kind = "a parameter" if target.tensor is not None else "a gradient"
                raise ExtractError(f"{str(target.site)!r} is {kind}: only what the forward pass makes has rows.")
        self.transforms = _by_layer(transform, self.layers)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "index": None, "targets": [t.site for t in self.targets]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.index = Index(self.model)
        self.targets = resolve(self.index, state["targets"])

    def __call__(self, batch: Any, device: torch.device, put: Put, stop: bool = True) -> None:
        """Run a batch; ``put`` is called inside the hooks, when the value is still what the layer produced."""
        args, kwargs = inputs.move(inputs.call_of(batch, self.model, self.input_fn), device)
        session = Session(self.model, index=self.index, warn=False)
        for target in self.targets:
            layer = str(target.site)
            session.look(target, _hand_on(layer, self.transforms[layer], put))
        if stop:
            session.stop_when_seen(self.targets)
        with torch.no_grad(), self._autocast(device), session:
            self.model(*args, **kwargs)
        for layer, why in session.recording.missing.items():
            raise ExtractError(f"{layer!r} did not run: {why}")

    def _autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if not self.autocast:
            return contextlib.nullcontext()
        return torch.autocast(device.type, None if self.autocast is True else self.autocast)


def _hand_on(layer: str, transform: Callable[[Any], Any] | None, put: Put) -> Look:
    return lambda value, call: put(layer, value if transform is None else transform(value))


def _by_layer(transform: Transforms, layers: list[str]) -> dict[str, Callable[[Any], Any] | None]:
    if not isinstance(transform, Mapping):
        return dict.fromkeys(layers, transform)
    for name in transform:
        if name not in layers:
            raise ExtractError(f"transform[{name!r}]: no such layer is extracted. {suggestion(name, layers)}")
    return {layer: transform.get(layer) for layer in layers}


def parts(layer: str, value: Any) -> Iterator[tuple[str, Tensor | Rows]]:
    """The columns of a value: the layer itself for a tensor, ``layer[leaf]`` for each tensor inside another value."""
    if isinstance(value, Tensor):
        yield layer, Rows(value.unbind()) if value.is_nested else value
    elif isinstance(value, Rows):
        yield layer, value
    else:
        for address, leaf in tree.leaves(value):
            if isinstance(leaf, Tensor):
                yield f"{layer}[{address}]", leaf

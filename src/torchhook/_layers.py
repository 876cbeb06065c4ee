"""``layers`` and ``ops``: what a model is made of, as tables that print, iterate and show in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook._core import calling
from torchhook._core.functional import Listener
from torchhook._core.index import Index, is_callable
from torchhook._core.keep import Keep
from torchhook._core.select import Target
from torchhook._core.session import Session
from torchhook._recording.address import Site, meant, shown
from torchhook._recording.tables import Table
from torchhook._values import tree
from torchhook.errors import SelectorError, suggestion


class Layer(NamedTuple):
    """One module: its path, its type, and the parameters in it and below it, tied weights counted once."""

    name: str
    type: str
    parameters: int
    shape: str | None = None
    """The shape of its output, if the model was run; ``None`` if it was not, or never called this module."""
    shared_with: str | None = None
    """The first name of a module that has more than one."""

    @property
    def depth(self) -> int:
        return self.name.count(".") + 1 if self.name else 0


class Layers:
    """The modules of a model, parents first. Iterate it, index it by name, print it."""

    def __init__(self, title: str, layers: list[Layer]) -> None:
        self.title = title
        self._layers = layers

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, name: str | int) -> Layer:
        if isinstance(name, int):
            return self._layers[name]
        for layer in self._layers:
            if layer.name in (name, meant(name)):
                return layer
        raise SelectorError(f"no layer {name!r} here. {suggestion(name, [layer.name for layer in self])}")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and any(layer.name in (name, meant(name)) for layer in self._layers)

    def names(self) -> list[str]:
        return [layer.name for layer in self._layers]

    def table(self) -> Table:
        run = any(layer.shape is not None for layer in self)
        rows = []
        for layer in self:
            indent = "  " * max(layer.depth - 1, 0)
            kind = layer.type if layer.shared_with is None else f"{layer.type} = {layer.shared_with}"
            shape = [layer.shape or "-"] if run else []
            rows.append([f"{indent}{shown(layer.name)}", kind, *shape, f"{layer.parameters:,}"])
        return Table(self.title, ["layer", "type", *(["output"] if run else []), ">parameters"], rows)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def layers(model: nn.Module, inputs: Any = None, *, depth: int | None = None) -> Layers:
    """The modules of a model down to ``depth``, with the shapes of their outputs if ``inputs`` are given.

    >>> print(layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(1, 2)))
    Sequential: 2 layers, 9 parameters
    layer    type        output  parameters
    ---------------------------------------
    (model)  Sequential  (1, 3)           9
    0        Linear      (1, 3)           9
    1        ReLU        (1, 3)           0

    With ``inputs`` the model runs once, in eval mode and without gradients: a tuple is the arguments, a dict the
    keyword arguments, ``th.Inputs(args, kwargs)`` both, anything else the one argument. The model, the inputs and the
    process are left as they were: modes, buffers, caches, gradients, random numbers.
    """
    if isinstance(inputs, int):
        raise TypeError(
            f"layers(model, {inputs}): the second argument is what the model is called with. For the levels below the "
            f"model write depth={inputs}; a number that the model takes goes in a tuple."
        )
    if depth is not None and depth < 0:
        raise ValueError(f"depth={depth}: give the number of levels below the model, or None for all of them.")
    index = Index(model)
    # By the id of the module: a shared one has its shape under each of its names.
    shapes = {} if inputs is None else _shapes(model, index, inputs)
    found = []
    for path, module in index.modules.items():
        first = index.names(module)[0]
        parameters = sum(numel(p) for p in set(module.parameters()))
        shared = None if first == path else first
        layer = Layer(path, type(module).__name__, parameters, shapes.get(id(module)), shared)
        if depth is None or layer.depth <= depth:
            found.append(layer)
    total = sum(numel(p) for p in set(model.parameters()))
    # Not of ``model``, which may be a wrapper (compiled, parallel): paths begin below that.
    title = f"{type(index.modules['']).__name__}: {len(index.modules) - 1} layers, {total:,} parameters"
    return Layers(title, found)


class Op(NamedTuple):
    """A functional operation: the module it ran in, its name, and how often it ran."""

    path: str
    name: str
    calls: int

    @property
    def address(self) -> str:
        return f"{self.path}/{self.name}"


class Ops(list[Op]):
    """The functional operations of a model, by module. Print it, or iterate it."""

    def table(self) -> Table:
        rows = [[shown(op.address), str(op.calls)] for op in self]
        return Table(f"{len(rows)} operations", ["address", ">calls"], rows)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def ops(model: nn.Module, inputs: Any) -> Ops:
    """Run the model once and list the functional operations that returned tensors, each with its address.

    >>> print(ops(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(1, 2)))
    2 operations
    address   calls
    ---------------
    0/linear      1
    1/relu        1

    It runs in the mode that it is in, and with gradients if they are on: other modes call other operations, and these
    addresses are for what one does next. ``inputs`` are a tuple of arguments, a dict of keyword arguments,
    ``th.Inputs(args, kwargs)`` for both, or else the one argument. The model, the inputs and the process are left as
    they were: modes, buffers, caches, gradients, random numbers.
    """
    session = Session(model)
    listener = Listener(session.scope)
    session.listen(listener)
    with calling.undisturbed(model), session:
        calling.call(model, calling.arguments(inputs))
    index = session.index
    # In the order of the modules, as ``layers`` lists them, and not in that of the run.
    found = ((index.names(m)[0], listener.seen[i]) for i, m in index.distinct.items() if i in listener.seen)
    return Ops(Op(path, name, calls) for path, names in found for name, calls in names.items())


def numel(parameter: Tensor) -> int:
    """The number of elements; a lazy parameter has none yet."""
    return 0 if isinstance(parameter, nn.parameter.UninitializedParameter) else parameter.numel()


def _shapes(model: nn.Module, index: Index, inputs: Any) -> dict[int, str]:
    given = calling.arguments(inputs)
    session = Session(model, index=index, warn=False)
    targets = {i: Target(Site(index.names(m)[0]), m) for i, m in index.distinct.items() if is_callable(m)}
    # Only the text is kept: all values of a large model at once may not fit in memory. Of several calls, the last.
    session.record(targets.values(), Keep(transform=tree.describe), max_records=1)
    with calling.undisturbed(model), calling.evaluating(model), torch.no_grad(), session as recording:
        calling.call(model, given)
    return {i: recording.all(t.site)[-1] for i, t in targets.items() if t.site in recording}

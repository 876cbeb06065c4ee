"""``layers``: what a model is made of, as a table that prints, iterates and shows in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from torchhook._core import calling
from torchhook._core.index import Index
from torchhook._layers.columns import COLUMNS, chosen, totals
from torchhook._layers.measure import Seen, Shape, measure
from torchhook._layers.ops import Op, Ops, ops
from torchhook._layers.timing import seconds
from torchhook._layers.untrained import untrained
from torchhook._recording.address import meant, shown
from torchhook._recording.tables import Table
from torchhook._values import tree
from torchhook._values.tree import Inputs
from torchhook._words import plural
from torchhook.errors import SelectorError, suggestion

__all__ = ["COLUMNS", "Layer", "Layers", "Op", "Ops", "chosen", "layers", "numel", "ops", "seconds", "untrained"]


class Layer(NamedTuple):
    """One module: its path, its type, and the parameters in it and below it, tied weights counted once."""

    name: str
    type: str
    parameters: int
    shape: Shape | None = None
    """The sizes of its first call's output, a tuple of these for an output of several tensors, if the model was run;
    ``None`` if it was not, or never called this module."""
    shared_with: str | None = None
    """The first name of a module that has more than one."""
    output: str | None = None
    """Its output in a few words: that of its first call, and how many other calls' differ from it and each other."""
    trainable: int = 0
    """Those of the parameters that require a gradient."""
    kernel: tuple[int, ...] | None = None
    multiply_adds: int | None = None
    """Of all its calls; ``None`` if nobody asked for them."""
    seconds: float | None = None
    memory: int | None = None
    """The bytes of its first call's output."""

    @property
    def depth(self) -> int:
        return self.name.count(".") + 1 if self.name else 0


class Layers:
    """The modules of a model, parents first. Iterate it, index it by name, print it."""

    def __init__(self, title: str, layers: list[Layer], columns: list[str], notes: list[str]) -> None:
        self.title = title
        self._layers = layers
        self._columns = columns
        self._notes = notes

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
        columns = [COLUMNS[name] for name in self._columns]
        rows = [
            [f"{'  ' * max(layer.depth - 1, 0)}{shown(layer.name)}", *(column.cell(layer) for column in columns)]
            for layer in self
        ]
        headings = ["layer", *(column.heading for column in columns)]
        return Table(self.title, headings, rows, self._notes)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def layers(
    model: nn.Module,
    inputs: Any = None,
    *,
    depth: int | None = None,
    columns: str | Iterable[str] | None = None,
    device: Literal["meta"] | None = None,
) -> Layers:
    """The modules of a model down to ``depth``, with the shapes of their outputs if ``inputs`` are given.

    >>> import torch
    >>> print(layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(1, 2)))
    Sequential: 2 layers, 9 parameters
    layer    type        output  parameters
    ---------------------------------------
    (model)  Sequential  (1, 3)           9
    0        Linear      (1, 3)           9
    1        ReLU        (1, 3)           0

    With ``inputs`` the model runs once, in eval mode and without gradients, and is left as it was, as are the inputs
    and the process.

    Args:
        model: The model.
        inputs: What it is called with: a tuple of arguments, a dict of keyword arguments, ``th.Inputs(args, kwargs)``
            for both, or the one argument.
        depth: How many levels below the model are listed.
        columns: Some of ``"type"``, ``"kernel"``, ``"output"``, ``"parameters"``, ``"trainable"``, ``"multiply_adds"``
            (as torch's ``FlopCounterMode`` knows them), ``"time"`` and ``"memory"`` (of the output), or ``"all"``.
        device: ``"meta"`` for shapes without memory for weights or values.
    """
    if isinstance(inputs, int):
        raise TypeError(
            f"layers(model, {inputs}): the second argument is what the model is called with. For the levels below the "
            f"model write depth={inputs}; a number that the model takes goes in a tuple."
        )
    if depth is not None and depth < 0:
        raise ValueError(f"depth={depth}: give the number of levels below the model, or None for all of them.")
    if device not in (None, "meta"):
        raise ValueError(f"device={device!r}: the model runs where it is, or as shapes alone with device='meta'.")
    wanted = chosen(columns, inputs is not None)
    index = Index(model)
    meta = device == "meta" or _on_meta(model)
    if meta and "time" in wanted:
        if columns != "all":
            raise ValueError("columns: 'time' needs a real run, and there is none on the meta device.")
        wanted.remove("time")
    seen, times = _run(model, index, inputs, wanted, meta)
    found = _listed(index, seen, times)
    kept = [layer for layer in found if depth is None or layer.depth <= depth]
    return Layers(_title(index, found[0], len(kept) - 1), kept, wanted, totals(found, wanted))


def _run(
    model: nn.Module, index: Index, inputs: Any, wanted: list[str], meta: bool
) -> tuple[dict[int, Seen], dict[str, float]]:
    if inputs is None:
        return {}, {}
    given = calling.arguments(inputs)
    if meta:
        given = Inputs(*tree.map_tensors(lambda tensor: tensor.to("meta"), given))
    seen = measure(model, index, given, meta, "multiply_adds" in wanted)
    times: dict[str, float] = {}
    if "time" in wanted:
        with calling.undisturbed(model), calling.evaluating(model):
            times = seconds(model, index, given, 3)[1].whole
    return seen, times


def _on_meta(model: nn.Module) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)


def _listed(index: Index, seen: dict[int, Seen], times: dict[str, float]) -> list[Layer]:
    found = []
    for path, module in index.modules.items():
        first, own = index.names(module)[0], set(module.parameters())
        what = seen.get(id(module), Seen(None, None, None, None))
        found.append(
            Layer(
                name=path,
                type=type(module).__name__,
                parameters=sum(map(numel, own)),
                shape=what.shape,
                shared_with=None if first == path else first,
                output=what.output,
                trainable=sum(numel(p) for p in own if p.requires_grad),
                kernel=_kernel(module),
                multiply_adds=what.multiply_adds,
                seconds=times.get(first),
                memory=what.memory,
            )
        )
    return found


def _kernel(module: nn.Module) -> tuple[int, ...] | None:
    size = getattr(module, "kernel_size", None)
    if isinstance(size, int):
        # A pooling of two dims may say one number for both.
        dims = next((n for n in (1, 2, 3) if type(module).__name__.endswith(f"{n}d")), 1)
        return (size,) * dims
    return tuple(size) if isinstance(size, tuple) and all(isinstance(n, int) for n in size) else None


def _title(index: Index, whole: Layer, shown_: int) -> str:
    # Not of the model handed in, which may be a wrapper (compiled, parallel): paths begin below that.
    every = len(index.modules) - 1
    many = f"{every}" if shown_ == every else f"{shown_} of {every}"
    frozen = "" if whole.trainable == whole.parameters else f", {whole.trainable:,} of them trainable"
    return f"{whole.type}: {many} {plural(every, 'layer')}, {whole.parameters:,} parameters{frozen}"


def numel(parameter: Tensor) -> int:
    """The number of elements; a lazy parameter has none yet."""
    return 0 if isinstance(parameter, nn.parameter.UninitializedParameter) else parameter.numel()

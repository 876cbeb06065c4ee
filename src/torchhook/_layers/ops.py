"""``ops``: the functional operations of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from torchhook._core import calling
from torchhook._core.functional import Listener
from torchhook._core.scope import Scope
from torchhook._core.session import Session
from torchhook._recording.address import shown
from torchhook._recording.tables import Table
from torchhook._values import tree
from torchhook._words import listed, plural


class Op(NamedTuple):
    """A functional operation: the module it ran in, its name, how often it ran, and what it returned."""

    path: str
    name: str
    calls: int
    output: str = ""
    """The shape of what the first call returned, and how many others there were."""

    @property
    def address(self) -> str:
        return f"{self.path}/{self.name}"


class Ops(list[Op]):
    """The functional operations of a model, by module. Print it, or iterate it."""

    def table(self) -> Table:
        rows = [[shown(op.address), op.output, str(op.calls)] for op in self]
        return Table(f"{len(rows)} {plural(len(rows), 'operation')}", ["address", "output", ">calls"], rows)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def ops(model: nn.Module, inputs: Any) -> Ops:
    """Run the model once and list the functional operations that returned tensors, each with its address.

    >>> import torch
    >>> print(ops(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(1, 2)))
    2 operations
    address   output  calls
    -----------------------
    0/linear  (1, 3)      1
    1/relu    (1, 3)      1

    It runs in the mode that it is in, and with gradients if they are on: other modes call other operations, and these
    addresses are for what one does next. ``inputs`` are a tuple of arguments, a dict of keyword arguments,
    ``th.Inputs(args, kwargs)`` for both, or else the one argument. The model, the inputs and the process are left as
    they were: modes, buffers, caches, gradients, random numbers.
    """
    session = Session(model)
    listener = _Shapes(session.scope)
    session.listen(listener)
    with calling.undisturbed(model), session:
        calling.call(model, calling.arguments(inputs))
    index = session.index
    # In the order of the modules, as ``layers`` lists them, and not in that of the run.
    found = ((index.names(m)[0], i, listener.seen[i]) for i, m in index.distinct.items() if i in listener.seen)
    return Ops(
        Op(path, name, calls, listener.output(i, name)) for path, i, names in found for name, calls in names.items()
    )


class _Shapes(Listener):
    """Keeps the text of what each operation returned: the values of a large model may not fit beside it."""

    def __init__(self, scope: Scope | None) -> None:
        super().__init__(scope)
        self._shapes: dict[tuple[int, str], dict[str, None]] = {}

    def after(self, name: str, module: nn.Module, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().after(name, module, output, args, kwargs)
        if name in self.seen.get(id(module), ()):
            self._shapes.setdefault((id(module), name), {})[tree.describe(output)] = None
        return output

    def output(self, module: int, name: str) -> str:
        return listed(list(self._shapes[module, name]), most=1)

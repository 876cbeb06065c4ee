"""The columns that ``layers`` can show: what each says of a layer, and whether the model has to run for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from torchhook._recording.tables import count, size
from torchhook.errors import closest

if TYPE_CHECKING:
    from torchhook._layers.api import Layer


class Column(NamedTuple):
    """A heading, set right where it begins with ``>``, and the text of a cell."""

    heading: str
    cell: Callable[[Layer], str]
    runs: bool = False
    """Whether the model has to run for it."""


def _kind(layer: Layer) -> str:
    return layer.type if layer.shared_with is None else f"{layer.type} = {layer.shared_with}"


def _known(value: object, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)  # type: ignore[arg-type]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


COLUMNS: dict[str, Column] = {
    "type": Column("type", _kind),
    "kernel": Column("kernel", lambda layer: "×".join(map(str, layer.kernel)) if layer.kernel else "-"),
    "output": Column("output", lambda layer: layer.output or "-", runs=True),
    "parameters": Column(">parameters", lambda layer: f"{layer.parameters:,}"),
    "trainable": Column(">trainable", lambda layer: f"{layer.trainable:,}"),
    "multiply_adds": Column(">multiply-adds", lambda layer: _known(layer.multiply_adds, _count), runs=True),
    "time": Column(">time", lambda layer: _known(layer.seconds, milliseconds), runs=True),
    "memory": Column(">memory", lambda layer: _known(layer.memory, size), runs=True),
}


def _count(number: float) -> str:
    return count(number).strip() if number >= 1000 else str(int(number))


def chosen(columns: str | Iterable[str] | None, run: bool) -> list[str]:
    """The names of the columns that are wanted, checked; in the order in which they were asked for."""
    if columns is None:
        return ["type", *(["output"] if run else []), "parameters"]
    wanted = list(COLUMNS) if columns == "all" else [columns] if isinstance(columns, str) else list(columns)
    if columns == "all" and not run:
        wanted = [name for name in wanted if not COLUMNS[name].runs]
    for name in wanted:
        if name not in COLUMNS:
            near = [repr(one) for one in closest(str(name), list(COLUMNS))]
            meant = f" Closest: {', '.join(near)}." if near else ""
            raise ValueError(f"columns: {name!r} is none of {', '.join(map(repr, COLUMNS))}, or 'all'.{meant}")
        if COLUMNS[name].runs and not run:
            raise ValueError(f"columns: {name!r} is known after a run: give inputs=, what the model is called with.")
    return wanted


def totals(layers: list[Layer], wanted: Iterable[str]) -> list[str]:
    """A line for the model as a whole, of what else than parameters was asked for."""
    whole, parents = layers[0], {layer.name.rpartition(".")[0] for layer in layers if layer.name}
    # What holds others gives out what the last of them gave: it would be counted again.
    own = [x.memory or 0 for x in layers if x.shared_with is None and (x.name not in parents or len(layers) == 1)]
    said = {
        "trainable": f"{whole.trainable:,} trainable parameters",
        "multiply_adds": f"{_known(whole.multiply_adds, _count)} multiply-adds",
        "time": f"{_known(whole.seconds, milliseconds)} in one pass, with a clock at every layer",
        "memory": f"{size(sum(own))} of outputs of the layers that hold no others",
    }
    parts = [said[name] for name in wanted if name in said]
    return [f"total: {', '.join(parts)}"] if parts else []

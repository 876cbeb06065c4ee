"""From what a user has (a recording, a tensor, a dict of tensors) to arrays that can be drawn."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchhook._recording.records import Record, Recording
from torchhook._values import tree
from torchhook._values.elements import dense, readable
from torchhook._values.finite import finite
from torchhook._values.histograms import inner_range, with_room
from torchhook._values.layout import Layout, guess, known_kind, looks_like_batch, told
from torchhook._words import counted, plural
from torchhook.errors import MissingRecordError

Source: TypeAlias = "Recording | Tensor | NDArray[Any] | Mapping[str, Any]"
Array: TypeAlias = NDArray[Any]


class Value(NamedTuple):
    """One value with its name."""

    name: str
    tensor: Tensor
    recorded: bool
    """Whether dim 0 is known to be the examples."""
    kind: str | None = None
    """Where its channels are, if it is known by more than its shape."""


def values(source: Source, sites: str | Iterable[str] | None = None) -> list[Value]:
    """The named tensors of a source, in the order in which they were recorded, or in that of ``sites``; of a nested
    value, its first floating-point tensor."""
    wanted = [sites] if isinstance(sites, str) else None if sites is None else list(sites)
    if isinstance(source, Recording):
        # Call by call, not site by site: the second call of a ResNet's ReLU comes after the second convolution.
        picked = [(None, source.records())] if wanted is None else [(key, source.records(key)) for key in wanted]
        known = _kinds(source)
        given = [(name, record.value, known(record)) for key, found in picked for name, record in _named(key, found)]
    elif isinstance(source, Mapping):
        if wanted is not None and (unknown := [key for key in wanted if key not in source]):
            raise MissingRecordError(f"nothing called {unknown[0]!r} here; there are: {', '.join(map(str, source))}.")
        given = [(str(n), v, None) for n, v in source.items() if wanted is None or n in wanted]
    elif wanted is not None:
        raise TypeError("sites are chosen from a recording or a dict, and this is one value.")
    else:
        given = [("", source, None)]
    # A dict is taken for what a recording gives, batch first; a bare tensor may be anything.
    recorded = isinstance(source, (Recording, Mapping))
    found = [Value(n, t, recorded, kind) for n, v, kind in given if (t := first(v)) is not None and t.numel()]
    if not found:
        raise ValueError("there is no tensor to draw here." if given else "the recording is empty: nothing to draw.")
    return found


def _kinds(recording: Recording) -> Callable[[Record], str | None]:
    """Tells where the channels of a record are, by the module that gave it and by the maps of other modules."""
    grids = {
        tuple(shape[2:] if own[0] == "channels_first" else shape[1:-1])
        for record in recording.records()
        for shape in _shapes(record)
        if (own := recording.layout_of(record.site)) is not None and own[1]
    }

    def known(record: Record) -> str | None:
        found = [told(shape[1:], grids, recording.layout_of(record.site)) for shape in _shapes(record)]
        return next(iter(found), None)

    return known


def _shapes(record: Record) -> Iterator[tuple[int, ...]]:
    """Of what has room for maps."""
    return (tuple(t.shape) for t in tree.tensors(record.value) if not t.is_nested and t.dim() > 3)


def one(source: Source, sites: str | None = None) -> Value:
    """The one value that is meant."""
    found = values(source, sites)
    if len(found) > 1:
        listed = ", ".join(repr(v.name) for v in found[:6]) + (", …" if len(found) > 6 else "")
        raise ValueError(f"which one? There are {len(found)} values: {listed}. Name it with sites=.")
    return found[0]


def _named(key: str | None, records: list[Record]) -> Iterator[tuple[str, Record]]:
    # The number of the call only where there are several: most layers run once.
    calls = Counter(record.site for record in records)
    for record in records:
        once = calls[record.site] == 1
        yield str((key or record.site) if once else record.site.but(call=record.call)), record


def first(value: Any) -> Tensor | None:
    """The first tensor of a value, preferably a floating-point one, dense, real and on the CPU."""
    if isinstance(value, np.ndarray):
        # torch refuses the negative strides of a flipped array.
        value = torch.from_numpy(np.ascontiguousarray(value))
    found = list(tree.tensors(value))
    chosen = next((t for t in found if t.is_floating_point() or t.is_complex()), next(iter(found), None))
    if chosen is None or not readable(chosen):
        return None
    chosen = dense(chosen)
    # numpy has no bfloat16, and statistics in half precision overflow.
    return chosen.to("cpu", torch.float64 if chosen.dtype == torch.float64 else torch.float32)


class Maps(NamedTuple):
    """Channels × height × width, ready to draw, and a word on how they came about."""

    array: Array
    note: str = ""
    flat: bool = False
    """Whether the picture is not one of places: a vector, or tokens by channels."""
    assumed: str = ""
    """What the shape alone spoke for, and nobody said."""


def maps(value: Value, sample: int = 0, layout: str | None = None, grid: Sequence[int] | None = None) -> Maps:
    """A value as maps of one sample: channels first or last, tokens on a grid, volumes by their middle slice."""
    kind = known_kind(layout)
    batch, sample = _batch(value, sample, kind)
    if batch.dim() <= 2:
        count = counted(batch[sample].numel(), "value")
        return Maps(batch[sample].reshape(1, 1, -1).numpy(), f"vector of {count}, no map", flat=True)
    # A matrix that nobody recorded is one map; a recorded one is examples by features, which was dealt with above.
    if value.tensor.dim() == 2 and kind != "tokens" and grid is None:
        return Maps(batch.numpy())
    own = value.kind if batch.dim() > 3 else None
    found = guess(batch.shape, kind or own, grid)
    if len(found.grid) == 1:  # text, or a sequence: rows and columns
        what = "channels × places" if kind == "channels_first" else "tokens × channels"
        return Maps(batch[sample][None].numpy(), what, flat=True)
    assumed = "channels last" if kind is None and own is None and found.kind == "channels_last" else ""
    return Maps(found.picture(batch, sample).numpy(), _left_out(found), assumed=assumed)


def _batch(value: Value, sample: int, kind: str | None) -> tuple[Tensor, int]:
    """The value with the samples on dim 0, and which of them is meant."""
    tensor = value.tensor
    if not (tensor.dim() >= 2 if value.recorded else looks_like_batch(tensor.shape, kind)):
        return tensor[None], 0
    if not -tensor.shape[0] <= sample < tensor.shape[0]:
        raise IndexError(f"sample={sample}: there are {tensor.shape[0]}.")
    return tensor, sample


def _left_out(layout: Layout) -> str:
    if layout.prefix:
        return f"{layout.prefix} prefix {plural(layout.prefix, 'token')} left out"
    if len(layout.grid) > 2:
        return f"slice {layout.grid[-3] // 2} of {layout.grid[-3]}"
    return ""


# -- numbers ----------------------------------------------------------------------------------------


def number(value: Any) -> int | None:
    """A whole number of Python, numpy or torch as Python's; ``None`` for anything else."""
    try:
        # Not int(): that would take 2.7 and "3" as well.
        return operator.index(value)
    except TypeError:
        return None


def chosen(wanted: Iterable[Any], count: int, what: str) -> list[int]:
    """Which of ``count`` are wanted, counted from the end too."""
    found = list(wanted)
    whole = [n for n in map(number, found) if n is not None and -count <= n < count]
    if len(whole) < len(found):
        raise IndexError(f"{what} {[n for n in found if number(n) not in whole]} are out of range: there are {count}.")
    return [n % count for n in whole]


def limits(array: Array, clip: float = 1.0, center: bool = False) -> tuple[float, float]:
    """The range of colors: the finite values without ``clip`` percent at either end, never empty.

    ``center`` makes it symmetric about zero.
    """
    # In double precision: between huge values, percentiles in single precision overflow.
    good = array[np.isfinite(array)].astype(np.float64)
    if not good.size:
        return 0.0, 1.0
    low, high = inner_range(good, clip)
    # Nearly all values are one number, and the clipping took the others: they are what there is to see.
    if low == high:
        low, high = float(good.min()), float(good.max())
    if center:
        low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
    return with_room(low, high)


def flaws(array: Array) -> str:
    """What a picture does not show by itself: NaN, infinities, a constant."""
    # A copy: torch warns of arrays that it must not write to.
    part = finite(torch.from_numpy(np.array(array)))
    said = []
    if part.bad:
        kind = "NaN" if part.nans == part.bad else "Inf" if not part.nans else "NaN and Inf"
        said.append(f"{part.bad / array.size:.0%} {kind}" if part.bad * 100 >= array.size else f"{part.bad} {kind}")
    if part.values.numel() > 1 and bool((part.values == part.values[0]).all()):
        said.append(f"constant {float(part.values[0]):.3g}")
    return ", ".join(said)

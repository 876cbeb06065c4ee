"""Where rows come from: data sets whose rows have numbers, and streams that can only be read in order."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, default_collate

from torchhook._extract import in_memory
from torchhook._extract.batches import Batch, SpanSampler, Tolerant, TolerantCollate, copied, split, why
from torchhook._extract.image_folder import ImageFolder
from torchhook._extract.inputs import rows_in
from torchhook._extract.iterables import Worked, holds_batches
from torchhook._extract.table import Columns
from torchhook.errors import DataWarning, ExtractError, hint, warn

BATCH = 32
LOOK = 16
"""So many batches of a stream are tried, if rows may be skipped, until one can be measured: they are kept."""


class Indexed:
    """A data set with a length: any row can be had by its number."""

    kind = "rows"
    may_skip = True
    """Whether rows that cannot be loaded could be left out, if one asked for that."""

    def __init__(
        self,
        dataset: Any,
        *,
        order: Sequence[int] | None = None,
        ends: Sequence[int] | None = None,
        batch_size: int = BATCH,
        collate: Callable[[list[Any]], Any] = default_collate,
        options: dict[str, Any] | None = None,
        tolerant: bool = False,
    ) -> None:
        self.dataset, self.collate, self.batch_size, self.tolerant = dataset, collate, batch_size, tolerant
        self.order: Sequence[int] = range(len(dataset)) if order is None else order
        self.ends = ends
        """Where the batches of a batch sampler end, if they are to be kept: ``batch_size`` is then the largest."""
        self.rows: int | None = len(self.order)
        self.options = options or {}
        self.memory = in_memory.of(dataset, self.order, collate, bool(self.options.get("pin_memory")))
        """Its rows, where they need no loading."""

    def batches(self, spans: Iterable[tuple[int, int]], first: Batch | None = None) -> Iterator[Batch]:
        """Batches of the given spans of rows, in their order; none reaches over the end of its span.

        If they begin with the batch ``first``, it is not loaded again.
        """
        spans = list(spans)
        if first is not None and spans and spans[0][0] == first.start and first.start + first.span <= spans[0][1]:
            yield first
            spans[0] = (first.start + first.span, spans[0][1])
        sampler = SpanSampler(spans, self.batch_size, self.order, self.ends)
        if self.memory is not None:
            for start, stop in sampler.cuts():
                value = self.memory.rows(start, stop)
                yield self._batch(start, stop, (value, {}) if self.tolerant else value)
            return
        loader: Any = DataLoader(
            cast(Any, Tolerant(self.dataset) if self.tolerant else self.dataset),
            batch_sampler=sampler,
            collate_fn=TolerantCollate(self.collate) if self.tolerant else self.collate,
            generator=torch.Generator().manual_seed(0),  # else a loader draws from the process's own random numbers
            **self.options,
        )
        # A loader starts its workers even if there is nothing to load.
        if len(sampler):
            loaded = iter(loader)
            for start, stop in sampler.cuts():
                with _telling(start, stop, self.may_skip):
                    value = next(loaded, _END)
                _whole_or_refused(value is not _END)
                yield self._batch(start, stop, value)
            _whole_or_refused(next(loaded, _END) is _END)

    def _batch(self, start: int, stop: int, value: Any) -> Batch:
        value, failed = value if self.tolerant else (value, {})
        return Batch(start, stop - start, value, failed, lambda: self._singles(start, stop))

    def _singles(self, start: int, stop: int) -> Iterator[Batch]:
        for row in range(start, stop):
            yield self._single(row)

    def _single(self, row: int) -> Batch:
        if self.memory is not None:
            return Batch(row, 1, self.memory.rows(row, row + 1), {}, lambda: iter(()))
        try:
            return Batch(row, 1, self.collate([self.dataset[int(self.order[row])]]), {}, lambda: iter(()))
        except Exception as error:  # the user's own data set: told with the row that it skips
            return Batch(row, 1, None, {0: why(error)}, lambda: iter(()))

    def first(self, at: int = 0) -> Iterator[Batch]:
        """Batches to measure with, from row ``at`` on, loaded here and now."""
        assert self.rows is not None
        yield from self.here([(at, self.rows)] if self.rows > at else [])

    def here(self, spans: Iterable[tuple[int, int]]) -> Iterator[Batch]:
        """Batches of some spans, loaded in this process: starting workers takes longer than to load a batch."""
        options, self.options = self.options, {}
        try:
            yield from self.batches(spans)
        finally:
            self.options = options


_END = object()


def _whole_or_refused(whole: bool) -> None:
    if not whole:  # all rows after it would have the ids of others
        raise ExtractError("the DataLoader does not give as many batches as its sampler has: rows would be mixed up.")


@contextlib.contextmanager
def _telling(start: int, stop: int, may_skip: bool) -> Iterator[None]:
    """Say which rows could not be loaded, and, where that is so, that they may be left out."""
    rows = f"row {start}" if stop == start + 1 else f"rows {start} to {stop - 1}"
    advice = "Repair or remove it" + (
        ", or pass on_error='skip' to leave out rows that cannot be loaded." if may_skip else "."
    )
    skip = "; on_error='skip' leaves out those that cannot be" if may_skip else ""
    try:
        yield
    except ExtractError as error:
        # From another process comes the text of its traceback, the last line of which is the message.
        text = str(error).strip().splitlines()[-1]
        raise ExtractError(f"{text.removeprefix('torchhook.errors.ExtractError: ')} {advice}") from error
    except Exception as error:
        hint(error, f"raised while {rows} of the data were loaded{skip}.")
        raise


class Stream:
    """Batches in the order in which they come. ``first`` can be looked at without losing it."""

    kind = "stream"
    rows: int | None = None

    def __init__(self, batches: Iterable[Any], batch_size: int | None = None, tolerant: bool = False) -> None:
        self.batch_size, self.tolerant = batch_size, tolerant
        self._source = batches
        self._seen: list[tuple[Any, Any]] = []
        self._rest: Iterator[tuple[Any, Any]] | None = None

    def _values(self) -> Iterator[tuple[Any, Any]]:
        """Each batch, and the same again, to take its single rows from: the model may change the first in place."""
        if self._rest is None:
            # Begun once: a generator cannot be read from its beginning again.
            filled = (value for value in self._source if rows_in(value))
            self._rest = ((value, copied(value) if self.tolerant else value) for value in filled)
        again, self._seen = self._seen, []
        return itertools.chain(again, self._rest)

    def batches(self, spans: Iterable[tuple[int, int]] = (), first: Batch | None = None) -> Iterator[Batch]:
        """Every batch from the beginning: what is not needed is passed over by the reader of this."""
        at = 0
        for value, kept in self._values():
            yield _whole(at, value, kept)
            at += rows_in(value)

    def first(self, at: int = 0) -> Iterator[Batch]:
        """Batches to measure with, from the beginning: copies, since the run comes to them again."""
        at = 0
        for value, kept in itertools.islice(self._values(), LOOK):
            self._seen.append((value, kept))
            yield _whole(at, copied(value), copied(kept) if self.tolerant else value)
            at += rows_in(value)


def _whole(at: int, value: Any, kept: Any) -> Batch:
    rows = rows_in(kept)
    return Batch(at, rows, value, {}, lambda: split(at, rows, kept))


Source = Indexed | Stream


def source(data: Any, batch_size: int | None, workers: int | None, tolerant: bool, pin: bool = False) -> Source:
    """Make a source of anything that holds data."""
    if isinstance(data, DataLoader):
        return _of_loader(data, batch_size, workers, tolerant)
    options: dict[str, Any] = {"num_workers": workers or 0, "pin_memory": pin}
    data = _giving_tensors(data)
    if isinstance(data, IterableDataset):
        loader = DataLoader(data, batch_size or BATCH, generator=torch.Generator().manual_seed(0), **options)
        return Stream(Worked(loader), batch_size or BATCH, tolerant)
    if type(data) in (list, tuple) and batch_size is None and holds_batches(data):
        return Stream(data, None, tolerant)
    if isinstance(data, Mapping):
        data = Columns(data)
    if _is_map(data):
        return Indexed(data, batch_size=batch_size or BATCH, options=options, tolerant=tolerant)
    if hasattr(data, "__iter__"):
        return Stream(data if batch_size is None else _chunks(data, batch_size), batch_size, tolerant)
    raise TypeError(
        f"data is a {type(data).__name__}; expected a data set, a DataLoader, an iterable of batches, "
        "a tensor of rows, or the path of a folder of images."
    )


def as_it_comes(data: Any, batch_size: int | None, workers: int | None, pin: bool = False) -> Source:
    """A source that may come in another order each time, for who keeps no rows by their numbers."""
    if not isinstance(data, DataLoader) or batch_size is not None or workers is not None:
        found = source(data, batch_size, workers, False, pin)
        if isinstance(found, Indexed):
            found.may_skip = False
        return found
    # The loader itself: only it knows what its samplers, and workers that persist, do from epoch to epoch.
    return Stream(Worked(data) if isinstance(data.dataset, IterableDataset) else data)


def _giving_tensors(data: Any) -> Any:
    """A data set of Hugging Face's gives numbers as Python lists, which collate the wrong way round, unless told."""
    # By name: importing the library only to ask would take seconds.
    if type(data).__module__.split(".")[0] != "datasets" or not hasattr(data, "with_format"):
        return data
    settings = getattr(data, "format", None) or {"type": getattr(data, "_formatting", None)}
    return data.with_format("torch") if settings["type"] is None else data


def own_ids(source: Source) -> Any:
    """Ids that a data set brings along: its own, or the paths of an image folder in torchvision's manner."""
    if isinstance(source, Stream):
        return None
    dataset = source.dataset
    samples = getattr(dataset, "samples", None)
    if isinstance(dataset, ImageFolder):
        ids = dataset.ids
    elif isinstance(samples, list) and samples and isinstance(samples[0], tuple) and isinstance(samples[0][0], str):
        ids = [sample[0] for sample in samples]
    else:
        return None
    return [ids[row] for row in source.order] if len(ids) == len(dataset) else None


def told(source: Source, own_labels: bool) -> dict[str, Any]:
    """What a data set says of its rows, for people: how images are prepared, and what the numbers of classes mean."""
    dataset = getattr(source, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    found: dict[str, Any] = {"preparation": dataset.preparation} if isinstance(dataset, ImageFolder) else {}
    classes = getattr(dataset, "classes", None)
    # Labels that the user finds in another way may count something else.
    if own_labels and isinstance(classes, list) and classes and all(isinstance(name, str) for name in classes):
        found["classes"] = classes
    return found


def _is_map(data: Any) -> bool:
    return isinstance(data, (Tensor, np.ndarray)) or (hasattr(data, "__len__") and hasattr(data, "__getitem__"))


def _of_loader(loader: DataLoader[Any], batch_size: int | None, workers: int | None, tolerant: bool) -> Source:
    if isinstance(loader.dataset, IterableDataset):
        return Stream(Worked(loader), loader.batch_size, tolerant)
    if loader.batch_sampler is None:  # it does not say how many rows a batch has
        return Stream(loader, tolerant=tolerant)
    # What a loader of the user's own makes of its batches, nobody else knows: it is asked for them.
    own = type(loader).__iter__ is not DataLoader.__iter__
    listed = None if own and loader.batch_size is None else _listed(loader)  # a sampler may then be one without end
    if own:
        return Stream(loader, tolerant=tolerant)
    ends = None
    if loader.batch_size is None and batch_size is None:
        ends = list(itertools.accumulate(map(len, listed or ())))
        batch_size = max(map(len, listed or ()), default=BATCH)
    return Indexed(
        loader.dataset,
        order=_without_dropped(loader, None if listed is None else [row for batch in listed for row in batch]),
        ends=ends,
        batch_size=batch_size or loader.batch_size or BATCH,
        collate=loader.collate_fn,
        options=_options_of(loader, workers),
        tolerant=tolerant,
    )


def _without_dropped(loader: DataLoader[Any], order: list[int] | None) -> Sequence[int] | None:
    """The rows that a loader gives which drops the last batch if it is not full."""
    if loader.batch_size is None or not loader.drop_last:
        return order
    rows: Sequence[int] = range(len(loader.dataset)) if order is None else order  # type: ignore[arg-type]
    dropped = len(rows) % loader.batch_size
    if dropped:
        warn(f"the DataLoader leaves out the last {dropped} of {len(rows)} rows: drop_last=True.", DataWarning)
    return rows[: len(rows) - dropped]


def _options_of(loader: DataLoader[Any], workers: int | None) -> dict[str, Any]:
    """How a loader loads, for one of ours that loads the same rows."""
    options: dict[str, Any] = {name: getattr(loader, name) for name in ("worker_init_fn", "pin_memory")}
    options["num_workers"] = loader.num_workers if workers is None else workers
    if options["num_workers"]:  # refused without workers
        options |= {name: getattr(loader, name) for name in ("timeout", "multiprocessing_context", "prefetch_factor")}
    return options


def _listed(loader: DataLoader[Any]) -> list[list[int]] | None:
    """The rows of a loader in its order, which must be the same each time: else no run could be resumed.

    As batches where a batch sampler makes them, else as one; ``None`` if they are all rows in their own order.
    """
    # Exactly this: a subclass may have another order, and one over other data has another number of rows.
    sequential = type(loader.sampler) is SequentialSampler and len(loader.sampler) == len(loader.dataset)  # type: ignore[arg-type]
    if sequential and loader.batch_size is not None:
        return None
    random = isinstance(loader.sampler, RandomSampler)
    # A random sampler is not tried: two orders of a few rows may be the same by chance.
    first, second = ([], [[1]]) if random else (_batches_of(loader), _batches_of(loader))
    if first != second:
        raise ExtractError(
            "the DataLoader gives its rows in another order each time (shuffle=True?). Features keep the order of the "
            "data set: pass shuffle=False, and shuffle when you read them."
        )
    return first


def _batches_of(loader: DataLoader[Any]) -> list[list[int]]:
    if loader.batch_size is not None:
        return [[int(i) for i in loader.sampler]]
    batches = ([int(i) for i in batch] for batch in loader.batch_sampler or ())
    return [batch for batch in batches if batch]


def _chunks(data: Iterable[Any], size: int) -> Iterator[Any]:
    rows = iter(data)
    while chunk := list(itertools.islice(rows, size)):
        yield default_collate(chunk)

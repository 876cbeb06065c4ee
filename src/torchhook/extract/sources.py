"""Where rows come from: data sets whose rows have numbers, and streams that can only be read in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from torchhook import tree
from torchhook.extract.errors import ExtractError
from torchhook.extract.inputs import rows_in

BATCH = 32


class Batch(NamedTuple):
    """A batch of the data, and which rows it stands for."""

    start: int
    span: int
    """How many rows it stands for, failed ones among them."""
    value: Any
    """``None`` if every row failed."""
    failed: dict[int, str]
    """Places in the span that could not be loaded, and why."""
    singles: Callable[[], Iterator[Batch]]
    """The same rows, one by one."""

    @property
    def good(self) -> Sequence[int]:
        return range(self.span) if not self.failed else [i for i in range(self.span) if i not in self.failed]


class Indexed:
    """A data set with a length: any row can be had by its number."""

    kind = "rows"

    def __init__(
        self,
        dataset: Any,
        *,
        order: Sequence[int] | None = None,
        batch_size: int = BATCH,
        collate: Callable[[list[Any]], Any] = default_collate,
        options: dict[str, Any] | None = None,
        tolerant: bool = False,
    ) -> None:
        self.dataset, self.collate, self.batch_size, self.tolerant = dataset, collate, batch_size, tolerant
        self.order: Sequence[int] = range(len(dataset)) if order is None else order
        self.rows: int | None = len(self.order)
        self.options = options or {}

    def batches(self, spans: Iterable[tuple[int, int]], first: Batch | None = None) -> Iterator[Batch]:
        """Batches of the given spans of rows, in their order; none reaches over the end of its span.

        If they begin with the batch ``first``, it is not loaded again.
        """
        spans = list(spans)
        if first is not None and spans and spans[0][0] == first.start and first.start + first.span <= spans[0][1]:
            yield first
            spans[0] = (first.start + first.span, spans[0][1])
        plan = _Cuts(spans, self.batch_size, self.order)
        loader: Any = DataLoader(
            cast(Any, _Tolerant(self.dataset) if self.tolerant else self.dataset),
            batch_sampler=plan,
            collate_fn=_TolerantCollate(self.collate) if self.tolerant else self.collate,
            generator=torch.Generator().manual_seed(0),  # else a loader draws from the process's own random numbers
            **self.options,
        )
        if len(plan):
            for (start, stop), value in zip(plan.cuts(), loader, strict=True):
                yield self._batch(start, stop, value)

    def _batch(self, start: int, stop: int, value: Any) -> Batch:
        value, failed = value if self.tolerant else (value, {})
        return Batch(start, stop - start, value, failed, lambda: self._singles(start, stop))

    def _singles(self, start: int, stop: int) -> Iterator[Batch]:
        for row in range(start, stop):
            yield self._single(row)

    def _single(self, row: int) -> Batch:
        try:
            return Batch(row, 1, self.collate([self.dataset[int(self.order[row])]]), {}, lambda: iter(()))
        except Exception as error:
            return Batch(row, 1, None, {0: _why(error)}, lambda: iter(()))

    def first(self) -> Iterator[Batch]:
        """Batches to measure with, loaded here and now."""
        options, self.options = self.options, {}
        try:
            assert self.rows is not None
            yield from self.batches([(0, self.rows)] if self.rows else [])
        finally:
            self.options = options


class _Cuts:
    """A batch sampler over spans of rows, made as it is read: its memory does not depend on the data set."""

    def __init__(self, spans: list[tuple[int, int]], size: int, order: Sequence[int]) -> None:
        self.spans, self.size, self.order = spans, size, order

    def cuts(self) -> Iterator[tuple[int, int]]:
        for first, last in self.spans:
            for start in range(first, last, self.size):
                yield start, min(start + self.size, last)

    def __iter__(self) -> Iterator[list[int]]:
        return ([int(self.order[row]) for row in range(*cut)] for cut in self.cuts())

    def __len__(self) -> int:
        return sum(-(-(last - first) // self.size) for first, last in self.spans)


class Stream:
    """Batches in the order in which they come. ``first`` can be looked at without losing it."""

    kind = "stream"
    rows: int | None = None

    def __init__(self, batches: Iterable[Any], batch_size: int | None = None) -> None:
        self.batch_size = batch_size
        self._source = batches
        self._seen: list[Any] = []
        self._rest: Iterator[Any] | None = None

    def _values(self) -> Iterator[Any]:
        if self._rest is None:
            self._rest = iter(self._source)
        again, self._seen = self._seen, []
        return itertools.chain(again, self._rest)

    def batches(self, spans: Iterable[tuple[int, int]] = (), first: Batch | None = None) -> Iterator[Batch]:
        """Every batch from the beginning: what is not needed is passed over by the reader of this."""
        at = 0
        for value in self._values():
            rows = rows_in(value)
            yield Batch(at, rows, value, {}, lambda at=at, rows=rows, value=value: _split(at, rows, value))  # type: ignore[misc]
            at += rows

    def first(self) -> Iterator[Batch]:
        for value in self._values():
            self._seen.append(value)
            yield Batch(0, rows_in(value), value, {}, lambda: iter(()))
            return


Source = Indexed | Stream


def source(data: Any, batch_size: int | None, workers: int | None, tolerant: bool, pin: bool = False) -> Source:
    """Make a source of anything that holds data."""
    options: dict[str, Any] = {"num_workers": workers or 0, "pin_memory": pin}
    if isinstance(data, DataLoader):
        return _of_loader(data, batch_size, workers, tolerant, options)
    if type(data).__module__.split(".")[0] == "datasets" and hasattr(data, "with_format"):
        settings = getattr(data, "format", None) or {"type": getattr(data, "_formatting", None)}
        if settings["type"] is None:
            data = data.with_format("torch")  # else numbers come as Python lists, which collate the wrong way round
    if isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not _is_map(data)):
        if isinstance(data, IterableDataset):
            loader = DataLoader(data, batch_size or BATCH, generator=torch.Generator().manual_seed(0), **options)
            return Stream(loader, batch_size or BATCH)
        if batch_size is None:
            return Stream(data)
        return Stream(_chunks(data, batch_size), batch_size)
    if _is_map(data):
        return Indexed(data, batch_size=batch_size or BATCH, options=options, tolerant=tolerant)
    raise TypeError(
        f"data is a {type(data).__name__}; expected a data set, a DataLoader, an iterable of batches, "
        "a tensor of rows, or the path of a folder of images."
    )


def _is_map(data: Any) -> bool:
    return isinstance(data, (Tensor, np.ndarray)) or (hasattr(data, "__len__") and hasattr(data, "__getitem__"))


def _of_loader(
    loader: DataLoader[Any], batch_size: int | None, workers: int | None, tolerant: bool, options: Any
) -> Source:
    if isinstance(loader.dataset, IterableDataset):
        return Stream(loader, loader.batch_size)
    for name in ("timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "pin_memory"):
        options[name] = getattr(loader, name)
    options["num_workers"] = loader.num_workers if workers is None else workers
    if not options["num_workers"]:
        for name in ("timeout", "multiprocessing_context", "prefetch_factor"):
            options.pop(name)
    if loader.batch_sampler is None:
        return Stream(loader)
    return Indexed(
        loader.dataset,
        order=_order(loader),
        batch_size=batch_size or loader.batch_size or BATCH,
        collate=loader.collate_fn,
        options=options,
        tolerant=tolerant,
    )


def _order(loader: DataLoader[Any]) -> Sequence[int] | None:
    """The rows of a loader in its order, which must be the same each time: else no run could be resumed."""
    if isinstance(loader.sampler, SequentialSampler) and loader.batch_size is not None:
        return None
    random = isinstance(loader.sampler, RandomSampler)
    first, second = ([], [1]) if random else (_listed(loader), _listed(loader))
    if first != second:
        raise ExtractError(
            "the DataLoader gives its rows in another order each time (shuffle=True?). Features keep the order of the "
            "data set: pass shuffle=False, and shuffle when you read them."
        )
    return first


def _listed(loader: DataLoader[Any]) -> list[int]:
    if loader.batch_size is not None:
        return [int(i) for i in loader.sampler]
    return [int(i) for batch in loader.batch_sampler or () for i in batch]


def _chunks(data: Iterable[Any], size: int) -> Iterator[Any]:
    rows = iter(data)
    while chunk := list(itertools.islice(rows, size)):
        yield default_collate(chunk)


def _split(start: int, rows: int, value: Any) -> Iterator[Batch]:
    for i in range(rows):
        one = tree.map_tensors(lambda t, i=i: t[i : i + 1] if t.dim() and len(t) == rows else t, value)  # type: ignore[misc]
        yield Batch(start + i, 1, one, {}, lambda: iter(()))


class _Failure(NamedTuple):
    why: str


class _Tolerant:
    """A data set that hands its errors over instead of raising them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            return _Failure(_why(error))


class _TolerantCollate:
    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Any, dict[int, str]]:
        failed = {i: sample.why for i, sample in enumerate(samples) if isinstance(sample, _Failure)}
        good = [sample for sample in samples if not isinstance(sample, _Failure)]
        return (self.collate(good) if good else None), failed


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

"""The tokens of a store's rows, one after the other, however long the rows are; and batches of them in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from torchhook._features.indexing import numbers, single
from torchhook._features.manifest import shown
from torchhook._features.permutation import Permutation
from torchhook._recording.tables import Table
from torchhook._words import counted
from torchhook.errors import ExtractError

if TYPE_CHECKING:
    from torchhook._features.columns import Column
    from torchhook._features.features import Features


class TokenPosition(NamedTuple):
    """Where tokens are: the numbers of their rows, and their positions in these."""

    rows: Any
    positions: Any


class Tokens(Dataset[Any]):
    """Every token of every row of some sites, by a number of its own: ``tokens[3]``, slices, lists, masks.

    Of one site a token is a tensor, of several a dict, in which all are the same token. Rows that were skipped or are
    missing have none. What is read is a copy.
    """

    def __init__(self, features: Features, sites: Sequence[str]) -> None:
        if not sites or not all(isinstance(site, str) for site in sites):
            raise TypeError("tokens() takes the names of one or more sites: features.tokens('h.3').")
        self.features: Features = features
        self.columns: dict[str, Column] = {site: features[site] for site in sites}
        self.single: bool = len(sites) == 1
        self._shapes = {site: column.token_shape for site, column in self.columns.items()}
        manifest = features.manifest
        self._per_shard = manifest.rows_per_shard
        shards = range(-(-len(features) // self._per_shard))
        first = next(iter(self.columns.values()))
        skipped = sorted(features.skipped)
        # Rows of one length that were skipped lie there as NaN or zeros; the tokens between them are what is left.
        self._kept: dict[int, Tensor] = {}
        for shard in {row // self._per_shard for row in skipped} - set(features.missing):
            self._kept[shard] = self._without(first, shard, [r % self._per_shard for r in skipped])
        counts = [len(self._kept[s]) if s in self._kept else first.token_count(s) for s in shards]
        self._starts = np.cumsum([0, *counts])
        for site, column in list(self.columns.items())[1:]:
            self._check_same(sites[0], first, site, column, shards)

    def __reduce__(self) -> Any:
        return Tokens, (self.features, tuple(self.columns))  # a worker maps the files itself

    def _without(self, column: Column, shard: int, skipped: list[int]) -> Tensor:
        ends = column.token_ends(shard)
        kept = torch.ones(int(ends[-1]), dtype=torch.bool)
        for row in skipped:
            if row + 1 < len(ends):
                kept[ends[row] : ends[row + 1]] = False
        return kept.nonzero().squeeze(1)

    def _check_same(self, one: str, first: Column, other: str, column: Column, shards: range) -> None:
        for shard in shards:
            if not torch.equal(first.token_ends(shard), column.token_ends(shard)):
                raise ExtractError(
                    f"{one!r} and {other!r}: rows from {shard * self._per_shard} on have other numbers of tokens, so "
                    "that they cannot be read together. Read them one by one: features.tokens(site)."
                )

    # -- reading ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def shape(self) -> Any:
        """The shape of all tokens together; of several sites, by their names."""
        found = {site: (len(self), *shape) for site, shape in self._shapes.items()}
        return next(iter(found.values())) if self.single else found

    @property
    def dtype(self) -> Any:
        """Of several sites, by their names."""
        found = {site: column.dtype for site, column in self.columns.items()}
        return next(iter(found.values())) if self.single else found

    def __getitem__(self, index: Any) -> Any:
        one, places = self._places(index)
        shards, order = self._by_shard(places)
        found = {}
        for site, column in self.columns.items():
            parts = [column.tokens(shard, there) for shard, there in shards]
            values = torch.empty((len(places), *self._shapes[site]), dtype=column.dtype)
            if parts:
                values[order] = torch.cat(parts).reshape(-1, *self._shapes[site])
            found[site] = values[0] if one else values
        return next(iter(found.values())) if self.single else found

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def where(self, index: Any) -> TokenPosition:
        """The row and the position of a token, or of several, by the same index as they are read."""
        one, places = self._places(index)
        shards, order = self._by_shard(places)
        rows, positions = torch.empty(len(places), dtype=torch.int64), torch.empty(len(places), dtype=torch.int64)
        column, at = next(iter(self.columns.values())), 0
        for shard, there in shards:
            ends, mine = column.token_ends(shard), order[at : at + len(there)]
            row = torch.searchsorted(ends, there, right=True) - 1
            rows[mine], positions[mine] = row + shard * self._per_shard, there - ends[row]
            at += len(there)
        return TokenPosition(int(rows[0]), int(positions[0])) if one else TokenPosition(rows, positions)

    def _places(self, index: Any) -> tuple[bool, np.ndarray[Any, Any]]:
        name = ", ".join(self.columns)
        if isinstance(index, slice):
            return False, np.arange(*index.indices(len(self)))
        if isinstance(index, range) or np.ndim(index):
            return False, np.asarray(numbers(index, len(self), name, "token"), dtype=np.int64)
        return True, np.array([single(index, len(self), name, "token")])

    def _by_shard(self, places: np.ndarray[Any, Any]) -> tuple[list[tuple[int, Tensor]], Tensor]:
        """The tokens of each shard in ascending order, and where each belongs in what is returned."""
        order = np.argsort(places, kind="stable")
        ascending = places[order]
        shards = np.searchsorted(self._starts, ascending, side="right") - 1
        found = []
        for part in np.split(np.arange(len(places)), np.flatnonzero(np.diff(shards)) + 1) if len(places) else ():
            shard = int(shards[part[0]])
            there = torch.from_numpy(ascending[part] - self._starts[shard])
            found.append((shard, self._kept[shard][there] if shard in self._kept else there))
        return found, torch.from_numpy(order)

    # -- batches ---------------------------------------------------------------------------------------

    def loader(
        self,
        batch: int = 4096,
        *,
        shuffle: bool = False,
        seed: int = 0,
        workers: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> TokenLoader:
        """Batches of tokens, every token once per epoch; with ``shuffle``, in an order that no epoch repeats.

        The order is one permutation of all tokens, of all sites the same, computed and not remembered: it needs no
        memory, however many tokens there are. Tokens are read by memory map, or just their bytes: of a store much
        larger than the memory, ``open_features(path, access="read")`` and a few ``workers`` read them best.

        Args:
            batch: Tokens in each batch.
            shuffle: Whether they come in a random order.
            seed: The order is the same for the same seed and epoch.
            workers: Processes that read.
            drop_last: Whether to leave out the last batch of an epoch if it is not full.
            options: Those of ``DataLoader``: ``pin_memory``, ``prefetch_factor``, …
        """
        if not isinstance(batch, int) or batch < 1:
            raise ValueError(f"batch={batch!r}: give a number of tokens, 1 or more.")
        if seed < 0:
            raise ValueError(f"seed={seed}: give a whole number, 0 or more.")
        order = _Batches(len(self), batch, seed if shuffle else None, drop_last)
        # Else a loader draws from the process's own random numbers.
        options.setdefault("generator", torch.Generator().manual_seed(seed))
        return TokenLoader(self, sampler=order, batch_size=None, num_workers=workers, **options)

    def __repr__(self) -> str:
        each = ", ".join(
            f"{shown(site)} {str(column.dtype).removeprefix('torch.')} {self._shapes[site]}"
            for site, column in self.columns.items()
        )
        return f"<{counted(len(self), 'token')}: {each}>"

    def _repr_html_(self) -> str:
        rows = [[shown(site), str(column.dtype), str(self._shapes[site])] for site, column in self.columns.items()]
        return Table(counted(len(self), "token"), ["site", "dtype", "shape"], rows)._repr_html_()


class _Batches(Sampler[Any]):
    """The numbers of the tokens of each batch, as arrays."""

    def __init__(self, size: int, batch: int, seed: int | None, drop_last: bool) -> None:
        self.size, self.batch, self.seed, self.drop_last = size, batch, seed, drop_last
        self.epoch = 0

    def __len__(self) -> int:
        return self.size // self.batch if self.drop_last else -(-self.size // self.batch)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._of(epoch)

    def _of(self, epoch: int) -> Iterator[Any]:
        order = None if self.seed is None else Permutation(self.size, (self.seed, epoch))
        for i in range(len(self)):
            places = np.arange(i * self.batch, min(self.size, (i + 1) * self.batch))
            yield places if order is None else order(places)


class TokenLoader(DataLoader[Any]):
    """Batches of tokens. Each ``for`` over it is an epoch, in an order of its own."""

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next: to go on where another process ended, or to repeat one."""
        assert isinstance(self.sampler, _Batches)
        self.sampler.epoch = epoch

    def __repr__(self) -> str:
        order = self.sampler
        assert isinstance(order, _Batches)
        shuffled = "in order" if order.seed is None else f"shuffled, epoch {order.epoch} comes next"
        return f"<{counted(len(order), 'batch', 'batches')} of {counted(order.batch, 'token')}, {shuffled}>"

    def _repr_html_(self) -> str:
        return Table(repr(self)[1:-1], [], [])._repr_html_()

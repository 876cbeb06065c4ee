"""Features in other shapes: ``.npy`` files, and Hugging Face data sets."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchhook._features.columns import Column, as_numpy
from torchhook._features.manifest import shown
from torchhook.errors import IncompleteStoreError, require

if TYPE_CHECKING:
    from torchhook._features.features import Features


Sites = str | Sequence[str] | None


def _columns(features: Features, sites: Sites, clean: Callable[[str], str]) -> Iterator[tuple[str, Column]]:
    """All that is exported, each under a name of its own: a site may be called like ids, labels or another site."""
    if features.missing:
        raise IncompleteStoreError(
            f"{features.path} lacks {len(features.missing)} shards, and what is exported has every row. Run the same "
            "extract call again: it does only those."
        )
    names = features.keys() if sites is None else [sites] if isinstance(sites, str) else sites
    extras = {"ids": features.ids, "labels": features.labels}
    found = {name: column for name, column in extras.items() if isinstance(column, Column)}
    taken = {file for name, column in found.items() for file in _files(name, column)}
    for name in dict.fromkeys(names):
        column = features[name]
        numbered = (f"{clean(column.name)}_{i}" for i in itertools.count(2))
        free = (new for new in itertools.chain([clean(column.name)], numbered) if taken.isdisjoint(_files(new, column)))
        unique = next(free)
        taken.update(_files(unique, column))
        yield unique, column
    yield from found.items()


def _files(name: str, column: Column) -> list[str]:
    return [name, f"{name}.offsets"] if column.spec.ragged and not column.spec.text else [name]


def _file_name(site: str) -> str:
    return site.replace("/", "_").replace(":", "_") or "model"


def to_npy(features: Features, folder: str | os.PathLike[str], sites: Sites = None) -> list[str]:
    """One file per column, written shard by shard; ragged ones with ``.offsets.npy``, text as ``.txt`` lines."""
    root = Path(folder)
    written = []
    for name, column in _columns(features, sites, _file_name):
        root.mkdir(parents=True, exist_ok=True)
        base = root / name
        if column.spec.text:
            path = Path(f"{base}.txt")
            _whole(path, lambda temporary, c=column: _lines(temporary, c))
        else:
            path = Path(f"{base}.npy")
            _whole(path, lambda temporary, c=column: _array(temporary, c))
            if column.spec.ragged:
                ends = np.cumsum([0, *(len(row) for _, block in column.blocks() for row in block)])
                written.append(f"{base}.offsets.npy")
                np.save(written[-1], ends)
        written.append(str(path))
    return sorted(written)


def _whole(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    write(temporary)
    os.replace(temporary, path)


def _lines(path: Path, column: Column) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for _, block in column.blocks():
            file.writelines(f"{text}\n" for text in block)


def _array(path: Path, column: Column) -> None:
    items = len(column) if not column.spec.ragged else sum(len(row) for _, block in column.blocks() for row in block)
    kind = as_numpy(torch.empty(0, dtype=column.dtype)).dtype
    array = np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=(items, *column.spec.shape))
    at = 0
    for _, block in column.blocks():
        rows = as_numpy(torch.cat(block) if isinstance(block, list) else block) if len(block) else block
        array[at : at + len(rows)] = rows
        at += len(rows)
    array.flush()


def to_hf(features: Features, sites: Sites = None) -> Any:
    """A ``datasets.Dataset`` whose columns are the sites, ids and labels; where Arrow has the dtype, a view."""
    datasets = require("datasets", "hf")
    arrow = require("pyarrow", "hf")
    columns = {
        name: arrow.chunked_array([_arrow(arrow, block) for _, block in column.blocks()])
        for name, column in _columns(features, sites, shown)
    }
    table = arrow.table(columns)
    about = [features.path, features.manifest.to_json(), list(columns), features.nbytes]
    # Without a fingerprint of our own, the library would hash every byte to make one.
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    return datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint=name)


def _arrow(arrow: Any, block: Any) -> Any:
    if isinstance(block, list):
        if not block or isinstance(block[0], str):
            return arrow.array(block, arrow.string())
        ends = np.cumsum([0, *map(len, block)]).astype(np.int32)
        return arrow.ListArray.from_arrays(arrow.array(ends), _arrow(arrow, torch.cat(block)))
    found = arrow.array(as_numpy(block).reshape(-1))
    for dim in reversed(range(1, block.dim())):
        if block.shape[dim]:
            found = arrow.FixedSizeListArray.from_arrays(found, block.shape[dim])
        else:  # nothing to tell their number by
            ends = np.zeros(math.prod(block.shape[:dim]) + 1, dtype=np.int32)
            found = arrow.ListArray.from_arrays(arrow.array(ends), found)
    return found

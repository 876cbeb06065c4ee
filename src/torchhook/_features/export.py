"""Features in other shapes: ``.npy`` files, and Hugging Face data sets."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from torchhook._features.columns import Column, as_numpy
from torchhook._features.manifest import shown
from torchhook._features.reading import MOST_MAPS
from torchhook._words import counted
from torchhook.errors import ExtractError, IncompleteStoreError, require

if TYPE_CHECKING:
    from torchhook._features.features import Features


Sites = str | Sequence[str] | None


def _columns(features: Features, sites: Sites, clean: Callable[[str], str]) -> Iterator[tuple[str, Column]]:
    """All that is exported, each under a name of its own: a site may be called like ids, labels or another site."""
    if features.missing:
        raise IncompleteStoreError(
            f"{features.path} lacks {counted(len(features.missing), 'shard')}, and what is exported has every row. Run "
            "the same extract call again: it does only those."
        )
    names = features.keys() if sites is None else [sites] if isinstance(sites, str) else sites
    extras = {"ids": features.ids, "labels": features.labels}
    found = {name: column for name, column in extras.items() if isinstance(column, Column)}
    # Ids and labels keep these names, by which they are looked for: a site that is called so gives way.
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
    """One file per column, written shard by shard; ragged ones with ``.offsets.npy``.

    Text becomes the lines of a ``.txt``, or a ``.json`` list where one of the texts has line breaks of its own.
    """
    root = Path(folder)
    written: list[Path] = []
    for name, column in _columns(features, sites, _file_name):
        root.mkdir(parents=True, exist_ok=True)
        if column.spec.text:
            written += _write_text(root, name, column)
        elif column.spec.ragged:
            written += _write_ragged(root, name, column)
        else:
            paths = [root / f"{name}.npy"]
            with _whole(paths) as (file,):
                _write_rows(file, column, len(column))
            written += paths
    return sorted(map(str, written))


@contextlib.contextmanager
def _whole(paths: Sequence[Path]) -> Iterator[list[BinaryIO]]:
    """New files that take their names together, when all that was written to them is on the disk, or never."""
    # A name by chance: two exports to one folder may run at once.
    temporary = [path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp") for path in paths]
    with contextlib.ExitStack() as stack:
        for path in temporary:
            stack.callback(path.unlink, missing_ok=True)
        # Not a mapped array: it has its full length from the start, and a full disk would end the process (SIGBUS).
        with contextlib.ExitStack() as handles:
            files: list[BinaryIO] = [handles.enter_context(open(path, "xb")) for path in temporary]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for path, final in zip(temporary, paths, strict=True):
            os.replace(path, final)
    with contextlib.suppress(OSError):  # not every system can sync a folder
        handle = os.open(paths[0].parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_text(root: Path, name: str, column: Column) -> list[Path]:
    texts = (text for _, block in column.blocks() for text in block)
    lines = all(map(_is_line, texts))
    path = root / f"{name}{'.txt' if lines else '.json'}"
    with _whole([path]) as (file,):
        between = b"["
        for _, block in column.blocks():
            if lines:
                file.writelines(f"{text}\n".encode() for text in block)
            else:
                file.write(between + ",\n".join(map(json.dumps, block)).encode())
                between = b",\n"
        file.write(b"" if lines else b"]\n")
    return [path]


def _is_line(text: str) -> bool:
    """Whether a text can be a line of a file, and is the same when it is read again."""
    return text.splitlines() in ([], [text])  # it knows more ends of lines than \n


def _write_ragged(root: Path, name: str, column: Column) -> list[Path]:
    ends = np.cumsum([0, *(len(row) for _, block in column.blocks() for row in block)])
    paths = [root / f"{name}.npy", root / f"{name}.offsets.npy"]
    with _whole(paths) as (items, offsets):
        _write_rows(items, column, int(ends[-1]))
        np.save(offsets, ends)
    return paths


def _write_rows(file: BinaryIO, column: Column, items: int) -> None:
    kind = as_numpy(torch.empty(0, dtype=column.dtype)).dtype  # as the rows will come: some dtypes are widened
    about = {"descr": kind.str, "fortran_order": False, "shape": (items, *column.spec.shape)}
    np.lib.format.write_array_header_1_0(file, about)
    for _, block in column.blocks():
        rows = torch.cat(block) if isinstance(block, list) and block else block
        if isinstance(rows, torch.Tensor) and rows.numel():
            file.write(np.ascontiguousarray(as_numpy(rows)).data)


def to_hf(features: Features, sites: Sites = None) -> Any:
    """A ``datasets.Dataset`` whose columns are the sites, ids and labels; where Arrow has the dtype, a view."""
    datasets = require("datasets", "hf")
    arrow = require("pyarrow", "hf")
    found = dict(_columns(features, sites, shown))
    chunks: dict[str, list[Any]] = {name: [] for name in found}
    # What is given away holds the maps of all shards: views of few, copies of many.
    few = len(features) <= MOST_MAPS * features.manifest.rows_per_shard
    # Shard by shard, so that all columns of one share its map.
    for blocks in zip(*(column.blocks() for column in found.values()), strict=True):
        for name, (_, block) in zip(found, blocks, strict=True):
            chunks[name].append(_arrow(arrow, block if few or isinstance(block, list) else block.clone()))
    columns = {name: arrow.chunked_array(parts) for name, parts in chunks.items()}
    table = arrow.table(columns)
    about = [features.path, features.manifest.to_json(), list(columns), features.nbytes]
    # Without a fingerprint of our own, the library would hash every byte to make one.
    name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    return datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint=name)


def _arrow(arrow: Any, block: Any) -> Any:
    if isinstance(block, list):
        if not block or isinstance(block[0], str):
            return arrow.array(block, arrow.string())
        ends = np.cumsum([0, *map(len, block)])
        if ends[-1] > np.iinfo(np.int32).max:
            raise ExtractError(
                f"{ends[-1]:,} items in one shard: Arrow's lists count in 32 bits. Extract with smaller shards."
            )
        ends = ends.astype(np.int32)
        return arrow.ListArray.from_arrays(arrow.array(ends), _arrow(arrow, torch.cat(block)))
    found = arrow.array(as_numpy(block).reshape(-1))
    for dim in reversed(range(1, block.dim())):
        if block.shape[dim]:
            found = arrow.FixedSizeListArray.from_arrays(found, block.shape[dim])
        else:  # nothing to tell their number by
            ends = np.zeros(math.prod(block.shape[:dim]) + 1, dtype=np.int32)
            found = arrow.ListArray.from_arrays(arrow.array(ends), found)
    return found

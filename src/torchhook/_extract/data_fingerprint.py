"""What is known of the data before it is run: digests of files, ids and rows, and how rows are prepared.

Small data in memory is read whole; of other data the names and sizes of files, and a few rows, spread over all of it.
A stream cannot be read ahead: its shards remember the batches that they begin with.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from torchhook._extract import fingerprint
from torchhook._extract.eval_mode import random_numbers_kept
from torchhook._extract.function_fingerprint import Texts, digest, of_function
from torchhook._extract.image_folder import ImageFolder
from torchhook._extract.inputs import is_table
from torchhook._extract.sources import Source, Stream
from torchhook._extract.table import Columns

ROWS = 16
"""So many rows are read, and into so many parts all of them are cut."""
WHOLE = 256 << 20
"""Data in memory is read whole up to so many bytes, in a quarter of a second on one core; of more, spread rows."""
SIZES, READ, ENDS = 1 << 16, 1 << 10, 4096
"""So many files are asked for their sizes, so many are read, and so much of each end; of more, evenly spread ones."""
_SMALL = 4 << 20  # bytes that are summed up before threads have started
_NO_SETTINGS = frozenset({"root", "ids", "labels", "classes", "guessed"})


@contextlib.contextmanager
def begun(source: Source, ids: Any, labels: Any, lengths: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """``of_data``, for who has other work until it is needed: data in memory is summed up beside that."""
    # Whatever has code of its own is read in its turn, by the thread that reads the batches; what lies on a GPU, on the
    # stream of that thread.
    if isinstance(source, Stream) or source.memory is None or not all(map(_on_host, source.memory.parts)):
        yield lambda: of_data(source, ids, labels, lengths)
        return
    with ThreadPoolExecutor(1, "data") as beside:
        found = beside.submit(of_data, source, ids, labels, lengths)
        beside.shutdown(wait=False)  # there is nothing else for it to do
        yield found.result


def _on_host(part: Tensor | np.ndarray) -> bool:
    return isinstance(part, np.ndarray) or part.device.type == "cpu"


def of_data(source: Source, ids: Any, labels: Any, lengths: Any) -> dict[str, Any]:
    """Facts about the rows of a source, of which only JSON's own types are made."""
    found: dict[str, Any] = {**_parts("ids", ids), **_parts("labels", labels)}
    if is_table(lengths):  # else the manifest has them
        found |= _parts("lengths", lengths)
    if isinstance(source, Stream):
        return found
    found["order"] = _rows_text(source.order, source.rows, "its own")
    found["collate"] = "the usual one" if source.collate is default_collate else of_function(source.collate)
    found["subset"] = ""
    dataset = source.dataset
    # What is inside may know more of itself than rows can tell.
    while isinstance(dataset, Subset):
        inner = _rows_text(dataset.indices, _length(dataset.dataset), "all")
        found["subset"] = f"{found['subset']} of {inner}" if found["subset"] else inner
        dataset = dataset.dataset
    found |= {**_files(dataset), **_preparation(dataset)}
    with _threads(dataset) as each:
        return {**found, **_contents(dataset, each), **_rows(source, each)}


def _length(dataset: Any) -> int:
    return len(dataset)


def _rows_text(rows: Sequence[int], of: int | None, plain: str) -> str:
    """Numbers of rows, or a word for all of them in their order."""
    if isinstance(rows, range) and of is not None and rows == range(of):  # without counting through millions
        return plain
    if len(rows) == of and all(int(row) == i for i, row in enumerate(rows)):
        return plain
    return digest(repr(list(map(int, rows))))


def _parts(name: str, part: Any) -> dict[str, Any]:
    """Ids or labels: of one value for every row the values, else how they are found in a batch."""
    if part is None or part is False:
        return {}
    if is_table(part):
        return {name: _spans(len(part), lambda low, high: _table(part, low, high))}
    return {name: of_function(part)}


def _table(part: Any, low: int, high: int) -> str:
    if isinstance(part, (Tensor, np.ndarray)):
        return fingerprint.of_batch(part[low:high])
    return digest(repr([_plain(part[row]) for row in range(low, high)]))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value


Each = Callable[..., Iterator[Any]]
"""As ``map``, or the one of a pool of threads."""


def _spans(rows: int, of: Callable[[int, int], str | None], each: Each = map) -> dict[str, str | None]:
    """A digest for each of a few runs of rows, so that a difference can be named."""
    size = max(1, -(-rows // ROWS))
    cuts = [(low, min(low + size, rows)) for low in range(0, rows, size)]
    names = [f"{low}-{high - 1}" if high - low > 1 else f"{low}" for low, high in cuts]
    return dict(zip(names, each(lambda cut: of(*cut), cuts), strict=True))


# -- files ------------------------------------------------------------------------------------------------


def _files(dataset: Any) -> dict[str, Any]:
    """Names, sizes and ends of the files of a folder. Not their dates: a copy of a folder is the same data."""
    found = _paths(dataset)
    if found is None:
        return {}
    root, names = found
    asked, read = (max(1, -(-len(names) // most)) for most in (SIZES, READ))

    def of(low: int, high: int) -> str | None:
        text = hashlib.sha256()
        for row in range(low, high):
            text.update(f"{names[row]}\0".encode("utf-8", "surrogateescape"))
            told = _file(root / names[row], row % read == 0) if row % asked == 0 else b""
            if told is None:
                return None  # the ids tell the names; the rest cannot be known now
            text.update(told)
        return text.hexdigest()[:12]

    return {"files": _spans(len(names), of)}


def _file(path: Path, read: bool) -> bytes | None:
    """The size of a file, and its ends: of images as of most formats, one of the two is enough to tell two apart."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not read:
                return b"%d" % size
            front = file.read(ENDS)
            file.seek(max(len(front), size - ENDS))
            return b"%d %b %b" % (size, front, file.read(ENDS))
    except OSError:
        return None  # which is for the run to say


def _paths(dataset: Any) -> tuple[Path, Sequence[str]] | None:
    """The folder and the files of a data set that has such; of torchvision's kind, too."""
    if isinstance(dataset, ImageFolder):
        return dataset.root, dataset.ids
    samples, root = getattr(dataset, "samples", None), getattr(dataset, "root", None)
    if not isinstance(samples, list) or not samples or not isinstance(samples[0], tuple) or root is None:
        return None
    if not all(isinstance(sample[0], (str, os.PathLike)) for sample in samples):
        return None
    # Relative, because the folder may have moved.
    return Path(root), [os.path.relpath(sample[0], root) for sample in samples]


def _preparation(dataset: Any) -> dict[str, str]:
    """How rows are made ready for the model, where a data set says so."""
    if isinstance(dataset, ImageFolder):
        settings = {name: value for name, value in vars(dataset).items() if name not in _NO_SETTINGS}
        return {"preparation": Texts().of({name: _listed(value) for name, value in settings.items()})}
    named = ("transform", "transforms", "target_transform")
    found = {name: getattr(dataset, name, None) for name in named}
    held = {name: value for name, value in found.items() if value is not None}
    return {"preparation": Texts().of(held)} if held else {}


def _listed(value: Any) -> Any:
    """Means and deviations as numbers: people are to see what differs."""
    return [round(number, 6) for number in value.flatten().tolist()] if isinstance(value, Tensor) else value


# -- rows -------------------------------------------------------------------------------------------------


def _arrays(dataset: Any) -> Sequence[Any] | None:
    """What data in memory is made of, where that is tensors and arrays."""
    held = dataset.tensors if type(dataset) in (TensorDataset, Columns) else (dataset,)
    return held if all(isinstance(one, (Tensor, np.ndarray)) and not _on_disk(one) for one in held) else None


@contextlib.contextmanager
def _threads(dataset: Any) -> Iterator[Each]:
    """How many sums are taken: to sum up bytes lets other threads run, to walk through objects does not."""
    held = _arrays(dataset)
    if held is None or sum(one.nbytes for one in held) <= _SMALL:
        yield map
        return
    with ThreadPoolExecutor(min(ROWS, os.cpu_count() or 1)) as pool:
        yield pool.map


def _contents(dataset: Any, each: Each) -> dict[str, Any]:
    """Digests of data that lies in memory."""
    held = _arrays(dataset)
    if held is not None:
        nbytes, rows = sum(one.nbytes for one in held), min(map(len, held))
    elif type(dataset) in (list, tuple):
        held = (dataset,)
        nbytes, rows = (len(dataset) * fingerprint.nbytes_of(dataset[0]) if dataset else 0), len(dataset)
    else:
        return {}
    step = max(1, -(-nbytes // WHOLE))
    return {
        "contents": _spans(rows, lambda low, high: fingerprint.of_batch([one[low:high:step] for one in held]), each)
    }


def _on_disk(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            return True
        array = array.base
    return False


def _rows(source: Any, each: Each) -> dict[str, Any]:
    """Digests of a few rows, as the data set gives them; some are read twice."""
    rows = sorted({round(i * (source.rows - 1) / (ROWS - 1)) for i in range(ROWS)}) if source.rows else []
    if source.memory is not None:  # and is the same each time
        return {
            "rows": dict(zip(map(str, rows), each(lambda row: _row(source, row), rows), strict=True)),
            "repeats": True,
        }
    with random_numbers_kept():
        found = {str(row): _row(source, row) for row in rows}
        # Several: of two, a coin that decides whether an image is flipped would often leave both as they were.
        repeats = all(_row(source, row) in (None, found[str(row)]) for row in rows[::2])
    return {"rows": found, "repeats": True} if repeats else {"repeats": False}


def _row(source: Any, row: int) -> str | None:
    index = int(source.order[row])
    try:
        value = source.dataset[index]
    except Exception:  # the user's own data set: it is raised again, or skipped, when the rows are run
        return None
    # A tensor and a data set of one tensor are the same rows.
    return fingerprint.of_batch(value[0] if type(value) is tuple and len(value) == 1 else value)

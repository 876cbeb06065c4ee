"""Values to files and back: tensors as safetensors, everything around them as JSON. No pickle.

A value is written as a tree of small JSON objects, each with one tag: ``TENSORS`` and ``VALUES`` list them. What JSON
cannot say (a function, a generator) is written as its type and repr, and read back as an ``Opaque``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchhook._recording import tensor_file
from torchhook._recording.codecs import Reader, Writer
from torchhook._recording.tensor_codecs import TENSORS
from torchhook._recording.value_codecs import VALUES
from torchhook._values import tree
from torchhook._values.loaded import Opaque
from torchhook._version import __version__
from torchhook.errors import RecordingFileError

FORMAT = "torchhook.recording"
VERSION = 2
"""What this version reads. A file says the lowest version that has all of its tags, so that older readers open it."""


def save(
    path: str | os.PathLike[str], values: Sequence[Any], about: dict[str, Any], names: Sequence[str] | None = None
) -> Path:
    """Write values and a JSON-able description of them as one file; other readers see their tensors by ``names``."""
    path = named(path)
    writer = Writer(TENSORS, VALUES)
    document = {
        "values": [writer.named(name, value) for name, value in zip(names or _numbers(values), values, strict=True)],
        "about": about,
        "versions": {"torchhook": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
    }
    # JSON in a string: the metadata of safetensors are strings and nothing else.
    metadata = {"format": FORMAT, "version": str(writer.version), "recording": json.dumps(document)}
    return tensor_file.write(path, writer.tensors, metadata)


def _numbers(values: Sequence[Any]) -> list[str]:
    return [str(number) for number in range(len(values))]


def named(path: str | os.PathLike[str], what: str = "a recording is", opener: str = "th.load") -> Path:
    """The path, unless its ending belongs to another format: who reads such a file would be told that it is broken.

    >>> named("run.safetensors").suffix
    '.safetensors'
    """
    path = Path(path)
    if path.suffix.lower() in _OTHER_FORMATS:
        raise ValueError(
            f"{path.name}: {what} written as safetensors, and {path.suffix} is read as another format. Save it as "
            f"{path.with_suffix('.safetensors').name!r}; {opener} opens it, and so does every reader of safetensors."
        )
    return path


_OTHER_FORMATS = frozenset(
    {".pt", ".pth", ".pt2", ".ckpt", ".bin", ".pkl", ".pickle", ".npy", ".npz", ".h5", ".hdf5", ".json", ".csv"}
    | {".zip", ".onnx", ".parquet", ".arrow", ".mat", ".txt"}
)


def load(path: str | os.PathLike[str]) -> tuple[list[Any], dict[str, Any]]:
    """Read what ``save`` wrote."""
    tensors, metadata = tensor_file.read(path)
    if metadata.get("format") != FORMAT:
        raise RecordingFileError(f"{path} is not a torchhook recording: its format is {metadata.get('format')!r}.")
    with understood(path):
        refuse_unknown(path, int(metadata["version"]), VERSION)
        document = json.loads(metadata["recording"])
        return Reader((*TENSORS, *VALUES), tensors).several(document["values"]), document["about"]


def refuse_unknown(path: str | os.PathLike[str], version: int, known: int) -> None:
    """Refuse a file of a version that is not known."""
    if not 1 <= version <= known:
        raise RecordingFileError(
            f"{path} has format version {version}; this torchhook ({__version__}) reads up to {known}: "
            "install a newer one from its repository."
        )


@contextlib.contextmanager
def understood(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever goes wrong while a document is interpreted into one clear error."""
    try:
        yield
    # Being a ValueError, it would be wrapped in another.
    except RecordingFileError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise RecordingFileError(f"{path} cannot be understood: {type(error).__name__}: {error}.") from error


def opaque(value: Any) -> Iterator[Opaque]:
    """The parts of a value that no file could hold."""
    for _, leaf in tree.leaves(value):
        # A set without tensors is not opened, so that what was lost may be inside of this leaf.
        parts = leaf if isinstance(leaf, (set, frozenset)) else (leaf,)
        yield from (part for part in parts if isinstance(part, Opaque))

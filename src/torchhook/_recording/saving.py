"""Values to files and back: tensors as safetensors, everything around them as JSON. No pickle.

A value is written as a tree of small JSON objects, each with one tag: ``TENSORS`` and ``VALUES`` list them. What JSON
cannot say (a function, a generator) is written as its type and repr, and read back as an ``Opaque``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchhook._recording import tensor_file
from torchhook._recording.codecs import Reader, Writer
from torchhook._recording.tensor_codecs import TENSORS
from torchhook._recording.value_codecs import VALUES
from torchhook._version import __version__
from torchhook.errors import RecordingFileError

FORMAT = "torchhook.recording"
VERSION = 2
"""What this version reads. A file says the lowest version that has all of its tags, so that older readers open it."""


def save(path: str | os.PathLike[str], values: list[Any], about: dict[str, Any]) -> Path:
    """Write values and a JSON-able description of them as one file."""
    writer = Writer(TENSORS, VALUES)
    document = {
        "values": writer.several(values),
        "about": about,
        "versions": {"torchhook": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
    }
    metadata = {"format": FORMAT, "version": str(writer.version), "recording": json.dumps(document)}
    return tensor_file.write(path, writer.tensors, metadata)


def load(path: str | os.PathLike[str]) -> tuple[list[Any], dict[str, Any]]:
    """Read what ``save`` wrote."""
    tensors, metadata = tensor_file.read(path)
    if metadata.get("format") != FORMAT:
        raise RecordingFileError(f"{path} is not a torchhook recording: its format is {metadata.get('format')!r}.")
    with understood(path):
        version = int(metadata["version"])
        if version > VERSION:
            raise RecordingFileError(
                f"{path} has format version {version}; this torchhook ({__version__}) reads up to {VERSION}: "
                "install a newer one from its repository."
            )
        document = json.loads(metadata["recording"])
        return Reader((*TENSORS, *VALUES), tensors).several(document["values"]), document["about"]


@contextlib.contextmanager
def understood(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever goes wrong while a document is interpreted into one clear error."""
    try:
        yield
    except RecordingFileError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise RecordingFileError(f"{path} cannot be understood: {type(error).__name__}: {error}.") from error

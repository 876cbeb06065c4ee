"""What a side of a comparison may be: a model, an exported program, a recording, arrays, or a file of these."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from torchhook._recording import arrays
from torchhook._recording.records import Recording
from torchhook.errors import RecordingFileError, TorchVersionError

Side: TypeAlias = "Recording | nn.Module | torch.export.ExportedProgram | Mapping[str, Any] | str | os.PathLike[str]"

_PROGRAM = ".pt2"


def runnable(side: Any, name: str) -> Any:
    """The side with a program, or the file of one, turned into a model; anything else that can be compared as it is."""
    if isinstance(side, (str, os.PathLike)) and Path(side).suffix == _PROGRAM:
        side = _program(Path(side))
    if isinstance(side, torch.export.ExportedProgram):
        return _layers(side)
    if isinstance(side, (Recording, nn.Module, Mapping, str, os.PathLike)):
        return side
    raise TypeError(
        f"{name} is a {type(side).__name__}: diff compares models, exported programs, recordings, mappings of arrays "
        f"by address, and files of them ({', '.join((_PROGRAM, *arrays.FILES))})."
    )


def _layers(program: torch.export.ExportedProgram) -> nn.Module:
    try:
        with _quiet():
            return torch.export.unflatten(program)
    except RuntimeError as error:  # torch 2.6 loses the names of some layers when it exports with strict=True
        raise TorchVersionError(
            f"torch {torch.__version__} cannot make layers of the program again ({error}). Export the model with "
            "strict=False, or compare it with a newer torch."
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says to itself about names that it still uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _program(path: Path) -> torch.export.ExportedProgram:
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}.")
    try:
        with _quiet():
            return torch.export.load(path)
    except Exception as error:  # whatever a reader of archives meets in a file that is none
        raise RecordingFileError(f"{path} is no program that torch.export.save wrote: {error}") from error


def recorded(side: Any, known: Collection[str]) -> Recording:
    """The recording that a side is, or that its arrays make; ``known`` are paths that its keys may begin with."""
    if isinstance(side, Recording):
        return side
    if isinstance(side, Mapping):
        return arrays.recording(side, "arrays", known)
    return arrays.read(side, known)


def is_program(model: Any) -> bool:
    return isinstance(model, torch.export.UnflattenedModule)


_COPY = re.compile(r"@(\d+)(?=\.|$)")


def with_calls(recording: Recording) -> Recording:
    """The recording of a program with one site for what are calls of one module.

    Where the calls of a module are not the same code, ``unflatten`` makes modules ``relu`` and ``relu@1`` of them.
    """
    made, calls = Recording(recording.model_name), Counter[Any]()
    made.missing = recording.missing
    for record in recording.records():
        path = record.site.path
        site = record.site.but(path=_COPY.sub("", path))
        # The copy of a later call may be the first that there is: a call that computed nothing is left out.
        copy = _COPY.match(path, path.rfind("@"))
        calls[site] = max(calls[site], int(copy[1]) if copy and copy.end() == len(path) else 0)
        made.opened(site).append((calls[site], next(made.order), record.value))
        calls[site] += 1
    return made

"""Edits as files: one safetensors file with the tensors, and JSON in its header that says which edit is where.

Only what the catalogue makes is written, by its name and its arguments. No pickle, and nothing of the user's code is
run when a file is read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchhook._recording import saving, tensor_file
from torchhook._recording.codecs import Codec, Reader, Writer
from torchhook._recording.records import Recording
from torchhook._recording.tensor_codecs import TENSORS
from torchhook._recording.value_codecs import VALUES
from torchhook._values.choices import Along
from torchhook._values.value_object import shown
from torchhook._version import __version__
from torchhook.edits import blocking, catalogue
from torchhook.edits.adapting import OfValue, Steps, adapt, no_dict
from torchhook.edits.protocol import CataloguedEdit
from torchhook.edits.where import Only
from torchhook.errors import EditError, RecordingFileError

FORMAT = "torchhook.edits"
VERSION = 1


def save_edits(path: str | os.PathLike[str], edits: Mapping[str, Any]) -> Path:
    """Write edits as one safetensors file: ``th.load_edits`` gives the same ones, in any process.

    >>> import tempfile
    >>> from torchhook import edits
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_edits(f"{folder}/steering.safetensors", {"h.3": edits.add(torch.ones(8))})
    ...     load_edits(path)
    {'h.3': edits.add((8,))}

    Args:
        path: The file. One that is there is replaced when the new one is complete.
        edits: What ``th.edit`` takes, with addresses or globs as its keys: edits of the catalogue, and lists of them.
            A function of one's own is no data, and is refused.
    """
    path = saving.named(path, "edits are", "th.load_edits")
    if not isinstance(edits, Mapping):
        raise no_dict(edits, "addresses")
    writer = Writer(TENSORS, (*_CODECS, *VALUES))
    document = {
        "edits": [[str(_address(site)), _written(site, edit, writer)] for site, edit in edits.items()],
        "shown": {str(site): shown(edit) for site, edit in edits.items()},
        "versions": {"torchhook": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
    }
    metadata = {"format": FORMAT, "version": str(VERSION), "edits": json.dumps(document)}
    return tensor_file.write(path, writer.tensors, metadata)


def load_edits(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what ``th.save_edits`` wrote: a dict for ``th.edit``."""
    tensors, metadata = tensor_file.read(path)
    if metadata.get("format") != FORMAT:
        hint = " th.load opens it." if metadata.get("format") == saving.FORMAT else ""
        raise RecordingFileError(f"{path} holds no edits: its format is {metadata.get('format')!r}.{hint}")
    with saving.understood(path):
        saving.refuse_unknown(path, int(metadata["version"]), VERSION)
        document = json.loads(metadata["edits"])
        reader = Reader((*TENSORS, *_CODECS, *VALUES), tensors)
        found = {str(site): reader.one(code) for site, code in document["edits"]}
        for edit in found.values():
            adapt(edit)  # what is no edit is said here, and not when a model runs
        return found


def _address(site: Any) -> str:
    if not isinstance(site, str):
        raise EditError(
            f"save_edits: the key {site!r} is a {type(site).__name__}, which a file cannot hold. Write the address of "
            "the site, or a glob: 'h.3', 'h.*.attn:input'."
        )
    return site


def _written(site: str, edit: Any, writer: Writer) -> Any:
    try:
        _check_all(edit)
        return writer.named(site, edit)
    except _NotData as error:
        raise EditError(
            f"save_edits: {str(site)!r}: {shown(edit)} holds {error}, which a file cannot hold. Write it with the "
            "edits of torchhook.edits, or keep it in your code and add it to what load_edits returns."
        ) from None


class _NotData(Exception):
    """Something in an edit is not data."""


# -- codecs -----------------------------------------------------------------------------------------------------------

_KINDS: dict[str, type[CataloguedEdit]] = {
    **{kind.__name__.strip("_").lower(): kind for kind in catalogue.KINDS},
    "only": Only,
    "block": blocking.Block,
    "steps": Steps,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}

# What would come back as something else: a function, an object of the user's class.
_LOST = {"opaque", "fields", "mapping", "sequence", "named_tuple"}


def _check_all(edit: Any) -> None:
    if isinstance(edit, (list, tuple)):  # in order, and lists in it too
        for one in edit:
            _check_all(one)
    else:
        _check_edit(edit)


def _check_edit(edit: Any) -> None:
    if isinstance(edit, OfValue):
        edit = edit.function
    if type(edit) not in _NAMES:
        what = "the function" if callable(edit) else "an object that is no edit,"
        raise _NotData(f"{what} {shown(edit)}")


def _write_edit(edit: Any, writer: Writer) -> Any:
    _check_edit(edit)
    held = {field.name: getattr(edit, field.name) for field in dataclasses.fields(edit)}
    inner = [held["edit"]] if "edit" in held else held["steps"] if isinstance(edit, Steps) else []
    for one in inner:
        _check_edit(one)
    codes = {name: writer.one(value) for name, value in held.items()}
    for name, code in codes.items():
        if name not in ("edit", "recording") and (kind := _lost(code)):
            raise _NotData(f"{kind} in {name}=")
    return [_NAMES[type(edit)], codes]


def _lost(code: Any) -> str:
    """What a code does not give back as it was, if anything."""
    if isinstance(code, dict):
        tag = next(iter(code), "")
        if tag in _LOST:
            return f"a {code[tag][0]}"
        if tag == "edit":  # was asked when it was written
            return ""
    parts = code.values() if isinstance(code, dict) else code if isinstance(code, list) else ()
    return next((found for part in parts if (found := _lost(part))), "")


def _read_edit(body: Any, reader: Reader) -> Any:
    name, codes = body
    if name not in _KINDS:
        raise ValueError(f"unknown edit {name!r}")
    return _KINDS[name](**{field: reader.one(code) for field, code in codes.items()})


def _write_recording(recording: Any, writer: Writer) -> Any:
    values, about, names = recording.plain()
    return [about, [writer.named(name, value) for name, value in zip(names, values, strict=True)]]


def _read_recording(body: Any, reader: Reader) -> Any:
    return Recording.of_plain(reader.several(body[1]), body[0])


_CODECS = (
    Codec("edit", lambda value, node: isinstance(value, CataloguedEdit), _write_edit, _read_edit),
    Codec("recording", lambda value, node: isinstance(value, Recording), _write_recording, _read_recording),
    Codec(
        "along",
        lambda value, node: isinstance(value, Along),
        lambda value, writer: writer.several([value.which, value.dim, value.count]),
        lambda body, reader: Along(*reader.several(body)),
    ),
)

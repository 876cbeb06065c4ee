"""Arrays of other programs as a recording: a mapping by address, or a file that holds one.

What ONNX Runtime, JAX, numpy or another framework computed is named by the sites that it stands for.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from safetensors import SafetensorError
from torch import Tensor

from torchhook._recording import records, saving
from torchhook._recording.address import Calls, Site, meant, readings
from torchhook._recording.records import Recording
from torchhook._values import tree
from torchhook.errors import MissingRecordError, RecordingFileError

FILES = (".safetensors", ".npz", ".npy")


def recording(arrays: Mapping[str, Any], name: str = "", known: Collection[str] = ()) -> Recording:
    """The arrays as records, in their order; ``known`` are paths that a key may begin with.

    >>> import numpy as np
    >>> recording({"fc": np.zeros(2), "relu#1": np.ones(3)}, known=["fc", "relu"])["relu", 1]
    tensor([1., 1., 1.], dtype=torch.float64)
    """
    if not arrays:
        raise MissingRecordError(f"{name or 'arrays'}: there is none to compare.")
    made = Recording(name)
    for key, value in arrays.items():
        if not isinstance(key, str):
            raise TypeError(f"arrays are named by addresses, found the key {key!r} ({type(key).__name__}).")
        site = _site(key, known)
        made.opened(site).append((site.first_call, next(made.order), _values(key, value)))
    return made


def _site(key: str, known: Collection[str]) -> Site:
    # A name that is no address here ("/layer1/Conv_output_0", as exporters write them) stays whole, so that names= can
    # lead to it.
    named = (site for site in readings(key) if site.path in known and not isinstance(site.call, Calls))
    return next(named, Site(meant(key)))


def read(path: str | os.PathLike[str], known: Collection[str] = ()) -> Recording:
    """The recording in a file: torchhook's own, or the arrays of a safetensors or npz file.

    An npy file has one array without a name, and is taken for the model's output.
    """
    path = Path(path)
    if path.suffix in (".npz", ".npy"):
        return recording(of_numpy(path), path.name, known)
    if path.suffix != ".safetensors":
        raise RecordingFileError(
            f"{path} is no file of arrays that can be read here: expected {' or '.join(FILES)}. Load it yourself and "
            "give a mapping of arrays by address."
        )
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("format") == saving.FORMAT:
                return records.load(path)
            return recording({key: file.get_tensor(key) for key in file.keys()}, path.name, known)  # noqa: SIM118
    except SafetensorError as error:
        raise RecordingFileError(f"{path} is no safetensors file: {error}.") from error


def of_numpy(path: Path) -> dict[str, Any]:
    """The arrays of an npz file by their names; that of an npy file under none."""
    if path.suffix == ".npy":
        try:
            with path.open("rb") as file:
                return {"": np.lib.format.read_array(file, allow_pickle=False)}
        except (ValueError, EOFError) as error:
            raise RecordingFileError(f"{path} is no npy file that can be read without pickle: {error}") from error
    # numpy takes what is no archive for pickled objects, and says to allow them.
    if path.exists() and not zipfile.is_zipfile(path):
        raise RecordingFileError(f"{path} is no npz file, as np.savez writes it, or a damaged one.")
    with np.load(path, allow_pickle=False) as archive:
        return {key: _entry(path, archive, key) for key in archive.files}


def _entry(path: Path, file: Any, key: str) -> Any:
    try:
        return file[key]
    except ValueError as error:
        raise RecordingFileError(f"{path}: {key!r} cannot be read without pickle: {error}") from error


# -- one array --------------------------------------------------------------------------------------------


def _values(key: str, value: Any) -> Any:
    """The value with tensors in the place of its arrays."""
    found = tree.map_parts(lambda array: _tensor(key, array), value, where=_is_array)
    if not any(True for _ in tree.tensors(found)):
        raise MissingRecordError(
            f"{key!r} holds no array: expected one of numpy, torch, JAX or ONNX Runtime, found {type(value).__name__}."
        )
    return found


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray, np.generic)) or (
        not isinstance(value, type)
        and any(hasattr(value, name) for name in ("__dlpack__", "__array__", "__array_interface__", "numpy"))
    )


def _tensor(key: str, array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array
    if hasattr(array, "__dlpack__") and not isinstance(array, np.ndarray):
        try:
            return torch.utils.dlpack.from_dlpack(array).clone()  # JAX's dtypes are not all numpy's
        except (RuntimeError, TypeError, BufferError, ValueError):
            pass  # numpy's copy is on the host, whatever the device was
    # An OrtValue has no other way out.
    numbers = array.numpy() if not hasattr(array, "__array__") and hasattr(array, "numpy") else np.asarray(array)
    try:
        return _of_numpy(np.asarray(numbers))
    except TypeError as error:
        raise TypeError(
            f"{key!r}: an array of dtype {getattr(numbers, 'dtype', '?')} is nothing that torch can hold. Convert it "
            "first, for example with .astype('float32')."
        ) from error


def _of_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    # ml_dtypes' bfloat16 is a dtype of numpy's that torch does not know, though the bits are the same.
    if array.dtype.name == "bfloat16":
        return _of_numpy(array.view(np.int16)).view(torch.bfloat16)
    # Fresh: torch wants memory that can be written to, of the machine's byte order and positive strides.
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))

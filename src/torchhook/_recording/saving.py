"""Values to files and back: tensors as safetensors, everything around them as JSON. No pickle.

A value is written as a tree of small JSON objects, each with one tag. What JSON cannot say (a user's own
class, a generator) is written as its type and repr, and read back as an ``Opaque``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchhook._recording import tensor_file
from torchhook._values import tree
from torchhook._version import __version__
from torchhook.errors import RecordingFileError

FORMAT = "torchhook.recording"
VERSION = 1


class Loaded(OrderedDict[str, Any]):
    """A named tuple, dataclass or model output read from a file: its fields by name, position or attribute."""

    def __getattribute__(self, name: str) -> Any:
        # A field comes before a method of dict: the layers of a key-value cache have fields `keys` and `values`.
        if not name.startswith("__") and dict.__contains__(self, name):
            return dict.__getitem__(self, name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this {type(self).__name__} has no field {name!r}; it has {', '.join(self)}")

    def __getitem__(self, key: Any) -> Any:
        return list(dict.values(self))[key] if isinstance(key, (int, slice)) else super().__getitem__(key)


class Opaque(NamedTuple):
    """A leaf that could not be saved: what it was, and how it showed itself."""

    type: str
    text: str


def save(path: str | os.PathLike[str], values: list[Any], about: dict[str, Any]) -> Path:
    """Write values and a JSON-able description of them as one file."""
    tensors: dict[str, Tensor] = {}
    trees = [_encode(value, tensors) for value in values]
    versions = {"torchhook": __version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    document = {"values": trees, "about": about, "versions": versions}
    metadata = {"format": FORMAT, "version": str(VERSION), "recording": json.dumps(document)}
    return tensor_file.write(path, tensors, metadata)


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
        return [_decode(value, tensors) for value in document["values"]], document["about"]


@contextlib.contextmanager
def understood(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever goes wrong while a document is interpreted into one clear error."""
    try:
        yield
    except RecordingFileError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise RecordingFileError(f"{path} cannot be understood: {type(error).__name__}: {error}.") from error


# -- values -----------------------------------------------------------------------------------


def _encode(value: Any, tensors: dict[str, Tensor], inside: tree.Loops | None = None) -> Any:
    def several(items: Any) -> list[Any]:
        return [_encode(item, tensors, below) for item in items]

    below = inside

    if isinstance(value, Tensor):
        return _encode_tensor(value, tensors)
    if value is None or isinstance(value, (bool, int, str)):
        plain = (kind for kind in (bool, int, str) if isinstance(value, kind))
        return {"leaf": None if value is None else next(plain)(value)}
    if isinstance(value, float):
        return {"leaf": value} if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.char in "?bBhHiIlLqQefdFD":
        tag = "array" if isinstance(value, np.ndarray) else "number"
        native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")  # fresh: writable, of positive strides
        return {tag: _encode_tensor(torch.from_numpy(native), tensors)}
    if isinstance(value, tree.Inputs):
        return {"inputs": several(value)}
    if isinstance(value, Opaque):
        return {"opaque": list(value)}
    node = tree.unpack(value, inside)
    if node is None:
        return {"opaque": [_type_name(value), repr(value)[:200]]}
    if inside is None:
        below = node.inside
    if type(value) in (tuple, list):
        return {type(value).__name__: several(value)}
    if type(value) is dict:
        return {"dict": [several(pair) for pair in value.items()]}
    if isinstance(value, (dict, MappingProxyType)) and any(type(key) is not str for key in value):
        pairs = [several(pair) for pair in value.items()]
        extra = slice(len(pairs), None)  # the attributes that hold tensors come after the items
        return {"mapping": [type(value).__name__, pairs, node.keys[extra], several(node.children[extra])]}
    return {"fields": [type(value).__name__, node.keys, several(node.children)]}


def _decode(code: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    ((tag, body),) = code.items()

    def several(items: Any) -> list[Any]:
        return [_decode(item, tensors) for item in items]

    decoders: dict[str, Callable[[], Any]] = {
        "leaf": lambda: body,
        "float": lambda: float(body),
        "complex": lambda: complex(float(body[0]), float(body[1])),
        "bytes": lambda: base64.b64decode(body),
        "size": lambda: torch.Size(body),
        "dtype": lambda: getattr(torch, body),
        "device": lambda: torch.device(body),
        "array": lambda: _decode(body, tensors).numpy(),
        "number": lambda: _decode(body, tensors).numpy()[()],
        "inputs": lambda: tree.Inputs(*several(body)),
        "opaque": lambda: Opaque(*body),
        "tuple": lambda: tuple(several(body)),
        "list": lambda: several(body),
        "dict": lambda: {_decode(k, tensors): _decode(v, tensors) for k, v in body},
        "fields": lambda: _fields(body[0], body[1], several(body[2])),
        "mapping": lambda: _mapping(body[0], [several(pair) for pair in body[1]], body[2], several(body[3])),
    }
    if tag in decoders:
        return decoders[tag]()
    return _decode_tensor(tag, body, tensors)


def _fields(name: str, keys: list[str], values: list[Any]) -> Loaded:
    kind: type[Loaded] = type(name, (Loaded,), {})
    return kind(zip(keys, values, strict=True))


def _mapping(name: str, pairs: list[Any], attributes: list[str], values: list[Any]) -> dict[Any, Any]:
    """A dict of another type whose keys are not all strings: it is read by its keys alone."""
    kind: type[dict[Any, Any]] = type(name, (dict,), {})
    result = kind(pairs)
    vars(result).update(zip(attributes, values, strict=True))
    return result


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# -- tensors ----------------------------------------------------------------------------------

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that a tensor of another layout is made of."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _COMPRESSED:
        first, second = _COMPRESSED[tensor.layout]
        return [getattr(tensor, first)(), getattr(tensor, second)(), tensor.values()]
    return [tensor.to_dense()]


def _encode_tensor(tensor: Tensor, tensors: dict[str, Tensor]) -> Any:
    def put(part: Tensor) -> Any:
        return _encode_tensor(part, tensors)

    tensor = tensor.detach()
    if tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor":
        return {"meta": [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]}
    if tensor.is_nested:
        layout = "jagged" if tensor.layout == torch.jagged else "strided"
        return {"nested": [layout, [put(part) for part in parts(tensor)]]}
    if tensor.layout != torch.strided:
        name = str(tensor.layout).removeprefix("torch.")
        if name not in ("sparse_coo", *(str(known).removeprefix("torch.") for known in _COMPRESSED)):
            return put(tensor.to_dense())
        coalesced = name == "sparse_coo" and tensor.is_coalesced()
        return {name: [list(tensor.shape), [put(part) for part in parts(tensor)], coalesced]}
    if tensor.is_quantized:
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return {"quantized": [kind, put(tensor.int_repr()), tensor.q_scale(), tensor.q_zero_point()]}
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return {
            "quantized_channels": [kind, put(tensor.int_repr()), put(scales), put(zeros), tensor.q_per_channel_axis()]
        }
    tensor = tensor.as_subclass(Tensor).cpu().resolve_conj().resolve_neg()
    if tensor.is_complex():
        return {"complex_tensor": put(torch.view_as_real(tensor))}
    if tensor.dtype not in tensor_file.DTYPES and tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return {"bits": [str(tensor.dtype).removeprefix("torch."), put(tensor.contiguous().view(torch.uint8))]}
    if tensor.dtype not in tensor_file.DTYPES:
        return {"opaque": [_type_name(tensor), f"{tensor.dtype} of shape {tuple(tensor.shape)}"]}
    name = f"t{len(tensors)}"
    tensors[name] = tensor
    return {"tensor": name}


def _decode_tensor(tag: str, body: Any, tensors: dict[str, Tensor]) -> Any:
    def take(code: Any) -> Any:
        return _decode(code, tensors)

    if tag == "tensor":
        return tensors[body]
    if tag == "bits":
        return take(body[1]).view(getattr(torch, body[0]))
    if tag == "meta":
        return torch.empty(body[0], dtype=getattr(torch, body[1]), device="meta")
    if tag == "complex_tensor":
        return torch.view_as_complex(take(body).contiguous())
    if tag == "nested":
        layout = torch.jagged if body[0] == "jagged" else torch.strided
        return torch.nested.as_nested_tensor([take(part) for part in body[1]], layout=layout)
    if tag == "sparse_coo":
        indices, values = map(take, body[1])
        return torch.sparse_coo_tensor(indices, values, body[0], check_invariants=True, is_coalesced=body[2] or None)
    if tag in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"):
        first, second, values = map(take, body[1])
        return torch.sparse_compressed_tensor(
            first, second, values, body[0], layout=getattr(torch, tag), check_invariants=True
        )
    if tag == "quantized":
        return torch._make_per_tensor_quantized_tensor(take(body[1]), body[2], body[3])
    if tag == "quantized_channels":
        return torch._make_per_channel_quantized_tensor(take(body[1]), take(body[2]), take(body[3]), body[4])
    raise ValueError(f"unknown tag {tag!r}")

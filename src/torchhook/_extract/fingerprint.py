"""Short texts that change when a model, a transform or a function changes."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import textwrap
import types
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchhook._core.index import Index
from torchhook._core.offload import read
from torchhook._values import tree
from torchhook._values.subclasses import is_distributed, local

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 17  # a block and its products stay in the cache
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def of_model(model: nn.Module) -> str:
    """The model's type and a hash of its modules, parameters and buffers, the same on every device.

    >>> of_model(nn.Identity())
    'Identity 0 tensors 477629fc3790'
    """
    index = Index(model)
    digest, count = hashlib.sha256(), 0
    for name, module in index.modules.items():
        digest.update(f"{name} {type(module).__qualname__} {_ADDRESS.sub('', module.extra_repr())}".encode())
    for name, (module, own) in index.tensors.items():
        with read(module, own) as tensor:
            if isinstance(tensor, Tensor):
                count += 1
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_contents(tensor)}".encode())
    return f"{type(index.modules['']).__name__} {count} tensors {digest.hexdigest()[:12]}"


@torch.no_grad()
def _contents(tensor: Tensor) -> str:
    """Sums of all items, read as integers and weighted by their places: exact on every device and in any order."""
    try:
        # Else all models of one shape whose weights are torchao's would pass for the same.
        plain = tensor if is_distributed(tensor) else local(tensor)
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        flat = plain.detach().contiguous().reshape(-1)
        # A view as wide integers must begin at one.
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()
        # Wide items are summed several times faster.
        flat = flat.view(torch.int64 if flat.nbytes % 8 == 0 and flat.nbytes else _AS_INTEGERS[flat.element_size()])
        weights = _weights()[: len(flat)].to(flat.device)
        sums = [(block * weights[: len(block)]).sum() for block in flat.split(_BLOCK)] if len(flat) else [flat.sum()]
        return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()[:16]
    except (RuntimeError, NotImplementedError, TypeError, KeyError):
        return "unread"  # meta, quantized and exotic tensors: shape and dtype have to do


@functools.cache
def _weights() -> Tensor:
    """Odd numbers without a pattern, one for each place in a block."""
    numbers = np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    # Odd factors can be undone modulo 2**64: another number in one place is always another sum.
    numbers = (numbers ^ (numbers >> np.uint64(32))) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64))


def of_batch(batch: Any) -> str:
    """A checksum of everything in a batch: tensors, arrays, texts and numbers."""
    crc = 0
    for address, leaf in tree.leaves(batch):
        crc = zlib.crc32(_leaf(leaf), zlib.crc32(address.encode(), crc))
    return f"{crc:08x}"


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        if leaf.is_nested:
            return b"".join(map(_leaf, leaf.unbind()))
        plain = (leaf.to_dense() if leaf.layout != torch.strided else leaf).detach().cpu().resolve_conj().resolve_neg()
        return plain.contiguous().reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return np.ascontiguousarray(leaf).tobytes()
    if isinstance(leaf, np.ndarray):
        return of_batch(leaf.tolist()).encode()
    if isinstance(leaf, bytes):
        return leaf
    return (repr(leaf) if isinstance(leaf, (str, bool, int, float, complex, np.generic)) else "").encode()


def of_function(value: Any) -> str:
    """How a transform or any other function is told from another one.

    >>> from torchhook import transforms
    >>> of_function(transforms.pool("mean"))
    "pool('mean')"
    """
    return _text(value, ())


def _text(value: Any, around: tuple[int, ...]) -> str:
    """``around`` are the ids of the values that this one is a part of: objects may hold themselves."""
    if id(value) in around:
        return "…"
    around = (*around, id(value))
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)):
        return repr(value)
    if isinstance(value, (Tensor, np.ndarray)):
        tensor = torch.as_tensor(value)
        return f"tensor({tuple(tensor.shape)}, {_contents(tensor)})"
    if isinstance(value, nn.Module):
        return of_model(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_text(v, around)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(item, around) for item in value) + "]"
    if isinstance(value, (set, frozenset)):  # their order is another one in each process
        return "{" + ", ".join(sorted(_text(item, around) for item in value)) + "}"
    if isinstance(value, functools.partial):
        return f"partial({_text([value.func, value.args, value.keywords], around)})"
    if isinstance(value, types.MethodType):
        return f"{_text(value.__self__, around)}.{_text(value.__func__, around)}"
    if isinstance(value, types.FunctionType):
        return _of_python(value, around)
    if isinstance(value, (types.BuiltinFunctionType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    # One of its own: the repr of object shows where it lies, and that is new in each process.
    if "__repr__" in {n for c in type(value).__mro__[:-1] for n in vars(c)} and not _ADDRESS.search(repr(value)):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}({_text(getattr(value, '__dict__', {}), around)})"


def _of_python(function: types.FunctionType, around: tuple[int, ...]) -> str:
    name = function.__qualname__.rpartition("<locals>.")[2]
    digest = hashlib.sha256(_code(function).encode())
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        digest.update(_text(held, around).encode())
    digest.update(_text([function.__defaults__, function.__kwdefaults__], around).encode())
    return f"{name} {digest.hexdigest()[:12]}"


def _code(function: types.FunctionType) -> str:
    if function.__name__ != "<lambda>":  # the source of a lambda is the whole statement around it
        try:
            return textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError):
            pass
    return _bytecode(function.__code__)


def _bytecode(code: types.CodeType) -> str:
    held = [_bytecode(c) if isinstance(c, types.CodeType) else of_function(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {held} {code.co_names}"

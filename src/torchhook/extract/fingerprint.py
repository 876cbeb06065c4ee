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

from torchhook.select import Index

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE = 256


def of_model(model: nn.Module) -> str:
    """The model's type and a hash of all its parameters and buffers, the same on every device.

    >>> of_model(nn.Identity())
    'Identity 0 tensors e3b0c44298fc'
    """
    index = Index(model)
    digest, count = hashlib.sha256(), 0
    for name, (module, own) in index.tensors.items():
        tensor = getattr(module, own)
        if isinstance(tensor, Tensor):
            count += 1
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_contents(tensor)}".encode())
    return f"{type(index.modules['']).__name__} {count} tensors {digest.hexdigest()[:12]}"


@torch.no_grad()
def _contents(tensor: Tensor) -> str:
    """The sum of all items read as integers, which is exact in any order, and a few of them in order."""
    try:
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        flat = plain.detach().contiguous().reshape(-1)
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()
        # Wide items sum several times faster.
        flat = flat.view(torch.int64 if flat.nbytes % 8 == 0 and flat.nbytes else _AS_INTEGERS[flat.element_size()])
        total = int(flat.sum(dtype=torch.int64))
        sample = flat[:: max(1, len(flat) // _SAMPLE)]
        return f"{total} {zlib.crc32(sample.cpu().numpy().tobytes()):08x}"
    except (RuntimeError, NotImplementedError, TypeError, KeyError):
        return "unread"  # meta, quantized and exotic tensors: shape and dtype have to do


def of_function(value: Any) -> str:
    """How a transform or any other function is told from another one.

    >>> from torchhook import transforms
    >>> of_function(transforms.pool("mean"))
    "pool('mean')"
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)):
        return repr(value)
    if isinstance(value, (Tensor, np.ndarray)):
        tensor = torch.as_tensor(value)
        return f"tensor({tuple(tensor.shape)}, {_contents(tensor)})"
    if isinstance(value, nn.Module):
        return of_model(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {of_function(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(of_function, value)) + "]"
    if isinstance(value, functools.partial):
        return f"partial({of_function(value.func)}, {of_function(value.args)}, {of_function(value.keywords)})"
    if isinstance(value, types.MethodType):
        return f"{of_function(value.__self__)}.{value.__name__}"
    if isinstance(value, types.FunctionType):
        return _of_python(value)
    if isinstance(value, (types.BuiltinFunctionType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    if "__repr__" in {n for c in type(value).__mro__[:-1] for n in vars(c)} and not re.search(
        r" at 0x[0-9a-f]+", repr(value)
    ):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}({of_function(getattr(value, '__dict__', {}))})"


def _of_python(function: types.FunctionType) -> str:
    name = function.__qualname__.rpartition("<locals>.")[2]
    digest = hashlib.sha256(_code(function).encode())
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        digest.update((held.__qualname__ if held is function else of_function(held)).encode())
    digest.update(of_function([function.__defaults__, function.__kwdefaults__]).encode())
    return f"{name} {digest.hexdigest()[:12]}"


def _code(function: types.FunctionType) -> str:
    if function.__name__ != "<lambda>":  # the source of a lambda is the whole statement around it
        try:
            return textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError):
            pass
    return _bytecode(function.__code__)


def _bytecode(code: types.CodeType) -> str:
    held = [_bytecode(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {held} {code.co_names}"

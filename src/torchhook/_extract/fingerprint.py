"""Short texts that change when the numbers of a model or of a batch change."""

from __future__ import annotations

import functools
import hashlib
import re
import zlib
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
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Where an object lies, in its repr: another place in each process."""


def of_model(model: nn.Module) -> str:
    """The model's type and a hash of its modules, parameters and buffers, the same on every device.

    >>> of_model(nn.Identity())
    'Identity 0 tensors 477629fc3790'
    """
    return of_tensors(model)[0]


def of_tensors(model: nn.Module) -> tuple[str, dict[str, str]]:
    """The same, and a short digest of each tensor by name, so that a difference can be named."""
    index = Index(model)
    digest, tensors = hashlib.sha256(), {}
    for name, module in index.modules.items():
        digest.update(f"{name} {type(module).__qualname__} {ADDRESS.sub('', module.extra_repr())}".encode())
    for name, (module, own) in index.tensors.items():
        with read(module, own) as tensor:
            if isinstance(tensor, Tensor):
                numbers = contents(tensor)
                tensors[name] = numbers[:8]
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {numbers}".encode())
    return f"{type(index.modules['']).__name__} {len(tensors)} tensors {digest.hexdigest()[:12]}", tensors


@torch.no_grad()
def contents(tensor: Tensor) -> str:
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
        kind = f"{address} {_kind(leaf)}"
        crc = zlib.crc32(_leaf(leaf), zlib.crc32(kind.encode(), crc))
    return f"{crc:08x}"


def nbytes_of(batch: Any) -> int:
    """About how much memory a batch takes."""
    return sum(getattr(leaf, "nbytes", 64) for _, leaf in tree.leaves(batch))


def _kind(leaf: Any) -> str:
    """Dtype and shape: the same bytes may be other numbers."""
    if isinstance(leaf, Tensor) and leaf.is_nested:
        return "nested"
    if isinstance(leaf, (Tensor, np.ndarray)):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    return ""


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
    if type(leaf).__module__.startswith("PIL."):
        return f"{leaf.mode} {leaf.size}".encode() + leaf.tobytes()
    return (repr(leaf) if isinstance(leaf, (str, bool, int, float, complex, np.generic)) else "").encode()

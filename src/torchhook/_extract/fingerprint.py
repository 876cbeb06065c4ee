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
from torchhook._torch import sharded, version_of
from torchhook._values import tree
from torchhook._values.host_copies import HostCopies
from torchhook._values.subclasses import is_distributed, local

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 17  # a block and its products stay in the cache
_AT_ONCE = 64  # so many on a GPU, with 64 MiB of products
_TOGETHER = _AT_ONCE * _BLOCK  # items of small tensors that wait for each other
_CPU = torch.device("cpu")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Where an object lies, in its repr: another place in each process."""


def of_model(model: nn.Module) -> str:
    """The model's type and a hash of its modules, parameters and buffers, the same on every device.

    >>> of_model(nn.Identity())
    'Identity 0 tensors 477629fc3790'
    """
    return of_tensors(model)[0]


def of_tensors(model: nn.Module, ahead: Ahead | None = None) -> tuple[str, dict[str, str]]:
    """The same, and a short digest of each tensor by name, so that a difference can be named.

    What was read ahead is not read again.
    """
    index = Index(model)
    digest, tensors = hashlib.sha256(), {}
    for name, module in index.modules.items():
        digest.update(f"{name} {type(module).__qualname__} {ADDRESS.sub('', module.extra_repr())}".encode())
    together, texts = _Together(), dict[str, str]()
    found: dict[str, str] = {}
    for name, (module, own) in index.tensors.items():
        with read(module, own) as tensor:
            if isinstance(tensor, Tensor):
                found[name] = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
                known = None if ahead is None else ahead.contents.get(id(tensor))
                if known is None:
                    together.add(name, tensor)
                else:
                    texts[name] = known
    texts |= together.texts()
    for name, about in found.items():
        tensors[name] = texts[name][:8]
        digest.update(f"{about} {texts[name]}".encode())
    return f"{type(index.modules['']).__name__} {len(tensors)} tensors {digest.hexdigest()[:12]}", tensors


class Ahead:
    """Contents of the tensors of a model on a GPU, begun before a batch runs: they are there while it still does.

    Read after it, they would be the last that the GPU does before the host can go on, and it would wait for the host.
    What is written to meanwhile is not taken from here; by way of ``.data``, nobody counts that, and what was there
    before the batch is what is known.
    """

    def __init__(self, index: Index) -> None:
        self._together = _Together()
        self._begun: dict[str, tuple[Tensor, Any]] = {}
        self.contents: dict[int, str] = {}
        """By the ids of tensors, which live as long as this."""
        for name, (module, own) in index.tensors.items():
            tensor = getattr(module, own)
            if _can_be_ahead(tensor):
                self._begun[name] = tensor, _state(tensor)
                self._together.add(name, tensor)
        self._together.begin()

    def read(self) -> None:
        """When the batch is under way; what it writes to is for who reads it when the batch has run."""
        texts = self._together.texts()
        for name, (tensor, before) in self._begun.items():
            if _state(tensor) == before and texts[name] != _NO_NUMBERS:
                self.contents[id(tensor)] = texts[name]


def _can_be_ahead(tensor: Any) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    # What was made for inference does not count who writes to it.
    return plain and _waited_for(tensor) and not tensor.is_inference() and version_of(tensor) >= 0


def _waited_for(tensor: Tensor) -> bool:
    """Whether its numbers are on a device that works on its own."""
    return tensor.is_cuda


def _state(tensor: Tensor) -> Any:
    # A parameter that is sharded, or that is moved, is given other memory without being written to.
    return version_of(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


_NO_NUMBERS = "unread"
_UNREAD = (RuntimeError, NotImplementedError, TypeError, KeyError)
"""What meta, quantized and exotic tensors raise: shape and dtype have to do."""


@torch.no_grad()
def contents(tensor: Tensor) -> str:
    """Sums of all items, read as integers and weighted by their places: exact on every device and in any order."""
    try:
        return _text(_sums(_integers(tensor)))
    except _UNREAD:
        return _NO_NUMBERS


def _text(sums: np.ndarray) -> str:
    return hashlib.sha256(sums.tobytes()).hexdigest()[:16]


def _integers(tensor: Tensor) -> Tensor:
    """The items of a tensor in one row, as integers."""
    # Else all models of one shape whose weights are torchao's would pass for the same.
    plain = tensor if is_distributed(tensor) else local(tensor)
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    flat = plain.detach().contiguous().reshape(-1)
    # A view as wide integers must begin at one.
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    # Wide items are summed several times faster.
    return flat.view(torch.int64 if flat.nbytes % 8 == 0 and flat.nbytes else _AS_INTEGERS[flat.element_size()])


def _sums(flat: Tensor) -> np.ndarray:
    """The sum of each block, weighted, modulo 2**64; of no items it is zero."""
    if not len(flat):
        return np.zeros(1, np.int64)
    if _on_host(flat):
        # By numpy, in one pass: torch multiplies whole numbers into memory first, and takes nine times as long.
        # FSDP frees what it gathered, which it cannot any more once numpy has had the memory.
        items, factors = (flat.clone() if sharded.are_ranks() else flat).numpy(), _weights().numpy()
        blocks = (items[low : low + _BLOCK].astype(np.int64, copy=False) for low in range(0, len(items), _BLOCK))
        return np.array([np.dot(block, factors[: len(block)]) for block in blocks])
    return _sums_there(flat).cpu().numpy()


def _on_host(flat: Tensor) -> bool:
    return type(flat) is Tensor and flat.device.type == "cpu"


def _sums_there(flat: Tensor) -> Tensor:
    """The same on the device of the items, which may still be at it."""
    weights = _weights(flat.device)
    whole = len(flat) // _BLOCK * _BLOCK if type(flat) is Tensor else 0
    # Many blocks at once: it is the number of launches that takes time.
    groups = flat[:whole].view(-1, _BLOCK).split(_AT_ONCE) if whole else ()
    sums = [(group * weights).sum(1) for group in groups]
    if whole < len(flat):
        sums += [(block * weights[: len(block)]).sum()[None] for block in flat[whole:].split(_BLOCK)]
    return torch.cat(sums) if len(sums) > 1 else sums[0]


class _Together:
    """The contents of many tensors; those on a GPU are read there all at once, since every answer is waited for."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._waiting: dict[Any, list[tuple[str, Tensor]]] = {}
        self._items = 0  # that wait: their memory may be held by nobody else
        self._taken: dict[torch.device, list[tuple[list[str], Tensor]]] = {}
        self._begun: list[tuple[list[tuple[list[str], Tensor]], Tensor]] = []
        self._copies = HostCopies()

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor, which may lose its numbers afterwards: what is offloaded is there only now."""
        try:
            flat = _integers(tensor)
            if type(flat) is not Tensor or not len(flat) or _on_host(flat):
                self._texts[name] = _text(_sums(flat))
            elif len(flat) > _BLOCK:
                self._taken.setdefault(flat.device, []).append(([name], _sums_there(flat)))
            else:
                # Those of one length are summed as rows of one tensor: it is the number of launches that takes time.
                self._waiting.setdefault((flat.device, flat.dtype, len(flat)), []).append((name, flat))
                self._items += len(flat)
        except _UNREAD:
            self._texts[name] = _NO_NUMBERS
        if self._items > _TOGETHER:
            self._take()

    @torch.no_grad()
    def begin(self) -> None:
        """Have the answers copied as soon as they are there: who asks for them waits for nothing that comes later."""
        self._take()
        for taken in self._taken.values():
            self._copy(taken)
        self._taken = {}
        self._copies.settle()

    def texts(self) -> dict[str, str]:
        """By the names of the tensors."""
        self.begin()
        if self._begun:
            self._copies.wait()
        for taken, answers in self._begun:
            numbers = answers.numpy()
            for names, sums in taken:
                each = np.split(numbers[: len(sums)], len(names))
                self._texts |= dict(zip(names, map(_text, each), strict=True))
                numbers = numbers[len(sums) :]
        self._begun = []
        return self._texts

    def _copy(self, taken: list[tuple[list[str], Tensor]]) -> None:
        try:
            self._begun.append((taken, self._copies.copy(torch.cat([sums for _, sums in taken]))))
        except _UNREAD:
            self._texts |= {name: _NO_NUMBERS for names, _ in taken for name in names}

    def _take(self) -> None:
        for (device, _, length), held in self._waiting.items():
            names, rows = [name for name, _ in held], [flat for _, flat in held]
            try:
                sums = (torch.stack(rows) * _weights(device)[:length]).sum(1)
                self._taken.setdefault(device, []).append((names, sums))
            except _UNREAD:  # too little memory for all of them, say
                self._texts |= {name: contents(flat) for name, flat in held}
        self._waiting.clear()
        self._items = 0


@functools.cache
def _weights(device: torch.device = _CPU) -> Tensor:
    """Odd numbers without a pattern, one for each place in a block."""
    numbers = np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    # Odd factors can be undone modulo 2**64: another number in one place is always another sum.
    numbers = (numbers ^ (numbers >> np.uint64(32))) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)


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

"""Values through a file and back, and whether they are then what they should be: decided without the library's tree."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchhook._recording import saving
from torchhook._values.loaded import Loaded


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    first: Any
    second: Any = None


def round_trip(value: Any, folder: Path) -> Any:
    path = saving.save(folder / "value.safetensors", [value], {})
    ((found,), _) = saving.load(path)
    return found


def quietly(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized, nested and CSR tensors warn that they exist
        return make()


def raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(found: Any, value: Any) -> bool:
    """Whether ``found`` is what a file should give back for ``value``, to the bit."""
    if isinstance(value, Tensor):
        return found.dtype == value.dtype and found.shape == value.shape and raw(found) == raw(value)
    if isinstance(value, np.ndarray):
        return found.dtype == value.dtype and found.shape == value.shape and found.tobytes() == value.tobytes()
    if isinstance(value, Box):
        named = isinstance(found, Loaded) and type(found).__name__ == "Box" and list(found) == ["first", "second"]
        return named and same(found.first, value.first) and same(found.second, value.second)
    if isinstance(value, Pair):
        named = isinstance(found, tuple) and type(found).__name__ == "Pair" and found._fields == ("left", "right")
        return named and same(tuple(found), tuple(value))
    if type(found) is not type(value):
        return False
    if isinstance(value, deque):
        return found.maxlen == value.maxlen and same(list(found), list(value))
    if isinstance(value, (list, tuple)):
        return len(found) == len(value) and all(map(same, found, value))
    if isinstance(value, (dict, MappingProxyType)):
        return same(list(found), list(value)) and same(list(found.values()), list(value.values()))
    if isinstance(value, float):
        return found.hex() == value.hex() or (math.isnan(found) and math.isnan(value))
    if isinstance(value, complex):
        return same(found.real, value.real) and same(found.imag, value.imag)
    return bool(found == value)

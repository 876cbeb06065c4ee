"""Which statistics there are, and the ledger: numbers of a step wait on their devices and come to the host together."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor

from torchhook._values.subclasses import local

OF_VALUES = ("mean", "std", "min", "max", "zeros", "nans", "norm", "histogram")
STATISTICS = (*OF_VALUES, "dead", "grad_norm", "update_ratio")
DEFAULT = tuple(name for name in STATISTICS if name != "histogram")


class Ledger:
    """Small tensors that wait on their devices until all of them are read at once."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}
        self._keys = count()  # gradients are noted from autograd's threads, one for each device

    def note(self, tensor: Tensor) -> int:
        """Hold a tensor of no or one dim; the number is its place in what ``read`` returns."""
        key = next(self._keys)
        self._held[key] = local(tensor)  # what a wrapper answers is wrapped again, and cannot be read
        return key

    def read(self) -> dict[int, Any]:
        """Every held tensor as Python numbers, with one transfer from each device."""
        groups: dict[torch.device, dict[torch.dtype, list[int]]] = {}
        for key, tensor in self._held.items():
            groups.setdefault(tensor.device, {}).setdefault(tensor.dtype, []).append(key)
        values: dict[int, Any] = {}
        for by_dtype in groups.values():
            ordered = sorted(by_dtype.items(), key=lambda item: -item[0].itemsize)  # wide first, for alignment
            packed = [torch.cat([self._held[key].reshape(-1) for key in keys]).view(torch.uint8) for _, keys in ordered]
            host = torch.cat(packed).cpu()
            for (dtype, keys), part in zip(ordered, host.split([len(p) for p in packed]), strict=True):
                numbers = part.view(dtype).tolist()
                start = 0
                for key in keys:
                    held = self._held[key]
                    stop = start + held.numel()
                    values[key] = numbers[start:stop] if held.dim() else numbers[start]
                    start = stop
        self._held.clear()
        return values

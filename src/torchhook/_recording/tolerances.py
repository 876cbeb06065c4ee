"""How far apart two values may be: tolerances by dtype, of the coarsest dtype so far.

An element differs when it is further away than ``atol + rtol * max(|a|, rms)``, where ``rms`` is the root mean square
of the value in A: rounding errors grow with the terms of a sum, not with what is left of them when they cancel. The
tolerances are those of the coarsest dtype seen so far on either side, since precision once lost does not come back;
the defaults are what eighteen to hundred layers of sound models make of their rounding errors, and little more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

Tolerance: TypeAlias = "float | Mapping[torch.dtype, float]"

RTOL: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2.5e-2,
    torch.bfloat16: 2e-1,
    torch.qint8: 2e-1,
    torch.quint8: 2e-1,
}
ATOL: dict[torch.dtype, float] = {
    torch.float64: 1e-14,
    torch.float32: 1e-8,
    torch.float16: 1e-5,
    torch.bfloat16: 1e-5,
    torch.qint8: 1e-5,
    torch.quint8: 1e-5,
}
_COMPLEX = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}


class Limits:
    """Tolerances by dtype, of the coarsest dtype so far."""

    def __init__(self, rtol: Tolerance | None, atol: Tolerance | None) -> None:
        self._rtol, self._atol = _table(RTOL, rtol, "rtol"), _table(ATOL, atol, "atol")
        self._coarsest = torch.float64

    def meet(self, *tensors: Tensor) -> tuple[float, float]:
        for tensor in tensors:
            dtype = _COMPLEX.get(tensor.dtype, tensor.dtype)
            if (dtype.is_floating_point or tensor.is_quantized) and _grain(dtype) > _grain(self._coarsest):
                self._coarsest = dtype
        return self._of(self._rtol), self._of(self._atol)

    def _of(self, table: Mapping[torch.dtype, float]) -> float:
        return table.get(self._coarsest, max(table.values()) * 2.5)  # the 8-bit floats


def _table(known: dict[torch.dtype, float], asked: Tolerance | None, name: str) -> dict[torch.dtype, float]:
    if asked is None:
        return known
    if isinstance(asked, Mapping):
        return {**known, **asked}
    if not asked >= 0:
        raise ValueError(f"{name}={asked!r}: a tolerance is a number that is not negative, or a dict of them by dtype.")
    # Also for the 8-bit floats, which would get more than was asked for: they are not in the tables.
    return dict.fromkeys(known, float(asked)) | {torch.float8_e4m3fn: float(asked), torch.float8_e5m2: float(asked)}


def _grain(dtype: torch.dtype) -> float:
    # Quantized: coarser than bfloat16 (2**-7), finer than the 8-bit floats (2**-3, 2**-2).
    return torch.finfo(dtype).eps if dtype.is_floating_point else 2.0**-6

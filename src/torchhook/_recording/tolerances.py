"""How far apart two values may be: tolerances by dtype, of the coarsest dtype so far.

An element differs when it is further away than ``atol + rtol * max(|a|, rms)``, where ``rms`` is the root mean square
of the value in A: rounding errors grow with the terms of a sum, not with what is left of them when they cancel. The
tolerances are those of the coarsest dtype seen so far on either side, since precision once lost does not come back;
the defaults are what eighteen to hundred layers of sound models make of their rounding errors, and little more.

*As a whole.* Rounding looks random: its largest error is several times its root mean square. An error that is as large
everywhere, such as that of a layer with a wrong scale, is none. In the 16-bit floats, whose ``rtol`` is wide enough to
hide one, the norm of the difference may therefore be a third of ``rtol`` of the norm of A at most.

*One layer alone* (``local=True``). Its inputs, its weights and its result are rounded once each, by half of the
spacing ``eps`` of the dtype. The errors of the n terms of a sum grow as sqrt(n), and so does the sum itself, and sums
are kept in float32: relative to the result, nothing is left of n, up to 65536 terms on CPUs and GPUs. Sound layers are
off by 0.4 ``eps`` in the norm (1.1 where a mean five times the deviation is taken away), and by 4 ``eps`` in one of a
million elements (8 in the angles of rotary positions). So 10 ``eps`` are tolerated, and a third of that in the norm;
and sqrt(k) times as much for code with k matrices of its own, which are as many layers, where errors add up, but never
more than for a whole model. ``atol`` is there for what falls below the range of the dtype, which is that of float32 in
bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeAlias

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
_HALVES = (torch.float16, torch.bfloat16)
_OF_ONE_LAYER = 10.0
_ATOL_OF_ONE_LAYER = {torch.float16: 1e-6, torch.bfloat16: ATOL[torch.float32]}
_AS_A_WHOLE = 1 / 3


class Limit(NamedTuple):
    """What is tolerated of one value."""

    rtol: float
    atol: float
    whole: float = math.inf
    """The most that the norm of the difference may be, over the norm of A."""


class Limits:
    """Tolerances by dtype, of the coarsest dtype so far; with ``layers``, of modules that run alone.

    That says how many layers the code of the module at a path stands for.
    """

    def __init__(
        self, rtol: Tolerance | None, atol: Tolerance | None, layers: Callable[[str], int] | None = None
    ) -> None:
        self._rtol, self._atol = _table(RTOL, rtol, "rtol"), _table(ATOL, atol, "atol")
        # Whoever asks for a tolerance gets that one and no other beside it.
        self._ours = _not_asked(rtol)
        self._near_zero = {} if layers is None else {dtype: _ATOL_OF_ONE_LAYER[dtype] for dtype in _not_asked(atol)}
        self._layers = layers
        self._coarsest = torch.float64

    def meet(self, path: str, *tensors: Tensor) -> Limit:
        """What is tolerated of tensors of the module at a path, and from here on."""
        for tensor in tensors:
            dtype = _COMPLEX.get(tensor.dtype, tensor.dtype)
            if (dtype.is_floating_point or tensor.is_quantized) and _grain(dtype) > _grain(self._coarsest):
                self._coarsest = dtype
        rtol, atol = self._of(self._rtol), self._near_zero.get(self._coarsest, self._of(self._atol))
        if self._coarsest not in self._ours:
            return Limit(rtol, atol)
        if self._layers is not None:
            rtol = min(rtol, _OF_ONE_LAYER * _grain(self._coarsest) * math.sqrt(self._layers(path)))
        return Limit(rtol, atol, rtol * _AS_A_WHOLE)

    def of_all_layers(self) -> Limits:
        """The same for a whole model, which has met the same dtypes."""
        made = Limits(None, None)
        made._rtol, made._atol, made._ours, made._coarsest = self._rtol, self._atol, self._ours, self._coarsest
        return made

    def _of(self, table: Mapping[torch.dtype, float]) -> float:
        return table.get(self._coarsest, max(table.values()) * 2.5)  # the 8-bit floats


def _not_asked(tolerance: Tolerance | None) -> list[torch.dtype]:
    asked = _HALVES if isinstance(tolerance, (int, float)) else tolerance or ()
    return [dtype for dtype in _HALVES if dtype not in asked]


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


def coarsest(names: Collection[str]) -> str:
    """Of the names of dtypes, that of the coarsest float or quantized one; empty where there is none.

    >>> coarsest(["float32", "int64", "bfloat16"])
    'bfloat16'
    """
    grains = {}
    for name in names:
        dtype = getattr(torch, name, None)
        if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype in (torch.qint8, torch.quint8)):
            grains[name] = _grain(dtype)
    return max(grains, key=lambda name: grains[name], default="")

"""Tensors that are hard to take statistics of, wherever they lie, and what numpy says of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

INF, NAN = math.inf, math.nan


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda x: x,
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float64": lambda x: x.double() + 1e9,
    "int64": lambda x: (x * 3).long(),
    "uint8": lambda x: (x.abs() * 3).to(torch.uint8),
    "bool": lambda x: x > 0,
    "complex": lambda x: torch.complex(x, -x).conj(),
    "a view of a conjugate": lambda x: torch.complex(x, -x).conj().imag,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "strided": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(3, 5, 7, 9),
    "a slice": lambda x: x[1:],
    "huge": lambda x: x * 1e37,
    "tiny": lambda x: x * 1e-38,
    "below normal numbers": lambda x: x.new_full((100,), 1e-45),
    "a large mean": lambda x: x + 1e4,
    "an outlier first": lambda x: torch.cat([x.new_tensor([1e6]), x.flatten()]),
    "many": lambda x: randn(300, 301).to(x.device),
    "zeros": lambda x: x.new_zeros(4, 4),
    "without dims": lambda x: x.new_tensor(3.0),
    "one": lambda x: x.new_ones(1, 1),
    "rectified": lambda x: x.relu(),
    "rectified, channels last": lambda x: x.relu().to(memory_format=torch.channels_last),
    "rectified planes": lambda x: randn(70, 3, 300).to(x.device).relu(),
    "rectified tokens": lambda x: randn(2, 40, 1500).to(x.device).relu(),
    "dead units": lambda x: torch.where(torch.arange(5, device=x.device)[:, None, None] % 2 == 0, x.abs(), 0.0),
    "nan": lambda x: x.new_tensor([1.0, NAN, 0.0, NAN]),
    "inf": lambda x: x.new_tensor([INF, 1.0]),
    "both infs": lambda x: x.new_tensor([0.0, INF, -INF]),
    "inf and nan": lambda x: x.new_tensor([NAN, INF, 1.0]),
    "only nan": lambda x: x.new_full((3,), NAN),
}


def by_numpy(tensor: Tensor) -> tuple[list[float], float, Any]:
    """The six fields, the norm, and the numbers themselves."""
    array = (tensor.abs() if tensor.is_complex() else tensor).resolve_neg().to("cpu", torch.float64).numpy()
    with np.errstate(all="ignore"):
        fields = [array.mean(), array.var(), array.min(), array.max(), (array != 0).sum(), np.isnan(array).sum()]
        return fields, float(np.sqrt((array**2).sum())), array

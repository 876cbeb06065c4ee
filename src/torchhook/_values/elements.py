"""A tensor's elements as plain real numbers, and whether they can be read at all."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from torchhook import _torch
from torchhook._torch import compiler
from torchhook._values.subclasses import is_freed, is_partial, local
from torchhook._values.wrappers import ORDINARY, is_causal_bias, is_fake, is_wrapper

UNREADABLE = (RuntimeError, NotImplementedError, TypeError)
"""What fake tensors raise, and layouts and subclasses that lack an operation."""

_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
# Bits without a meaning, and numbers that share a byte: torch turns them into nothing else.
_PACKED = frozenset(dtype for name, dtype in _DTYPES.items() if re.fullmatch(r"bits\w+|float4\w+|u?int[1-7]", name))
# Numbers that torch stores and does not compute with.
_FLOAT8 = frozenset(dtype for name, dtype in _DTYPES.items() if name.startswith("float8"))
# Numbers that single precision has no room for.
_WIDE = frozenset({torch.float64, torch.int32, torch.int64, torch.uint32, torch.uint64})
SATURATES = torch.float8_e4m3fn
"""It has no infinity: a cast to it gives the largest number instead."""
_MOST = 464.0  # rounds to that number, 448; anything larger would have been infinity


def in_range(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value, for a cast to ``dtype``: with NaN where that would silently give another number."""
    if dtype != SATURATES or value.dtype == dtype or not value.is_floating_point():
        return value
    return torch.where(value.abs() > _MOST, math.nan, value)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as users write it.

    >>> dtype_name(torch.float16)
    'float16'
    """
    return str(dtype).removeprefix("torch.")


def is_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and one device."""
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def can_cast(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether numbers of one kind stay what they are in another: ``torch.can_cast``, in compiled code too.

    >>> can_cast(torch.float32, torch.int64), can_cast(torch.int64, torch.float16)
    (False, True)
    """
    # The question would become a part of an exported program, which torch 2.6 saves and cannot load.
    if not compiler.in_trace() and not compiler.is_exporting():
        return torch.can_cast(old, new)
    if new == torch.bool or old == torch.bool:
        return old == torch.bool
    floats = new.is_floating_point or new.is_complex
    return (new.is_complex or not old.is_complex) and (floats or not old.is_floating_point)


def readable(tensor: Tensor) -> bool:
    """Whether a tensor has elements here that torch can turn into numbers: of a DTensor, those of this rank."""
    return (
        not is_fake(tensor)
        and not is_causal_bias(tensor)
        and tensor.dtype not in _PACKED
        and not is_freed(tensor)
        and not is_partial(tensor)  # summands are no elements
        and (not is_wrapper(tensor) or not is_wrapper(local(tensor)))
    )


def measurable(tensor: Tensor) -> bool:
    """Whether statistics can be taken of a tensor: it has elements, and they lie in one piece of memory.

    >>> measurable(torch.ones(3)), measurable(torch.empty(0)), measurable(torch.eye(3).to_sparse())
    (True, False, False)
    """
    if is_causal_bias(tensor) or tensor.layout != torch.strided or tensor.is_nested:
        return False
    if type(tensor) in ORDINARY:  # as nearly all: what can be wrong with one is asked at once
        return tensor.numel() > 0 and tensor.dtype not in _PACKED and not tensor.is_meta and not is_freed(tensor)
    return readable(tensor) and local(tensor).numel() > 0


def real(tensor: Tensor) -> Tensor:
    """The same elements as floating-point numbers that torch computes with: complex ones by their size.

    >>> real(torch.tensor([3 + 4j])), real(torch.tensor([True]))
    (tensor([5.]), tensor([1.]))
    """
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.is_complex():
        return tensor.abs()
    return tensor if tensor.is_floating_point() and tensor.dtype not in _FLOAT8 else tensor.float()


def real_in_full(tensor: Tensor) -> Tensor:
    """As ``real``, and in double precision what single has no room for.

    >>> real_in_full(torch.tensor([2**24 + 1])).tolist()
    [16777217.0]
    """
    return tensor.to(widest(tensor.device)) if tensor.dtype in _WIDE else real(tensor)


def dense(tensor: Tensor) -> Tensor:
    """A tensor without gaps, of real numbers; the rows of a nested one are filled up with NaN.

    >>> dense(torch.eye(2).to_sparse())
    tensor([[1., 0.],
            [0., 1.]])
    """
    tensor = local(tensor.detach())
    if tensor.is_nested:
        tensor = torch.nested.to_padded_tensor(tensor, math.nan)
    return real(tensor if tensor.layout == torch.strided else tensor.to_dense())


def flatten(tensor: Tensor) -> Tensor:
    """All elements in one dim, as real numbers in single or double precision, without a graph.

    >>> flatten(torch.tensor([[1, 2], [3, 4]]))
    tensor([1., 2., 3., 4.], dtype=torch.float64)
    """
    flat = in_one_dim(local(tensor.detach()))
    if flat.dtype == torch.float32:
        return flat
    if flat.is_quantized or flat.is_complex():
        flat = real(flat)
    return flat.double() if flat.dtype in _WIDE and flat.device.type != "mps" else flat.float()


def in_one_dim(tensor: Tensor) -> Tensor:
    """All elements in one dim, in the order that costs least."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    # Channels last, or transposed: without gaps, it is contiguous in another order of its dims.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)


def floats(tensor: Tensor) -> Tensor | None:
    """What of a tensor may be a NaN or Inf, as a plain tensor without a graph: of a sparse one, the values it holds.

    ``None`` for integers, and where nothing can be read.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or is_fake(tensor):
        return None
    if _torch.in_transform():  # there it is a wrapper, whose numbers cannot be asked for: those behind it can
        tensor = _torch.unwrapped(tensor)
    if is_freed(tensor):
        return None
    tensor = local(tensor.detach())
    if tensor.layout != torch.strided or tensor.is_nested:
        try:
            tensor = _torch.sparse_parts(tensor)[1] if tensor.layout == torch.sparse_coo else tensor.values()
        except UNREADABLE:
            tensor = tensor.to_dense()
    if tensor.dtype in _PACKED:
        return None
    return tensor.float() if tensor.dtype in _FLOAT8 else tensor


def widest(device: torch.device) -> torch.dtype:
    """The most exact dtype that a device computes with."""
    return torch.float32 if device.type == "mps" else torch.float64


def least(dtype: torch.dtype) -> float | int:
    """What no number of a dtype is less than.

    >>> least(torch.float16), least(torch.int8), least(torch.bool)
    (-inf, -128, 0)
    """
    if dtype.is_floating_point:
        return float("-inf")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min

"""Tensors that are more than the numbers in their memory: one way to plain numbers, and one back.

Quantized tensors hold integers that stand for others; wrapper subclasses (torchao's weights, those made by hand) hold
other tensors; fake tensors hold nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchhook import _torch

ORDINARY = Tensor, torch.nn.Parameter  # no set: the compiler of torch 2.6 cannot look into one
_INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
# What a class may raise that has no answer to an operation.
_NO_ANSWER = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no numbers at all: it is on the meta device, or stands for one on another."""
    # By name: the class is private, and a fake tensor names the device that it stands for.
    if is_causal_bias(tensor):  # torch 2.6 does not say where it is
        return False
    return tensor.device.type == "meta" or any(kind.__name__ == "FakeTensor" for kind in type(tensor).__mro__)


def faked_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor as one without numbers where ``other`` is one: fake tensors take no others beside them."""
    mode = getattr(other, "fake_mode", None)
    if mode is None or is_fake(tensor) or torch.compiler.is_compiling():  # who traces lifts constants
        return tensor
    found: Tensor = mode.from_tensor(tensor)
    return found


def is_causal_bias(tensor: Tensor) -> bool:
    """Whether a tensor is a mask of ``torch.nn.attention.bias``, which says what it means; its memory holds nothing."""
    # By name: importing the class takes seconds, unless the model has done it.
    return type(tensor) not in ORDINARY and any(kind.__name__ == "CausalBias" for kind in type(tensor).__mro__)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor answers operations by itself, so that its memory is not its numbers, or is none."""
    kind = type(tensor)
    return kind not in ORDINARY and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not tensor.is_nested


def carrying(copy: Tensor, tensor: Tensor) -> Tensor:
    """A copy of a tensor with what its class keeps beside the numbers, which torch's own copies lose.

    >>> class Tagged(Tensor): ...
    >>> tagged = torch.ones(2).as_subclass(Tagged)
    >>> tagged.tag = "input"
    >>> hasattr(tagged.clone(), "tag"), carrying(tagged.clone(), tagged).tag
    (False, 'input')
    """
    # A wrapper answers by itself, and has made a copy as it should be.
    if type(copy) is type(tensor) and not is_wrapper(tensor):
        for name, value in vars(tensor).items():
            vars(copy).setdefault(name, value)
    return copy


def plain(tensor: Tensor) -> Tensor | None:
    """The same numbers as an ordinary tensor, of the same memory where it is one; ``None`` where there are none.

    >>> class Tagged(Tensor): ...
    >>> type(plain(torch.ones(2).as_subclass(Tagged))) is Tensor
    True
    >>> plain(torch.ones(2, device="meta")) is None
    True
    """
    if is_fake(tensor) or is_causal_bias(tensor):
        return None
    if not is_wrapper(tensor):
        return tensor if type(tensor) in ORDINARY or tensor.is_nested else tensor.as_subclass(Tensor)
    with torch.no_grad():
        for way in (_dequantized, _copied):
            try:
                found = way(tensor)
            except _NO_ANSWER:
                continue
            if type(found) is Tensor and found.shape == tensor.shape:
                return found
    return None


def _dequantized(tensor: Tensor) -> Tensor:
    # Of an ordinary tensor torch's own would only change the dtype.
    found: Tensor = tensor.dequantize()
    return found


def _copied(tensor: Tensor) -> Tensor:
    # Into memory of our own: what a wrapper returns, it wraps again.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copy.copy_(tensor)
    return copy


def like(new: Tensor, old: Tensor) -> Tensor:
    """A fresh tensor with the numbers of ``new`` and the device, dtype and kind of ``old``: quantized as that is.

    >>> like(torch.ones(2, dtype=torch.float64), torch.zeros(2))
    tensor([1., 1.])
    """
    if old.is_quantized:
        return new.clone() if new.is_quantized else _quantized(new.to(old.device), old)
    if new.is_quantized:
        new = new.dequantize()
    if is_wrapper(old) and not is_wrapper(new):
        try:
            return old.detach().clone().copy_(new)
        except _NO_ANSWER:
            pass  # its operations may take an ordinary tensor as well
    return new.to(old.device, old.dtype, copy=True)


def _quantized(new: Tensor, old: Tensor) -> Tensor:
    """``new`` with the scales of ``old``. torch's own functions for this warn that they will go."""
    integers = _INTEGERS.get(old.dtype)
    if integers is None:
        raise TypeError(f"numbers cannot be put into a tensor of {old.dtype}.")
    limits = torch.iinfo(integers)
    by_tensor = old.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
    if by_tensor:
        scale, zero = torch.tensor(old.q_scale()), torch.tensor(old.q_zero_point())
    else:
        shape = [-1 if dim == old.q_per_channel_axis() else 1 for dim in range(old.dim())]
        scale, zero = old.q_per_channel_scales().reshape(shape), old.q_per_channel_zero_points().reshape(shape)
    steps = torch.round(new.float() * (1 / scale).float().to(new.device)) + zero.to(new.device)
    whole = steps.clamp(limits.min, limits.max).to(integers)
    if by_tensor:
        return _torch.quantized_per_tensor(whole, old.q_scale(), old.q_zero_point())
    scales, zeros = old.q_per_channel_scales(), old.q_per_channel_zero_points()
    return _torch.quantized_per_channel(whole, scales, zeros, old.q_per_channel_axis())


def through_numbers(change: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply a change to the numbers that a tensor stands for: hardly any operation takes a quantized one."""
    if not tensor.is_quantized:
        return change(tensor)
    return like(change(tensor.dequantize()), tensor)

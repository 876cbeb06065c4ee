"""How far apart two values are: their tensors pair by pair, and the distance of two tensors in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchhook._values import tree
from torchhook._values.subclasses import is_distributed, is_partial, local, placed_like


class Numbers(NamedTuple):
    max_abs: float
    relative: float
    cosine: float
    mismatches: int
    nans: tuple[int, int]
    is_off: bool = False
    """Whether it is too far off as a whole."""

    @property
    def differs(self) -> bool:
        return self.mismatches > 0 or self.is_off


def severity(numbers: Numbers) -> tuple[bool, bool, float]:
    # A NaN is worse than any number, but no comparison would say so.
    return numbers.differs, math.isnan(numbers.max_abs), numbers.relative


def paired(a: Any, b: Any) -> tuple[list[tuple[str, Tensor, Tensor]], str | None]:
    """The tensors of two values, pair by pair, and a sentence where the values are not built alike.

    A tuple against a named output is no divergence when the tensors in them pair up: ports do that.
    """
    ones, twos = ({address: _as_tensor(leaf) for address, leaf in tree.leaves(value)} for value in (a, b))
    tensors_a = {address: t for address, t in ones.items() if isinstance(t, Tensor)}
    tensors_b = {address: t for address, t in twos.items() if isinstance(t, Tensor)}
    if tensors_a.keys() == tensors_b.keys():
        if not tensors_a and (odd := _plain_difference(ones, twos)):
            return [], odd
        return [(address, *_here(t, tensors_b[address])) for address, t in tensors_a.items()], None
    sentence = f"{tree.describe(a)} in A, {tree.describe(b)} in B"
    if len(tensors_a) != len(tensors_b):
        return [], sentence
    both = zip(tensors_a.items(), tensors_b.values(), strict=True)
    pairs = [(address, *_here(one, two)) for (address, one), two in both]
    return (pairs if all(shape(one) == shape(two) for _, one, two in pairs) else []), sentence


_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def _plain_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Where values without any tensor differ, as far as they can be compared."""
    for address in a.keys() | b.keys():
        one, two = a.get(address), b.get(address)
        nan = isinstance(one, float) and isinstance(two, float) and one != one and two != two
        if isinstance(one, _PLAIN) and isinstance(two, _PLAIN) and one != two and not nan:
            return f"{one!r} in A, {two!r} in B"
    return None


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub":
        return torch.from_numpy(np.ascontiguousarray(leaf))
    return leaf


def _here(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """What of both lies on this rank: of a whole one, what belongs beside the part of the other."""
    if is_partial(one) or is_partial(two):
        return one, two  # summands are no elements: nobody can read them
    if is_distributed(one) != is_distributed(two) and one.shape == two.shape:
        with torch.no_grad():
            one, two = placed_like(one, two), placed_like(two, one)
    return local(one), local(two)


def shape(tensor: Tensor) -> Any:
    return [part.shape for part in tensor.unbind()] if tensor.is_nested else tensor.shape


def _flat(tensor: Tensor, paired: bool) -> Tensor:
    """All numbers in one dim; real ones as complex ones too, if ``paired`` with such."""
    tensor = local(tensor.detach())
    if tensor.is_nested:
        return torch.cat([_flat(part, paired) for part in tensor.unbind()])
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # torch compares the small floats with nothing else
    if paired and not tensor.is_complex():
        tensor = torch.complex(tensor.double(), torch.zeros_like(tensor, dtype=torch.float64))
    if tensor.is_complex():
        # view_as_real refuses a conjugate that is only marked as one.
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1)


def measure(a: Tensor, b: Tensor, rtol: float, atol: float, whole: float = math.inf) -> Numbers:
    if not a.numel():
        return Numbers(0.0, 0.0, 1.0, 0, (0, 0))
    paired = a.is_complex() or b.is_complex()
    one, two = _flat(a, paired), _flat(b, paired)
    home = torch.device("cpu") if one.device.type == "mps" else one.device  # which has no double precision
    one, two = one.to(home), two.to(home)
    # Before they are doubles, in which integers beyond 2**53 fall together.
    same = one == two
    exact = not (one.is_floating_point() or two.is_floating_point())
    one, two = one.double(), two.double()
    same |= one.isnan() & two.isnan()
    delta = torch.where(same, 0.0, (one - two).abs())
    finite = one.isfinite()
    rms = torch.where(finite, one, 0.0).square().sum().div(finite.sum().clamp(min=1)).sqrt()
    # An infinity makes its own limit infinite, and anything would be near it.
    near = (delta <= atol + rtol * torch.maximum(one.abs(), rms)) & finite & two.isfinite()
    wrong = ~same if exact else ~same & ~near
    agreed = same & ~finite  # the same infinities and NaNs on both sides say nothing about an angle
    left, right = one.masked_fill(agreed, 0.0), two.masked_fill(agreed, 0.0)
    sizes = left.norm(), right.norm()
    # One wait for the device, not five.
    numbers = torch.stack([delta.max(), delta.norm(), *sizes, left @ right]).tolist()
    largest, gap, norm_a, norm_b, product = numbers
    relative = gap / norm_a if norm_a else 0.0 if gap == 0 else math.inf
    lengths = norm_a * norm_b
    cosine = product / lengths if lengths else float(norm_a == norm_b)
    cosine = cosine if math.isnan(cosine) else min(1.0, max(-1.0, cosine))
    nans = int(one.isnan().sum()), int(two.isnan().sum())
    is_off = not exact and gap > atol * math.sqrt(one.numel()) + (whole * norm_a if whole < math.inf else math.inf)
    return Numbers(largest, relative, cosine, int(wrong.sum()), nans, is_off)

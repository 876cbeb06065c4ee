"""Tensors whose elements are not all here: the parts of a DTensor, and memory that was given back.

One way for all who read or make values: ``local`` is what lies on this rank, ``full`` the whole, for which every rank
of the mesh has to ask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchhook import _torch
from torchhook._values.wrappers import ORDINARY, faked_like, is_causal_bias, plain


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which each rank holds a part.

    >>> is_distributed(torch.ones(3))
    False
    """
    # Known by what it has: importing DTensor only to ask takes a second, and may not be possible at all.
    return type(tensor) not in ORDINARY and hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def is_partial(tensor: Tensor) -> bool:
    """Whether the ranks hold summands of the elements, which are the elements only once they are added up."""
    return is_distributed(tensor) and any(p.is_partial() for p in _placements(tensor))


def is_part(tensor: Tensor) -> bool:
    """Whether only some of the elements of a tensor lie on this rank.

    >>> is_part(torch.ones(3))
    False
    """
    return is_distributed(tensor) and not is_partial(tensor) and local(tensor).shape != tensor.shape


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank, as an ordinary tensor: all of it, unless it is a DTensor.

    >>> local(torch.ones(3))
    tensor([1., 1., 1.])
    """
    if type(tensor) in ORDINARY:
        return tensor
    if is_distributed(tensor):
        return local(tensor.to_local())  # type: ignore[attr-defined]
    found = plain(tensor)
    return tensor if found is None else found


def full(tensor: Tensor) -> Tensor:
    """All of a tensor. Every rank of a DTensor's mesh has to ask, in the same order, or those that do wait forever.

    >>> full(torch.ones(3))
    tensor([1., 1., 1.])
    """
    return tensor.full_tensor() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def cloned(tensor: Tensor) -> Tensor:
    """A copy, for which no other rank is asked: torch adds up the summands of a DTensor when it is cloned.

    >>> cloned(torch.ones(3))
    tensor([1., 1., 1.])
    """
    if not is_partial(tensor):
        return tensor.clone()
    from torch.distributed.tensor import DTensor

    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    own = tensor.to_local().clone()  # type: ignore[attr-defined]
    return DTensor.from_local(
        own, mesh, _placements(tensor), run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The same elements, as a DTensor where ``other`` is one: laid out as it, if the shape is the same.

    A plain tensor is taken for the whole, the same on every rank.
    """
    if type(other) in ORDINARY:  # as nearly always
        return tensor
    if not is_distributed(other):
        return faked_like(tensor, other)
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = other.device_mesh  # type: ignore[attr-defined]
    if not is_distributed(tensor):
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    # A sum of parts has no layout that whole elements could be given.
    if tensor.shape != other.shape or _placements(tensor) == _placements(other) or is_partial(other):
        return tensor
    return tensor.redistribute(mesh, _placements(other))  # type: ignore[attr-defined, no-any-return]


def shape(tensor: Tensor) -> tuple[Any, ...]:
    """The shape of a tensor; of a nested one, which may have none, those of its rows.

    >>> shape(torch.ones(2, 3)), shape(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged))
    ((2, 3), ((1,), (2,)))
    """
    return tuple(tuple(row.shape) for row in tensor.unbind()) if tensor.is_nested else tuple(tensor.shape)


def packed(tensor: Tensor) -> Tensor:
    """The elements of a nested tensor in one dim, whose rows have lengths of their own; any other tensor as it is.

    >>> packed(torch.nested.nested_tensor([torch.ones(1, 2), torch.zeros(2, 2)], layout=torch.jagged))
    tensor([1., 1., 0., 0., 0., 0.])
    """
    if not tensor.is_nested:
        return tensor
    tensor = tensor.detach()
    if tensor.layout == torch.jagged and tensor.lengths() is None:  # type: ignore[attr-defined]
        return tensor.values().reshape(-1)  # rows would have to be waited for on a GPU
    rows = [row.reshape(-1) for row in tensor.unbind()]
    return torch.cat(rows) if rows else torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def with_rows(change: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """A nested tensor whose rows were changed one by one, each to one of its own shape.

    >>> x = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    >>> with_rows(lambda row: row / len(row), x).values()
    tensor([1.0000, 0.5000, 0.5000])
    """
    rows = [change(row) for row in tensor.unbind()]
    if tensor.layout == torch.strided:
        return torch.nested.as_nested_tensor(rows)
    jagged = next(dim for dim, size in enumerate(tensor.shape) if not isinstance(size, int))
    # With the offsets that it has: torch takes two jagged dims for the same one only if these are the same tensor.
    offsets, lengths = tensor.offsets(), tensor.lengths()  # type: ignore[attr-defined]
    if lengths is not None:  # there is room between the rows
        old, ends = tensor.values(), offsets.tolist()
        taken = [(start + row.shape[jagged - 1], end) for start, row, end in zip(ends, rows, ends[1:], strict=False)]
        gaps = [old.narrow(jagged - 1, start, end - start) for start, end in taken]
        rows = [part for pair in zip(rows, gaps, strict=True) for part in pair]
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows, jagged - 1), offsets, lengths, jagged)


def traits(tensor: Tensor) -> dict[str, Any]:
    """What whoever goes on with a value counts on.

    >>> traits(torch.ones(2))
    {'kind of tensor': 'Tensor', 'shape': (2,), 'dtype': torch.float32, 'device': device(type='cpu')}
    """
    kind = "DTensor" if is_distributed(tensor) else "Tensor"
    # In torch 2.6, a causal bias tells nobody its shape.
    with _torch.unheard() if is_causal_bias(tensor) else contextlib.nullcontext():
        return {"kind of tensor": kind, "shape": shape(tensor), "dtype": tensor.dtype, "device": tensor.device}


def sharded_over(tensor: Tensor) -> tuple[Any, ...]:
    """The process groups over which the parts of a DTensor lie; none, where every rank has all of it."""
    if not is_distributed(tensor):
        return ()
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    return tuple(mesh.get_group(dim) for dim, p in enumerate(_placements(tensor)) if p.is_shard())


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor has elements and no memory: FSDP frees gathered weights, and to read one ends the process.

    >>> x = torch.ones(3)
    >>> _ = x.untyped_storage().resize_(0)
    >>> is_freed(x), is_freed(torch.empty(0))
    (True, False)
    """
    try:
        return tensor.numel() > 0 and tensor.device.type != "meta" and not tensor.untyped_storage().nbytes()
    except (
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # wrappers and layouts without memory of their own
        return False


def _placements(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.placements)  # type: ignore[attr-defined]

"""Values inside the transforms of ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torchhook._torch.finding import find, missing

_functorch = find("_C._functorch", None)
_stack_top = find("_C._functorch.peek_interpreter_stack", lambda: None)
in_transform: Callable[[], bool] = find("_C._are_functorch_transforms_active", lambda: _stack_top() is not None)
"""Whether a transform of ``torch.func`` is running."""

_level: Callable[[Tensor], int] = find("_C._functorch.maybe_get_level", lambda tensor: -1)
is_wrapped: Callable[[Tensor], bool] = find(
    "_C._functorch.is_functorch_wrapped_tensor", lambda tensor: _level(tensor) not in (-1, -2)
)
"""Whether a tensor is the wrapper of a transform, which is dead outside of it."""

_inside_func = "to read values inside torch.func"
_is_batched = find("_C._functorch.is_batchedtensor", missing("is_batchedtensor", _inside_func))
_batch_dim = find("_C._functorch.maybe_get_bdim", missing("maybe_get_bdim", _inside_func))
_unwrap = find("_C._functorch.get_unwrapped", missing("get_unwrapped", _inside_func))


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor behind the wrappers of ``torch.func``; the dim of vmap comes first."""
    while in_transform() and is_wrapped(tensor):
        batched = _is_batched(tensor)
        dim = _batch_dim(tensor) if batched else 0
        tensor = _unwrap(tensor)
        tensor = tensor.movedim(dim, 0) if batched else tensor
    return tensor

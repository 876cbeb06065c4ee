"""Tensor subclasses made by hand, for the tests of those that read and change values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Wrapped(Tensor):
    """Holds another tensor, and wraps whatever comes of it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        output = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(lambda value: cls(value) if isinstance(value, Tensor) else value, output)


class Halved(Wrapped):
    """Stands for twice what it holds, and says so when asked: as quantized weights do."""

    def dequantize(self) -> Tensor:
        return self.inner * 2

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default or func is torch.ops.aten.clone.default:
            return cls(func(args[0].inner))
        raise NotImplementedError(str(func))


class Closed(Wrapped):
    """Tells nobody what it holds."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default or func is torch.ops.aten.clone.default:
            return cls(func(args[0].inner))
        raise NotImplementedError(str(func))


class Tagged(Tensor):
    """With memory of its own, and nothing else."""

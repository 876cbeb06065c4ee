"""Values that are not plain tensors: nested ones, quantized and sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from torchhook._torch.finding import find, missing


class _NoPytree:
    """Stands for the registry where it has vanished: nothing is registered."""

    SUPPORTED_NODES: ClassVar[dict[type, Any]] = {}

    @staticmethod
    def register_pytree_node(*args: Any, **kwargs: Any) -> None:
        """``torch.export`` will say that it cannot return such a class."""


_pytree = find("utils._pytree", _NoPytree)
_pytree = _pytree if hasattr(_pytree, "SUPPORTED_NODES") else _NoPytree
pytree_nodes: Mapping[type, Any] = _pytree.SUPPORTED_NODES
"""How torch's pytree opens and rebuilds the classes it knows: ``flatten_fn`` and ``unflatten_fn``."""


def register_pytree_node(
    kind: type, flatten: Callable[[Any], tuple[list[Any], Any]], rebuild: Callable[[Any, Any], Any]
) -> None:
    """Let torch open a class of this library as it opens tuples; ``torch.export`` returns no others."""
    _pytree.register_pytree_node(kind, flatten, rebuild, serialized_type_name=f"torchhook.{kind.__name__}")


_quantized = "to read a quantized tensor back"
quantized_per_tensor: Callable[..., Tensor] = find(
    "_make_per_tensor_quantized_tensor", missing("_make_per_tensor_quantized_tensor", _quantized)
)
quantized_per_channel: Callable[..., Tensor] = find(
    "_make_per_channel_quantized_tensor", missing("_make_per_channel_quantized_tensor", _quantized)
)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse tensor as they are: the public names want it coalesced."""
    if not hasattr(tensor, "_indices"):
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    return tensor._indices(), tensor._values()

"""``Hook``, as the tutorials have it: an object for ``register_forward_hook`` that keeps what passes."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchhook._core.keep import Keep
from torchhook._torch import kept_out


class Hook:
    """A callable for ``register_forward_hook`` that keeps what goes into a module and what comes out.

    Inputs are kept as the tuple that PyTorch passes; values are safe, and still on the autograd graph.
    """

    def __init__(self) -> None:
        self.module_name: list[type[nn.Module]] = []
        self.features_in_hook: list[Any] = []
        self.features_out_hook: list[Any] = []
        self._keep = Keep("live")  # on the graph: its users compute losses and gradients from what it keeps

    @kept_out
    def __call__(self, module: nn.Module, fea_in: Any, fea_out: Any) -> None:
        self.module_name.append(type(module))
        self.features_in_hook.append(self._keep.value(fea_in))
        self.features_out_hook.append(self._keep.value(fea_out))

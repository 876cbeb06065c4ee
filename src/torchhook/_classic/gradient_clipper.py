"""``gradient_clipper``, as the tutorials have it: clamps gradients for good."""

from __future__ import annotations

from torch import nn

from torchhook._core import hooks


def gradient_clipper(model: nn.Module, val: float) -> nn.Module:
    """Clamp every parameter's gradient to ``[-val, val]`` as it is computed, from now on; returns the model."""
    # Without a handle, as the tutorials have it. Who wants an end to it takes ``clip_gradients``.
    for parameter in model.parameters():
        if parameter.requires_grad:
            hooks.on_gradient(parameter, lambda grad: grad.clamp(-val, val))
    return model

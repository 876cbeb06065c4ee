"""``gradient_clipper``, as the tutorials have it: clamps gradients for good."""

from __future__ import annotations

from torch import nn

from torchhook._clip import clamp_for_good
from torchhook._core.index import Index
from torchhook._core.sharding import Homes


def gradient_clipper(model: nn.Module, val: float) -> nn.Module:
    """Clamp every parameter's gradient to ``[-val, val]`` as it is computed, from now on; returns the model.

    A model in DDP or FSDP is given as it is after wrapping: its gradients are clamped when they have been reduced.
    """
    # Without a handle, as the tutorials have it. Who wants an end to it takes ``clip_gradients``.
    index, seen = Index(model), set()
    places = []
    for module, name in index.tensors.values():
        parameter = module._parameters.get(name)
        if parameter is not None and id(parameter) not in seen:  # a tied weight has one gradient
            seen.add(id(parameter))
            places.append((module, name))
    clamp_for_good(places, Homes(index), val)
    return model

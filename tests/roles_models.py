"""Small models for the tests of roles, in which no value equals another by accident.

Norms are moved away from one and zero: two fresh ones would give the same, and hide a name that was taken for another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.language_models import ENCODER_DECODER, GROUPED, MODELS, SMALL, VISION, from_config

__all__ = ["ENCODER_DECODER", "GROUPED", "MODELS", "SMALL", "VISION", "build", "made"]


def build(name: str, **options: Any) -> nn.Module:
    """One of ``MODELS`` in eval mode, its norms moved."""
    return made(*MODELS[name], **options)


def made(kind: str, config: dict[str, Any], **options: Any) -> nn.Module:
    """Any other one, in the same way."""
    model: nn.Module = from_config(kind, config, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() == 2 and "embed" not in path:
                parameter.mul_(3.0)  # fresh ones are so small that all branches are near zero
    return model

"""The formulas: from activations and gradients (batch × channels × grid) to maps (batch × grid), before the ReLU.

Where a formula divides, a zero below is left out instead of being hidden by a small constant: gradients are often
smaller than any constant that one would add.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchhook.errors import suggestion

Formula = Callable[[Tensor, Tensor], Tensor]


def gradcam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Grad-CAM (Selvaraju et al. 2017): channels weighted by their mean gradient."""
    return weighted(activations, _sum(gradients) / math.prod(gradients.shape[2:]))


def gradcam_plus_plus(activations: Tensor, gradients: Tensor) -> Tensor:
    """Grad-CAM++ (Chattopadhay et al. 2018), with the factor exp(score), which only scales the map, left out."""
    # g² / (2 g² + ΣA g³) with g² cancelled: the square of a small gradient is zero in float32.
    below = 2 + _sum(activations)[(...,) + (None,) * (gradients.dim() - 2)] * gradients
    alpha = 1 / torch.where(below == 0, 1.0, below)
    return weighted(activations, _sum(alpha * gradients.relu()))


def hirescam(activations: Tensor, gradients: Tensor) -> Tensor:
    """HiResCAM (Draelos and Carin 2020): gradient times activation, place by place."""
    return (activations * gradients).sum(1)


def layercam(activations: Tensor, gradients: Tensor) -> Tensor:
    """LayerCAM (Jiang et al. 2021): as HiResCAM, with the positive gradients only."""
    return (activations * gradients.relu()).sum(1)


def xgradcam(activations: Tensor, gradients: Tensor) -> Tensor:
    """XGrad-CAM (Fu et al. 2020): channels weighted by their gradient, averaged where they are active."""
    total = _sum(activations)
    share = _sum(activations * gradients) / torch.where(total == 0, 1.0, total)
    return weighted(activations, torch.where(total == 0, 0.0, share))


def eigencam(activations: Tensor) -> Tensor:
    """Eigen-CAM (Muhammad and Yeasin 2020): the first principal component of the activations. It knows no class."""
    columns = activations.flatten(2).transpose(1, 2)
    _, _, directions = torch.linalg.svd(columns, full_matrices=False)
    projection = (columns @ directions[:, :1].transpose(1, 2)).squeeze(-1)
    # The sign of a singular vector means nothing: take the one that most of the map is positive with.
    sign = torch.where(projection.sum(1, keepdim=True) < 0, -1.0, 1.0)
    component: Tensor = (projection * sign).reshape(activations.shape[0], *activations.shape[2:])
    return component


def scorecam_weights(scores: Tensor) -> Tensor:
    """Score-CAM (Wang et al. 2020): from the score of the input seen through each channel, to the channels' weights."""
    return scores.softmax(-1)


def ablationcam_weights(scores: Tensor, without: Tensor) -> Tensor:
    """Ablation-CAM (Desai and Ramaswamy 2020): the share of the score that goes with each channel."""
    # |score|, not score: for a negative one the quotient would say the opposite of what it means.
    size = torch.where(scores == 0, 1.0, scores.abs())
    return (scores - without) / size


def weighted(activations: Tensor, weights: Tensor) -> Tensor:
    """The sum of the channels, each with its weight."""
    return torch.einsum("bc...,bc->b...", activations, weights)


def _sum(values: Tensor) -> Tensor:
    return values.flatten(2).sum(-1)


BY_GRADIENT: dict[str, Formula] = {
    "gradcam": gradcam,
    "gradcam++": gradcam_plus_plus,
    "hirescam": hirescam,
    "layercam": layercam,
    "xgradcam": xgradcam,
}
METHODS = (*BY_GRADIENT, "eigencam", "scorecam", "ablationcam")


def known_method(name: str) -> str:
    """The name of a method as it is written here.

    >>> known_method("Grad-CAM++")
    'gradcam++'
    """
    plain = name.casefold().replace("-", "").replace("_", "").replace(" ", "")
    plain = {"gradcampp": "gradcam++", "gradcamplusplus": "gradcam++"}.get(plain, plain)
    if plain not in METHODS:
        raise ValueError(f"method={name!r} is not known. {suggestion(plain, METHODS)} All: {', '.join(METHODS)}.")
    return plain

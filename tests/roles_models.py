"""Small models for the tests of roles, in which no value equals another by accident.

Norms are moved away from one and zero: two fresh ones would give the same, and hide a name that was taken for another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.language_models import ENCODER_DECODER, GROUPED, MODELS, SMALL, VISION, from_config

__all__ = [
    "ENCODER_DECODER",
    "GROUPED",
    "HEADS",
    "MODELS",
    "SMALL",
    "VISION",
    "WIDTH",
    "Attention",
    "Block",
    "FeedForward",
    "Mixture",
    "build",
    "hooked",
    "language_model",
    "made",
]


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


WIDTH, HEADS, EXPERTS = 16, 4, 4


class Attention(nn.Module):
    """Causal attention by hand; what is done otherwise is in ``scores``, ``weights`` and ``keys``."""

    num_heads, head_dim = HEADS, WIDTH // HEADS

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2)
        return scores / 2 + torch.full(scores.shape[-2:], -1e9).triu(1)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        seen = x if seen is None else seen
        given = ((self.q_proj, x), (self.k_proj, seen), (self.v_proj, seen))
        q, k, v = (layer(value).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer, value in given)
        return self.o_proj((self.weights(self.scores(q, k)) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(self.up(x).relu())
        return made


class Mixture(nn.Module):
    """Two experts of four for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), nn.ModuleList(FeedForward() for _ in range(EXPERTS))

    def routed(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            made.index_add_(0, token, expert(rows[token]) * weights[token, place, None])
        return made.view(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.routed(x)


class Block(nn.Module):
    def __init__(self, attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.before, self.attn, self.between, self.mlp = nn.LayerNorm(WIDTH), attn, nn.LayerNorm(WIDTH), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.before(x))
        return x + self.mlp(self.between(x))


def language_model(attn: type[nn.Module] = Attention, mlp: type[nn.Module] = FeedForward) -> nn.Sequential:
    """Three blocks of these kinds, between an embedding and a head; the second block is ``model[1][1]``."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(attn(), mlp()) for _ in range(3)))
    return nn.Sequential(nn.Embedding(50, WIDTH), blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50)).eval()


def hooked(model: nn.Module, inputs: Tensor | dict[str, Any], *paths: str) -> list[Tensor]:
    """What modules return, by bare hooks."""
    seen: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen[path] = (output if isinstance(output, Tensor) else output[0]).clone()

        return hook

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    with torch.no_grad():
        model(**inputs) if isinstance(inputs, dict) else model(inputs)
    for handle in handles:
        handle.remove()
    return [seen[path] for path in paths]

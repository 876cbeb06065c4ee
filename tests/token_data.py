"""Sentences of different lengths, and small language models to run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.language_models import made

LENGTHS = [5, 11, 3, 7, 1, 9, 11, 2, 6, 4, 8, 10, 3, 5, 11, 7, 2, 9, 6]
BOS, PAD = 1, 0


def sentences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(5, 60, (n,), generator=generator) for n in LENGTHS]
    for row in rows:
        row[0] = BOS
    return rows


def padded(side: str = "right", width: int = 11) -> dict[str, Tensor]:
    rows = sentences()
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        part = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, part], mask[i, part] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


class Net(nn.Module):
    """Has modes, a buffer that moves in training, a layer in place, and parts that run after the last site."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(100, 6)
        self.up, self.relu, self.drop = nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.calls = 0
        # Whole numbers, whose products are the same in batches of any size.
        for part in (self.table.weight, self.up.weight, self.up.bias):
            part.data = torch.randint_like(part, -9, 9)

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        x = self.drop(self.relu(self.up(self.table(ids))))
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


def tokens_of(model: Net, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.up(model.table(ids)).flatten(0, 1)


def gpt2() -> nn.Module:
    return made("gpt2", n_layer=2, bos_token_id=BOS, eos_token_id=2, pad_token_id=PAD)


def llama() -> nn.Module:
    return made("llama", num_hidden_layers=2, bos_token_id=BOS, eos_token_id=2, pad_token_id=None)


MODELS = {
    "gpt2": (gpt2, "transformer.h.0", "transformer.h.1.mlp"),
    "llama": (llama, "model.layers.0", "model.layers.1.mlp"),
}


def by_hand(model: nn.Module, sites: list[str], batches: list[dict[str, Tensor]]) -> dict[str, list[Tensor]]:
    """What bare hooks see, one tensor for each batch."""
    found: dict[str, list[Tensor]] = {site: [] for site in sites}

    def hook(site: str) -> Any:
        return lambda module, args, out: found[site].append((out[0] if isinstance(out, tuple) else out).clone())

    handles = [model.get_submodule(site).register_forward_hook(hook(site)) for site in sites]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for handle in handles:
        handle.remove()
    return found


def cut(data: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    rows = len(data["input_ids"])
    return [{name: part[i : i + size] for name, part in data.items()} for i in range(0, rows, size)]


def rows_sorted(tokens: Tensor) -> Tensor:
    """Rows in an order that depends on them alone."""
    order = sorted(range(len(tokens)), key=lambda i: tokens[i].tolist())
    return tokens[order]

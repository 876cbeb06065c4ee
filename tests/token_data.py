"""Sentences of different lengths, and small language models to run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def _transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


def gpt2() -> nn.Module:
    library = _transformers()
    torch.manual_seed(0)
    config = library.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        bos_token_id=BOS,
        eos_token_id=2,
        pad_token_id=PAD,
    )
    return library.GPT2LMHeadModel(config).eval()


def llama() -> nn.Module:
    library = _transformers()
    torch.manual_seed(0)
    config = library.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        bos_token_id=BOS,
        eos_token_id=2,
    )
    return library.LlamaForCausalLM(config).eval()


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

"""The models of ``gpu.py``, with random weights; ``tiny`` ones run anywhere, to see that the program does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from models import import_torchvision, import_transformers
from torch import Tensor, nn

STAGES = ["relu", "maxpool", "layer1", "layer2", "layer3", "layer4"]


@dataclasses.dataclass
class Sizes:
    """How large everything is."""

    device: str
    tiny: bool

    def __post_init__(self) -> None:
        self.batch = 2 if self.tiny else 64
        self.pixels = 32 if self.tiny else 224
        self.tokens = (2, 8) if self.tiny else (8, 512)
        self.gpt_blocks = 3 if self.tiny else 24
        self.big_tokens = (2, 8) if self.tiny else (8, 1024)
        self.big_blocks = 4 if self.tiny else 32
        self.big_block = self.big_blocks // 2
        self.big_rows = 6 if self.tiny else 256
        self.rows = 8 if self.tiny else 4096
        self.dtype = torch.float32 if self.tiny else torch.bfloat16


def resnet50(sizes: Sizes) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = import_torchvision().models.resnet50(weights=None).to(sizes.device).eval()
    return model, torch.randn(sizes.batch, 3, sizes.pixels, sizes.pixels, device=sizes.device)


def gpt2_medium(sizes: Sizes) -> tuple[nn.Module, dict[str, Any]]:
    """With its head, so that blocks are ``transformer.h.0``; the dict holds the keywords of a call.

    All that are made have the same weights. No row takes a ``deepcopy`` of one: the modules of a copy have attributes
    that Python finds more slowly, so that the same pass takes its host 1.01 to 1.04 of the time.
    """
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_head": 2} if sizes.tiny else {"n_embd": 1024, "n_head": 16}
    config = import_transformers().GPT2Config(n_layer=sizes.gpt_blocks, **shape)
    with where_it_runs(sizes):
        model = import_transformers().GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 50_000, sizes.tokens, device=sizes.device)
    return model, {"input_ids": ids, "use_cache": False}


@contextlib.contextmanager
def where_it_runs(sizes: Sizes) -> Iterator[None]:
    """What is made in this block is made on the device, as of the kind of numbers that it computes in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(sizes.dtype)
    try:
        with torch.device(sizes.device):
            yield
    finally:
        torch.set_default_dtype(before)


def llama(sizes: Sizes) -> nn.Module:
    """A Llama of 6.6 billion parameters (without a head), made where it runs."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 32_000}
    large = {"hidden_size": 4096, "intermediate_size": 11_008, "num_attention_heads": 32, "vocab_size": 32_000}
    config = import_transformers().LlamaConfig(num_hidden_layers=sizes.big_blocks, **(small if sizes.tiny else large))
    with where_it_runs(sizes):
        return import_transformers().LlamaModel(config).eval()


def trainer(sizes: Sizes) -> tuple[nn.Module, Any]:
    """A ResNet-50 in training, and its step."""
    model, x = resnet50(sizes)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    labels = torch.arange(len(x), device=sizes.device)
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), labels).backward()
        optimizer.step()

    return model, step

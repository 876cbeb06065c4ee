"""The models that are measured, with random weights, and the sites chosen in each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_LIBRARIES: list[Any] = []


def import_torchvision() -> Any:
    """torchvision's wheels are built for CUDA torch: beside a CPU build, its import misses two operators."""
    try:
        import torchvision
    except (RuntimeError, AttributeError):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)  # it must outlive the import
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        import torchvision
    return torchvision


def import_transformers() -> Any:
    """Offline and quiet; it imports torchvision."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import_torchvision()
    import transformers

    return transformers


class Work(NamedTuple):
    """A model, what it is called with, and the sites of the rows "one", "few" and "all"."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    one: str
    few: list[str]

    @property
    def all(self) -> list[str]:
        """Every module that runs and returns a tensor."""
        seen: dict[str, None] = {}
        handles = [
            module.register_forward_hook(
                lambda m, a, output, name=name: seen.setdefault(name) if isinstance(output, Tensor) else None
            )
            # One that has two names counts as two: some peers know only one of them.
            for name, module in self.model.named_modules(remove_duplicate=False)
            if name
        ]
        with torch.no_grad():
            self.model(*self.args)
        for handle in handles:
            handle.remove()
        return list(seen)

    def sites(self, how_many: str) -> list[str]:
        return {"one": lambda: [self.one], "few": lambda: self.few, "all": lambda: self.all}[how_many]()


def chain() -> Work:
    """A hundred layers that cost next to nothing, so that what is left is the cost of the hooks."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(100)))
    return Work("100 small layers", model.eval(), (torch.randn(4, 16),), "50", [str(n) for n in range(10, 100, 20)])


def resnet18() -> Work:
    """Half of its layers are overwritten by the next one, which works in place."""
    model = import_torchvision().models.resnet18(weights=None).eval()
    stages = ["bn1", "layer1", "layer2.0.bn1", "layer3.0.bn2", "layer4"]
    return Work("ResNet-18", model, (torch.randn(2, 3, 96, 96),), "layer3.0.bn1", stages)


def vit() -> Work:
    import_torchvision()
    import timm

    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=96, num_classes=10).eval()
    blocks = [f"blocks.{n}" for n in (2, 5, 8, 11)]
    return Work("ViT tiny", model, (torch.randn(2, 3, 96, 96),), "blocks.6", blocks)


class Logits(nn.Module):
    """A language model called with one tensor, and returning one: what every peer can do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.lm = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm(ids, use_cache=False).logits


def gpt2_config() -> Any:
    return import_transformers().GPT2Config(n_layer=6, n_embd=192, n_head=6, n_positions=128, vocab_size=2000)


def gpt2() -> Work:
    model = Logits(import_transformers().GPT2LMHeadModel(gpt2_config())).eval()
    blocks = [f"lm.transformer.h.{n}.mlp" for n in (0, 2, 4, 5)]
    return Work("GPT-2, 6 blocks", model, (torch.randint(0, 2000, (2, 32)),), "lm.transformer.h.3.mlp", blocks)


def large(modules: int = 10_000) -> Work:
    """Blocks of a hundred modules, one of which works in place."""
    blocks = [_block() for _ in range(modules // 100)]
    model = nn.Sequential(*blocks).eval()
    middle = modules // 200
    few = [f"{n}.2" for n in range(0, modules // 100, max(modules // 500, 1))]
    return Work(f"{modules:,} modules", model, (torch.randn(1, 4),), f"{middle}.2", few)


def _block() -> nn.Module:
    return nn.Sequential(*(nn.ReLU(inplace=True) if n == 3 else nn.Linear(4, 4) for n in range(99)))


WORKS: dict[str, Callable[[], Work]] = {
    "chain": chain,
    "resnet": resnet18,
    "vit": vit,
    "gpt2": gpt2,
    "large": large,
}

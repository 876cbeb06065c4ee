"""Make the pictures of the README and the documentation, all by the library itself: ``python examples/pictures.py``.

The screenshot of the report needs Playwright and a Chromium; without them it is left as it is.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

import torchhook as th
from torchhook.demo import SENTENCES, efficientnet_lite0, minilm, photograph

IMAGES = Path(__file__).parent.parent / "docs" / "images"


def first_screen() -> None:
    """The photograph's mean feature maps at four depths, and where the class is seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    model, x = efficientnet_lite0(), photograph("chelsea")
    with torch.no_grad():
        _, rec = th.run(model, x, capture="_blocks.*")
    seen = th.cam(model, x, 285)
    figure = Figure(figsize=(10, 2.3), layout="constrained")
    axes = figure.subplots(1, 5)
    axes[0].imshow(((x[0] + 1) / 2).permute(1, 2, 0))
    axes[0].set_title("input", fontsize=9)
    axes[0].axis("off")
    for ax, name in zip(axes[1:4], ["_blocks.0", "_blocks.2", "_blocks.4"], strict=True):
        th.plot.feature_maps(rec, name, reduce="mean", ax=ax)
    seen.overlay(x, ax=axes[4], titles=["class 285: Egyptian cat"])
    figure.savefig(IMAGES / "first.png", dpi=160)


def attention() -> None:
    tokenizer, model = minilm()
    batch = tokenizer(SENTENCES[0], return_tensors="pt")
    with torch.no_grad():
        maps = th.attention(model, batch)
    words = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    figure = th.plot.attention(maps, maps.keys()[-1], heads=[1, 3, 5, 7], tokens=words)
    figure.savefig(IMAGES / "attention.png", dpi=110)


def recipes() -> None:
    """What the recipes draw, on their own small models."""
    from torch import nn
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "n_positions": 32, "n_embd": 32, "n_layer": 6, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.2)
    gpt = GPT2LMHeadModel(config).eval()
    clean = torch.tensor([[5, 17, 42, 8, 23, 61, 3]])
    corrupted = torch.tensor([[5, 17, 61, 8, 23, 61, 3]])
    result = th.sweep(
        gpt, clean, corrupted, lambda output: output.logits[0, -1, 7], sites="transformer.h.*", progress=False
    )
    th.plot.sweep(result).savefig(IMAGES / "sweep.png", dpi=110)

    deep = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.Sigmoid())), nn.Linear(32, 2))
    with th.capture(deep, nn.Linear, port="grad") as rec:
        deep(torch.randn(64, 32)).pow(2).mean().backward()
    th.plot.gradient_flow(rec).savefig(IMAGES / "gradients.png", dpi=110)


def classes() -> list[str] | None:
    """The names of ImageNet's classes, where there is a torchvision that has them."""
    try:
        from torchvision.models import ResNet18_Weights
    except (ImportError, RuntimeError):  # or one that was built for another torch
        return None
    return list(ResNet18_Weights.DEFAULT.meta["categories"])


def page() -> None:
    """The screenshot of the report."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        browser = None
    if browser is None:
        print("no Playwright or Chromium: the screenshot of the report stays as it is")
        return
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = th.report(
            efficientnet_lite0(),
            photograph("chelsea"),
            f"{folder}/report.html",
            title="EfficientNet-Lite0",
            labels=classes(),
            repeats=20,  # the quickest counts, and a machine may be busy
        )
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        window = chromium.new_page(viewport={"width": 1300, "height": 860})
        window.goto(path.resolve().as_uri())
        window.screenshot(path=IMAGES / "report.png")
        chromium.close()


if __name__ == "__main__":
    torch.manual_seed(0)
    IMAGES.mkdir(parents=True, exist_ok=True)
    first_screen()
    attention()
    recipes()
    page()

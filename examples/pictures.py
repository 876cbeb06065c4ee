"""Make the pictures of the README and the documentation, all by the library: ``python -m examples.pictures``.

The screenshot of the report needs Playwright and a Chromium; without them it is left as it is.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchhook as th
from torchhook.demo import SENTENCES, efficientnet_lite0, minilm, photograph

IMAGES = Path(__file__).parent.parent / "docs" / "images"


def first_screen() -> None:
    """What the first lines of the README draw: a photograph, and the mean maps of three layers of ResNet-18."""
    model, x = resnet18(), photograph("chelsea")
    with torch.no_grad(), th.capture(model, "bn1", "layer*") as rec:
        model(x)
    figure, axes = row(4)
    show(axes[0], x)
    for ax, name in zip(axes[1:], ["bn1", "layer1", "layer2"], strict=True):
        th.plot.feature_maps(rec, name, reduce="mean", ax=ax)
    save(figure, "first")


def overwritten() -> None:
    """One channel of a layer whose output the next one overwrites: kept by the library, and by a hook that keeps it."""
    from matplotlib.image import AxesImage

    model, x = resnet18(), photograph("chelsea")
    kept: dict[str, Tensor] = {}
    model.bn1.register_forward_hook(lambda module, args, output: kept.update(bn1=output))
    with torch.no_grad(), th.capture(model, "bn1") as rec:
        model(x)
    # The channel in which the numbers below zero, which a ReLU sets to zero, are nearest to half of all.
    channel = int(((rec["bn1"][0] < 0).float().mean((1, 2)) - 0.5).abs().argmin())
    figure, axes = row(3)
    show(axes[0], x)
    for ax, (way, value) in zip(axes[1:], {"th.capture": rec, "bare hook": kept}.items(), strict=True):
        one = value["bn1"][:, channel : channel + 1]
        th.plot.feature_maps(one, reduce="mean", ax=ax, title=f"bn1: {way}", cmap="RdBu_r")
    # The same colors for the same numbers, white at zero.
    reach = float(rec["bn1"][0, channel].abs().quantile(0.98))
    for picture in figure.findobj(AxesImage)[1:]:
        picture.set_clim(-reach, reach)
    save(figure, "overwritten")


def trained() -> None:
    """A trained network: how strongly its layers answer to a photograph, and where it sees the class."""
    model, x = efficientnet_lite0(), photograph("chelsea")
    with torch.no_grad():
        _, rec = th.run(model, x, capture="_blocks.*")
    figure, axes = row(4)
    show(axes[0], x)
    for ax, name in zip(axes[1:3], ["_blocks.0", "_blocks.2"], strict=True):
        th.plot.feature_maps(rec, name, reduce="norm", ax=ax)
    th.cam(model, x, 285).overlay(x, ax=axes[3], titles=["class 285: Egyptian cat"])
    save(figure, "trained")


def resnet18() -> nn.Module:
    """With random weights: its trained ones would have to be downloaded."""
    importlib.import_module("tests.conftest")  # it makes torchvision work beside a CPU build of torch
    import torchvision

    torch.manual_seed(0)
    model: nn.Module = torchvision.models.resnet18(weights=None)
    return model.eval()


def row(count: int) -> tuple[Any, Any]:
    """A figure with so many square pictures side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 * count, 2.75), layout="constrained")
    return figure, figure.subplots(1, count)


def show(ax: Any, x: Tensor) -> None:
    ax.imshow(((x[0] + 1) / 2).permute(1, 2, 0))
    ax.set_title("x")
    ax.axis("off")


def save(figure: Any, name: str) -> None:
    from matplotlib.text import Text

    for title in [text for text in figure.findobj(Text) if text.get_text()]:
        title.set_fontsize(10)
    figure.savefig(IMAGES / f"{name}.png", dpi=160)


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
    overwritten()
    trained()
    attention()
    recipes()
    page()

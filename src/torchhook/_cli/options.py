"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_IN = "Input"
_MODEL = "Model"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="torchvision:NAME, timm:NAME, transformers:PATH, package.module:callable, or a .pt2 file.",
        show_default=False,
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(help="A state dict: .safetensors, or .pt/.pth with --allow-pickle.", rich_help_panel=_MODEL),
]
# Switches have their names spelled out: otherwise Typer adds a --no-allow-pickle that nobody needs.
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Open pickled weights, which can run code.", rich_help_panel=_MODEL)
]
Pretrained = Annotated[
    bool, typer.Option("--pretrained", help="Let the library fetch its own weights.", rich_help_panel=_MODEL)
]
Random = Annotated[
    bool, typer.Option("--random", help="Take random weights, where none are given.", rich_help_panel=_MODEL)
]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.", rich_help_panel=_MODEL)]
File = Annotated[
    Path | None, typer.Option("--input", "-i", help="An image, .safetensors, .npz, .npy or .txt.", rich_help_panel=_IN)
]
Text = Annotated[str | None, typer.Option(help="A text, for transformers: models.", rich_help_panel=_IN)]
Tokens = Annotated[str | None, typer.Option(help="Token ids with commas between: 464,2068.", rich_help_panel=_IN)]
Shape = Annotated[str | None, typer.Option(help="Random numbers, as in 1x3x224x224.", rich_help_panel=_IN)]
Size = Annotated[int | None, typer.Option(help="Resize and crop images to this.", rich_help_panel=_IN)]
# As text: a list option would have to be repeated for each channel.
Mean = Annotated[
    str | None, typer.Option(help="Normalize images, with --std: 0.5 or 0.48,0.46,0.41.", rich_help_panel=_IN)
]
Std = Annotated[
    str | None, typer.Option(help="Normalize images, with --mean: 0.5 or 0.23,0.22,0.23.", rich_help_panel=_IN)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Sites = Annotated[
    list[str] | None, typer.Option("--sites", "-s", help="An address or glob: layer4, 'blocks.*'. Repeatable.")
]

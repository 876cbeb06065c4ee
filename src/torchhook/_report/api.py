"""``report``: the door."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from torchhook._report.collect import collect
from torchhook._report.render import render
from torchhook._report.score import Target
from torchhook.errors import require


def report(
    model: nn.Module,
    x: Any,
    out: str | os.PathLike[str] = "report.html",
    *,
    target: Target = None,
    image: Any = None,
    tokens: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    title: str | None = None,
    gradients: bool = True,
    attention: bool = True,
    cam: str | None = "gradcam",
    cam_layer: str | None = None,
    train: bool = False,
    repeats: int = 3,
) -> Path:
    """Write one self-contained HTML page about one run of a model, and return its path.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.ones(1, 3), f"{folder}/report.html").name
    'report.html'

    ``x`` is a tensor, a tuple of arguments or a dict of keyword arguments. ``target`` is the class whose score the
    gradients are of, or a function of the output that returns one number; without it, the most likely class. ``image``
    is a picture to show in place of the input, ``tokens`` are the input's tokens as text, ``classes`` the names of the
    classes. ``cam`` is the method of the class activation map (``None`` for none) and ``cam_layer`` its layer. The
    model runs a few times, in eval mode unless ``train=True``, and is left as it was.
    """
    require("jinja2", "report")
    require("PIL.Image", "report")
    page = collect(
        model,
        x,
        target=target,
        image=image,
        tokens=tokens,
        classes=classes,
        title=title,
        gradients=gradients,
        attention=attention,
        cam=cam,
        cam_layer=cam_layer,
        train=train,
        repeats=repeats,
    )
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(page), encoding="utf-8")
    return path

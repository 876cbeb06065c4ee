"""``report``: one page of HTML about one run of a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn

from torchhook._core.select import Selector
from torchhook._report.collect import collect
from torchhook._report.page_path import PagePath, page_at
from torchhook._report.render import render
from torchhook._values.targets import Goal, Labels
from torchhook.errors import require

__all__ = ["PagePath", "page_at", "report"]


def report(
    model: nn.Module,
    inputs: Any,
    out: str | os.PathLike[str] = "report.html",
    *,
    target: Goal = None,
    image: Any = None,
    tokens: Sequence[str] | None = None,
    labels: Labels | None = None,
    title: str | None = None,
    gradients: bool = True,
    attention: bool = True,
    cam: str | None = "gradcam",
    cam_layer: Selector | None = None,
    train: bool = False,
    repeats: int = 3,
) -> PagePath:
    """Write one self-contained HTML page about one run of a model, and return its path; a notebook shows the page.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.ones(1, 3), f"{folder}/report.html").name
    'report.html'

    The model runs a few times, in evaluation mode unless ``train=True``, and is left undisturbed: its modes, buffers,
    gradients and hooks, and the process's random numbers, are as before afterwards.

    Args:
        model: Any module that has its parameters; a lazy one has to run once before.
        inputs: A tuple is the positional arguments, a dict the keyword arguments, ``th.Inputs(args, kwargs)`` both,
            anything else the one argument.
        out: The page to write, as HTML; folders are made.
        target: What the gradients are of: a class, a class for each sample, or a function of the output that returns
            one number for each sample or for all. Without it, the most likely class, for a language model at the last
            token; the mean square of an output without classes.
        image: A picture to show in place of the input: whatever ``th.plot.overlay`` takes.
        tokens: The input's tokens as text; without them, their numbers are shown.
        labels: The names of the classes: a list, or a dict by number. Without them, those of a transformers config, or,
            for a trained model of torchvision's with as many classes as its own weights, the names of these.
        title: The title of the page; the model's class if left out.
        gradients: Whether to take gradients of the target's score.
        attention: Whether to show attention maps.
        cam: The method of the class activation map, one of ``th.cam``; ``None`` for no map.
        cam_layer: The layer of the class activation map, by any selector; chosen by rule if left out.
        train: Run in training mode instead of evaluation mode.
        repeats: How many runs are timed; the quickest counts.
    """
    # Asked for before the model runs: a missing package, or a name that is refused, should not show after minutes of
    # work.
    path = page_at(out)
    require("jinja2", "report")
    require("PIL.Image", "report")
    page = collect(
        model,
        inputs,
        target=target,
        image=image,
        tokens=tokens,
        labels=labels,
        title=title,
        gradients=gradients,
        attention=attention,
        cam=cam,
        cam_layer=cam_layer,
        train=train,
        repeats=repeats,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(page), encoding="utf-8")
    return path

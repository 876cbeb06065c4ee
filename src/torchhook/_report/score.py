"""The one number whose gradients a report shows, and the classes that the model found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook._values import tree

Target = int | Callable[[Any], Tensor] | None


class Score(NamedTuple):
    value: Tensor | None
    text: str
    label: int | None = None
    """The class it is of, where it is of one; that of the first sample, where each has its own."""


def score(output: Any, target: Target) -> Score:
    """A scalar to differentiate: the target's, or the most likely class's, or the mean square of the output.

    >>> score(torch.tensor([[0.0, 2.0]]), None).text
    'class 1, the most likely'
    """
    if callable(target):
        value = target(output)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(f"target must return a tensor with one element, found {tree.describe(value)}.")
        return Score(value.sum(), f"{getattr(target, '__name__', 'target')}(output)")
    logits = logits_of(output)
    if logits is None:
        found = next((t for t in tree.tensors(output) if t.is_floating_point() and t.numel()), None)
        if target is not None:
            raise ValueError(f"target={target}: the output {tree.describe(output)} has no classes; give a function.")
        if found is None:
            return Score(None, "the output holds no floating-point tensor")
        return Score(found.float().square().mean(), "the mean square of the output")
    classes = logits.shape[-1]
    if target is not None and not -classes <= target < classes:
        raise ValueError(f"target={target}: the model has {classes} classes, 0 to {classes - 1}.")
    chosen = logits.argmax(-1) if target is None else torch.full_like(logits[:, 0], target, dtype=torch.long)
    label = int(chosen[0]) % classes
    if target is not None:
        text = f"class {label}"
    else:
        text = f"class {label}, the most likely" if len(logits) == 1 else "each sample's most likely class"
    text += "" if len(logits) == 1 else ", summed over the batch"
    return Score(logits.gather(-1, chosen[:, None] % classes).sum(), text, label)


def logits_of(output: Any) -> Tensor | None:
    """Rows of class scores, if that is what the output is; those of the last token for a language model."""
    named = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    found = named if isinstance(named, Tensor) else output
    if not isinstance(found, Tensor) or not found.is_floating_point() or found.is_meta or found.dim() not in (2, 3):
        return None
    if not found.numel() or found.shape[-1] < 2:
        return None
    if isinstance(named, Tensor) and found.dim() == 3:
        return found[:, -1]
    return found if found.dim() == 2 else None


def likely(output: Any, names: Sequence[str] | None, number: int = 5) -> list[tuple[str, float]]:
    """The most likely classes of the first sample, with the share that a softmax gives them."""
    logits = logits_of(output)
    if logits is None or not bool(logits[0].isfinite().all()):
        return []
    shares, classes = logits[0].detach().float().softmax(-1).topk(min(number, logits.shape[-1]))
    return [(name_of(c, names), p) for c, p in zip(classes.tolist(), shares.tolist(), strict=True)]


def name_of(label: int, names: Sequence[str] | None) -> str:
    return f"class {label}" if names is None or label >= len(names) else f"{names[label]} ({label})"

"""The one number whose gradients a report shows, and the classes that the model found."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from torchhook._values import tree
from torchhook._values.subclasses import local
from torchhook._values.targets import (
    Goal,
    Labels,
    ask,
    class_scores,
    classes,
    is_function,
    logits,
    name_of,
    pick,
)


class Score(NamedTuple):
    value: Tensor | None
    text: str
    label: int | None = None
    """The class it is of, where it is of one; that of the first sample, where each has its own."""
    each: bool = True
    """Whether it is a sum over the samples, so that the first sample has its own."""


def score(output: Any, target: Goal, examples: int = 1) -> Score:
    """A scalar to differentiate: the target's, or the most likely class's, or the mean square of the output.

    >>> import torch
    >>> score(torch.tensor([[0.0, 2.0]]), None).text
    'class 1, the most likely'
    """
    if is_function(target):
        value, name = ask(target, output, examples, whole=True), getattr(target, "__name__", "target")
        each = value.numel() == examples
        # In a sum every sample keeps its own gradients; a function of the whole batch may mix them.
        return Score(value.sum(), f"{name}(output){_summed(value.numel())}", each=each)
    found = _choice(output) if target is None else class_scores(target, output)
    if found is None:
        return _mean_square(output)
    wanted = classes(target, found)
    word = "token" if next_token(output) else "class"
    if target is None:
        text = f"{word} {wanted[0]}, the most likely" if len(found) == 1 else f"each sample's most likely {word}"
    else:
        text = f"{word} {wanted[0]}" if len(set(wanted)) == 1 else f"each sample's own {word}"
    return Score(pick(found, wanted).sum(), text + _summed(len(found)), wanted[0])


def _summed(count: int) -> str:
    return "" if count == 1 else ", summed over the batch"


def _choice(output: Any) -> Tensor | None:
    """The class scores in an output; one number for each sample is no choice."""
    found = logits(output)
    return None if found is None or found.shape[1] < 2 else found


def _mean_square(output: Any) -> Score:
    found = next((t for t in tree.tensors(output) if t.is_floating_point() and t.numel()), None)
    if found is None:
        return Score(None, "the output holds no floating-point tensor")
    # In half precision, the square of 256 is infinite already.
    return Score(found.float().square().mean(), "the mean square of the output")


def next_token(output: Any) -> bool:
    """Whether the scores are those of the token that comes next: rows × tokens × vocabulary."""
    return any(address == "logits" and isinstance(t, Tensor) and t.dim() == 3 for address, t in tree.leaves(output))


def likely(output: Any, names: Labels | None, number: int = 5) -> list[tuple[str, float]]:
    """The most likely classes of the first sample, with the share that a softmax gives them."""
    found = _choice(output)
    if found is None or not bool(found[0].isfinite().all()):
        return []
    shares, top = local(found[0].detach()).float().softmax(-1).topk(min(number, found.shape[-1]))
    word = "token" if next_token(output) else "class"
    return [(name_of(c, names, word), p) for c, p in zip(top.tolist(), shares.tolist(), strict=True)]

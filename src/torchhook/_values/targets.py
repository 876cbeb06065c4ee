"""What is explained: one number for each example, taken from the model's output."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchhook._values import tree

Goal: TypeAlias = "int | Callable[[Any], Tensor] | Sequence[int] | Tensor | None"


class Scores:
    """The scores that a target asks for. Made once from the model's output; ``None`` becomes the classes predicted."""

    def __init__(self, goal: Goal, output: Any, examples: int) -> None:
        self._examples = examples
        self._function = goal if callable(goal) and not isinstance(goal, Tensor) else None
        self.classes: list[int] | None = None
        if self._function is None:
            self.classes = _classes(goal, logits(output), examples)

    def __call__(self, output: Any, example: int | None = None) -> Tensor:
        """One score for each row of the output; with ``example``, every row is a variant of that one."""
        if self._function is not None:
            return self._asked(output, example)
        assert self.classes is not None
        scores = logits(output)
        wanted = self.classes if example is None else [self.classes[example]] * scores.shape[0]
        return scores.gather(1, torch.tensor(wanted, device=scores.device)[:, None]).squeeze(1)

    def _asked(self, output: Any, example: int | None) -> Tensor:
        assert self._function is not None
        rows = self._examples if example is None else next(t.shape[0] for t in tree.tensors(output) if t.dim())
        scores = self._function(output)
        if not isinstance(scores, Tensor) or scores.numel() != rows:
            found = tree.describe(scores) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(
                f"target: the function must return one number for each example, a tensor of {rows}; found {found}. "
                "Do not sum over the batch."
            )
        return scores.reshape(rows)


def logits(output: Any) -> Tensor:
    """The class scores in a model's output: batch × classes."""
    found = {address: leaf for address, leaf in tree.leaves(output) if isinstance(leaf, Tensor)}
    scores = found.get("logits", next(iter(found.values()), None))
    if scores is not None and scores.dim() == 1:
        scores = scores[:, None]
    if scores is None or scores.dim() != 2 or (len(found) > 1 and "logits" not in found):
        raise ValueError(
            f"target: classes need an output of batch × classes, found {tree.describe(output)}. Give a function of the "
            "output that returns one number for each example: target=lambda output: output[:, 5].mean((1, 2))."
        )
    return scores


def _classes(goal: Any, scores: Tensor, examples: int) -> list[int]:
    if scores.shape[0] != examples:
        raise ValueError(f"target: the output has {scores.shape[0]} rows for {examples} examples; give a function.")
    if goal is None:
        return [int(i) for i in scores.argmax(-1)]
    wanted = _integers(goal, examples)
    if wanted is None or len(wanted) != examples:
        raise ValueError(
            f"target: give a class, a function of the output, or one class for each of the {examples} examples; "
            f"found {goal!r}."
        )
    count = scores.shape[1]
    for i in wanted:
        if not -count <= i < count:
            raise IndexError(f"target: class {i} is out of range, the model has {count} classes.")
    return [i % count for i in wanted]


def _integers(goal: Any, examples: int) -> list[int] | None:
    """The classes as Python's integers, from numpy's and torch's too; ``None`` where they are none."""
    plain = goal.tolist() if hasattr(goal, "tolist") else goal
    try:
        return [operator.index(i) for i in plain] if isinstance(plain, Iterable) else [operator.index(plain)] * examples
    except TypeError:
        return None

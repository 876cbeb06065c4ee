"""Which score is meant: one number for each example, taken from a model's output; and what its class is called."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchhook._values import tree
from torchhook._values.wrappers import is_fake
from torchhook._words import plural
from torchhook.errors import TargetError

Goal: TypeAlias = "int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None"
"""What ``target=`` takes: a class, a class for each example, a function of the output; ``None`` the predicted class."""

Labels: TypeAlias = "Sequence[str] | Mapping[int, str]"
"""The names of the classes, by their numbers."""


class Scores:
    """The scores that a target asks for. Made once from the model's output; ``None`` becomes the classes predicted.

    >>> scores = Scores(None, torch.tensor([[0.0, 3.0], [2.0, 1.0]]), examples=2)
    >>> scores.classes, scores(torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    ([1, 0], tensor([6., 7.]))
    """

    def __init__(self, goal: Goal, output: Any, examples: int) -> None:
        self._goal = goal
        self._examples = examples
        self.classes: list[int] | None = None
        if not is_function(goal):
            found = class_scores(goal, output)
            if len(found) != examples:
                raise TargetError(f"target: the output has {len(found)} rows for {examples} examples; give a function.")
            # Fixed now: a changed input may be taken for another class, and the score of this one is asked for.
            self.classes = classes(goal, found)

    def __call__(self, output: Any, example: int | None = None) -> Tensor:
        """One score for each row of the output; with ``example``, every row is a variant of that one."""
        if self.classes is None:
            rows = self._examples if example is None else next(t.shape[0] for t in tree.tensors(output) if t.dim())
            return ask(self._goal, output, rows).reshape(rows)
        found = class_scores(self._goal, output)
        return pick(found, self.classes if example is None else [self.classes[example]] * len(found))


def is_function(goal: Goal) -> bool:
    """Whether a target is a function of the output."""
    return callable(goal) and not isinstance(goal, Tensor)


def logits(output: Any) -> Tensor | None:
    """The class scores in a model's output, rows × classes, or ``None`` where it has none.

    They are what is called ``logits``, else the only tensor. Of a language model's (rows × tokens × classes) those of
    the last token count; one number for each row is the score of one class.

    >>> logits({"hidden": torch.zeros(2, 5, 8), "logits": torch.zeros(2, 3)}).shape
    torch.Size([2, 3])
    """
    found = {address: leaf for address, leaf in tree.leaves(output) if isinstance(leaf, Tensor)}
    scores = next(iter(found.values())) if len(found) == 1 else found.get("logits")
    if scores is None or not scores.is_floating_point() or is_fake(scores) or not scores.numel():
        return None
    # Only by name: three dims without one may be anything.
    if scores.dim() == 3 and "logits" in found:
        return scores[:, -1]
    return scores[:, None] if scores.dim() == 1 else scores if scores.dim() == 2 else None


def class_scores(goal: Goal, output: Any) -> Tensor:
    """The class scores in a model's output, rows × classes; that there are none is an error."""
    found = logits(output)
    if found is None:
        raise TargetError(
            f"target={goal!r}: the output {tree.describe(output)} has no classes, which are batch × classes. Give a "
            "function of the output that returns one number for each example: "
            "target=lambda output: output[:, 5].mean((1, 2))."
        )
    return found


def classes(goal: Goal, scores: Tensor) -> list[int]:
    """The class that is meant in each row of class scores, counted from 0.

    >>> classes(-1, torch.zeros(2, 5)), classes(None, torch.eye(2))
    ([4, 4], [0, 1])
    """
    rows, count = scores.shape
    if goal is None:
        return [int(i) for i in scores.argmax(-1)]
    wanted = _integers(goal, rows)
    if wanted is None or len(wanted) != rows:
        raise TargetError(
            f"target: give a class, a function of the output, or one class for each of the {rows} examples; "
            f"found {goal!r}."
        )
    for i in wanted:
        if not -count <= i < count:
            raise TargetError(
                f"target={i}: the model has {count} {plural(count, 'class', 'classes')}, 0 to {count - 1}."
            )
    return [i % count for i in wanted]


def pick(scores: Tensor, wanted: Sequence[int]) -> Tensor:
    """The score of one class in each row."""
    return scores.gather(1, torch.tensor(wanted, device=scores.device)[:, None]).squeeze(1)


def ask(goal: Any, output: Any, examples: int, *, whole: bool = False) -> Tensor:
    """What a function says of an output: a number for each example, or, if ``whole``, one element for them all."""
    scores = goal(output)
    if not isinstance(scores, Tensor) or scores.numel() not in ((examples, 1) if whole else (examples,)):
        found = tree.describe(scores) if isinstance(scores, Tensor) else type(scores).__name__
        raise TargetError(
            f"target: the function must return one number for each example, a tensor of {examples}"
            f"{', or one element for them all' if whole else ''}; found {found}."
            f"{'' if whole else ' Do not sum over the batch.'}"
        )
    return scores


def _integers(goal: Any, rows: int) -> list[int] | None:
    """The classes as Python's integers, from numpy's and torch's too; ``None`` where they are none."""
    # operator.index, because int would take 2.7 for 2.
    plain = goal.tolist() if hasattr(goal, "tolist") else goal
    try:
        return [operator.index(i) for i in plain] if isinstance(plain, Iterable) else [operator.index(plain)] * rows
    except TypeError:
        return None


# -- names of classes -----------------------------------------------------------------------------------


def name_of(label: int, names: Labels | None, word: str = "class") -> str:
    """A class by its name and number, or by its number alone.

    >>> name_of(1, ["cat", "dog"]), name_of(7, ["cat", "dog"])
    ('dog (1)', 'class 7')
    """
    if isinstance(names, Mapping):
        found = names.get(label)
    else:
        found = None if names is None or label >= len(names) else names[label]
    return f"{word} {label}" if found is None else f"{found} ({label})"


def known_labels(model: nn.Module) -> Labels | None:
    """The names of the classes that a model of transformers has in its config, where they are more than numbers."""
    found = getattr(getattr(model, "config", None), "id2label", None)
    if not isinstance(found, Mapping) or not all(isinstance(key, int) for key in found):
        return None
    # What the config makes up when nobody named the classes.
    return None if all(str(name) == f"LABEL_{key}" for key, name in found.items()) else dict(found)


def torchvision_labels(model: nn.Module, output: Any) -> Labels | None:
    """The names that torchvision's own weights have for a model of its own with as many classes, where all agree."""
    home, scores = type(model).__module__, logits(output)
    if not home.startswith("torchvision.models.") or scores is None:
        return None
    # What its file offers, and nothing is fetched: names are part of the description of weights.
    offered = [kind.DEFAULT for name, kind in vars(sys.modules[home]).items() if name.endswith("_Weights")]
    lists = [tuple(weights.meta.get("categories", ())) for weights in offered]
    fitting = {names for names in lists if len(names) == scores.shape[1]}
    return list(fitting.pop()) if len(fitting) == 1 else None

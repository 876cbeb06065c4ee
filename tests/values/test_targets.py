"""Which score is meant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchhook._values.targets import Scores, ask, class_scores, classes, logits, name_of, torchvision_labels
from torchhook.errors import TargetError

LOGITS = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])


# -- the classes of an output -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        (LOGITS,),
        {"out": LOGITS},
        {"hidden": torch.rand(2, 5, 8), "logits": LOGITS},
        SimpleNamespace(loss=torch.tensor(1.0), logits=LOGITS),
    ],
    ids=["tensor", "tuple", "dict of one", "named", "attribute"],
)
def test_classes_are_what_is_called_logits_or_the_only_tensor(output: Any) -> None:
    found = logits(output)
    assert found is not None
    assert torch.equal(found, LOGITS)


def test_a_language_model_is_asked_about_its_last_token() -> None:
    scores = torch.rand(2, 4, 6)
    found = logits(SimpleNamespace(logits=scores))
    assert found is not None
    assert torch.equal(found, scores[:, 3])


def test_one_number_for_each_row_is_one_class() -> None:
    found = logits(torch.tensor([1.0, 2.0]))
    assert found is not None
    assert found.tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize(
    "output",
    [
        torch.rand(2, 5, 8),
        torch.rand(2, 3, 8, 8),
        (LOGITS, LOGITS),
        torch.tensor(1.0),
        torch.ones(2, 3, dtype=torch.long),
        torch.empty(0, 3),
        torch.empty(2, 3, device="meta"),
        {"logits": torch.rand(1, 3, 8, 8)},
        "text",
    ],
    ids=["tokens", "maps", "two", "scalar", "integers", "empty", "meta", "named maps", "text"],
)
def test_what_is_no_table_of_scores_has_no_classes(output: Any) -> None:
    assert logits(output) is None
    with pytest.raises(TargetError, match=r"target=3: the output .* has no classes.* Give a function"):
        class_scores(3, output)


# -- what a user asks for ---------------------------------------------------------------------------


def test_nothing_is_the_class_predicted_in_each_row() -> None:
    assert classes(None, LOGITS) == [1, 0]


@pytest.mark.parametrize(
    "goal", [2, -1, np.int64(2), torch.tensor(2), [2, 2], (2, -1), np.array([2, 2]), torch.tensor([2, 2])]
)
def test_a_class_is_any_whole_number_or_one_for_each_row(goal: Any) -> None:
    assert classes(goal, LOGITS) == [2, 2]


@pytest.mark.parametrize("goal", [3, -4, [0, 3]])
def test_a_class_that_is_not_there_is_an_error_with_the_range(goal: Any) -> None:
    for builtin in (ValueError, IndexError):
        with pytest.raises(builtin, match=r"target=-?\d: the model has 3 classes, 0 to 2"):
            classes(goal, LOGITS)


@pytest.mark.parametrize("goal", [2.0, "cat", [1], [1, 2, 3], [1.0, 2.0], torch.rand(2)])
def test_what_is_no_class_is_refused_with_what_may_be_given(goal: Any) -> None:
    with pytest.raises(TargetError, match=r"target: give a class.*one class for each of the 2 examples; found"):
        classes(goal, LOGITS)


def test_a_function_returns_a_number_for_each_example() -> None:
    assert ask(lambda output: output[:, 1], LOGITS, 2).tolist() == [3.0, 0.0]
    with pytest.raises(TargetError, match=r"a tensor of 2; found \(\). Do not sum over the batch"):
        ask(torch.sum, LOGITS, 2)
    assert float(ask(torch.sum, LOGITS, 2, whole=True)) == 7.0
    with pytest.raises(TargetError, match="or one element for them all; found float"):
        ask(lambda output: 1.0, LOGITS, 2, whole=True)


# -- scores -----------------------------------------------------------------------------------------


def test_scores_are_of_the_classes_of_the_first_output() -> None:
    scores = Scores(None, LOGITS, 2)
    assert scores.classes == [1, 0]
    assert scores(LOGITS).tolist() == [3.0, 2.0]
    assert scores(LOGITS.flip(1)).tolist() == [3.0, 1.0]


def test_variants_of_one_example_are_asked_about_its_class() -> None:
    variants = torch.arange(12.0).reshape(4, 3)
    assert Scores([2, 0], LOGITS, 2)(variants, example=0).tolist() == [2.0, 5.0, 8.0, 11.0]
    asked = Scores(lambda output: output.sum(1), LOGITS, 2)
    assert asked.classes is None
    assert asked(variants, example=1).tolist() == [3.0, 12.0, 21.0, 30.0]


def test_rows_that_are_not_the_examples_need_a_function() -> None:
    with pytest.raises(TargetError, match="the output has 2 rows for 3 examples; give a function"):
        Scores(1, LOGITS, 3)


# -- names of classes -------------------------------------------------------------------------------


def test_a_model_of_torchvisions_has_the_names_of_its_weights_where_the_number_of_classes_fits() -> None:
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    written = models.ResNet18_Weights.DEFAULT.meta["categories"]
    found = torchvision_labels(models.resnet18(), torch.zeros(1, 1000))
    assert found == written
    assert name_of(285, found) == "Egyptian cat (285)"
    assert torchvision_labels(models.resnet18(num_classes=10), torch.zeros(1, 10)) is None
    assert torchvision_labels(nn.Linear(2, 1000), torch.zeros(1, 1000)) is None
    assert torchvision_labels(models.resnet18(), torch.zeros(1, 1000, 7, 7)) is None


def test_models_of_videos_have_the_names_of_their_own_data_set() -> None:
    video = pytest.importorskip("torchvision.models.video", reason="torchvision is not installed")
    found = torchvision_labels(video.r3d_18(), torch.zeros(1, 400))
    assert found == video.R3D_18_Weights.DEFAULT.meta["categories"]

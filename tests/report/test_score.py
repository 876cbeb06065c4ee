"""What the gradients are of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torchhook._report.score import likely, score

LOGITS = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])


def test_the_most_likely_class_of_each_row_is_the_default() -> None:
    found = score(LOGITS, None)
    assert float(found.value) == 5.0
    assert found.label == 1
    assert found.text == "each sample's most likely class, summed over the batch"
    assert score(LOGITS[:1], None).text == "class 1, the most likely"
    assert score(LOGITS, 2).text == "class 2, summed over the batch"


def test_a_class_can_be_chosen_from_the_end_too() -> None:
    assert float(score(LOGITS, -1).value) == 2.0
    assert score(LOGITS, -1).label == 2


def test_a_class_that_is_not_there_is_an_error_with_the_range() -> None:
    with pytest.raises(ValueError, match="target=7: the model has 3 classes, 0 to 2"):
        score(LOGITS, 7)


def test_a_function_of_the_output_is_a_target() -> None:
    assert float(score(LOGITS, lambda output: output.sum()).value) == 7.0
    with pytest.raises(ValueError, match="one element"):
        score(LOGITS, lambda output: output)


def test_a_language_model_is_asked_about_its_last_token() -> None:
    logits = torch.zeros(1, 4, 6)
    logits[0, 3, 5] = 9.0
    logits[0, 0, 1] = 99.0
    assert score(SimpleNamespace(logits=logits), None).label == 5


def test_what_has_no_classes_is_scored_by_its_mean_square() -> None:
    found = score(torch.full((1, 2, 4, 4), 3.0), None)
    assert float(found.value) == 9.0
    assert found.label is None
    with pytest.raises(ValueError, match="no classes"):
        score(torch.zeros(1, 2, 4, 4), 1)


def test_shares_are_a_softmax_with_the_names_that_were_given() -> None:
    found = likely(torch.tensor([[0.0, 0.0, 100.0]]), ["a", "b", "c"], 1)
    assert found == [("c (2)", pytest.approx(1.0))]
    assert likely(torch.tensor([[float("nan"), 1.0]]), None) == []


def test_a_function_may_return_a_number_for_each_sample() -> None:
    def first(output: torch.Tensor) -> torch.Tensor:
        return output[:, 0]

    found = score(LOGITS, first, examples=2)
    assert (float(found.value), found.text, found.each) == (2.0, "first(output), summed over the batch", True)
    assert not score(LOGITS, torch.sum, examples=2).each


def test_each_sample_may_have_a_class_of_its_own() -> None:
    found = score(LOGITS, [2, 0])
    assert (float(found.value), found.label) == (3.0, 2)
    assert found.text == "each sample's own class, summed over the batch"
    assert score(LOGITS[:1], [2]).text == "class 2"


def test_one_number_is_a_class_where_it_is_asked_for() -> None:
    one = torch.tensor([[3.0]])
    assert score(one, None).text == "the mean square of the output"
    assert score(one, 0) == (3.0, "class 0", 0, True)
    assert likely(one, None) == []

"""Numbers in one tensor: whatever mode they are put together in, and however many there are."""

from __future__ import annotations

import torch

from torchhook._watch import joining
from torchhook._watch.joining import Joiner


def numbers(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def test_what_was_joined_stays_when_more_is_joined() -> None:
    joiner = Joiner()
    found = [joiner.join(numbers(i, i + 1)) for i in range(3)]
    assert [tensor.tolist() for tensor in found] == [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    assert joiner.join([torch.tensor(7)]).tolist() == [7]


def test_numbers_are_joined_in_inference_mode_and_outside_of_it() -> None:
    joiner = Joiner()
    with torch.inference_mode():
        assert joiner.join(numbers(1.0, 2.0)).tolist() == [1.0, 2.0]
    assert joiner.join(numbers(3.0, 4.0)).tolist() == [3.0, 4.0]
    with torch.inference_mode():
        assert joiner.join(numbers(5.0, 6.0)).tolist() == [5.0, 6.0]


def test_numbers_with_a_history_are_joined_without_it() -> None:
    joiner, leaf = Joiner(), torch.ones((), requires_grad=True)
    for _ in range(2):
        found = joiner.join([leaf * 2, leaf * 3])
        assert found.tolist() == [2.0, 3.0]
        assert not found.requires_grad


def test_few_sizes_are_remembered() -> None:
    joiner = Joiner()
    for size in range(1, 50):
        assert joiner.join(numbers(*range(size))).tolist() == list(range(size))
        assert len(joiner._known) <= joining._KNOWN

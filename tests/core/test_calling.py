"""Running a model without leaving anything behind."""

from __future__ import annotations

import random
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchhook._core.calling import arguments, call, evaluating, mode, random_numbers, undisturbed
from torchhook._values.tree import Inputs


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (1, Inputs((1,), {})),
        ([1, 2], Inputs(([1, 2],), {})),
        ((1, 2), Inputs((1, 2), {})),
        ({"a": 1}, Inputs((), {"a": 1})),
        (UserDict(a=1), Inputs((), {"a": 1})),
        (Inputs((1,), {"a": 2}), Inputs((1,), {"a": 2})),
    ],
    ids=["one", "list", "tuple", "dict", "tokenised batch", "both"],
)
def test_inputs_become_arguments(inputs: Any, expected: Inputs) -> None:
    assert arguments(inputs) == expected


def test_a_model_that_writes_to_its_input_writes_to_a_copy() -> None:
    x = -torch.ones(2)
    assert call(nn.ReLU(inplace=True), arguments(x)).tolist() == [0, 0]
    assert x.tolist() == [-1, -1]


def test_every_generator_goes_back() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    restore = random_numbers()
    first = draw()
    restore()
    assert draw() == first


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return self.norm(x)


def test_buffers_that_moved_or_were_replaced_come_back_the_same_objects() -> None:
    model = Buffers()
    before = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in before.items()}
    with undisturbed(model) as restore:
        model(torch.randn(4, 3))
        assert model.steps.item() == 1
        restore()
        assert model.steps.item() == 0
        model(torch.randn(4, 3))
    after = dict(model.named_buffers())
    assert all(after[name] is before[name] and torch.equal(after[name], values[name]) for name in before)


def test_an_error_passes_after_everything_is_back() -> None:
    model, state = Buffers(), torch.get_rng_state()

    def fail() -> None:
        with undisturbed(model):
            model(torch.randn(4, 3))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert model.norm.num_batches_tracked.item() == 0
    assert torch.equal(state, torch.get_rng_state())


def test_evaluation_mode_ends_with_the_block_however_it_ends() -> None:
    model = nn.Sequential(nn.Dropout(), nn.ReLU())
    model[1].training = False
    modes = []

    def fail() -> None:
        modes.extend(module.training for module in model.modules())
        raise KeyError

    with pytest.raises(KeyError), evaluating(model):
        fail()
    assert modes == [False, False, False]
    assert [module.training for module in model.modules()] == [True, True, False]


def test_training_mode_ends_with_the_block_too() -> None:
    model = nn.Sequential(nn.Dropout(), nn.ReLU()).eval()
    model[1].training = True
    with mode(model, training=True):
        assert all(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [False, False, True]

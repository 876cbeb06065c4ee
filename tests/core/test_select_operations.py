"""Operations in selectors: which of them can be chosen, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchhook as th
from torchhook.errors import SelectorError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc(x))


MODEL = nn.Sequential(Block(), Block())
X = torch.ones(1, 2)


@pytest.mark.parametrize("selector", ["0/*", "0/ge*", "*/*", "0/*:input", "0/*#0", "**/g?lu"])
def test_a_glob_of_operations_is_refused_with_what_is_possible(selector: str) -> None:
    tools: list[Any] = [
        lambda: th.capture(MODEL, selector),
        lambda: th.edit(MODEL, {selector: th.edits.zero()}),
        lambda: th.diff(MODEL, MODEL, X, sites=selector),
        lambda: th.watch(MODEL, selector),
    ]
    for tool in tools:
        with pytest.raises(SelectorError, match=r"cannot be chosen by a glob.*th\.ops\(model, inputs\)") as error:
            tool()
        assert repr(selector) in str(error.value)


def test_an_operation_of_several_modules_is_chosen_by_a_glob_of_these() -> None:
    _, rec = th.run(MODEL, X, capture="*/gelu")
    assert rec.keys() == ["0/gelu", "1/gelu"]


def test_a_module_whose_name_looks_like_that_is_itself() -> None:
    model = nn.Sequential()
    model.add_module("a/*", nn.Linear(2, 2))
    _, rec = th.run(model, X, capture="a/*")
    assert rec.keys() == ["a/*"]

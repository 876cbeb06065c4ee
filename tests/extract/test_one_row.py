"""Which dim are the rows, where sizes do not tell: one row alone does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchhook._extract.api import extract
from torchhook.errors import ExtractError


class Gated(nn.Module):
    """A vector of weights that has no rows, beside a number for each row."""

    def __init__(self):
        super().__init__()
        self.gate, self.weights, self.score = nn.Softmax(0), nn.Parameter(torch.randn(8)), nn.Flatten(0)

    def forward(self, x):
        return self.score((x * self.gate(self.weights)).sum(1))


def test_a_vector_that_is_as_long_as_the_batch_is_no_rows(tmp_path):
    x, model = torch.randn(32, 8), Gated()
    with pytest.raises(ExtractError, match="tried with one row"):
        extract(model, x, "gate", tmp_path / "gate", batch_size=8, progress=False)
    store = extract(model, x, "score", tmp_path / "score", batch_size=8, progress=False)
    assert torch.equal(store["score"][:], model(x).detach())

"""Paths that a patch cannot take: what comes after the sites that it should go through is told of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.language_models import small_gpt2
from torchhook._sweep.api import sweep


class Shared(nn.Module):
    """One layer that runs before and after another."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.between, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.twice(self.between(self.twice(x))))


def run(model: nn.Module, sites: Any, through: Any, **options: Any) -> Any:
    clean, corrupted = torch.randn(2, 1, 4, 3, generator=torch.Generator().manual_seed(0))
    return sweep(model, clean, corrupted, torch.sum, sites=sites, through=through, progress=False, dim=None, **options)


@pytest.mark.parametrize("estimate", [None, "gradient"])
def test_a_site_after_those_it_should_go_through_is_told(estimate: Any) -> None:
    torch.manual_seed(0)
    model = Shared()
    found = run(model, ["between", "last"], "between", estimate=estimate)
    assert any("1 site of 2 comes after all that through= names ('last')" in note for note in found.notes)
    assert found.values[1, 0].item() == pytest.approx(found.corrupted)
    assert found.values[0, 0].item() != pytest.approx(found.corrupted)
    assert "comes after" in str(found)


def test_each_call_has_its_own_place_in_the_order() -> None:
    torch.manual_seed(0)
    found = run(Shared(), "twice", "between")
    assert found.sites == ["twice#0", "twice#1"]
    (note,) = found.notes
    assert "1 site of 2" in note
    assert "'twice#1'" in note
    # Of a site that runs twice, the last call counts.
    assert not run(Shared(), ["twice", "between"], "twice").notes
    assert not run(Shared(), "between:input", "between").notes
    assert run(Shared(), "between", "between:input").notes


def test_a_path_that_there_is_needs_no_note() -> None:
    model, call = small_gpt2()
    ids = call["input_ids"]

    def metric(output: Any) -> Tensor:
        return output.logits[0, -1, 3]

    options: dict[str, Any] = {"progress": False, "positions": [0]}
    fine = sweep(model, ids[:1], ids[1:], metric, sites="@resid_post.0", through=["@mlp_out.1", "@embed"], **options)
    assert not fine.notes
    late = sweep(model, ids[:1], ids[1:], metric, sites="@resid_post.*", through="@attn_out.1", **options)
    assert len(late.notes) == 1
    assert "'@resid_post.1'" in late.notes[0]

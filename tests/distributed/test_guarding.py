"""Guards on two ranks: what is blamed was spoilt by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.distributed.models import batch, net
from tests.distributed.ranks import Results

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(results: Callable[[str], Results]) -> Results:
    return results("tests.distributed.guarding")


@pytest.mark.shows("Sharded training: guard")
def test_a_bad_weight_is_named_and_not_what_gathers_it(found: Results) -> None:
    for findings in found["weights"]:
        assert len(findings) == 6
        for (_, site), blamed in findings.items():
            module = site.rpartition(".")[0]
            assert blamed == [("parameter", site, f"{module}/linear#0")]


def test_nothing_is_found_where_nothing_is_wrong(found: Results) -> None:
    assert found["nothing_is_found_in_sound_models"] == [[], []]


def test_a_bad_gradient_is_the_losses_fault(found: Results) -> None:
    assert found["gradients"] == [{kind: [("loss", "backward")] for kind in ("ddp", "fsdp1", "fsdp2")}] * 2


@pytest.mark.shows("Sharded training: guard")
def test_a_rank_that_raises_says_so_to_those_that_wait_for_it(found: Results) -> None:
    raised, heard = found["a_rank_raises"]
    assert "This is rank 0 of 2" in raised
    assert len(heard) == 1
    assert "the guard of another rank has raised" in heard[0]
    assert "rank 0: <Finding: an input of the model already holds it (input: 1 NaN)" in heard[0]


def test_one_rank_repeats_what_needs_no_other_and_says_where_it_cannot(found: Results) -> None:
    first, second = found["one_rank_repeats"]
    assert first[True, False] == [("2/div#0", "")]
    assert first[True, True] == [("2#0", "it needs the other ranks")]
    assert first[False, False] == [("2/sqrt#0:grad_input", "")]
    ((site, why),) = first[False, True]
    assert site in ("module.0.weight:grad", "0.weight:grad", "0.bias:grad")
    assert why == "it needs the other ranks"
    # Its gradients came together with the bad ones of the other rank; its own were good.
    assert second == {key: [] for key in first}


def test_operations_of_fsdp_are_not_the_models(found: Results) -> None:
    for values, x in zip(found["operations_are_the_models_own"], batch().chunk(2), strict=True):
        model = net()
        hidden = torch.relu(model.blocks[0].a(x))
        torch.testing.assert_close(values["blocks.0/relu"], hidden.detach())
        torch.testing.assert_close(values["blocks.1/add"], model.blocks(x).detach())

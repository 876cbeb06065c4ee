"""Guards on two ranks: what is blamed was spoilt by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.distributed.guarding import MANNERS
from tests.distributed.models import WRAPPED, batch, net
from tests.distributed.ranks import Results

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(results: Callable[[str], Results]) -> Results:
    return results("tests.distributed.guarding")


@pytest.mark.shows("Sharded training: guard")
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_bad_weight_is_named_and_not_what_gathers_it(found: Results, kind: str) -> None:
    for findings in found[f"weights_{kind}"]:
        assert len(findings) == 2
        for site, blamed in findings.items():
            module = site.rpartition(".")[0]
            assert blamed == [("parameter", site, f"{module}/linear#0")]


@pytest.mark.parametrize("kind", WRAPPED)
def test_nothing_is_found_where_nothing_is_wrong(found: Results, kind: str) -> None:
    assert found[f"nothing_is_found_in_sound_models_{kind}"] == [[], []]


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_bad_gradient_is_the_losses_fault(found: Results, kind: str) -> None:
    assert found[f"gradients_{kind}"] == [[("loss", "backward")]] * 2


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
    assert second == {key: [("0.weight:grad", "")] for key in first}


@pytest.mark.parametrize("manner", MANNERS)
def test_what_another_rank_brought_is_told_before_backward_returns(found: Results, manner: str) -> None:
    (passes, findings), (others, blamed) = found[f"what_another_rank_brought_{manner}"]
    assert passes == others == [("", True), ("", False), ("", True)]  # the second was spoilt, on both ranks
    assert [(kind, run, times) for kind, _, run, times, _ in findings] == [("rank", 1, 1)]
    assert findings[0][1] in ("blocks.0.a.weight:grad", "_flat_param:grad")
    assert "it came from another rank, for what this one gave was finite" in findings[0][4]
    assert [(kind, run, times) for kind, _, run, times, _ in blamed] == [("loss", 1, 1)]


def test_what_another_rank_brought_to_the_first_pass_of_a_static_graph_is_told(found: Results) -> None:
    assert found["what_another_rank_brought_to_a_static_graph"] == [[("rank", "backward")], [("loss", "backward")]]


@pytest.mark.shows("Sharded training: guard")
def test_no_rank_steps_with_what_another_has_spoilt(found: Results) -> None:
    (passes, _), (others, _) = found["what_another_rank_brought_raises"]
    assert len(passes) == len(others) == 2  # and no third
    assert "came from another rank" in passes[1][0]
    assert "Look at what the guards of the other ranks found." in passes[1][0]
    assert "the loss, outside the model, made it" in others[1][0]


def test_gradients_that_are_kept_are_no_new_fault_and_those_of_each_rank_are_its_own(found: Results) -> None:
    assert found["what_stays_bad_is_nobodys_fault_again"] == [
        [[("loss", 1)], [("rank", 1)]],
        [[("loss", 1)], [("loss", 1)]],
    ]
    assert found["each_rank_accumulates_by_itself"] == [[("rank", 2)], [("loss", 0)]]


def test_operations_of_fsdp_are_not_the_models(found: Results) -> None:
    for values, x in zip(found["operations_are_the_models_own"], batch().chunk(2), strict=True):
        model = net()
        hidden = torch.relu(model.blocks[0].a(x))
        torch.testing.assert_close(values["blocks.0/relu"], hidden.detach())
        torch.testing.assert_close(values["blocks.1/add"], model.blocks(x).detach())

"""The gradients of parameters on two ranks, against those of a single process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchhook as th
from tests.distributed.gradients import EDITS, SITES
from tests.distributed.models import batch, loss, net
from tests.distributed.ranks import Results

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(results: Callable[[str], Results]) -> Results:
    return results("tests.distributed.gradients")


def alone(x: Tensor) -> dict[str, Tensor]:
    model = net()
    loss(model(x)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.shows("Sharded training: gradients of parameters, in full")
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_full_gradients_are_those_of_a_single_process(found: Results, kind: str) -> None:
    expected = alone(batch())
    for captured, after in found[f"full_of_{kind}"]:
        assert list(captured) == SITES
        for site in SITES:
            close(captured[site], expected[site.removesuffix(":grad")])
        close(after, expected)  # and nothing was changed on the way


@pytest.mark.shows("Sharded training: gradients of parameters, local")
def test_under_ddp_the_local_gradient_is_that_of_the_ranks_own_batch(found: Results) -> None:
    for (captured, after), x in zip(found["local_of_ddp"], batch().chunk(2), strict=True):
        mine = alone(x)
        for site in SITES:
            close(captured[site], mine[site.removesuffix(":grad")])
        close(after, alone(batch()))


@pytest.mark.shows("Sharded training: gradients of parameters, local")
def test_under_fsdp1_the_local_gradient_is_a_piece_of_the_reduced_one(found: Results) -> None:
    expected = alone(batch())
    pieces = [captured for captured, _ in found["local_of_fsdp1"]]
    for site in SITES:
        close(torch.cat([piece[site] for piece in pieces]), expected[site.removesuffix(":grad")].flatten())


@pytest.mark.shows("Sharded training: gradients of parameters, local")
def test_under_fsdp2_the_local_gradient_is_a_dtensor_of_the_reduced_one(found: Results) -> None:
    expected = alone(batch())
    ranks = [captured for captured, _ in found["local_of_fsdp2"]]
    for site in SITES:
        name = site.removesuffix(":grad")
        close(torch.cat([part[site][0] for part in ranks]), expected[name])
        for part in ranks:
            close(part[site][1], expected[name])


def test_a_session_may_open_while_fsdp2_holds_whole_weights(found: Results) -> None:
    expected = alone(batch())
    for captured in found["after_an_evaluation"]:
        for site in SITES:
            close(captured[site], expected[site.removesuffix(":grad")])


def test_every_pass_is_a_call(found: Results) -> None:
    expected = alone(batch())["head.weight"]
    for calls in found["several_passes"]:
        close(calls, [expected] * 3)


@pytest.mark.shows("Sharded training: edits of gradients")
@pytest.mark.parametrize("kind", ["ddp", "ddp_in_buckets", "ddp_static_graph", "fsdp1", "fsdp2"])
def test_edited_gradients_are_those_of_a_single_process(found: Results, kind: str) -> None:
    model = net()
    with th.edit(model, EDITS):
        loss(model(batch())).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for after in found[f"edited_{kind}"]:
        close(after, expected)


def test_with_an_edit_at_the_site_what_is_kept_is_what_the_optimizer_sees(found: Results) -> None:
    expected = 2 * alone(batch())["head.weight"]
    for captured, after in found["captured_and_edited"]:
        close(captured, expected)
        close(after, expected)


@pytest.mark.shows("Sharded training: one rank alone that captures")
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_one_rank_alone_may_capture_what_it_has(found: Results, kind: str) -> None:
    assert found[f"one_rank_captures_its_part_{kind}"] == [5, "no session"]


@pytest.mark.shows("Sharded training: one rank alone that wants the full gradient", error="SessionError")
def test_one_rank_alone_that_wants_all_is_told_so_and_does_not_hang(found: Results) -> None:
    said, other = found["one_rank_wants_all"]
    assert other == "no session"
    assert "'head.weight:grad'" in said
    assert "rank 1 has nothing open" in said


def test_nothing_is_left_on_the_parameters(found: Results) -> None:
    assert found["nothing_is_left_behind"] == [(True, [0, 0])] * 2

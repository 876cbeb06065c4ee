"""Watching on two ranks, against a single process with the whole batch and against numbers computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.models import batch, loss, net
from tests.distributed.ranks import Results

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(results: Callable[[str], Results]) -> Results:
    return results("tests.distributed.watching")


def by_hand(steps: int) -> list[dict[str, tuple[float, float, float]]]:
    """Norm, gradient norm and relative update of each parameter, trained in one process."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shots = []
    for _ in range(steps):
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        loss(model(batch())).backward()
        optimizer.step()
        numbers = {}
        for name, p in model.named_parameters():
            assert p.grad is not None
            norm = before[name].norm().item()
            numbers[name] = norm, p.grad.norm().item(), (p.detach().double() - before[name]).norm().item() / norm
        shots.append(numbers)
    return shots


def check(history: Any, expected: list[dict[str, tuple[float, float, float]]]) -> None:
    for step, sites in history:
        for name, (norm, grad_norm, ratio) in expected[step].items():
            assert sites[name]["norm"] == pytest.approx(norm, rel=1e-4), name
            assert sites[name]["grad_norm"] == pytest.approx(grad_norm, rel=1e-3), name
            assert sites[name]["update_ratio"] == pytest.approx(ratio, rel=1e-3), name


@pytest.mark.shows("Sharded training: watch for 100 steps")
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_a_hundred_steps_have_the_norms_of_a_single_process(found: Results, kind: str) -> None:
    expected = by_hand(100)
    for history in found[f"with_{kind}"]:
        assert [step for step, _ in history] == list(range(0, 100, 10))
        check(history, expected)


def test_every_step_may_be_measured(found: Results) -> None:
    for history in found["every_step_of_fsdp2"]:
        assert [step for step, _ in history] == list(range(5))
        check(history, by_hand(5))


def test_a_watch_may_open_while_fsdp2_holds_whole_weights(found: Results) -> None:
    for history in found["after_an_evaluation"]:
        check(history, by_hand(3))


@pytest.mark.shows("Sharded training: watch of flat parameters")
def test_flat_parameters_are_watched_as_the_vectors_that_they_are(found: Results) -> None:
    expected = by_hand(12)
    members = ("a.weight", "a.bias", "b.weight", "b.bias")
    for history in found["with_flat_fsdp1"]:
        for step, sites in history:
            norm, grad_norm = (math.hypot(*(expected[step][f"blocks.0.{name}"][i] for name in members)) for i in (0, 1))
            assert sites["blocks.0._flat_param"]["norm"] == pytest.approx(norm, rel=1e-4)
            assert sites["blocks.0._flat_param"]["grad_norm"] == pytest.approx(grad_norm, rel=1e-3)


def test_activations_are_those_of_the_ranks_own_batch(found: Results) -> None:
    for history, x in zip(found["with_fsdp2"], batch().chunk(2), strict=True):
        expected = net().blocks[0](x)
        assert history[0][1]["blocks.0"]["mean"] == pytest.approx(expected.mean().item(), rel=1e-4)
        assert history[0][1]["blocks.0"]["max"] == pytest.approx(expected.max().item(), rel=1e-4)


@pytest.mark.shows("Sharded training: one rank alone that watches")
def test_a_rank_that_watches_alone_is_told_so_and_nobody_waits(found: Results) -> None:
    (steps, said), other = found["one_rank_watches"]
    assert (steps, other) == (3, (0, []))
    assert len(said) == 1
    assert "another rank does not watch the same" in said[0]


def test_a_rank_that_stops_watching_leaves_the_others_their_own_numbers(found: Results) -> None:
    (first, said), (second, also) = found["one_rank_stops_watching"]
    assert (first, second) == (4, 2)
    assert len(said) == len(also) == 1


def test_a_parameter_that_is_a_site_is_counted_once(found: Results) -> None:
    weight = net().head.weight.detach()
    for sites in found["a_parameter_as_a_site"]:
        assert sites["head.weight"]["mean"] == pytest.approx(weight.mean().item(), rel=1e-4)
        assert sites["head.weight"]["norm"] == pytest.approx(weight.norm().item(), rel=1e-4)

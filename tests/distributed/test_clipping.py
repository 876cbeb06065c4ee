"""Limited gradients on two ranks, against a single process with the whole batch and torch's own limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.clipping import NORM, VALUE
from tests.distributed.models import Net, batch, loss, net
from tests.distributed.ranks import Results

pytestmark = pytest.mark.slow
KINDS = ["ddp", "fsdp1", "fsdp2"]


@pytest.fixture(scope="module")
def found(results: Callable[[str], Results]) -> Results:
    return results("tests.distributed.clipping")


def alone(passes: int = 1) -> Net:
    model = net()
    for _ in range(passes):
        loss(model(batch())).backward()
    return model


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def shortened(model: nn.Module) -> dict[str, Tensor]:
    nn.utils.clip_grad_norm_(model.parameters(), NORM)
    return grads(model)


def clamped(model: nn.Module) -> dict[str, Tensor]:
    nn.utils.clip_grad_value_(model.parameters(), VALUE)
    return grads(model)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def limited_on_all_ranks_alike(first: Any, second: Any) -> None:
    close(first, second)
    (norm, _), (value, _) = first
    close(norm, shortened(alone()))
    close(value, clamped(alone()))


@pytest.mark.shows("Sharded training: clipping by norm under DDP, FSDP1 and FSDP2")
@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_over_all_ranks_is_limited_as_torch_limits_it(found: Results, kind: str) -> None:
    for limited, free in found[f"norms_{kind}"]:
        close(limited, shortened(alone()))
        close(free, grads(alone()))  # and no longer once it is closed


@pytest.mark.shows("Sharded training: clipping by value")
@pytest.mark.parametrize("kind", KINDS)
def test_elements_are_limited_after_the_reduction(found: Results, kind: str) -> None:
    for limited, free in found[f"values_{kind}"]:
        close(limited, clamped(alone()))
        close(free, grads(alone()))


@pytest.mark.shows("Sharded training: clipping with gradient_as_bucket_view=True")
def test_gradients_that_are_views_of_buckets_are_limited_on_all_ranks_alike(found: Results) -> None:
    limited_on_all_ranks_alike(*found["in_buckets"])


def test_gradients_that_a_static_graph_reduces_at_the_end_of_its_first_pass_are_limited(found: Results) -> None:
    limited_on_all_ranks_alike(*found["static_graph"])


def test_flat_parameters_are_limited_by_their_norm_over_all_ranks(found: Results) -> None:
    assert found["flat"] == pytest.approx([NORM, NORM], rel=1e-4)


@pytest.mark.shows("Sharded training: gradient_clipper")
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_clipper_limits_what_the_optimizer_sees(found: Results, kind: str) -> None:
    for after in found[f"for_good_{kind}"]:
        close(after, clamped(alone()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_is_not_reduced_is_limited_with_the_one_that_is(found: Results, kind: str) -> None:
    for after in found[f"without_sync_{kind}"]:
        close(after, shortened(alone(passes=2)))


@pytest.mark.shows("Sharded training: one rank alone that clips", error="SessionError")
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_one_rank_alone_that_clips_is_told_so(found: Results, kind: str) -> None:
    said, other = found[f"one_rank_clips_{kind}"]
    assert other == "no error"
    assert said.startswith("the limit on gradients: it is shared with other ranks, and rank 1 has nothing open")


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_stay_together_while_they_train(found: Results, kind: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        loss(model(batch())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
    optimizer.zero_grad()
    loss(model(batch())).backward()
    for after in found[f"trained_{kind}"]:
        torch.testing.assert_close(after, grads(model), rtol=1e-3, atol=1e-5)

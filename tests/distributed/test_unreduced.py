"""Parameters that some ranks do not use, and ``no_sync``, on two ranks, against a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.models import batch, loss, net
from tests.distributed.ranks import Results
from tests.distributed.unreduced import EDITED, NORM, PASSES, VALUE, skipping

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(results: Callable[[str], Results]) -> Results:
    return results("tests.distributed.unreduced")


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def both() -> nn.Module:
    """What both ranks do, one after the other."""
    model = skipping()
    for rank, part in enumerate(batch().chunk(2)):
        model.skips = rank == 1
        (loss(model(part)) / 2).backward()
    return model


def accumulated() -> nn.Module:
    model = net()
    for part in range(PASSES):
        loss(model((part + 1) * batch())).backward()
    return model


@pytest.mark.shows("DDP: parameters that one rank does not use, clipped")
@pytest.mark.parametrize("how", ["norm", "value", "clipper"])
def test_a_rank_limits_what_only_the_others_used(found: Results, how: str) -> None:
    model = both()
    if how == "norm":
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
    else:
        nn.utils.clip_grad_value_(model.parameters(), VALUE)
    for result in found[f"unused_and_limited_{how}"]:
        close(result, [grads(model)] * 2)


def test_a_rank_edits_what_only_the_others_used(found: Results) -> None:
    expected = {name: grad * (3 if name in EDITED else 1) for name, grad in grads(both()).items()}
    for result in found["unused_and_edited"]:
        close(result, expected)


def test_a_rank_captures_whole_what_only_the_others_used(found: Results) -> None:
    for captured, after in found["unused_and_captured"]:
        close(captured, grads(both()))
        close(after, grads(both()))


def test_a_gradient_that_an_earlier_pass_left_is_not_that_of_a_pass_that_made_none(found: Results) -> None:
    assert found["unused_by_all"] == [1, 1]


@pytest.mark.shows("FSDP1: no_sync, clipped")
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1_flat", "fsdp1_whole", "fsdp1_flat_whole"])
def test_passes_without_a_reduction_are_limited_with_the_one_that_reduces(found: Results, kind: str) -> None:
    norm = float(torch.stack([grad.norm() for grad in grads(accumulated()).values()]).norm())
    limited = accumulated()
    nn.utils.clip_grad_value_(limited.parameters(), VALUE)
    small = float(torch.stack([grad.norm() for grad in grads(limited).values()]).norm())
    for result in found[f"accumulated_{kind}"]:
        assert result[""][0] == pytest.approx(norm, rel=1e-4)
        assert result["norm"][0] == pytest.approx(NORM, rel=1e-4)
        assert result["value"] == pytest.approx((small, VALUE), rel=1e-4)


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1_whole"])
def test_passes_without_a_reduction_are_captured_with_the_one_that_reduces(found: Results, kind: str) -> None:
    for result in found[f"accumulated_and_captured_{kind}"]:
        close(result, {name: [grad] for name, grad in grads(accumulated()).items()})


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1_whole"])
def test_passes_without_a_reduction_are_edited_with_the_one_that_reduces(found: Results, kind: str) -> None:
    model, more = accumulated(), net()
    loss(more(0 * batch())).backward()
    expected = {name: 3 * grads(model)[name] + grads(more)[name] for name in EDITED}
    for result in found[f"accumulated_and_edited_{kind}"]:
        close(result, expected)

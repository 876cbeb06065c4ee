"""Forward passes that end early on two ranks, against a single process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchhook as th
from tests.distributed.models import Net, batch, loss, net
from tests.distributed.ranks import Results
from tests.distributed.stopping import MODELS, SITES, WAYS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(results: Callable[[str], Results]) -> Results:
    return results("tests.distributed.stopping")


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def seen(model: Net, site: str) -> Tensor:
    with torch.no_grad():
        block, x = model.blocks[0], batch()
        return {
            "blocks.0.a": block.a,
            "blocks.0:input": lambda x: x,
            "blocks.0/relu": lambda x: torch.relu(block.a(x)),
            "blocks.0": block,
        }[site](x)


@pytest.mark.shows("Sharded training: stop=True leaves the weights as a whole pass does")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_seen_to_change_after_a_pass_that_ended_early(found: Results, kind: str, way: str) -> None:
    model, site = net(), SITES.get(way, "blocks.0.a")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(batch())).backward()
        values += [seen(model, site)] * 2
        optimizer.step()
    expected = [*values, seen(model, site), model(batch()).detach()]
    for rank, result in enumerate(found[f"followed_{kind}"]):
        earlier, later, output, names = result[way]
        close([*earlier, later, output], [value.chunk(2)[rank] for value in expected])
        assert names == len(model.state_dict())


@pytest.mark.parametrize("kind", [kind for kind in MODELS if "2" in kind])
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("site", ["blocks.0.a", "blocks.1"])
def test_features_of_units_that_were_under_way_are_trained_on(
    found: Results, kind: str, attach: bool, site: str
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        with th.capture(model, site, keep="live") as rec:
            model(batch())
        loss(rec[site]).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    for result in found[f"trained_{kind}"]:
        close(result[attach, site], grads)


def test_what_is_around_the_model_that_is_listened_to_is_left_as_after_a_whole_pass(found: Results) -> None:
    model = net()
    loss(model(batch())).backward()
    first = model.blocks[0].a(batch()).detach()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for rank, (value, output) in enumerate(found["around"]):
        close([value, output], [first.chunk(2)[rank], model(batch()).detach().chunk(2)[rank]])


def test_weights_that_are_gathered_are_read_and_can_be_freed_afterwards(found: Results) -> None:
    model = net()
    loss(model(batch())).backward()
    for after in found["extracted_before"]:
        close(after, {name: p.grad for name, p in model.named_parameters()})

"""Training on two ranks without this library, against a single process: the ground on which the other tests stand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.distributed.models import WRAPPED, batch, loss, net
from tests.distributed.ranks import Results

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(results: Callable[[str], Results]) -> Results:
    return results("tests.distributed.training")


@pytest.mark.parametrize("kind", WRAPPED)
def test_ranks_train_as_a_single_process_does_without_torchhook(found: Results, kind: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(batch())).backward()
        optimizer.step()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for after, imported in found[f"trained_{kind}"]:
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-6)
        assert not imported

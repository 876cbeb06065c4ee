"""Whose memory a tensor is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchhook._values.memory import origin, reach, storage


def test_views_share_a_storage_and_copies_do_not() -> None:
    x = torch.zeros(4, 6)
    for view in (x[1:], x.T, x.view(-1), x.detach(), x[::2, 3]):
        assert storage(view) == storage(x)
    for copy in (x.clone(), x + 0, x.T.contiguous()):
        assert storage(copy) != storage(x)


def test_asking_does_not_end_copy_on_write() -> None:
    lazy = torch._lazy_clone(torch.zeros(3))
    assert storage(lazy) is not None
    assert torch._C._is_cow_tensor(lazy)


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.ones(2).to_mkldnn()], ids=["sparse", "mkldnn"])
def test_what_has_no_memory_of_its_own_has_no_identity(tensor: torch.Tensor) -> None:
    assert storage(tensor) is None
    assert origin(tensor) == (None, 0, False)
    assert reach(tensor) == range(1)


def test_a_parameter_and_its_views_are_learned() -> None:
    weight = nn.Parameter(torch.zeros(4, 3))
    assert origin(weight) == (storage(weight), 0, True)
    assert origin(weight[1]) == (storage(weight), 3, True)
    assert not origin(weight.detach() + 1).learned
    assert not origin(torch.zeros(3)).learned


def test_the_reach_is_from_the_first_element_to_the_last() -> None:
    x = torch.zeros(4, 6)
    assert reach(x) == range(24)
    assert reach(x[1]) == range(6, 12)
    assert reach(x[:, 2]) == range(2, 21)
    assert reach(x[:1, :1].expand(5, 5)) == range(1)
    assert reach(x[:0]) == range(1)

"""Grouped queries of one token that a kernel is given as (N, heads of keys, queries of each, D): heads and tokens are
those of the model all the same. The judge is the same attention with its keys repeated, and bare hooks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.models import PackedAttention
from torchhook import edits, transforms
from torchhook.errors import EditError, TransformError

FUSED = "attn/scaled_dot_product_attention"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = PackedAttention()

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        return self.attn(x, seen)  # type: ignore[no-any-return]


@pytest.fixture
def packed() -> Net:
    return Net().eval()


@pytest.fixture
def unpacked(packed: Net) -> Net:
    made = copy.deepcopy(packed)
    made.attn.packs = False
    return made


@pytest.fixture
def call() -> tuple[Tensor, Tensor]:
    seen = torch.randn(3, 6, 32)
    return seen[:, -1:], seen


def zeroed_before_joining(net: Net, call: tuple[Tensor, Tensor], heads: list[int], rows: Any = slice(None)) -> Tensor:
    """The output where heads are zeros in what joins them, by a bare hook."""

    def zero(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        split = args[0].clone().unflatten(-1, (4, 8))
        for head in heads:
            split[rows, :, head] = 0
        return split.flatten(2)

    handle = net.attn.o_proj.register_forward_pre_hook(zero)
    try:
        return net(*call)
    finally:
        handle.remove()


@pytest.mark.parametrize("heads", [[0], [1], [2], [3], [1, 2]])
def test_an_edit_of_heads_changes_the_heads_of_the_queries(packed: Net, call: Any, heads: list[int]) -> None:
    with th.edit(packed, {FUSED: edits.only(edits.zero(), heads=heads)}):
        found = packed(*call)
    torch.testing.assert_close(found, zeroed_before_joining(packed, call, heads))


def test_rows_positions_and_heads_together(packed: Net, call: Any) -> None:
    with th.edit(packed, {FUSED: edits.only(edits.zero(), rows=[0, 2], positions=-1, heads=slice(1, 3))}):
        found = packed(*call)
    torch.testing.assert_close(found, zeroed_before_joining(packed, call, [1, 2], [0, 2]))
    with pytest.raises(EditError, match="positions=1 is outside of the 1 that there are"), torch.no_grad():
        with th.edit(packed, {FUSED: edits.only(edits.zero(), positions=1)}):
            packed(*call)


def test_queries_are_those_of_the_unpacked_call(packed: Net, unpacked: Net, call: Any) -> None:
    for heads in (0, 3, [1, 2]):
        kept = [
            th.run(net, *call, capture=f"{FUSED}:input.args.0", transform=transforms.only(heads=heads))[1]
            for net in (packed, unpacked)
        ]
        values = [next(iter(dict(rec.items()).values())) for rec in kept]
        torch.testing.assert_close(*values)


def test_an_edge_is_cut_for_the_heads_of_the_queries(packed: Net, unpacked: Net, call: Any) -> None:
    for chosen in ({}, {"heads": 1}, {"heads": [0, 3], "rows": 1}):
        cut = {f"{FUSED}:input": edits.block(queries=-1, keys=[0, 2], **chosen)}
        outputs = []
        for net in (packed, unpacked):
            with th.edit(net, cut):
                outputs.append(net(*call))
        torch.testing.assert_close(*outputs)
        assert not torch.equal(outputs[0], packed(*call))


def test_maps_have_the_heads_of_the_queries(packed: Net, unpacked: Net, call: Any) -> None:
    ours, theirs = (th.attention(net, call)["attn"] for net in (packed, unpacked))
    assert ours.shape == (3, 4, 1, 6)
    torch.testing.assert_close(ours, theirs)


def test_heads_of_a_whole_call_are_refused_where_they_may_be_packed(packed: Net, call: Any) -> None:
    with pytest.raises(EditError, match="may be one token's queries"):
        with th.edit(packed, {f"{FUSED}:input": edits.at("args.0", edits.only(edits.zero(), heads=1))}):
            packed(*call)
    with pytest.raises(TransformError, match=r"as ':input\.args\.0' does"):
        th.run(packed, *call, capture=f"{FUSED}:input", transform=transforms.only(heads=1))

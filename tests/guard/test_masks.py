"""Infinities that are there on purpose: masks in all their forms are no finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.guard.faults import INF, Apply, around, at_zero, one_zero
from torchhook._guard.api import guard
from torchhook.errors import GuardError


def _scores() -> Tensor:
    return torch.randn(2, 4, 4)


def _causal(fill: float = -INF) -> Tensor:
    return torch.full((4, 4), fill).triu(1)


def _weighted(scores: Tensor) -> Tensor:
    return scores.softmax(-1) @ torch.ones(4, 4)


def _banned(x: Tensor) -> Tensor:
    x = x * 1
    x[..., 2] = -INF
    return x


def _summed_masks(x: Tensor) -> Tensor:
    lowest = torch.finfo(x.dtype).min
    return _weighted(x + _causal(lowest).to(x.dtype) + _causal(lowest).to(x.dtype))


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_fill": lambda x: _weighted(x.masked_fill(_causal() < 0, -INF)),
    "masked_fill_": lambda x: _weighted((x * 1).masked_fill_(_causal() < 0, float("-inf"))),
    "where": lambda x: _weighted(torch.where(_causal() < 0, -INF, x)),
    "where with a tensor": lambda x: _weighted(torch.where(_causal() < 0, torch.tensor(-INF), x)),
    "added": lambda x: _weighted(x + _causal()),
    "added in place": lambda x: _weighted((x * 1).add_(_causal())),
    "scaled after": lambda x: _weighted((x + _causal()) / 2),
    "lowest number": lambda x: _weighted(x + _causal(torch.finfo(x.dtype).min)),
    "lowest number twice": _summed_masks,
    "lowest number in half": lambda x: _weighted((x.half() - 60).add(_causal(-65504.0).half()).float()),
    "log of zeros and ones": lambda x: _weighted(x + (_causal() == 0).float().log()),
    "set by index": lambda x: _weighted(_banned(x)),
    "scatter": lambda x: _weighted(x.scatter(-1, torch.zeros(2, 4, 1, dtype=torch.long), -INF)),
    "fused attention": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=_causal()),
    "log softmax": lambda x: (x + _causal()).log_softmax(-1).exp(),
    "left in the output": lambda x: _banned(x),
    "running maximum": lambda x: torch.maximum(torch.full_like(x, -INF), x),
    "largest unmasked": lambda x: x.masked_fill(x < 0, -INF).amax(-1).clamp(min=0),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_no_finding(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Apply(MASKS[name]))
    with guard(model) as g:
        output = model(_scores())
        output[output.isfinite()].sum().backward()
    assert g.findings == []


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda mask: mask.to(torch.half),
    "half": lambda mask: mask.half(),
    "type": lambda mask: mask.type(torch.half),
    "type_as": lambda mask: mask.type_as(torch.ones(1).half()),
}


@pytest.mark.parametrize("cast", CASTS)
def test_a_low_number_in_a_mask_may_become_infinite_in_a_cast(cast: str) -> None:
    model = nn.Sequential(Apply(lambda x: x.half() + CASTS[cast]((_causal() < 0) * -1e9)), nn.Softmax(dim=-1))
    with guard(model) as g:
        model(_scores())
    assert g.findings == []


def test_a_mask_may_come_from_outside_or_pass_through_modules_or_be_a_buffer() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("causal", _causal())
            self.make = Apply(lambda x, mask: (mask + 0, x + mask))
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            both, scores = self.make(x, mask + self.causal)
            return self.layer(scores.softmax(-1), src_mask=both)

    model = Masked()
    with guard(model) as g:
        model(_scores(), _causal()).sum().backward()
        model(x=_scores(), mask=_causal() + 1)  # named as one
    assert g.findings == []


def test_what_is_allowed_can_be_widened_and_narrowed() -> None:
    low, high = (
        around(lambda x: x.masked_fill(x == 0, -INF).relu()),
        around(lambda x: x.masked_fill(x == 0, INF).clamp(max=9)),
    )
    with guard(low) as g:
        low(one_zero(True))
    with guard(high, allow="inf") as h:
        high(one_zero(True))
    assert g.findings == h.findings == []
    unbounded = around(lambda x: x.masked_fill(x == 0, -INF))
    with pytest.raises(GuardError, match="masked_fill"):
        with guard(unbounded, allow=None):
            unbounded(one_zero(True))


class _UnseenLog(torch.autograd.Function):
    """Works in numpy, where no listener sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        numbers = x.detach().numpy()
        return torch.from_numpy(np.log(numbers, out=np.full_like(numbers, -INF), where=numbers > 0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_an_infinity_that_nobody_was_seen_to_write_is_the_modules() -> None:
    for bad in (True, False):
        model = at_zero(_UnseenLog.apply)(bad)
        model[2] = nn.Softmax(dim=-1)
        with guard(model, action="record") as g:
            model(torch.ones(2, 4))
        assert [(f.kind, str(f.site)) for f in g.findings] == [("module", "1#0")] * bad


def test_a_mask_may_be_kept_by_a_module_and_returned_as_it_is() -> None:
    mask = _causal()
    seen = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: (mask, x)), Apply(lambda both: both[1] + both[0]))
    made = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: (x + mask, x * 2)), Apply(lambda both: both[0].softmax(-1)))
    for model in (seen, made):
        with guard(model) as g:
            model(_scores())
        assert g.findings == []

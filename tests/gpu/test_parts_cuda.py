"""Parts of values and cut attention on a GPU, where kernels are chosen by what the call looks like."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th
from torchhook import edits

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # tests.gpu runs without pytest too
    pass


class Attention(nn.Module):
    """Eight heads of queries share two of keys and values."""

    def __init__(self, causal: bool, bias: bool) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = 8, 2, 64
        self.causal, self.bias = causal, bias
        self.q_proj, self.o_proj = nn.Linear(512, 512), nn.Linear(512, 512)
        self.k_proj, self.v_proj = nn.Linear(512, 128), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 64)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device) if self.bias else None
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=True)
        return self.o_proj(z.transpose(1, 2).flatten(2))

    def by_hand(self, x: Tensor, cut: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 64)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
        scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(64)
        if self.causal:
            cut = cut | ~torch.ones_like(cut).tril()
        z = scores.masked_fill(cut, -math.inf).softmax(-1).to(x.dtype) @ v
        return self.o_proj(z.transpose(1, 2).flatten(2))


def test_edges_are_cut_in_every_kernel() -> None:
    for dtype, near in ((torch.float32, 1e-4), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)):
        for causal, bias in ((True, False), (False, False), (False, True)):
            model = Attention(causal, bias).to("cuda", dtype)
            x = torch.randn(3, 37, 512, device="cuda", dtype=dtype)
            cut = torch.zeros(3, 8, 37, 37, dtype=torch.bool, device="cuda")
            cut[1:, 3, 5:, [0, 4]] = True
            block = edits.block(slice(5, None), [0, 4], heads=3, rows=[1, 2])
            with torch.no_grad(), th.edit(model, {"(model)/scaled_dot_product_attention:input": block}):
                found = model(x)
            expected = model.by_hand(x, cut)
            assert (found - expected).abs().max() < near, (dtype, causal, bias)
            assert (model(x) - expected).abs().max() > (found - expected).abs().max()


def test_parts_are_changed_as_indexing_does() -> None:
    model, x = Attention(True, False).cuda(), torch.randn(3, 37, 512, device="cuda")
    mask = torch.rand(3, 37) > 0.5
    for chosen, index in (
        ({"positions": [0, -1]}, (slice(None), [0, -1])),
        ({"positions": [[1], [5], [-1]]}, ([0, 1, 2], [1, 5, -1])),
        ({"positions": mask}, mask),
        ({"positions": mask.cuda(), "rows": 0}, (0, mask[0])),
    ):
        with torch.no_grad(), th.capture(model, "q_proj", edit={"q_proj": edits.only(edits.scale(3), **chosen)}) as rec:
            model(x)
        expected = model.q_proj(x)
        expected[index] *= 3
        assert torch.equal(rec["q_proj"], expected)
    with torch.no_grad(), th.capture(model, "k_proj", edit={"k_proj": edits.only(edits.zero(), heads=1)}) as rec:
        model(x)
    assert not rec["k_proj"][..., 64:].any()
    assert torch.equal(rec["k_proj"][..., :64], model.k_proj(x)[..., :64])


def test_a_slice_of_positions_makes_nobody_wait() -> None:
    model, x = Attention(True, False).cuda(), torch.randn(3, 37, 512, device="cuda")
    with torch.no_grad(), th.edit(model, {"o_proj:input": edits.only(edits.zero(), positions=-1, heads=2)}):
        model(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")

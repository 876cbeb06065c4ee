"""What must hold for a name: of a fused attention call, that queries, keys and values give what it returned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import torchhook as th


class Attention(nn.Module):
    def __init__(self, mask: str) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.mask = mask

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        tokens = x.shape[1]
        options = {
            "none": {},
            "causal": {"is_causal": True},
            "booleans": {"attn_mask": torch.ones(tokens, tokens, dtype=torch.bool).tril()},
            "numbers": {"attn_mask": torch.linspace(-2, 2, tokens * tokens).view(tokens, tokens)},
            "upper left": {"attn_mask": causal_upper_left(tokens, tokens)},
            "lower right": {"attn_mask": causal_lower_right(tokens, tokens)},
            "scaled": {"scale": 0.9},
        }[self.mask]
        return self.out(F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mask: str) -> None:
        super().__init__()
        self.attn = Attention(mask)
        self.ff = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ff(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mask", ["none", "causal", "booleans", "numbers", "upper left", "lower right", "scaled"])
def test_queries_keys_and_values_have_their_names_whatever_the_mask_is(mask: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(mask), Block(mask)).to(dtype).eval()
    x = torch.randn(2, 5, 8, dtype=dtype)
    names = th.roles(model, x)
    assert {f"@{kind}.{i}" for kind in "qkv" for i in (0, 1)} <= set(names), names
    with torch.no_grad():
        _, rec = th.run(model, x, capture=["@q.1", "@k.1", "@v.1"])
        expected = model[1].attn.heads(model[0](x))
    for kind, value in zip("qkv", expected, strict=True):
        assert torch.equal(rec[f"@{kind}.1"], value)

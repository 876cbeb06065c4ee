"""Blocks of unusual shapes: what is named in them is right, what is not clear is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th
from tests.roles_models import build


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _Attention(), _Attention()
        self.f, self.g = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.gate, self.share = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.3))
        self.n = nn.LayerNorm(8)


class FeedForwardFirst(_Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        return x + self.a(x)


class Macaron(_Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.f(x)
        x = x + self.a(x)
        return x + 0.5 * self.g(x)


class InPlace(_Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        x += self.f(x)
        return x


class AlphaOfAdd(_Block):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.add(x, self.a(x), alpha=0.5)
        return torch.add(x, self.f(x), alpha=0.5)


class CalledTwice(_Block):
    """What the first call of attention gives goes nowhere, and has the same address."""

    def forward(self, x: Tensor) -> Tensor:
        self.a(x)
        x = x + self.a(x)
        return x + self.f(x)


class Gated(_Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.sigmoid(self.gate(x)) * self.a(x)
        return x + self.f(x)


class Rezero(_Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.share * self.a(x)
        return x + self.share * self.f(x)


class StreamTwice(_Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x + self.a(x)
        return x + y + self.f(y)


class SideBySide(_Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.n(x)
        return x + self.a(h) + self.f(h)


class PostNorm(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.m = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x + self.a(x))
        return self.m(x + self.f(x))


STREAM = {"resid_pre": "0", "resid_post": "1"}
HEADS = {"z": "1.a.out:input", "q": "1.a/scaled_dot_product_attention:input.args.0"}
BOTH = {**STREAM, **HEADS, "attn_out": "1.a", "mlp_out": "1.f"}
EXPECTED: dict[type[nn.Module], dict[str, str]] = {
    FeedForwardFirst: BOTH,
    Macaron: {**STREAM, **HEADS, "attn_out": "1.a"},
    InPlace: {**BOTH, "resid_mid": "1/add"},
    AlphaOfAdd: {"resid_pre": "0", **HEADS},
    CalledTwice: {**STREAM, "resid_mid": "1/add(0)", "mlp_out": "1.f"},
    Gated: {**STREAM, "q": HEADS["q"], "resid_mid": "1/add(0)", "attn_out": "1/mul", "mlp_out": "1.f"},
    Rezero: {**STREAM, "q": HEADS["q"], "resid_mid": "1/add(0)", "attn_out": "1/mul(0)", "mlp_out": "1/mul(1)"},
    StreamTwice: STREAM,
    SideBySide: BOTH,
    PostNorm: {**BOTH, "resid_post": "1", "resid_mid": "1.n"},
}


@pytest.mark.parametrize("block", EXPECTED)
def test_each_name_stands_where_it_must_or_nowhere(block: type[nn.Module]) -> None:
    roles = th.roles(nn.Sequential(block(), block()), torch.randn(2, 5, 8))
    kinds = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "z", "router", "experts", "pattern")
    assert {kind: str(roles[f"{kind}.1"]) for kind in kinds if f"{kind}.1" in roles} == EXPECTED[block]
    assert all(f"{kind}.1" in roles.refused for kind in kinds if kind not in EXPECTED[block])


def test_a_stream_that_is_joined_from_elsewhere_between_blocks_is_none() -> None:
    class LongSkips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([FeedForwardFirst() for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            kept: list[Tensor] = []
            for i, block in enumerate(self.blocks):
                x = block(x + kept.pop() if i >= 2 else x)
                kept.append(x)
            return x

    roles = th.roles(LongSkips(), torch.randn(2, 5, 8))
    assert "resid_post.0" not in roles
    assert not len(roles)


def test_blocks_that_run_out_of_order_or_in_part_have_no_numbers() -> None:
    class Shuffled(nn.Module):
        def __init__(self, order: list[int]) -> None:
            super().__init__()
            self.blocks, self.order = nn.ModuleList([FeedForwardFirst() for _ in range(3)]), order

        def forward(self, x: Tensor) -> Tensor:
            for i in self.order:
                x = self.blocks[i](x)
            return x

    for order in ([2, 0, 1], [0, 2], [0, 1, 1, 2]):
        assert "resid_post.0" not in th.roles(Shuffled(order), torch.randn(2, 5, 8))
    assert th.roles(Shuffled([0, 1, 2]), torch.randn(2, 5, 8))["resid_post.2"] == "blocks.2"


class _PooledMixer(nn.Module):
    """Every token gets the mean of all: the same for equal tokens, wherever they are."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.up, self.down = dim, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x - x.mean(self.dim, keepdim=True))))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("batch", [1, 2])
def test_what_looks_along_the_tokens_is_no_feed_forward_part_whichever_dim_they_are(dim: int, batch: int) -> None:
    model = nn.Sequential(_PooledMixer(dim), _PooledMixer(dim))
    shape = (batch, 5, 8) if dim == 1 else (5, batch, 8)
    assert "from each token" in th.roles(model, torch.randn(shape)).refused["mlp_out.1"]


class _Scan(nn.Module):
    """Looks back only, as state spaces do; or ahead only."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.back, self.up, self.down = back, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h.cumsum(1) if self.back else h.flip(1).cumsum(1).flip(1)
        return x + self.down(torch.tanh(h))


@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_what_looks_back_or_ahead_only_is_no_feed_forward_part(back: bool, batch: int) -> None:
    model = nn.Sequential(_Scan(back), _Scan(back))
    assert "from each token" in th.roles(model, torch.randn(batch, 5, 8)).refused["mlp_out.0"]


def test_the_mixer_of_mamba_is_neither_attention_nor_a_feed_forward_part() -> None:
    roles = th.roles(build("mamba"))
    assert {name.rpartition(".")[0] for name in roles.sites if name[-1].isdecimal()} == {"resid_pre", "resid_post"}

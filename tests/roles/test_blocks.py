"""Blocks of unusual shapes: what is named in them is right, what is not clear is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th
from tests.roles_models import build
from torchhook.errors import SelectorError


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


class _DropPath(nn.Module):
    """Drops whole branches, in training mode only."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 0.5 * (torch.rand(x.shape[0], *[1] * (x.dim() - 1)) + 0.5).floor() if self.training else x


class DropPaths(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.r = _DropPath(), _DropPath()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.p(self.a(x))
        return x + self.r(self.f(x))


class OneDropPath(DropPaths):
    """One module for both branches, as in DINOv2: its address stands for two values."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.p(self.a(x))
        return x + self.p(self.f(x))


@pytest.mark.parametrize("block", [DropPaths, OneDropPath])
def test_what_is_dropped_while_training_is_named_where_it_was_dropped(block: type[nn.Module]) -> None:
    model = nn.Sequential(block(), block())
    roles = th.roles(model, torch.randn(6, 5, 8))
    assert roles.eval_only == {}
    for training in (True, False):
        with th.capture(model.train(training), [*roles]) as rec:
            model(torch.randn(6, 5, 8))
        torch.testing.assert_close(rec["@resid_pre.1"] + rec["@attn_out.1"], rec["@resid_mid.1"])
        torch.testing.assert_close(rec["@resid_mid.1"] + rec["@mlp_out.1"], rec["@resid_post.1"])


class InlineAttention(_Block):
    """With a mask, its first addition is that of the mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.a.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2)
        scores = scores if mask is None else scores + mask
        x = x + self.a.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.f(x)


class _Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *given)
        return x


def test_a_name_for_one_of_several_operations_is_an_error_where_there_are_more_or_less_of_them() -> None:
    model, x, mask = _Stack(InlineAttention(), InlineAttention()), torch.randn(2, 5, 8), torch.randn(5, 5)
    for inputs, others in (((x,), (x, mask)), ((x, mask), (x,))):
        th.roles(model, inputs)
        with th.capture(model, "@resid_mid.1", "@attn_out.1", "@resid_pre.1") as rec:
            model(*inputs)
        torch.testing.assert_close(rec["@resid_pre.1"] + rec["@attn_out.1"], rec["@resid_mid.1"])
        with pytest.raises(SelectorError, match=r"add runs . times.*now it ran . times.*th\.roles\(model, inputs\)"):
            with th.capture(model, "@resid_mid.1"):
                model(*others)
        with th.capture(model, "@resid_post.*", "@mlp_out.1") as rec:
            model(*others)
        assert len(rec) == 3


def test_what_goes_into_the_first_block_is_a_tensor_whatever_else_it_is_called_with() -> None:
    model, x, mask = _Stack(InlineAttention(), InlineAttention()), torch.randn(2, 5, 8), torch.randn(5, 5)
    for inputs, others in (((x,), (x, mask)), ((x, mask), (x,))):
        th.roles(model, inputs)
        with torch.no_grad(), th.capture(model, "@resid_pre.0") as rec:
            model(*others)
        assert torch.equal(rec["@resid_pre.0"], x)
        with torch.no_grad(), th.edit(model, {"@resid_pre.0": th.edits.scale(2.0)}):
            changed = model(*others)
        with torch.no_grad():
            assert torch.equal(changed, model(2 * x, *others[1:]))


class SmallAlpha(_Block):
    """What is added is half of what attention makes, and both are small beside the stream."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.add(x, self.a(x), alpha=0.5)
        return torch.add(x, self.f(x), alpha=0.5)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 0.1), (torch.float32, 0.0)])
def test_what_is_small_beside_the_stream_is_not_taken_for_what_is_added(dtype: torch.dtype, factor: float) -> None:
    model = nn.Sequential(SmallAlpha(), SmallAlpha()).to(dtype)
    with torch.no_grad():
        for block in model:
            for parameter in (*block.a.out.parameters(), *block.f[2].parameters()):
                parameter.mul_(factor)
    roles = th.roles(model, 100 * torch.randn(2, 5, 8, dtype=dtype))
    assert not {"attn_out.0", "attn_out.1", "mlp_out.0", "mlp_out.1"} & set(roles.sites)


class TwoParts(_Block):
    """The stream is kept in two parts, and the next block adds them up: neither is what stands between blocks."""

    def forward(self, x: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        x = x + more
        x = x + self.a(x)
        return x, self.f(x)


def test_a_stream_that_is_handed_on_in_two_parts_has_no_names() -> None:
    class Model(_Stack):
        def forward(self, x: Tensor, *given: Tensor) -> Tensor:
            more = torch.zeros_like(x)
            for block in self.blocks:
                x, more = block(x, more)
            return x + more

    assert not len(th.roles(Model(TwoParts(), TwoParts(), TwoParts()), torch.randn(2, 5, 8)))


class TokensFirst(_Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        x = x + self.a(x.transpose(0, 1)).transpose(0, 1)
        x = x + self.f(x)
        return x.transpose(0, 1)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_same_numbers_in_other_dims_are_not_the_stream(batch: int) -> None:
    roles = th.roles(nn.Sequential(TokensFirst(), TokensFirst()), torch.randn(batch, 5, 8))
    assert "resid_mid.1" not in roles
    assert "attn_out.1" not in roles


class StateBesideAttention(_Block):
    """As in Falcon-H1: something else is added to what attention makes."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.n(x)
        x = x + (self.gate(h).cumsum(1) + self.a(h))
        return x + self.f(x)


class AdaptedAttention(_Block):
    """With a low-rank adapter by hand, which is made from the same values of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.a.out = _Adapted(self.a.out)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        return x + self.f(x)


class _Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


def test_what_attention_adds_together_with_something_else_is_not_what_it_adds() -> None:
    x = torch.randn(2, 5, 8)
    mixed = th.roles(nn.Sequential(StateBesideAttention(), StateBesideAttention()), x)
    assert {"attn_out.1", "q.1", "z.1"} <= set(mixed.refused)
    assert mixed["resid_mid.1"] == "1/add(1)"
    assert th.roles(nn.Sequential(AdaptedAttention(), AdaptedAttention()), x)["attn_out.1"] == "1.a"


class ScoresInPlace(_Block):
    """A bias is added in place, and the product is written with einsum, as in LongT5."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.a.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        scores += torch.ones(5, 5)
        x = x + self.a.out(torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), v).flatten(2))
        return x + self.f(x)


class CrossByEinsum(_Block):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        q, _, _ = self.a.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        _, k, v = self.b.qkv(other).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
        x = x + self.a.out(torch.einsum("bhqk,bhkd->bqhd", weights, v).flatten(2))
        return x + self.f(x)


def test_attention_to_the_stream_and_to_something_else_are_told_apart() -> None:
    x = torch.randn(2, 5, 8)
    own = th.roles(nn.Sequential(ScoresInPlace(), ScoresInPlace()), x)
    assert own["attn_out.1"] == "1.a.out"
    assert "cross_attn_out.1" not in own
    cross = th.roles(_Stack(CrossByEinsum(), CrossByEinsum()), (x, torch.randn(2, 4, 8)))
    assert cross["cross_attn_out.1"] == "blocks.1.a.out"
    assert "attn_out.1" not in cross


def test_positions_that_are_given_are_not_taken_for_tokens() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(9, 8), nn.Embedding(50, 8)
            self.blocks = nn.Sequential(FeedForwardFirst(), FeedForwardFirst())

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return self.blocks(self.tokens(input_ids) + self.places(position_ids))

    ids = torch.randint(0, 9, (2, 5))
    roles = th.roles(Model(), {"input_ids": ids, "position_ids": torch.arange(5).expand(2, 5)})
    assert roles["embed"] == "tokens"

"""The norm behind the last block is final where the stream ends there, and not where one more block begins with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.roles_models import WIDTH, Attention, Block, FeedForward, hooked, language_model, made

IDS = torch.tensor([[5, 9, 33, 21, 40, 7], [8, 2, 13, 44, 49, 31]])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.inner(self.norm(x))
        return made


class Changing(nn.Module):
    """Its stream begins behind its norm, as where a stage of blocks has another width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.attn = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Attention()

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        made: Tensor = self.project(normed) + self.attn(normed)
        return made


class Then(nn.Module):
    """Blocks, and one more that is no member of their stack."""

    def __init__(self, more: nn.Module) -> None:
        super().__init__()
        self.embed, self.more, self.head = nn.Embedding(50, WIDTH), more, nn.Linear(WIDTH, 50)
        self.blocks = nn.ModuleList(Block(Attention(), FeedForward()) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.more(x))
        return logits


class Written(Then):
    """One more block, written where the others are called."""

    def __init__(self) -> None:
        super().__init__(Residual())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(0.5 * x + self.more.inner(self.more.norm(x)))
        return logits


@pytest.mark.parametrize(
    "model",
    [Then(Residual()), Then(Changing()), Then(Block(Attention(), FeedForward())), Written()],
    ids=["residual", "changing", "block", "written"],
)
def test_the_first_norm_of_one_more_block_is_not_final(model: nn.Module) -> None:
    roles = th.roles(model.eval(), IDS)
    assert "@norm_final" not in roles
    assert "on as a block does" in (why := roles.refused["norm_final"]) or "the stream goes on" in why
    assert "@resid_post.2" in roles


class Nested(nn.Module):
    """Stacks of two, of which each begins with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50)
        self.layers = nn.ModuleList(nn.ModuleList([Residual(), Residual()]) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for pair in self.layers:
            x = pair[1](pair[0](x))
        logits: Tensor = self.head(self.norm(x))
        return logits


def test_of_several_stacks_in_a_row_only_the_last_has_a_final_norm() -> None:
    roles = th.roles(Nested().eval(), IDS)
    assert {name: roles[name] for name in roles if "norm_final" in name} == {"@2.norm_final": "norm"}


class Head(nn.Module):
    """A norm of the head's own, and a feed-forward part behind it, is still behind the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(self.norm(x))
        return made


def test_the_norm_of_a_head_is_final() -> None:
    model = Then(Head()).eval()
    assert th.roles(model, IDS)["@norm_final"] == "more.norm"
    with torch.no_grad():
        _, rec = th.run(model, IDS, capture=["@norm_final"])
    assert torch.equal(rec["@norm_final"], *hooked(model, IDS, "more.norm"))
    assert th.roles(language_model(), IDS)["@norm_final"] == "2"


def test_the_first_norm_of_the_next_stage_of_an_image_model_is_not_final() -> None:
    sizes = {"image_size": [32, 32], "patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1]}
    stages = {"depths": [1, 2], "num_heads": [2, 4], "query_stride": [2, 2], "num_query_pool": 1}
    model = made("HieraForImageClassification", {**sizes, **stages, "embed_dim": 16, "masked_unit_size": [4, 4]})
    roles = th.roles(model, {"pixel_values": torch.randn(2, 3, 32, 32)})
    assert not [name for name in roles if "norm_final" in name]
    assert "goes on as a block does" in roles.refused["norm_final"]

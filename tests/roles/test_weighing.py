"""Experts are what scores weigh and a sum puts together: what comes behind that, or is chosen otherwise, is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th
from tests.roles_models import GROUPED, WIDTH, FeedForward, Mixture, hooked, language_model, made

IDS = torch.tensor([[5, 9, 33, 21, 40, 7], [8, 2, 13, 44, 49, 31]])


class ThenLinear(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.routed(x))
        return made


class ThenMatrix(ThenLinear):
    def forward(self, x: Tensor) -> Tensor:
        return self.routed(x) @ self.out.weight


class ThenResidual(ThenLinear):
    def forward(self, x: Tensor) -> Tensor:
        routed = self.routed(x)
        return routed + self.out(routed)


class ThenSums(ThenLinear):
    """A matrix, and a sum behind it that is none of experts."""

    def forward(self, x: Tensor) -> Tensor:
        wide = self.routed(x) @ self.out.weight.repeat(1, 2)
        return wide.unflatten(-1, (2, WIDTH)).sum(-2)


class ThenConvolution(Mixture):
    """Over tokens, so that it is no feed-forward part either."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        routed = self.routed(x)
        return routed + self.conv(F.pad(routed.transpose(1, 2), (2, 0))).transpose(1, 2)


class ThenActivation(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.routed(x))


class ThenGate(ThenLinear):
    def forward(self, x: Tensor) -> Tensor:
        return self.routed(x) * self.out(x).sigmoid()


class Latent(ThenLinear):
    """Experts of another space than the stream's."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.routed(x.flip(-1)))
        return made


class ThenScores(ThenLinear):
    """Weighed once more: what the second score weighs is no expert's."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.routed(x)) * self.gate(x).softmax(-1).topk(2)[0].sum(-1, keepdim=True)
        return made


class ThenHeads(Mixture):
    """As many matrices behind the sum as there are experts."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btd,hde->bthe", self.routed(x), self.heads).sum(-2)


BEHIND = [
    ThenHeads,
    ThenLinear,
    ThenMatrix,
    ThenResidual,
    ThenSums,
    ThenConvolution,
    ThenActivation,
    ThenGate,
    Latent,
]


@pytest.mark.parametrize("kind", BEHIND)
def test_what_comes_behind_the_experts_is_not_what_they_make(kind: type[Mixture]) -> None:
    roles = th.roles(language_model(mlp=kind), IDS)
    assert "@experts.1" not in roles
    assert "comes after what the experts make together" in roles.refused["experts.1"]
    assert roles["@router.1"] == "1.1.mlp.gate"


class Dense(Mixture):
    """All experts, weighed by what was chosen."""

    def routed(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(2, -1)
        weights = torch.zeros(*x.shape[:-1], len(self.experts)).scatter(-1, chosen, scores)
        return torch.einsum("bted,bte->btd", torch.stack([expert(x) for expert in self.experts], 2), weights)


class OneByOne(Mixture):
    def routed(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(2, -1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            made = made + expert(x) * (scores * (chosen == number)).sum(-1, keepdim=True)
        return made


@pytest.mark.parametrize("kind", [Dense, OneByOne])
def test_what_experts_make_together_has_its_name_however_it_is_summed(kind: type[Mixture]) -> None:
    model = language_model(mlp=kind)
    roles = th.roles(model, IDS)
    assert roles["@router.1"] == "1.1.mlp.gate"
    with torch.no_grad():
        _, rec = th.run(model, IDS, capture=["@experts.1"])
        (taken,) = hooked(model, IDS, "1.1.between")
        hand = model[1][1].mlp.routed(taken)
    torch.testing.assert_close(rec["@experts.1"].reshape(hand.shape), hand)


class Sparse(FeedForward):
    """The largest activations stay: no expert is chosen."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        values, chosen = hidden.topk(8, -1)
        made: Tensor = self.down(torch.zeros_like(hidden).scatter(-1, chosen, values.relu()))
        return made


class SparseGate(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        values, chosen = self.gate(x).topk(8, -1)
        made: Tensor = self.down(self.up(x) * torch.zeros(*x.shape[:-1], 2 * WIDTH).scatter(-1, chosen, values))
        return made


class Memory(nn.Module):
    """Looks values up by the best keys: rows of a matrix, that take nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.rows = nn.Linear(WIDTH, 64), nn.Embedding(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.keys(x).topk(4, -1)
        made: Tensor = (self.rows(chosen) * scores.softmax(-1)[..., None]).sum(-2)
        return made


@pytest.mark.parametrize("kind", [Sparse, SparseGate, Memory])
def test_where_a_choice_is_not_one_of_experts_there_is_no_router(kind: type[nn.Module]) -> None:
    roles = th.roles(language_model(mlp=kind), IDS)
    assert not {"@router.1", "@experts.1"} & set(roles)
    assert "by no score is anything weighed" in roles.refused["router.1"]
    assert "@mlp_out.1" in roles


class Twice(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return self.routed(self.routed(x))


@pytest.mark.parametrize("kind", [ThenScores, Twice])
def test_of_two_choices_none_is_taken_for_the_experts(kind: type[Mixture]) -> None:
    roles = th.roles(language_model(mlp=kind), IDS)
    assert not {"@router.1", "@experts.1"} & set(roles)
    assert "more than one choice" in roles.refused["experts.1"]


class Depths(FeedForward):
    """Some tokens go through it: what is chosen among is tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = (x @ self.score).topk(3, -1)
        places = chosen[..., None].expand(-1, -1, WIDTH)
        return torch.zeros_like(x).scatter_add(1, places, super().forward(x.gather(1, places)) * scores[..., None])


def test_a_choice_among_tokens_is_no_router() -> None:
    roles = th.roles(language_model(mlp=Depths), IDS)
    assert not {"@router.1", "@experts.1"} & set(roles)
    assert "2 times for 12 tokens" in roles.refused["router.1"]


SCONV = {"moe_intermediate_size": 24, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "layers_block_type": ["moe", "full_attention", "moe"],
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_shared_expert_intermediate_size": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "head_dim": 8,
    "moe_latent_size": 16,
}


@pytest.mark.parametrize(("kind", "config"), [("InklingForCausalLM", SCONV), ("NemotronHForCausalLM", LATENT)])
def test_models_of_transformers_with_more_behind_their_experts_have_no_name_for_these(
    kind: str, config: dict[str, Any]
) -> None:
    model = made(kind, {**GROUPED, **config})
    roles = th.roles(model, {"input_ids": IDS})
    assert [name for name in roles if "resid_post" in name]
    assert not [name for name in roles if "experts" in name]

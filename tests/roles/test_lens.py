"""The lens, judged by each model's own norm, head and soft cap, written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchhook as th
from tests.roles_models import MODELS, build
from torchhook._roles import probe
from torchhook.errors import MissingRecordError, SelectorError

IDS = torch.tensor([[5, 9, 33, 21, 60, 7], [8, 2, 13, 44, 50, 31]])
FAST = ("gpt2", "llama", "gemma2", "cohere", "t5", "bert")
WITHOUT = ("albert", "dinov2", "siglip", "vit", "deit", "beit")
LANGUAGE = [
    *FAST,
    *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n not in FAST and n not in WITHOUT),
]


def _recorded(model: Any, names: str = "@**.resid_*.*") -> tuple[Any, Any]:
    inputs = {key: value.flip(-1) for key, value in probe.made_for(model).kwargs.items()}
    with torch.no_grad(), th.capture(model, names) as rec:
        output = model(**inputs)
    return rec, output


@pytest.mark.parametrize("name", LANGUAGE)
def test_the_last_value_of_the_stream_gives_the_models_own_logits(name: str) -> None:
    model = build(name)
    rec, output = _recorded(model)
    lens = th.lens(model, rec)
    torch.testing.assert_close(lens[lens.sites[-1]], output.logits)
    assert torch.equal(lens.tokens[-1, ..., 0], output.logits.argmax(-1))


def test_every_block_goes_through_norm_head_and_soft_cap_as_by_hand() -> None:
    model: Any = build("gemma2")
    rec, _ = _recorded(model, "@resid_post.*")
    lens = th.lens(model, rec)
    cap = model.config.final_logit_softcapping
    for i in range(3):
        by_hand = model.lm_head(model.model.norm(rec[f"@resid_post.{i}"])).detach()
        torch.testing.assert_close(lens[f"@resid_post.{i}"], torch.tanh(by_hand / cap) * cap)
    top = lens["@resid_post.1"].softmax(-1).topk(5)
    assert torch.equal(lens.tokens[1], top.indices)
    torch.testing.assert_close(lens.probabilities[1], top.values)


def test_other_shapes_than_the_probes_and_last_tokens_alone_do() -> None:
    model: Any = build("gpt2")
    with torch.no_grad():
        _, rec = th.run(model, IDS[:1, :3], capture="@resid_post.*")
        lens = th.lens(model, rec)
        by_hand = model.lm_head(model.transformer.ln_f(rec["@resid_post.0"]))
        torch.testing.assert_close(lens["@resid_post.0"], by_hand)
        _, last = th.run(model, IDS[:1, :3], capture="@resid_post.*", transform=th.transforms.tokens("last"))
        torch.testing.assert_close(th.lens(model, last)["@resid_post.0"], by_hand[:, -1])


def test_a_head_that_depends_on_more_than_the_stream_is_refused() -> None:
    class Positional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
            self.blocks = nn.ModuleList([_Block(), _Block()])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x + self.embed(ids))

    model = Positional()
    ids = torch.randint(2, 20, (2, 6))
    th.roles(model, ids)
    _, rec = th.run(model, ids, capture="@resid_post.*")
    with pytest.raises(SelectorError, match="depend on more than that value"):
        th.lens(model, rec, inputs=ids)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def test_a_recording_without_the_stream_is_an_error_that_says_what_to_capture() -> None:
    model: Any = build("gpt2")
    _, rec = th.run(model, IDS, capture="@z.*")
    with pytest.raises(MissingRecordError, match=r"capture '@resid_post\.\*'"):
        th.lens(model, rec)
    with pytest.raises(TypeError, match="takes a model and a recording"):
        th.lens(model, IDS)  # type: ignore[arg-type]


def test_it_prints_tokens_by_the_names_that_a_tokenizer_gives() -> None:
    model: Any = build("gpt2")
    _, rec = th.run(model, IDS, capture="@resid_*.*")
    lens = th.lens(model, rec, tokenizer=lambda token: f"w{token}")
    assert lens.sites == [
        "@resid_pre.0",
        *(f"@resid_{kind}.{i}" for i in range(3) for kind in ("mid", "post")),
    ]
    assert f"'w{int(lens.tokens[-1, 0, -1, 0])}'" in str(lens)
    assert "@resid_post.2" in lens._repr_html_()
    with pytest.raises(MissingRecordError, match=r"@resid_post\.0"):
        lens["@resid_post.9"]


def test_the_model_is_left_as_it_was() -> None:
    model: Any = build("gpt2").train()
    _, rec = th.run(model, IDS, capture="@resid_post.*")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = rec["@resid_post.0"].clone()
    lens = th.lens(model, rec)
    lens["@resid_post.0"]
    assert model.training
    assert torch.equal(rec["@resid_post.0"], kept)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_lens_that_needs_inputs_asks_for_its_own_and_not_for_names_that_are_there() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    th.roles(model, table={"@resid_post.0": "0", "@logits": "2"})
    _, rec = th.run(model, ids, capture="@resid_post.0")
    with pytest.raises(SelectorError, match=r"with which inputs it runs: give them, th\.lens\(.*inputs=…\)") as told:
        th.lens(model, rec)
    assert "th.roles" not in str(told.value)
    torch.testing.assert_close(th.lens(model, rec, inputs=ids)["@resid_post.0"], model(ids))

"""The lens, judged by each model's own norm, head and soft cap, written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchhook as th
from tests.roles_models import MODELS, build
from torchhook._roles import probe
from torchhook.errors import AmbiguousCallError, MissingRecordError, SelectorError

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


def test_a_site_is_found_by_the_models_own_name_for_it_too() -> None:
    model: Any = build("llama")
    inputs = probe.made_for(model).kwargs
    with torch.no_grad(), th.capture(model, "model.layers.*") as rec:
        output = model(**inputs)
    lens = th.lens(model, rec)
    last = len(model.model.layers) - 1
    assert lens.sites == [f"@resid_post.{i}" for i in range(last + 1)]
    by_hand = model.lm_head(model.model.norm(rec["model.layers.0"])).detach()
    torch.testing.assert_close(lens["model.layers.0"], by_hand)
    torch.testing.assert_close(lens[f"model.layers.{last}"], output.logits)
    assert "model.layers.0" in lens
    with pytest.raises(MissingRecordError, match=r"no site 'model\.layers\.9' in this lens"):
        lens["model.layers.9"]


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


def _generated(model: Any, *sites: str, **options: Any) -> tuple[Any, Any]:
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    with torch.no_grad(), th.capture(model, *sites) as rec:
        written = model.generate(IDS, **options)
    return rec, written


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_the_lens_of_a_generation_is_that_of_the_whole_text(name: str) -> None:
    model: Any = build(name)
    rec, written = _generated(model, "@resid_post.*")
    lens = th.lens(model, rec)
    with torch.no_grad():
        whole = model(written[:, :-1], use_cache=False).logits
    torch.testing.assert_close(lens["@resid_post.2"], whole, rtol=1e-4, atol=1e-4)
    assert torch.equal(lens.tokens[-1, :, 5:, 0], written[:, 6:])  # what it said is what it wrote
    assert "@resid_post.0" in str(lens)
    later, _ = _generated(model, "@resid_post.*#1:")
    torch.testing.assert_close(th.lens(model, later)["@resid_post.2"], whole[:, 6:], rtol=1e-4, atol=1e-4)


def test_batches_are_the_rows_of_a_lens() -> None:
    model: Any = build("gpt2")
    with torch.no_grad(), th.capture(model, "@resid_post.*") as rec:
        logits = [model(ids).logits for ids in (IDS, IDS.flip(1))]
    torch.testing.assert_close(th.lens(model, rec)["@resid_post.2"], torch.cat(logits))


def test_calls_that_are_not_one_text_are_an_error_that_says_what_a_lens_takes() -> None:
    model: Any = build("gpt2")
    searched, written = _generated(model, "@resid_post.*", num_beams=2)
    with torch.no_grad(), th.capture(model, "@resid_post.*") as unlike:
        model(IDS)
        model(IDS[:, :3])
    for rec in (searched, unlike):
        with pytest.raises(AmbiguousCallError, match=r"no lens: .*th\.run\(model, ids, capture='@resid_post\.\*'\)"):
            th.lens(model, rec)
    with torch.no_grad():  # as it says
        output, rec = th.run(model, written, capture="@resid_post.*")
    torch.testing.assert_close(th.lens(model, rec)["@resid_post.2"], output.logits)
    some, _ = _generated(model, "@resid_post.*#0", num_beams=2)
    assert th.lens(model, some).tokens.shape == (3, 4, 6, 5)


def test_sites_of_different_calls_are_an_error() -> None:
    model: Any = build("gpt2")
    rec, _ = _generated(model, "@resid_post.0", "@resid_post.1#1:")
    with pytest.raises(ValueError, match=r"found @resid_post\.0 \(2, 9\), @resid_post\.1 \(2, 3\)"):
        th.lens(model, rec)


@pytest.mark.parametrize("top", [0, -1, 1.5, None, "5"])
def test_no_tokens_at_all_are_refused(top: Any) -> None:
    model: Any = build("gpt2")
    _, rec = th.run(model, IDS, capture="@resid_post.*")
    with pytest.raises(ValueError, match=r"top=.*give a positive number"):
        th.lens(model, rec, top=top)
    assert "@resid_post.2" in str(th.lens(model, rec, top=1))
    assert th.lens(model, rec, top=1000).tokens.shape[-1] == 64  # no more than there are

"""Values of a generation in which tokens share a dim with rows, or come before them, joined to one sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.edits.test_time_first import FSMT, XLNET
from tests.language_models import from_config, ids, made
from torchhook.errors import AmbiguousCallError
from torchhook.types import Recording

PROMPT = ids(3, 6)
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1}


def generated(model: Any, site: str, prompt: Tensor = PROMPT, **more: Any) -> tuple[Recording, Any]:
    with torch.no_grad(), th.capture(model, site) as rec:
        written = model.generate(prompt, **{**GREEDY, **more})
    return rec, written


def whole(model: nn.Module, path: str, **call: Any) -> Any:
    """What a bare hook sees in one forward pass."""
    kept = list[Any]()
    handle = model.get_submodule(path).register_forward_hook(lambda _, args, out: kept.append(out))
    with torch.no_grad():
        model(**call)
    handle.remove()
    return kept[0]


@pytest.fixture(scope="module")
def moe() -> Any:
    return made("mixtral", initializer_range=0.2)  # whose experts disagree


EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(("name", "site"), [("mixtral", EXPERTS), ("opt", "model.decoder.layers.1.fc2")])
def test_flat_values_are_joined_row_by_row(name: str, site: str) -> None:
    model = made(name)
    rec, written = generated(model, site)
    expected = whole(model, site, input_ids=written[:, :-1])
    torch.testing.assert_close(rec.cat(site), expected, rtol=1e-4, atol=1e-5)
    apart = expected.unflatten(0, (3, -1))
    torch.testing.assert_close(rec.cat(site, dim=1), apart, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rec.cat(f"{site}#1:"), apart[:, 6:].flatten(0, 1), rtol=1e-4, atol=1e-5)
    with pytest.raises(AmbiguousCallError, match=rf"or rec\.cat\('{site}'\)"):
        rec[site]


def test_new_tokens_of_experts_alone_are_joined_alike(moe: Any) -> None:
    rec, written = generated(moe, "@experts.1#1:")
    expected = whole(moe, EXPERTS, input_ids=written[:, :-1]).unflatten(0, (3, -1))[:, 6:]
    torch.testing.assert_close(rec.cat("@experts.1#1:"), expected.flatten(0, 1), rtol=1e-4, atol=1e-5)


def test_a_saved_recording_joins_alike(moe: Any, tmp_path: Any) -> None:
    rec, _ = generated(moe, "@experts.1")
    rec.save(tmp_path / "r.safetensors")
    assert torch.equal(th.load(tmp_path / "r.safetensors").cat("@experts.1"), rec.cat("@experts.1"))


def test_beams_of_flat_values_are_followed(moe: Any) -> None:
    rec, out = generated(moe, "@experts.1", num_beams=3, return_dict_in_generate=True)
    with pytest.raises(AmbiguousCallError, match=r"rec\.cat\('@experts\.1', dim=0, beams=out\.beam_indices\)"):
        rec.cat("@experts.1")
    expected = whole(moe, EXPERTS, input_ids=out.sequences[:, :-1])
    torch.testing.assert_close(rec.cat("@experts.1", beams=out.beam_indices), expected, rtol=1e-4, atol=1e-5)


def test_rejected_candidates_are_left_out(moe: Any) -> None:
    rec, written = generated(
        moe, "@experts.1", PROMPT[:1].repeat(1, 2), prompt_lookup_num_tokens=3, max_new_tokens=7, min_new_tokens=7
    )
    expected = whole(moe, EXPERTS, input_ids=written[:, :-1])
    torch.testing.assert_close(rec.cat("@experts.1"), expected, rtol=1e-4, atol=1e-5)


def test_two_generations_are_not_joined_to_one(moe: Any) -> None:
    with torch.no_grad(), th.capture(moe, "@experts.1") as rec:
        first = moe.generate(PROMPT, **GREEDY)
        moe.generate(PROMPT.flip(0), **GREEDY)
    with pytest.raises(AmbiguousCallError, match=r"several sequences.*'@experts\.1#0:4'"):
        rec.cat("@experts.1")
    expected = whole(moe, EXPERTS, input_ids=first[:, :-1])
    torch.testing.assert_close(rec.cat("@experts.1#0:4"), expected, rtol=1e-4, atol=1e-5)


def test_tokens_that_come_first_are_joined_on_dim_0() -> None:
    model = from_config("FSMTForConditionalGeneration", FSMT)
    site = "model.decoder.layers.0.fc2"
    rec, written = generated(model, site)
    expected = whole(model, site, input_ids=PROMPT, decoder_input_ids=written[:, :-1], use_cache=False)
    torch.testing.assert_close(rec.cat(site), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(AmbiguousCallError, match=rf"dim 0 holds the tokens: rec\.cat\('{site}'\)"):
        rec.cat(site, dim=1)
    rec, out = generated(model, site, num_beams=2, return_dict_in_generate=True)
    with pytest.raises(AmbiguousCallError, match="dim=0, beams="):
        rec.cat(site)
    expected = whole(model, site, input_ids=PROMPT, decoder_input_ids=out.sequences[:, :-1], use_cache=False)
    torch.testing.assert_close(rec.cat(site, beams=out.beam_indices), expected, rtol=1e-4, atol=1e-5)


def test_where_tokens_are_given_again_no_position_is_made_up() -> None:
    model = from_config("XLNetLMHeadModel", XLNET)
    site = "transformer.layer.0:output.0"
    rec, _ = generated(model, site)
    seen = [(record.step, record.position, record.shape[0]) for record in rec.records()]
    assert seen == [(0, 0, 7), (1, None, 3), (2, None, 3), (3, None, 3)]
    with pytest.raises(AmbiguousCallError, match=r"where in the sequence.*rec\.records\("):
        rec.cat(site)

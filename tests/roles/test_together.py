"""Standard names together with heads, positions, steps and files, judged by bare hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchhook as th
from tests.roles_models import build
from torchhook import edits

IDS = torch.tensor([[5, 9, 33, 21, 60, 7], [8, 2, 13, 44, 50, 31]])


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def test_a_head_of_a_name_is_what_a_hook_on_the_projection_would_cut_out(llama: Any) -> None:
    def cut(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        value = args[0].clone()
        value[..., 8:16] = 0
        return (value,)

    with torch.no_grad():
        handle = llama.model.layers[1].self_attn.o_proj.register_forward_pre_hook(cut)
        expected = llama(IDS).logits
        handle.remove()
        with th.edit(llama, {"@z.1": edits.only(edits.zero(), heads=[1])}):
            assert torch.equal(llama(IDS).logits, expected)


@pytest.mark.parametrize(("model", "name"), [("llama", "@resid_mid.1"), ("gpt_neo", "@resid_post.0")])
def test_positions_of_a_name_are_positions_of_its_tensor(model: str, name: str) -> None:
    built = build(model)
    with torch.no_grad(), th.edit(built, {name: edits.only(edits.zero(), positions=[2])}):
        _, rec = th.run(built, IDS, capture=name)
    assert rec[name].abs().sum((0, 2)).bool().tolist() == [True, True, False, True, True, True]


def test_steps_of_a_generation_are_chosen_and_joined_by_name(llama: Any) -> None:
    with th.capture(llama, "@resid_mid.1#1:", "@resid_post.0") as rec:
        ids = llama.generate(IDS, max_new_tokens=4, do_sample=False)
    assert [value.shape[1] for value in rec.all("@resid_mid.1")] == [1, 1, 1]
    _, whole = th.run(llama, ids[:, :-1], capture="@resid_post.0")
    torch.testing.assert_close(rec.cat("@resid_post.0", dim=1), whole["@resid_post.0"], rtol=1e-4, atol=1e-5)
    with (
        th.edit(llama, {"@resid_mid.1": edits.only(edits.zero(), steps=[1])}),
        th.capture(llama, "@resid_mid.1") as rec,
    ):
        llama.generate(IDS, max_new_tokens=4, do_sample=False)
    assert [bool(value.any()) for value in rec.all("@resid_mid.1")] == [True, False, True, True]


def test_edits_are_kept_in_files_by_name(llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "edits.safetensors"
    th.save_edits(path, {"@resid_mid.1": edits.add(torch.ones(32))})
    with torch.no_grad(), th.edit(llama, th.load_edits(path)):
        found = llama(IDS).logits
    with torch.no_grad(), th.edit(llama, {"@attn_out.1": edits.add(torch.ones(32))}):
        torch.testing.assert_close(found, llama(IDS).logits)


def test_an_estimated_sweep_has_the_sign_and_size_of_the_real_one_near_by(llama: Any) -> None:
    def metric(output: Any) -> torch.Tensor:
        return output.logits[0, -1, 3]

    clean = {"inputs_embeds": llama.model.embed_tokens(IDS[:1]).detach()}
    near = {"inputs_embeds": clean["inputs_embeds"] + 1e-3 * torch.randn(1, 6, 32)}
    th.roles(llama)
    real, estimated = (
        th.sweep(llama, clean, near, metric, sites="@resid_mid.*", dim=None, progress=False, estimate=estimate)
        for estimate in (None, "gradient")
    )
    torch.testing.assert_close(real.normalized, estimated.normalized, rtol=0.05, atol=0.05)

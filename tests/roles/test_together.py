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


class Middle:
    """What flows between the two halves of a block of Llama's, seen and set by bare hooks.

    ``change(value, call)`` returns what is to flow there instead; the attention is made to add the difference.
    """

    def __init__(self, block: Any, change: Any = None) -> None:
        self.seen: list[torch.Tensor] = []
        entered: list[torch.Tensor] = []

        def attended(module: Any, args: Any, output: Any) -> Any:
            value = change(entered[-1] + output[0], len(entered) - 1)
            return value if value is None else (value - entered[-1], *output[1:])

        def enter(module: Any, args: Any) -> None:
            entered.append(args[0])

        def leave(module: Any, args: Any) -> None:
            self.seen.append(args[0].detach().clone())

        self.handles = [block.post_attention_layernorm.register_forward_pre_hook(leave)]
        if change is not None:
            self.handles.append(block.register_forward_pre_hook(enter))
            self.handles.append(block.self_attn.register_forward_hook(attended))

    def __enter__(self) -> list[torch.Tensor]:
        return self.seen

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


def without_position_2(value: torch.Tensor) -> torch.Tensor:
    return value * (torch.arange(value.shape[1]) != 2)[:, None]


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


def test_positions_of_a_name_are_positions_of_its_tensor(llama: Any) -> None:
    with torch.no_grad():
        with Middle(llama.model.layers[1], lambda value, call: without_position_2(value)) as expected:
            logits = llama(IDS).logits
        with (
            Middle(llama.model.layers[1]) as seen,
            th.edit(llama, {"@resid_mid.1": edits.only(edits.zero(), positions=[2])}),
        ):
            torch.testing.assert_close(llama(IDS).logits, logits)
    torch.testing.assert_close(seen, expected)
    assert seen[0].abs().sum((0, 2)).bool().tolist() == [True, True, False, True, True, True]


def test_positions_of_a_name_are_positions_of_its_tensor_where_a_block_returns_a_tuple() -> None:
    model = build("gpt_neo")
    block = model.transformer.h[0]
    with torch.no_grad():
        handle = block.register_forward_hook(lambda m, args, out: (without_position_2(out[0]), *out[1:]))
        expected = model(IDS).logits
        handle.remove()
        with th.edit(model, {"@resid_post.0": edits.only(edits.zero(), positions=[2])}):
            torch.testing.assert_close(model(IDS).logits, expected)


def test_steps_of_a_generation_are_chosen_and_joined_by_name(llama: Any) -> None:
    with th.capture(llama, "@resid_mid.1#1:", "@resid_post.0") as rec:
        ids = llama.generate(IDS, max_new_tokens=4, do_sample=False)
    with torch.no_grad(), Middle(llama.model.layers[1]) as middles:
        states = llama(ids[:, :-1], use_cache=False, output_hidden_states=True).hidden_states
    later = [middles[0][:, at : at + 1] for at in (6, 7, 8)]
    torch.testing.assert_close(rec.all("@resid_mid.1"), later, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rec.cat("@resid_post.0", dim=1), states[1], rtol=1e-4, atol=1e-5)


def test_steps_of_a_generation_are_edited_by_name(llama: Any) -> None:
    def cut(value: torch.Tensor, call: int) -> torch.Tensor | None:
        return torch.zeros_like(value) if call == 1 else None

    with Middle(llama.model.layers[1], cut) as expected:
        wanted = llama.generate(IDS, max_new_tokens=4, do_sample=False)
    with (
        Middle(llama.model.layers[1]) as seen,
        th.edit(llama, {"@resid_mid.1": edits.only(edits.zero(), steps=[1])}),
    ):
        found = llama.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(seen, expected)
    assert [bool(value.any()) for value in seen] == [True, False, True, True]


def test_edits_are_kept_in_files_by_name(llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "edits.safetensors"
    th.save_edits(path, {"@resid_mid.1": edits.add(torch.ones(32))})
    with torch.no_grad(), th.edit(llama, th.load_edits(path)):
        found = llama(IDS).logits
    handle = llama.model.layers[1].self_attn.o_proj.register_forward_hook(lambda m, args, out: out + 1)
    with torch.no_grad():
        expected = llama(IDS).logits
    handle.remove()
    torch.testing.assert_close(found, expected)


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
    # By hand: what flowed in the clean run is put into the other one.
    clean_metric, near_metric = (metric(llama(**call)).item() for call in (clean, near))
    patched = []
    for block in llama.model.layers:
        with torch.no_grad(), Middle(block) as middle:
            llama(**clean)
        with torch.no_grad(), Middle(block, lambda value, call, middle=middle: middle[0]):
            patched.append((metric(llama(**near)).item() - near_metric) / (clean_metric - near_metric))
    expected = torch.tensor(patched)
    for found in (real, estimated):
        torch.testing.assert_close(found.normalized.flatten(), expected, rtol=0.05, atol=0.05, check_dtype=False)

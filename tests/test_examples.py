"""The examples do what they say, on small models with random weights."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples import distillation, head_ablation, logit_lens, patching, probing, sparse_autoencoder, steering
from tests.language_models import made

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture
def gpt2() -> Any:
    return made("gpt2", vocab_size=60, n_positions=48, initializer_range=0.2, eos_token_id=None)


@pytest.fixture
def llama() -> Any:
    return made("llama", vocab_size=60, initializer_range=0.2, eos_token_id=None, pad_token_id=None)


def ids(rows: int = 1, tokens: int = 7) -> torch.Tensor:
    return torch.randint(1, 60, (rows, tokens), generator=torch.Generator().manual_seed(1))


def margin(output: Any) -> torch.Tensor:
    return output.logits[0, -1, 3] - output.logits[0, -1, 5]


def scripts() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*.py") if path.name != "pictures.py")


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) < 40
    assert ast.get_docstring(ast.parse(text))


def test_steering_changes_what_comes_after_the_prompt_by_the_vector(gpt2: Any) -> None:
    wanted, unwanted, prompt = ids(), ids().flip(1), ids(tokens=5)
    with torch.no_grad():
        states = [gpt2.transformer(x, output_hidden_states=True).hidden_states[2][:, -1] for x in (wanted, unwanted)]
    vector = steering.direction(gpt2, wanted, unwanted, "@resid_post.1")
    torch.testing.assert_close(vector, (states[0] - states[1])[0])
    # By hand: a hook that counts its calls, and leaves the first alone.
    calls: list[int] = []

    def add(module: nn.Module, args: Any, output: Any) -> Any:
        calls.append(1)
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden + 30 * vector if len(calls) > 1 else hidden
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = gpt2.transformer.h[1].register_forward_hook(add)
    expected = gpt2.generate(prompt, do_sample=False, max_new_tokens=6)
    handle.remove()
    plain = gpt2.generate(prompt, do_sample=False, max_new_tokens=6)
    found = steering.steered(gpt2, prompt, "@resid_post.1", vector, strength=30.0, max_new_tokens=6)
    assert torch.equal(found, expected)
    assert not torch.equal(found, plain)


def test_ablated_heads_are_those_of_slices_by_hand(gpt2: Any) -> None:
    lost = head_ablation.ablated(gpt2, ids(), margin, blocks=3, heads=4)

    def without(module: nn.Module, args: Any) -> Any:
        value = args[0].clone()
        value[..., 16:24] = 0
        return (value, *args[1:])

    with torch.no_grad():
        whole = margin(gpt2(ids()))
        handle = gpt2.transformer.h[1].attn.c_proj.register_forward_pre_hook(without)
        expected = whole - margin(gpt2(ids()))
        handle.remove()
    assert lost.shape == (3, 4)
    assert lost[1, 2].item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_patching_needs_no_names_of_the_architecture(name: str, request: pytest.FixtureRequest) -> None:
    model, clean = request.getfixturevalue(name), ids()
    corrupted = clean.clone()
    corrupted[0, 2] = 9
    found = patching.patched(model, clean, corrupted, margin)
    assert found["estimate"].values.shape == (9, 7)
    assert found["heads"].values.shape == (3, 4)
    # The last block at the last token is all that the answer is read from.
    last = next(site for site in found["estimate"].sites if "resid_post.2" in site)
    assert found["estimate"].normalized[found["estimate"].sites.index(last), :-1].abs().max() < 1e-6
    assert len(found["best"].sites) == 1


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_last_guess_of_the_lens_is_the_models_own(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    lens = logit_lens.guesses(model, ids())
    with torch.no_grad():
        torch.testing.assert_close(lens["@resid_post.2"], model(ids()).logits, rtol=1e-4, atol=1e-4)


def test_an_autoencoder_learns_from_the_stream_and_is_spliced_in(llama: Any) -> None:
    site, text = "@resid_post.1", ids(64, 12)
    learner = sparse_autoencoder.trained(llama, text, site, features=128, epochs=30, batch=128)
    with torch.no_grad():
        stream = llama.model(text, output_hidden_states=True).hidden_states[2]
        error = (learner(stream) - stream).pow(2).mean() / stream.var()
        assert error < 0.2
        handle = llama.model.layers[1].register_forward_hook(lambda module, args, output: learner(output))
        expected = llama(text[:2]).logits
        handle.remove()
    torch.testing.assert_close(sparse_autoencoder.spliced(llama, text[:2], site, learner).logits, expected)


def test_a_probe_finds_what_a_layer_holds(gpt2: Any, tmp_path: Path) -> None:
    text = ids(200, 6)
    labels = (text[:, 0] > 30).long()
    text[:, 1:] = torch.where(labels[:, None] == 1, text[:, 1:] % 30 + 30, text[:, 1:] % 30)
    found = probing.accuracies(gpt2, text, labels, "@resid_post.*", tmp_path / "one")
    assert len(found) == 3
    assert min(found.values()) > 0.8
    chance = probing.accuracies(gpt2, text, labels[torch.randperm(200)], "@resid_post.*", tmp_path / "two")
    assert max(chance.values()) < 0.7


def test_a_student_comes_nearer_to_its_teacher() -> None:
    torch.manual_seed(0)

    def network(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(inplace=True), nn.Linear(width, 16), nn.Linear(16, 4))

    teacher, student = network(64), network(32)
    head = [parameter.clone() for parameter in student[3].parameters()]
    losses = distillation.distill(teacher, student, torch.randn(300, 32, 8), {"2": "2"})
    assert sum(losses[-10:]) < 0.3 * sum(losses[:10])
    # Neither ran beyond what was asked for.
    assert all(torch.equal(a, b) for a, b in zip(head, student[3].parameters(), strict=True))
    assert all(parameter.grad is None for parameter in teacher.parameters())

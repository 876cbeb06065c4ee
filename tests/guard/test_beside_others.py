"""A guard that repeats a run beside other tools: nothing of theirs begins or ends by it, no NaN is missed for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import torchhook as th
from tests.oracle import hooks_on
from torchhook import edits, transforms
from torchhook.errors import GuardError


class Discarded(nn.Module):
    """Makes a NaN that the guard sees, and nobody else: the model computes what it would without."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x * float("nan"))
        return x


class Spoils(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x * 0) * 0


def speaker() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"vocab_size": 50, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=None)).eval()
    model.generation_config.pad_token_id = 0
    model.transformer.h[0].mlp.dropout = Discarded()
    return model


# -- steps of a generation ----------------------------------------------------------------------------


@pytest.mark.parametrize("guard_first", [True, False])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_repetition_is_no_step_of_a_generation(guard_first: bool, use_cache: bool) -> None:
    model, site, vector = speaker(), "transformer.h.1", 3 * torch.randn(16)
    prompt = torch.randint(1, 48, (2, 4))
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "use_cache": use_cache}
    calls: list[int] = []

    def by_hand(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # Calls 1 and 2 are steps 1 and 2. Without a cache, each call is given the tokens of all steps before it.
        step = len(calls)
        calls.append(step)
        added = torch.zeros_like(output)
        for edited in (1, 2):
            at = -1 if use_cache else 3 + edited
            if (step == edited) if use_cache else (step >= edited):
                added[:, at] = vector
        return output + added

    handle = model.transformer.h[1].register_forward_hook(by_hand)
    expected = model.generate(prompt, **how)
    handle.remove()
    session = th.capture(model, site, edit={site: edits.only(edits.add(vector), steps=slice(1, 3))})
    guard = th.guard(model, action="record")
    first, second = (guard, session) if guard_first else (session, guard)
    with first, second:
        found = model.generate(prompt, **how)
    assert torch.equal(found, expected)
    assert [record.step for record in session.recording.records(site)] == [0, 1, 2, 3, 4]
    assert guard.findings
    assert hooks_on(model) == []


def test_nor_in_a_loop_of_ones_own() -> None:
    model = speaker()
    past, ids = None, torch.randint(1, 48, (1, 4))
    with th.capture(model, "transformer.h.1") as rec, th.guard(model, action="record"):
        for _ in range(4):
            output = model(ids, past_key_values=past, use_cache=True)
            past, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
    assert [record.step for record in rec.records("transformer.h.1")] == [0, 1, 2, 3]


# -- the call that runs ---------------------------------------------------------------------------------


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.discarded, self.last = nn.Embedding(20, 8), Discarded(), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.last(self.discarded(self.embedding(input_ids)))


@pytest.mark.parametrize("guard_first", [True, False])
def test_a_repetition_does_not_end_the_call_that_a_mask_belongs_to(guard_first: bool) -> None:
    torch.manual_seed(0)
    model, ids = Text(), torch.randint(1, 20, (3, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    whole = model(ids).detach()
    session = th.capture(model, "(model)", transform=transforms.pool("mean"))
    guard = th.guard(model, action="record")
    first, second = (guard, session) if guard_first else (session, guard)
    with first, second:
        model(ids, attention_mask=mask)
    expected = (whole * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    assert torch.allclose(session.recording["(model)"], expected, atol=1e-6)
    assert guard.findings


# -- features of hooks that stay ------------------------------------------------------------------------


@pytest.mark.parametrize("thorough", [True, False])
@pytest.mark.parametrize("attach", [True, False])
def test_features_are_those_of_the_call_and_not_of_its_repetition(attach: bool, thorough: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Spoils(), nn.Linear(4, 2)), torch.randn(3, 4)
    hooked = th.FeatureLayers(model, ["0", "2"], attach=attach, edit={"0": edits.scale(2)})
    with th.guard(model, action="record", thorough=thorough) as g:
        features, output = hooked(x)
    assert torch.equal(features["0"], 2 * (x @ model[0].weight.T + model[0].bias))
    assert features["2"].shape == output.shape
    assert [str(finding.site) for finding in g.findings] == ["1/div#0"]


class Perceptual(nn.Module):
    """Calls another model for its features, and divides by what may be zero."""

    def __init__(self, attach: bool, stop: bool) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.__dict__["features"] = th.FeatureExtractor(self.other, ["1"], attach=attach, stop=stop)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.features(self.layer(x))["1"]
        return (features / (features * 0)).sum()


@pytest.mark.parametrize("attach", [True, False])
@pytest.mark.parametrize("stop", [True, False])
def test_a_wrapper_that_the_model_calls_has_its_features_in_a_repetition(attach: bool, stop: bool) -> None:
    torch.manual_seed(0)
    with th.guard(model := Perceptual(attach, stop), action="record") as g:
        model(torch.randn(2, 4))
    assert [str(finding.site) for finding in g.findings] == ["/div#0"]


class Writes(nn.Module):
    """Opens sessions of its own, and has another model write."""

    def __init__(self, tell: Callable[[list[int | None]], None]) -> None:
        super().__init__()
        self.speaker, self.last, self.tell = speaker(), nn.Identity(), tell
        self.speaker.transformer.h[0].mlp.dropout = nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        site = "transformer.h.1"
        with th.capture(self.speaker, site, edit={site: edits.only(edits.add(5.0), steps=slice(2, 3))}) as rec:
            text = self.speaker.generate(ids, max_new_tokens=4, do_sample=False)
        self.tell([record.step for record in rec.records(site)])
        return self.last(text.float()) / 0 * 0


def test_sessions_that_the_model_opens_count_their_steps_in_a_repetition_too() -> None:
    steps: list[list[int | None]] = []
    model = Writes(steps.append)
    with th.guard(model, action="record") as g:
        model(torch.randint(1, 48, (1, 3)))
    assert steps == [[0, 1, 2, 3]] * 2  # the run and its repetition
    assert [str(finding.site) for finding in g.findings] == ["/div#0"]


# -- passes that end early ------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["1", "2"])
@pytest.mark.parametrize("way", ["attached", "session", "run", "around"])
def test_what_a_stopped_pass_made_is_told(way: str, site: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Spoils(), nn.Linear(4, 2)), torch.randn(3, 4)

    def stopped() -> None:
        if way == "around":
            with th.capture(model, site, stop=True), th.guard(model):
                model(x)
            return
        extractor = None if way == "run" else th.FeatureExtractor(model, [site], attach=way == "attached", stop=True)
        with th.guard(model):
            th.run(model, x, capture=site, stop=True) if extractor is None else extractor(x)

    with pytest.raises(GuardError, match=r"'1#0' returned .*the pass was ended early"):
        stopped()


def test_a_stopped_pass_in_which_all_is_well_says_nothing() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Spoils()), torch.randn(3, 4)
    with th.guard(model) as g:
        for _ in range(3):
            th.run(model, x, capture="1", stop=True)
    assert g.findings == []
    assert hooks_on(model) == []


# -- what the first look could miss ---------------------------------------------------------------------


class WrittenToUnseen(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "data":
            x.data.div_(0).mul_(0)
        else:
            x.detach().numpy()[:] = np.nan
        return x


@pytest.mark.parametrize("way", ["data", "numpy"])
def test_what_the_model_returns_is_looked_at_though_nobody_counted_a_write(way: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), WrittenToUnseen(way))
    with pytest.raises(GuardError, match=r"^'1"), th.guard(model):
        model(torch.randn(3, 4))


class SqrtOfZero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).sqrt()


def test_gradients_of_tensors_that_stand_for_parameters_are_looked_at() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), SqrtOfZero(), nn.Linear(4, 1)), torch.randn(3, 4)
    plain = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    # A repetition would run with the model's own.
    with pytest.raises(GuardError, match=r"gradient.*other tensors stood for its parameters"), th.guard(model):
        torch.func.functional_call(model, plain, (x,)).sum().backward()
    reloaded = nn.Sequential(nn.Linear(4, 4), SqrtOfZero(), nn.Linear(4, 1))
    reloaded.load_state_dict(model.state_dict())
    with pytest.raises(GuardError, match=r"gradient.*other tensors stood for its parameters"), th.guard(reloaded):
        torch.func.functional_call(reloaded, plain, (x,)).sum().backward()
    with th.guard(nn.Sequential(model[0], nn.ReLU(), model[2])) as g:
        torch.func.functional_call(nn.Sequential(model[0], nn.ReLU(), model[2]), plain, (x,)).sum().backward()
    assert g.findings == []


# -- what a repetition would move on ----------------------------------------------------------------------


class Noise(nn.Module):
    def __init__(self, source: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.source, self.draw = source, draw

    def forward(self, x: Tensor) -> Tensor:
        return x + self.draw(self.source)


def _counted(array: Any) -> float:
    array[0] += 1
    return float(array[0])


SOURCES: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: Noise(torch.Generator().manual_seed(0), lambda g: torch.rand((), generator=g).item()),
    "python": lambda: Noise(random.Random(0), lambda g: g.random()),
    "numpy": lambda: Noise(np.random.default_rng(0), lambda g: g.random()),
    "old numpy": lambda: Noise(np.random.RandomState(0), lambda g: g.random_sample()),
    "mersenne": lambda: Noise(np.random.Generator(np.random.MT19937(0)), lambda g: g.standard_normal()),
    "in a list": lambda: Noise([random.Random(0)], lambda g: g[0].random()),
    "array": lambda: Noise(np.zeros(2), _counted),
    "bytes": lambda: Noise(bytearray(2), _counted),
}


def drawn(source: str, guarded: bool, times: int = 9) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(SOURCES[source](), Discarded())
    if not guarded:
        return [model(torch.zeros(1)).item() for _ in range(times)]
    with th.guard(model, action="record") as g:
        found = [model(torch.zeros(1)).item() for _ in range(times)]
    assert g.findings
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_sources_of_chance_that_modules_hold_go_on_as_without_a_guard(source: str) -> None:
    assert drawn(source, guarded=True) == drawn(source, guarded=False)


class Momentum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(0.5)
        return x + self.mean


@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize("first", [0, 2, 4])
def test_a_model_that_writes_to_its_parameters_is_not_run_twice_and_that_is_said(learning: bool, first: int) -> None:
    model, moves, found = nn.Sequential(Momentum(), Discarded()), Momentum.forward, list[float]()
    model[0].forward = lambda x: x if len(found) < first else moves(model[0], x)
    model[1].forward = lambda x: x if len(found) < first else Discarded.forward(model[1], x)
    with torch.set_grad_enabled(learning), th.guard(model, action="record") as g:
        for _ in range(first + 3):
            found.append(model(torch.zeros(1)).item())
    assert found == [*[0.0] * first, 0.5, 0.75, 0.875]
    assert "parameters were written to since the forward pass began" in str(g.findings[0])

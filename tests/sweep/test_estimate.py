"""Attribution patching: exact where the model is linear, close to the real sweep where the inputs are close."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.language_models import ENDS, made
from tests.oracle import hooks_on
from torchhook._recording.sweeps import Sweep
from torchhook._sweep.api import sweep as _sweep
from torchhook.errors import NeverRanError


def sweep(*args: Any, **options: Any) -> Sweep:
    return _sweep(*args, progress=False, **options)


class Linear(nn.Module):
    """Tokens that look at each other, and nothing that bends."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x + self.a(x)
        x = x + self.b(x.cumsum(1))
        x += 1  # in place, after what was looked at
        return self.c(x)


class Bent(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class BentInPlace(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh_()


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 5, 4), torch.randn(2, 5, 4)


def metric(output: Tensor) -> Tensor:
    return (output[:, -1, 0] - output[:, -1, 2]).mean()


def model_of(kind: type[Linear]) -> Linear:
    torch.manual_seed(0)
    return kind().eval()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("dim", [1, None, -1])
def test_of_a_linear_model_it_is_exact(steps: int, dim: int | None) -> None:
    model, (clean, corrupted) = model_of(Linear), inputs()
    real = sweep(model, clean, corrupted, metric, sites="*", dim=dim)
    found = sweep(model, clean, corrupted, metric, sites="*", dim=dim, estimate="gradient", steps=steps)
    assert real.values.std() > 1e-3
    torch.testing.assert_close(found.values, real.values, rtol=1e-4, atol=1e-5)
    assert (found.sites, found.positions, found.clean, found.notes) == (real.sites, real.positions, real.clean, [])
    assert found.corrupted == pytest.approx(real.corrupted, abs=1e-6)
    assert "estimated by gradient" in str(found)
    assert "estimated" not in str(real)


def test_it_is_the_gradient_times_the_difference() -> None:
    """By hand, with bare hooks: d metric / d value at the corrupted input, times what the patch changes."""
    model, (clean, corrupted) = model_of(Bent), inputs()
    values: dict[str, list[Tensor]] = {"a": [], "b": [], "c": []}
    gradients: dict[str, Tensor] = {}

    def keep(name: str, output: Tensor) -> None:
        values[name].append(output.detach().clone())
        output.register_hook(lambda gradient: gradients.__setitem__(name, gradient.clone()))

    handles = [
        getattr(model, name).register_forward_hook(lambda m, a, output, name=name: keep(name, output))
        for name in values
    ]
    model(clean)
    metric(model(corrupted)).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    expected = torch.stack([(gradients[name] * (a - b)).sum((0, 2)) for name, (a, b) in values.items()])
    found = sweep(model, clean, corrupted, metric, sites=["a", "b", "c"], estimate="gradient")
    torch.testing.assert_close(found.values - found.corrupted, expected.double(), rtol=1e-4, atol=1e-6)


def test_a_value_that_is_overwritten_next_makes_no_difference() -> None:
    found = [
        sweep(model_of(kind), *inputs(), metric, sites=["a", "b", "c"], estimate="gradient").values
        for kind in (Bent, BentInPlace)
    ]
    assert torch.equal(*found)


def test_it_takes_two_forward_passes_and_leaves_nothing_behind() -> None:
    model, (clean, corrupted) = model_of(Bent), inputs()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    before = model.calls
    found = sweep(model, clean, corrupted, metric, sites="*", estimate="gradient")
    assert found.values.std() > 1e-3
    assert model.calls == before  # put back, whatever the passes counted
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    sweep(model, clean, corrupted, metric, sites="*", estimate="gradient")
    assert len(calls) == 2
    calls.clear()
    sweep(model, clean, corrupted, metric, sites="*", estimate="gradient", steps=4)
    assert len(calls) == 6
    handle.remove()
    assert not hooks_on(model)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_needs_no_block_with_gradients(context: Any) -> None:
    model, (clean, corrupted) = model_of(Bent), inputs()
    expected = sweep(model, clean, corrupted, metric, sites="*", estimate="gradient")
    with context():
        found = sweep(model, clean, corrupted, metric, sites="*", estimate="gradient")
    assert torch.equal(found.values, expected.values)


# -- a transformer --------------------------------------------------------------------------------


def gpt2() -> Any:
    return made("gpt2", initializer_range=0.2, **ENDS)


def margin(output: Any) -> Tensor:
    return output.logits[0, -1, 3] - output.logits[0, -1, 5]


def correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


def test_it_tends_to_the_real_sweep_as_the_inputs_approach_each_other() -> None:
    model = gpt2()
    sites = ["transformer.h.*", "transformer.h.*.attn.c_proj", "transformer.h.*.mlp"]
    ids = torch.randint(64, (2, 8))
    embeddings = model.transformer.wte(ids).detach().double()
    model.double()
    found = []
    for distance in (1.0, 0.1, 0.001):
        near = embeddings[:1] + distance * (embeddings[1:] - embeddings[:1])
        given = ({"inputs_embeds": embeddings[:1]}, {"inputs_embeds": near})
        real = sweep(model, *given, margin, sites=sites)
        estimated = sweep(model, *given, margin, sites=sites, estimate="gradient")
        found.append(correlation(real.values - real.corrupted, estimated.values - estimated.corrupted))
    assert found[0] < found[1] < found[2]
    assert found[2] > 0.99999


def test_more_steps_come_nearer_to_what_all_patches_do_together() -> None:
    """At the embedding, where the way begins, the effects of all positions add up to the whole: completeness."""
    model, ids = gpt2(), torch.randint(64, (2, 8))
    clean, corrupted = ids[:1], ids[1:].clone()
    far = []
    for steps in (1, 4, 64):
        found = sweep(model, clean, corrupted, margin, sites="transformer.wte", estimate="gradient", steps=steps)
        far.append(abs(float((found.values - found.corrupted).sum()) - (found.clean - found.corrupted)))
    assert far[2] < 0.02 * min(far[:2])


class Halves(nn.Module):
    """Half precision inside, and a sum in single."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.inner, self.weight = nn.Identity(), weight

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x).float() * self.weight).sum(-1)


@pytest.mark.parametrize(("weight", "size"), [(1e-4, 1e-4), (1e-3, 4e4)], ids=["too small", "too large"])
@pytest.mark.parametrize("steps", [1, 300])
def test_effects_that_half_precision_has_no_room_for_are_found(weight: float, size: float, steps: int) -> None:
    """Values and gradients may be numbers there, and the difference of two, or the product of both, none."""
    clean = torch.full((1, 3, 1024), size, dtype=torch.float16)
    found = sweep(Halves(weight), clean, -clean, torch.sum, sites="inner", estimate="gradient", steps=steps)
    expected = torch.full((3,), 1024 * 2 * weight * size, dtype=torch.float64)
    torch.testing.assert_close(found.values[0] - found.corrupted, expected, rtol=1e-2, atol=0)


# -- through other sites --------------------------------------------------------------------------


def through_by_hand(model: nn.Module, clean: Tensor, corrupted: Tensor, sender: str, receivers: list[str]) -> Tensor:
    """Bare hooks: the sender patched and the receivers cached; then the receivers alone put in."""
    modules, cache, values = dict(model.named_modules()), {}, []
    with torch.no_grad():
        handle = modules[sender].register_forward_hook(lambda m, a, o: cache.__setitem__("clean", o.clone()))
        model(clean)
        handle.remove()
        for position in range(clean.shape[1]):

            def put(module: nn.Module, args: Any, output: Tensor, position: int = position) -> Tensor:
                output = output.clone()
                output[:, position] = cache["clean"][:, position]
                return output

            def note(module: nn.Module, args: Any, output: Tensor) -> None:
                cache[id(module)] = output.clone()

            handles = [modules[sender].register_forward_hook(put)]
            handles += [modules[name].register_forward_hook(note) for name in receivers]
            model(corrupted)
            for handle in handles:
                handle.remove()
            handles = [modules[name].register_forward_hook(lambda m, a, o: cache[id(m)]) for name in receivers]
            values.append(float(metric(model(corrupted))))
            for handle in handles:
                handle.remove()
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("receivers", [["b"], ["c"], ["b", "c"]])
@pytest.mark.parametrize("batch", [None, 1])
def test_a_patch_that_acts_through_other_sites_alone(receivers: list[str], batch: int | None) -> None:
    model, (clean, corrupted) = model_of(Bent), inputs()
    expected = through_by_hand(model, clean, corrupted, "a", receivers)
    found = sweep(model, clean, corrupted, metric, sites="a", through=receivers, batch=batch)
    assert expected.std() > 1e-3
    torch.testing.assert_close(found.values[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("receivers", [["b"], ["c"], ["b", "c"]])
def test_the_estimate_through_other_sites_is_exact_for_a_linear_model(receivers: list[str]) -> None:
    model, (clean, corrupted) = model_of(Linear), inputs()
    expected = through_by_hand(model, clean, corrupted, "a", receivers)
    found = sweep(model, clean, corrupted, metric, sites="a", through=receivers, estimate="gradient")
    torch.testing.assert_close(found.values[0], expected, rtol=1e-4, atol=1e-5)


def test_what_comes_after_the_sites_it_should_go_through_does_nothing() -> None:
    model, (clean, corrupted) = model_of(Bent), inputs()
    real = sweep(model, clean, corrupted, metric, sites="c", through="a")
    assert (real.values - real.corrupted).abs().max() < 1e-6
    found = sweep(model, clean, corrupted, metric, sites="c", through="a", estimate="gradient")
    assert (found.values == found.corrupted).all()
    assert "no gradient of the metric reaches 1 of 1 sites ('c')" in found.notes[0]


class Choosing(Linear):
    """Has a layer of whole numbers on the way, which carries no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.best = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(x) + self.best(x.argmax(-1))[..., None]


def test_no_gradient_goes_through_whole_numbers_and_it_is_said() -> None:
    model, (clean, corrupted) = model_of(Choosing), inputs()
    found = sweep(model, clean, corrupted, torch.sum, sites="a", through="best", estimate="gradient")
    assert (found.values == found.corrupted).all()
    assert "no gradient of the metric reaches 1 of 1 sites ('a')" in found.notes[0]


# -- what cannot be done --------------------------------------------------------------------------


def test_bad_requests_are_refused() -> None:
    model, (clean, corrupted) = model_of(Bent), inputs()

    def ask(**options: Any) -> Sweep:
        return sweep(model, clean, corrupted, options.pop("metric", metric), sites="*", **options)

    with pytest.raises(ValueError, match="estimate='taylor': use 'gradient'"):
        ask(estimate="taylor")
    with pytest.raises(ValueError, match="steps=0"):
        ask(estimate="gradient", steps=0)
    with pytest.raises(ValueError, match=r"steps=3: .* for estimate='gradient'"):
        ask(steps=3)
    with pytest.raises(TypeError, match=r"on the autograd graph.*without float\(\)"):
        ask(estimate="gradient", metric=lambda output: metric(output).item())
    with pytest.raises(TypeError, match="one number"):
        ask(estimate="gradient", metric=lambda output: output)


def test_equal_metrics_are_said() -> None:
    model, (clean, _) = model_of(Bent), inputs()
    with pytest.warns(UserWarning, match="nothing lies between them"):
        found = sweep(model, clean, clean, metric, sites="*", estimate="gradient")
    assert "nothing lies between them" in str(found)


def test_inputs_without_numbers_between_them_cannot_be_walked() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4))
            self.fc = nn.Linear(4, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.fc(self.weight[ids])

    model, ids = Whole(), torch.randint(8, (2, 1, 5))
    sweep(model, ids[0], ids[1], torch.sum, sites="fc", estimate="gradient")
    with pytest.raises(ValueError, match="no numbers between them"):
        sweep(model, ids[0], ids[1], torch.sum, sites="fc", estimate="gradient", steps=2)


def test_a_site_that_only_the_clean_input_reaches() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) if x.sum() > 0 else self.right(x)

    with pytest.raises(NeverRanError, match="'left' ran for the clean input and never for the corrupted one"):
        sweep(Branches(), torch.ones(1, 2), -torch.ones(1, 2), torch.sum, sites="left", estimate="gradient")

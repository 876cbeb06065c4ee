"""Measured steps that follow one another: their hooks stay, their numbers do not mix, and each costs few calls."""

from __future__ import annotations

import contextvars
import cProfile
import gc
import pstats
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.watch.emulated import Kernels, emulated  # noqa: F401
from tests.watch.helpers import X, assert_close, by_numpy, hooks_on, mlp, square_norm
from torchhook._watch import ledger, weights
from torchhook._watch.alarms import Alarms
from torchhook._watch.api import watch
from torchhook.errors import TrainingWarning


def keys(model: nn.Sequential) -> list[int]:
    return [key for module in model for key in module._forward_hooks]


def test_hooks_stay_from_step_to_step_and_come_anew_when_others_came() -> None:
    model, seen = mlp(), []
    with watch(model):
        for step in range(6):
            if step == 4:
                model[2].register_forward_hook(lambda *_: None).remove()
            model(X).sum().backward()
            seen.append(keys(model))
    # The first step has yet to find out what runs at all.
    assert seen[1] == seen[2] == seen[3] != seen[4] == seen[5]
    assert hooks_on(model) == 0


def test_values_gradients_and_updates_are_those_of_each_step(emulated: Kernels) -> None:  # noqa: F811
    model, expected = mlp(inplace=False), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with watch(model) as w:
        for step in range(5):
            x = X * (step + 1)
            value, values = x, {}
            twin = mlp(inplace=False)
            twin.load_state_dict(model.state_dict())
            for name, module in twin.named_children():
                values[name] = value = module(value)
            gradients = torch.autograd.grad((value**2).sum(), list(values.values()))
            expected.append((values, dict(zip(values, gradients, strict=True))))
            optimizer.zero_grad()
            (model(x) ** 2).sum().backward()
            optimizer.step()
    assert len(w.history) == 5
    for shot, (values, grads) in zip(w.history, expected, strict=True):
        for site, tensor in values.items():
            assert_close(shot.sites[site], by_numpy([tensor]), site)
            assert shot.sites[site]["grad_norm"] == pytest.approx(square_norm(grads[site]), rel=1e-5), site


def test_a_graph_of_an_older_step_says_nothing_in_a_newer_one() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with watch(model, parameters=False, alarms=False) as w:
        outputs = [model(torch.ones(2, 3)) for _ in range(4)]
        outputs[0].sum().backward()
        outputs[2].sum().backward()
    assert all("grad_norm" not in shot.sites["0"] for shot in w.history)
    assert not any(output._backward_hooks for output in outputs)


def test_an_edit_between_two_steps_is_seen_and_one_that_has_gone_is_not() -> None:
    model = mlp(inplace=False)
    with watch(model, alarms=False) as w:
        for step in range(8):
            if step in (3, 4):
                with th.edit(model, {"0": th.edits.scale(0.0), "5:grad": th.edits.scale(0.0)}):
                    model(X).sum().backward()
            else:
                model(X).sum().backward()
    assert [shot.sites["0"]["zeros"] == 1 for shot in w.history] == [step in (3, 4) for step in range(8)]
    assert [shot.sites["2"]["grad_norm"] == 0 for shot in w.history] == [step in (3, 4) for step in range(8)]


def test_a_step_in_another_context_is_measured_too() -> None:
    model = mlp()
    with watch(model) as w:
        before = contextvars.copy_context()
        for step in range(6):
            if step == 3:
                before.run(lambda: model(X).sum().backward())
            else:
                model(X).sum().backward()
    assert [sorted(shot.sites) for shot in w.history] == [sorted(w.history[0].sites)] * 6
    assert hooks_on(model) == 0


def test_an_alarm_that_is_an_error_leaves_one_hook_and_the_next_step_is_measured() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    nn.init.constant_(model[0].bias, -100.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        w = watch(model, alarms=Alarms(window=4)).open()
        for _ in range(4):
            model(torch.rand(2, 3))
        with pytest.raises(TrainingWarning, match="4 of 4 units"):
            model(torch.rand(2, 3))
        assert hooks_on(model) == 1
        model(torch.rand(2, 3))
        w.close()
    assert [shot.step for shot in w.history] == [0, 1, 2, 3, 4]
    assert hooks_on(model) == 0


def test_layers_that_are_frozen_or_replaced_between_steps_are_followed() -> None:
    model = mlp()
    with watch(model, alarms=False) as w:
        for step in range(8):
            if step == 3:
                model[0].requires_grad_(False)
            if step == 5:
                model[0].requires_grad_(True)
            if step == 6:
                model[5].weight = nn.Parameter(torch.ones(5, 64))
            model.zero_grad()
            model(X).sum().backward()
    assert ["0.weight" in shot.sites for shot in w.history] == [step not in (3, 4) for step in range(8)]
    assert w.history[6].sites["5.weight"]["norm"] == pytest.approx(320**0.5)


def calls_of(step: Any) -> int:
    profile = cProfile.Profile()
    # What other tests have left is not freed meanwhile, and whoever is told of a collection is not called.
    gc.collect()
    gc.disable()
    try:
        profile.runcall(step)
    finally:
        gc.enable()
    counts = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    # Any hook makes PyTorch ask whether it is being compiled: in one call, or in more once the compiler was loaded.
    return sum(number for (file, *_), (_, number, *_) in counts.items() if "torch/compiler/" not in file)


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="this torch cannot be asked whether a checkpoint runs: the stack is read instead, which takes more calls",
)
def test_a_measured_step_costs_few_calls_for_each_layer_and_others_next_to_none(
    emulated: Kernels,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted as on a GPU, where kernels take no calls: a bare hook for a value and its gradient takes 14 of them."""
    monkeypatch.setattr(emulated, "launcher", lambda *_: lambda *_: None)
    monkeypatch.setattr(ledger, "_goes_together", lambda t: type(t) is Tensor)
    monkeypatch.setattr(weights, "_goes_together", lambda t: type(t) in weights._PLAIN)
    model = nn.Sequential(*[layer for _ in range(40) for layer in (nn.Linear(8, 8), nn.ReLU(inplace=True))])
    x = torch.randn(4, 8)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    step()
    plain = calls_of(step)
    with watch(model, alarms=False):
        for _ in range(4):
            step()
        # Of several: whatever is loaded or remembered once is no part of a step.
        assert min(calls_of(step) for _ in range(3)) - plain < 75 * 65
    with watch(model, every=4, alarms=False):
        for _ in range(7):
            step()
        assert calls_of(step) - plain < 60

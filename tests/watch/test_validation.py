"""Validation inside a watch: calls that train nothing are no steps, once there are some that do."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.watch.helpers import X, mlp
from torchhook._watch.api import watch


def in_eval_mode(model: nn.Module) -> None:
    model.eval()
    model(X * 100)
    model.train()


def without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        model(X * 100)


def in_inference_mode(model: nn.Module) -> None:
    model.eval()
    with torch.inference_mode():
        model(X * 100)
        model(X * 100)
    model.train()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(X).pow(2).mean().backward()
    optimizer.step()


def run(validate: Callable[[nn.Module], None] | None, **options: Any) -> Any:
    """Six steps, with validation after the second and the fifth."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, alarms=False, **options) as w:
        for step in range(6):
            trained(model, optimizer)
            if validate is not None and step in (1, 4):
                validate(model)
    return w


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("validate", [in_eval_mode, without_gradients, in_inference_mode])
def test_steps_are_those_of_the_same_training_without_validation(validate: Any, every: int) -> None:
    with_it, without = run(validate, every=every), run(None, every=every)
    assert [shot.step for shot in with_it.history] == list(range(0, 6, every))
    for one, other in zip(with_it.history, without.history, strict=True):
        assert one == other


def test_a_csv_file_has_the_steps_of_training_alone(tmp_path: Path) -> None:
    run(in_eval_mode, log=tmp_path / "s.csv")
    with open(tmp_path / "s.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["site"] == "5.weight"]
    assert [row["step"] for row in rows] == [str(step) for step in range(6)]
    assert all(float(row["update_ratio"]) > 0 for row in rows)


def test_the_table_says_how_many_calls_were_no_steps() -> None:
    assert "4 calls in evaluation mode or without gradients are no steps" in str(run(in_inference_mode).table())
    assert "no steps" not in str(run(None).table())


def test_an_evaluation_is_watched_where_nothing_trains() -> None:
    model = mlp()
    with watch(model) as w:
        for _ in range(3):
            without_gradients(model)
            in_eval_mode(model)
    assert len(w.history) == 6


def test_a_model_that_is_trained_in_evaluation_mode_is_watched() -> None:
    """As with frozen normalization."""
    model = mlp().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, alarms=False) as w:
        for _ in range(3):
            trained(model, optimizer)
    assert len(w.history) == 3
    assert w.last["5.weight"]["update_ratio"] > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_model_trains_also_where_that_runs_without_gradients(reentrant: bool) -> None:
    model = mlp(inplace=False)
    x: Tensor = X.clone().requires_grad_()
    with watch(model, alarms=False) as w, contextlib.ExitStack():
        for _ in range(3):
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert [shot.step for shot in w.history] == [0, 1, 2]


def test_steps_by_hand_take_every_call() -> None:
    model = mlp()
    with watch(model, steps="manual") as w:
        model(X).sum().backward()
        without_gradients(model)
        w.step()
    assert w.history[0].sites["0"]["max"] > 50 * model[0](X).max().item()


def test_a_step_by_hand_that_a_pause_comes_before_is_measured_behind_it() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, steps="manual", every=2, alarms=False) as w:
        for _ in range(4):
            trained(model, optimizer)
            w.step()
            with w.paused(), w.paused():
                without_gradients(model)
    assert [shot.step for shot in w.history] == [0, 2]
    assert w.history[1].sites["0"]["max"] < 50 * model[0](X).max().item()
    assert w.history[1].sites["5.weight"]["update_ratio"] > 0


def test_a_pause_in_a_step_by_hand_ends_it() -> None:
    model = mlp()
    with watch(model, steps="manual", alarms=False) as w:
        model(X)
        with w.paused():
            model(X * 100)
        model(X * 100)
        w.step()
        model(X)
    one, two = w.history
    assert (one.step, two.step) == (0, 1)
    assert one.sites["0"] == two.sites["0"]

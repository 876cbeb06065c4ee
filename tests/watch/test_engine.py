"""Which steps are measured and what of them, and that nothing piles up between them."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.watch.helpers import X, assert_close, by_numpy, hooks_on, mlp, square_norm
from torchhook._watch import engine
from torchhook._watch.api import watch
from torchhook.errors import SessionError


def test_frozen_layers_have_values_and_no_gradients() -> None:
    model = mlp()
    model[:3].requires_grad_(False)
    with watch(model) as w:
        model(X).sum().backward()
    assert "grad_norm" not in w.last["0"]
    assert "mean" in w.last["0"]
    assert "0.weight" not in w.last
    assert w.last["5.weight"]["grad_norm"] > 0


def test_a_layer_that_is_unfrozen_later_is_watched_from_then_on() -> None:
    model = mlp().requires_grad_(False)
    with watch(model) as w:
        model(X)
        model[5].requires_grad_(True)
        model(X).sum().backward()
    first, second = (shot.sites for shot in w.history)
    assert "5.weight" not in first
    assert second["5.weight"]["grad_norm"] > 0


def test_tied_parameters_come_once_and_sparse_gradients_too() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 3, sparse=True)
            self.head = nn.Linear(4, 4, bias=False)
            self.other = nn.Linear(4, 4, bias=False)
            self.other.weight = self.head.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids).sum() * self.other(self.head(torch.ones(1, 4))).sum()

    model = Tied()
    with watch(model, alarms=False) as w:
        model(torch.tensor([1, 1, 4])).backward()
    assert w.last["embed.weight"]["grad_norm"] == pytest.approx(square_norm(model.embed.weight.grad.to_dense()))
    assert w.last["head.weight"]["grad_norm"] == pytest.approx(square_norm(model.head.weight.grad), rel=1e-5)
    assert "other.weight" not in w.last


@pytest.mark.shows("Gradient modes: watch")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluated_model_has_values_and_no_gradients(mode: Any) -> None:
    model = mlp().eval()
    with watch(model) as w, mode():
        model(X)
        model(X)
    assert len(w.history) == 2
    assert_close(w.last["5"], by_numpy([model(X)]))
    assert "grad_norm" not in w.last["5"]
    assert w.last["5.weight"]["update_ratio"] == 0


@pytest.mark.shows("Compiled: watch")
@pytest.mark.slow
def test_a_compiled_model_is_measured_at_due_steps_and_compiled_at_the_others() -> None:
    torch._dynamo.reset()
    frames = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            frames.append(1)
            return graph(*args)

        return run

    model = mlp(inplace=False)
    compiled = torch.compile(model, backend=backend)
    compiled(X)
    frames.clear()
    with watch(compiled, every=4, steps="manual") as w:
        for _ in range(8):
            compiled(X)
            w.step()
    assert [shot.step for shot in w.history] == [0, 4]
    assert len(frames) == 6
    assert_close(w.last["5"], by_numpy([model(X)]))


def test_only_every_nth_step_is_measured_and_between_them_one_hook_is_left() -> None:
    model = mlp()
    seen = []
    with watch(model, every=5, log=lambda step, values: seen.append(step)) as w:
        counts = []
        for _ in range(11):
            model(X).sum().backward()
            counts.append(hooks_on(model))
    assert seen == [0, 5, 10] == [shot.step for shot in w.history]
    assert [n for i, n in enumerate(counts) if i % 5] == [1] * 8
    assert min(counts[::5]) > 6


def test_steps_by_hand_leave_no_hook_between_measured_steps_and_continue_an_older_count() -> None:
    model = mlp()
    w = watch(model, every=2, steps="manual", start=11).open()
    assert hooks_on(model) == 0
    w.step()
    model(X)
    assert hooks_on(model) > 0
    w.step()
    assert hooks_on(model) == 0
    w.close()
    assert [shot.step for shot in w.history] == [12]
    with pytest.raises(SessionError, match="closed"):
        w.step()


def test_calls_from_other_threads_are_not_steps() -> None:
    model = mlp()
    with watch(model) as w:
        model(X)
        other = threading.Thread(target=lambda: model(X * 100))
        other.start()
        other.join()
    assert len(w.history) == 1
    assert_close(w.last["5"], by_numpy([model(X)]))


def test_two_watches_on_one_model_do_not_disturb_each_other() -> None:
    model = mlp()
    with watch(model, "0", every=2) as one, watch(model, "5", every=3) as two:
        for _ in range(7):
            model(X).sum().backward()
    assert [shot.step for shot in one.history] == [0, 2, 4, 6]
    assert [shot.step for shot in two.history] == [0, 3, 6]
    assert {"0", "0.weight", "0.bias"} == set(one.last)


def test_the_history_keeps_the_newest() -> None:
    model = mlp()
    with watch(model, "0", history=3) as w:
        for _ in range(10):
            model(X)
    assert [shot.step for shot in w.history] == [7, 8, 9]


@pytest.mark.slow
def test_memory_is_constant_over_ten_thousand_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(4, 4)
    sizes, tensors = [], []
    with watch(model, every=4, history=10, alarms=False) as w:
        for step in range(10_000):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            if step in (1999, 9999):
                gc.collect()
                objects = gc.get_objects()
                sizes.append(len(objects))
                tensors.append(sum(issubclass(type(o), Tensor) for o in objects))
                del objects
    assert [shot.step for shot in w.history] == list(range(9960, 10_000, 4))
    # 2,000 measured steps lie between: one object each would be seen. Fewer are what other tests had left.
    assert sizes[1] - sizes[0] < 1_000
    assert tensors[1] - tensors[0] < 100


def test_what_a_step_is_measured_with_is_built_once_and_again_when_other_parameters_are_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = []

    class Counted(engine.Session):
        def __init__(self, *args: Any, **options: Any) -> None:
            built.append(1)
            super().__init__(*args, **options)

    monkeypatch.setattr(engine, "Session", Counted)
    model = mlp()
    with watch(model) as w:
        for step in range(6):
            model(X).sum().backward()
            if step == 3:
                model[0].requires_grad_(False)
    assert len(built) == 2
    assert ["0.weight" in shot.sites for shot in w.history] == [True] * 4 + [False] * 2


def test_edits_that_come_later_are_seen_from_the_next_step_on() -> None:
    model = mlp(inplace=False)
    with watch(model, "0", alarms=False) as w:
        for _ in range(2):
            model(X)
        with th.edit(model, {"0": th.edits.scale(0.0)}):
            for _ in range(2):
                model(X)
        model(X)
    assert [shot.sites["0"]["zeros"] == 1 for shot in w.history] == [False, False, True, True, False]


@pytest.mark.parametrize("fails_in", range(6))
def test_a_step_after_one_that_failed_anywhere_is_like_any_other(fails_in: int) -> None:
    model = mlp()
    with watch(model, alarms=False) as w:
        model(X).sum().backward()
        handle = model[fails_in].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(X)
        handle.remove()
        model.zero_grad()
        model(X).sum().backward()
    first, last = w.history[0].sites, w.history[-1].sites
    for site, values in first.items():
        assert last[site] == pytest.approx(values, rel=1e-5), site

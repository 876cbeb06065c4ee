"""What ``watch`` says against bare hooks, numpy and ``autograd.grad``; when it says it; and that it leaves no trace."""

from __future__ import annotations

import copy
import csv
import gc
import math
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.oracle import BareHooks, assert_same, copies, snapshot
from torchhook._values.histograms import Histogram
from torchhook._watch.alarms import Alarms
from torchhook._watch.api import watch
from torchhook._watch.statistics import DEFAULT
from torchhook.errors import NeverRanWarning, SelectorError, SessionError, TrainingWarning

VALUES = ("mean", "std", "min", "max", "zeros", "nans", "norm")


def by_numpy(tensors: list[Tensor]) -> dict[str, float]:
    """The statistics of several tensors taken together, by their definitions, in double precision."""
    x = np.concatenate([t.detach().double().numpy().ravel() for t in tensors])
    with np.errstate(invalid="ignore"):
        mean, std = x.mean(), x.std()
    return {
        "mean": mean,
        "std": std,
        "min": x.min(),
        "max": x.max(),
        "zeros": (x == 0).mean(),
        "nans": float(np.isnan(x).sum()),
        "norm": math.sqrt((x**2).sum()),
    }


def assert_close(found: dict[str, Any], expected: dict[str, float], where: str = "", rel: float = 1e-5) -> None:
    for name, value in expected.items():
        # Single precision: the mean, and the deviations from it, are as exact as the size of the values allows.
        size = max(abs(expected["min"]), abs(expected["max"])) if name in ("mean", "std") else 0.0
        slack = 1e-7 + 1e-6 * (size if math.isfinite(size) else 0.0)
        assert found[name] == pytest.approx(value, rel=rel, abs=slack, nan_ok=True), f"{where} {name}"


def mlp(inplace: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(inplace), nn.Conv2d(8, 4, 3), nn.ReLU(inplace), nn.Flatten(), nn.Linear(64, 5)
    )


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def hooks_on(model: nn.Module) -> int:
    modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return modules + sum(len(p._backward_hooks or ()) for p in model.parameters())


def square_norm(tensor: Tensor) -> float:
    return math.sqrt((tensor.detach().double() ** 2).sum().item())


# -- values -----------------------------------------------------------------------------------------------------------


def test_every_layer_of_a_resnet_has_the_statistics_of_what_bare_hooks_cloned() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(weights=None).train()
    x = torch.randn(2, 3, 32, 32)
    twin = copy.deepcopy(model)
    with BareHooks(twin) as bare:
        twin(x)
    with watch(model, alarms=False) as w:
        model(x).sum().backward()
    sites = {name for name, _ in model.named_modules() if name}
    assert sites == {site for site in w.last if site in sites}
    for site in sites:
        tensors = [c.tensor for frozen in bare.outputs[site] for c in copies(frozen)]
        assert_close(w.last[site], by_numpy(tensors), site)


def test_a_large_mean_does_not_hide_a_small_spread() -> None:
    model = nn.Sequential(nn.Identity())
    x = 1e4 + torch.randn(4096)
    with watch(model, gradients=False) as w:
        model(x)
    assert w.last["0"]["std"] == pytest.approx(x.double().std(correction=0).item(), rel=1e-3)


def test_several_calls_of_a_layer_are_taken_together_and_one_of_them_by_its_index() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x) * 3 + 1)

    model = Twice()
    x = torch.randn(5, 4)
    with BareHooks(model) as bare:
        model(x)
    with watch(model, "layer", "layer#1") as w:
        for _ in range(2):  # the index counts the calls of a step, not of the run
            model(x).sum().backward()
    first, second = (next(copies(frozen)).tensor for frozen in bare.outputs["layer"])
    for shot in w.history:
        assert_close(shot.sites["layer"], by_numpy([first, second]))
        assert_close(shot.sites["layer#1"], by_numpy([second]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_values_of_any_dtype_are_measured_as_numbers(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.tensor([[0, 1, 3], [0, 2, 1]]).to(dtype)
    with watch(model, alarms=False) as w:
        model(x)
    assert_close(w.last["0"], by_numpy([x]))


def test_complex_values_are_measured_by_their_size() -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.tensor([3 + 4j, 0j])
    with watch(model) as w:
        model(x)
    assert_close(w.last["0"], by_numpy([x.abs()]))


@pytest.mark.parametrize("value", [torch.tensor([1.0, math.nan, 0.0, math.nan]), torch.tensor([math.inf, 0.0])])
def test_values_that_are_not_numbers_are_counted_and_not_hidden(value: Tensor) -> None:
    model = nn.Sequential(nn.Identity())
    with watch(model) as w:
        model(value)
    expected = by_numpy([value])
    assert w.last["0"]["nans"] == expected["nans"]
    assert w.last["0"]["zeros"] == expected["zeros"]
    assert w.last["0"]["max"] == pytest.approx(expected["max"], nan_ok=True)
    assert not math.isfinite(w.last["0"]["mean"])
    assert w.last["0"]["norm"] == pytest.approx(expected["norm"], nan_ok=True)
    assert math.isnan(w.last["0"]["std"])


@pytest.mark.parametrize("statistics", [VALUES, ("norm", "std")])
@pytest.mark.parametrize("value", [[math.inf, 1.0], [-math.inf, 1.0], [math.inf, -math.inf, 0.0], [math.inf, math.nan]])
def test_the_norm_of_an_infinite_value_is_infinite(value: list[float], statistics: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Identity())
    with watch(model, statistics=statistics, alarms=False) as w:
        model(torch.tensor(value))
    expected = by_numpy([torch.tensor(value)])
    assert w.last["0"]["norm"] == pytest.approx(expected["norm"], nan_ok=True)
    assert math.isnan(w.last["0"]["std"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e25, 3e37, 1e-23, 1e-36])
def test_very_large_and_very_small_values_have_a_norm_and_a_spread(size: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Linear(100, 1, bias=False))
    x = (torch.rand(50, 100) * size).to(dtype)
    model[1].to(dtype).weight.data.mul_(1e-3)
    expected = by_numpy([x])
    with watch(model, alarms=False) as w:
        model(x).sum().backward()
    for name in ("std", "norm", "max"):
        assert w.last["0"][name] == pytest.approx(expected[name], rel=1e-4, abs=0), name
    gradient = model[1].weight.grad.double().numpy()
    assert w.last["1.weight"]["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5, abs=0)


def test_statistics_of_tens_of_millions_of_values_are_as_exact_as_those_of_few() -> None:
    x = torch.rand(30_000_000, generator=torch.Generator().manual_seed(0)).square_()
    x[::4] = 0
    model = nn.Sequential(nn.Identity())
    with watch(model, alarms=False) as w:
        model(x)
    expected = by_numpy([x])
    for name in VALUES:
        assert w.last["0"][name] == pytest.approx(expected[name], rel=1e-5, abs=0), name


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(1, 3),
        lambda x: x[:, ::2],
        lambda x: x[:1, :1, :1, :1].expand(2, 3, 4, 5),
    ],
)
def test_the_order_of_elements_in_memory_does_not_matter(change: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Identity())
    x = change(torch.randn(2, 4, 5, 6))
    with watch(model) as w:
        model(x)
    assert_close(w.last["0"], by_numpy([x]))


def test_nested_outputs_have_a_row_for_each_tensor_and_its_gradient() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 4)})
    model.forward = lambda x: model["lstm"](x)  # type: ignore[method-assign]
    output, (h, c) = model(torch.ones(5, 2, 3))
    expected = torch.autograd.grad((output**2).sum() + (h**3).sum() + c.sum(), [output, h, c])
    with watch(model, "lstm") as w:
        output, (h, c) = model(torch.ones(5, 2, 3))
        ((output**2).sum() + (h**3).sum() + c.sum()).backward()
    for leaf, tensor, gradient in zip(("0", "1.0", "1.1"), (output, h, c), expected, strict=True):
        assert_close(w.last[f"lstm[{leaf}]"], by_numpy([tensor]))
        assert w.last[f"lstm[{leaf}]"]["grad_norm"] == pytest.approx(square_norm(gradient), rel=1e-5)


def test_outputs_without_elements_that_can_be_read_are_passed_over() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            packed = torch.zeros(2, dtype=torch.uint8).view(torch.bits8)
            return {"empty": x[:0], "text": "a", "none": None, "packed": packed, "x": x}

    model = nn.Sequential(Odd())
    with watch(model, gradients=False) as w:
        model(torch.ones(3))
    assert list(w.last) == ["0[x]"]


def test_inputs_gradients_parameters_and_operations_are_sites_like_others() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.fc(x))

    torch.manual_seed(0)
    model = Net()
    x = torch.randn(6, 3)
    hidden = model.fc(x)
    output = F.relu(hidden)
    (gradient,) = torch.autograd.grad((output**2).sum(), [hidden])
    with watch(model, ":input", "fc:grad", "fc.weight", "/relu", alarms=False) as w:
        for _ in range(2):
            (model(x) ** 2).sum().backward()
    for shot in w.history:
        assert_close(shot.sites[":input"], by_numpy([x]))
        assert_close(shot.sites["fc:grad"], by_numpy([gradient]))
        assert_close(shot.sites["fc.weight"], by_numpy([model.fc.weight]))
        assert_close(shot.sites["/relu"], by_numpy([output]))


# -- gradients and parameters -----------------------------------------------------------------------------------------


def outputs_and_gradients(model: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    outputs = {}
    for name, module in model.named_children():
        outputs[name] = x = module(x)
    gradients = torch.autograd.grad((x**2).sum(), list(outputs.values()))
    return dict(zip(outputs, gradients, strict=True))


def test_gradient_norms_are_those_of_autograd_in_a_twin_without_in_place_layers() -> None:
    twin = mlp(inplace=False)
    expected = outputs_and_gradients(twin, X)
    weights = torch.autograd.grad((twin(X) ** 2).sum(), list(twin.parameters()))
    model = mlp()
    with watch(model) as w:
        (model(X) ** 2).sum().backward()
    for site, gradient in expected.items():
        assert w.last[site]["grad_norm"] == pytest.approx(square_norm(gradient), rel=1e-5), site
    for (name, _), gradient in zip(twin.named_parameters(), weights, strict=True):
        assert w.last[name]["grad_norm"] == pytest.approx(square_norm(gradient), rel=1e-5), name


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_update_ratio_is_how_far_the_optimizer_went(kind: Any) -> None:
    model = mlp()
    optimizer = kind(model.parameters(), lr=1e-2)
    expected = []
    with watch(model, every=2) as w:
        for step in range(4):
            before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
            optimizer.zero_grad()
            (model(X) ** 2).sum().backward()
            optimizer.step()
            if step % 2 == 0:
                after = dict(model.named_parameters())
                expected.append({n: ((after[n] - b).norm() / b.norm()).item() for n, b in before.items()})
    assert [shot.step for shot in w.history] == [0, 2]
    for shot, ratios in zip(w.history, expected, strict=True):
        for name, ratio in ratios.items():
            assert shot.sites[name]["update_ratio"] == pytest.approx(ratio, rel=1e-4), name


def test_a_parameter_of_many_pieces_moves_as_far_as_one_of_few() -> None:
    model = nn.Sequential(nn.Linear(700, 500, bias=False))
    with watch(model) as w:
        model(torch.ones(1, 700))
        before = model[0].weight.detach().double().clone()
        with torch.no_grad():
            model[0].weight.add_(torch.randn(500, 700), alpha=1e-3)
    moved = (model[0].weight.double() - before).norm() / before.norm()
    assert w.last["0.weight"]["update_ratio"] == pytest.approx(moved.item(), rel=1e-4)
    assert w.last["0.weight"]["norm"] == pytest.approx(before.norm().item(), rel=1e-5)


def test_zero_weights_have_an_infinite_ratio_when_they_move_and_none_when_they_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    nn.init.zeros_(model[0].bias)
    with watch(model, alarms=False) as w:
        model(torch.ones(1, 2))
        w.flush()
        model(torch.ones(1, 2))
        model[0].bias.data += 1
    assert [shot.sites["0.bias"]["update_ratio"] for shot in w.history] == [0.0, math.inf]


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


def test_accumulated_gradients_are_what_the_optimizer_sees_when_steps_are_counted_by_hand() -> None:
    model = mlp()
    with watch(model, steps="manual") as w:
        norms = []
        for _ in range(2):
            model.zero_grad()
            for part in (X[:1], X[1:]):
                model(part).sum().backward()
            norms.append({n: square_norm(p.grad) for n, p in model.named_parameters() if p.grad is not None})
            w.step()
        w.flush()
    assert [shot.step for shot in w.history] == [0, 1]
    for shot, expected in zip(w.history, norms, strict=True):
        for name, norm in expected.items():
            assert shot.sites[name]["grad_norm"] == pytest.approx(norm, rel=1e-5), name
    parts = [by_numpy([mlp()[0](X[i : i + 1])]) for i in range(2)]
    assert w.history[0].sites["0"]["norm"] == pytest.approx(math.hypot(*(p["norm"] for p in parts)), rel=1e-5)


def test_gradients_that_are_accumulated_call_by_call_are_the_sum_so_far() -> None:
    model = mlp()
    with watch(model) as w:
        for _ in range(3):
            model(X).sum().backward()
    (single,) = torch.autograd.grad(model(X).sum(), [model[5].weight])
    found = [shot.sites["5.weight"]["grad_norm"] for shot in w.history]
    assert found == pytest.approx([k * square_norm(single) for k in (1, 2, 3)], rel=1e-5)


def test_gradients_that_autograd_hands_out_are_measured_unless_older_ones_are_in_the_way() -> None:
    model = mlp()
    with watch(model) as w:
        (expected,) = torch.autograd.grad(model(X).sum(), [model[5].weight])
        model(X).sum().backward()
        torch.autograd.grad(model(X).sum(), [model[5].weight])
    assert w.history[0].sites["5.weight"]["grad_norm"] == pytest.approx(square_norm(expected), rel=1e-5)
    assert "grad_norm" not in w.history[2].sites["5.weight"]


def test_gradients_are_those_of_now_after_a_backward_pass_that_failed() -> None:
    def fail(grad: Tensor) -> None:
        raise RuntimeError("out of memory")

    model = mlp()
    with watch(model, steps="manual") as w:
        model(X).sum().backward()
        handle = model[0].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(X).sum().backward()
        handle.remove()
        model(X * 3).sum().backward()
        expected = {name: square_norm(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        w.flush()
    for name, norm in expected.items():
        assert w.last[name]["grad_norm"] == pytest.approx(norm, rel=1e-5), name


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


def test_a_loss_scale_is_taken_out_of_gradients() -> None:
    model, twin = mlp(), mlp()
    with watch(twin) as expected:
        twin(X).sum().backward()
    with watch(model, loss_scale=lambda: 1024.0) as w:
        (model(X).sum() * 1024).backward()
    for site in ("0", "5.weight"):
        assert w.last[site]["grad_norm"] == pytest.approx(expected.last[site]["grad_norm"], rel=1e-5)


def test_a_recomputed_layer_is_measured_once() -> None:
    class Saving(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=self.reentrant)

    for reentrant in (False, True):
        torch.manual_seed(0)
        model = Saving(reentrant)
        x = torch.randn(3, 4, requires_grad=True)
        with watch(model) as w:
            model(x).sum().backward()
        assert_close(w.last["layer"], by_numpy([model.layer(x)]))
        assert w.last["layer"]["grad_norm"] == pytest.approx(math.sqrt(12), rel=1e-5)
        assert w.last["layer.weight"]["grad_norm"] == pytest.approx(square_norm(model.layer.weight.grad), rel=1e-5)


# -- modes ------------------------------------------------------------------------------------------------------------


def test_under_autocast_the_low_precision_values_are_measured_in_full_precision() -> None:
    model = mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with BareHooks(model) as bare:
            model(X)
        with watch(model) as w:
            loss = model(X).float().sum()
            loss.backward()
    for site in ("0", "1", "2", "5"):
        (kept,) = copies(bare.outputs[site][0])
        assert kept.tensor.dtype == torch.bfloat16
        assert_close(w.last[site], by_numpy([kept.tensor]))
    assert w.last["5.weight"]["grad_norm"] == pytest.approx(square_norm(model[5].weight.grad), rel=1e-5)


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


def test_watching_changes_neither_the_outputs_nor_the_gradients() -> None:
    model, twin = mlp(), mlp()
    expected = twin(X)
    expected.sum().backward()
    with watch(model, statistics=(*DEFAULT, "histogram")):
        found = model(X)
        found.sum().backward()
    assert torch.equal(found, expected)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


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


# -- steps ------------------------------------------------------------------------------------------------------------


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
    w = watch(model, every=2, steps="manual", start=11)
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


def test_a_step_that_was_forgotten_is_pointed_out() -> None:
    model = mlp()
    with watch(model) as w:
        model(X)
        with pytest.raises(SessionError, match="steps='manual'"):
            w.step()
        with pytest.raises(SessionError, match="no step has been measured"):
            w.last
        w.flush()
        assert w.last["5"]["mean"] == pytest.approx(model(X).mean().item(), rel=1e-4)


def test_a_pause_hides_validation_from_the_count_and_the_statistics() -> None:
    model = mlp()
    with watch(model, every=2) as w:
        model(X)
        with w.paused():
            assert [shot.step for shot in w.history] == [0]
            for _ in range(3):
                model(X * 100)
        model(X)
        model(X)
    assert [shot.step for shot in w.history] == [0, 2]
    assert w.history[0].sites["0"] == w.history[1].sites["0"]


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


# -- where it goes ----------------------------------------------------------------------------------------------------


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        self.histograms: dict[tuple[str, int], Any] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag, step] = value

    def add_histogram(self, tag: str, values: Any, step: int) -> None:
        self.histograms[tag, step] = values


class Run:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))


def test_all_destinations_are_told_the_same(tmp_path: Path) -> None:
    model, writer, run, calls, path = mlp(), Writer(), Run(), [], tmp_path / "runs" / "watch.csv"
    log = [writer, run, path, lambda step, values: calls.append((step, values))]
    with watch(model, every=2, log=log, statistics=(*DEFAULT, "histogram")) as w:
        for _ in range(3):
            model(X).sum().backward()
    assert run.logged == calls
    assert [step for step, _ in calls] == [0, 2]
    for step, values in calls:
        for tag, value in values.items():
            if isinstance(value, Histogram):
                assert writer.histograms[tag, step].min() >= value.edges[0]
            else:
                assert writer.scalars[tag, step] == value
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(w.last)
    row = next(r for r in rows if r["step"] == "2" and r["site"] == "5")
    assert float(row["mean"]) == w.last["5"]["mean"]
    assert row["update_ratio"] == ""
    assert "histogram" not in row


def test_a_tensorboard_writer_of_its_own_kind_takes_what_it_is_given(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    model = mlp()
    with tensorboard.SummaryWriter(tmp_path) as writer, watch(model, log=writer, statistics=(*DEFAULT, "histogram")):
        model(X).sum().backward()
    assert any(path.stat().st_size > 1000 for path in tmp_path.iterdir())


def test_a_raw_histogram_is_handed_over_as_one() -> None:
    taken = {}

    class Raw(Writer):
        def add_histogram_raw(self, tag: str, *numbers: Any, global_step: int) -> None:
            taken[tag] = numbers

    model = mlp()
    with watch(model, "5", log=Raw(), statistics=["histogram"], bins=8):
        output = model(X)
    low, high, number, total, _, limits, counts = taken["5/histogram"]
    assert (low, high) == pytest.approx((output.min().item(), output.max().item()))
    assert number == sum(counts) == 10
    assert len(limits) == 8
    assert total == pytest.approx(output.sum().item(), abs=10 * (high - low) / 16)


def test_a_csv_file_is_continued_with_one_header_even_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "watch.csv"
    for start in (0, 1):
        with watch(mlp(), "5", log=str(path), parameters=False, start=start) as w:
            model_output = w._engine.plan.index.modules[""](X)
        with path.open("ab") as file:
            file.write(b"7,torn")
    lines = path.read_text().splitlines()
    assert lines[0].startswith("step,site,mean,std")
    assert [line.split(",")[0] for line in lines] == ["step", "0", "7", "1", "7"]
    assert float(lines[1].split(",")[2]) == pytest.approx(model_output.mean().item(), rel=1e-4)


def test_a_csv_file_with_other_columns_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "watch.csv"
    path.write_text("step,site,loss\n")
    model = mlp()
    with pytest.raises(ValueError, match=r"expected step,site,mean, found step,site,loss"):
        watch(model, log=path, statistics=["mean"])
    assert hooks_on(model) == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"log": 3}, TypeError, "expected a TensorBoard SummaryWriter"),
        ({"every": 0}, ValueError, "1 or more"),
        ({"statistics": ["men"]}, ValueError, "Closest: 'mean'"),
        ({"steps": "epochs"}, ValueError, "'calls'"),
        ({"alarms": Alarms(vanishing=0.0), "threads": "some"}, ValueError, "threads"),
    ],
)
def test_wrong_options_are_refused_and_leave_no_hook(options: Any, error: Any, message: str) -> None:
    model = mlp()
    with pytest.raises(error, match=message):
        watch(model, **options)
    assert hooks_on(model) == 0


def test_a_name_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(SelectorError, match="layer9"):
        watch(mlp(), "layer9")


def test_histograms_are_those_of_numpy() -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    with watch(model, statistics=["histogram"], bins=16) as w:
        model(x)
    counts, edges = np.histogram(x.double().numpy(), bins=16)
    found = w.last["0"]["histogram"]
    assert np.abs(np.array(found.counts) - counts).sum() <= 2  # a value on an edge may fall on either side
    assert found.edges == pytest.approx(edges.tolist(), rel=1e-5)


def test_histograms_of_several_calls_lose_nobody() -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x: Tensor) -> None:
            for factor in (1, 5, 0):
                self.same(x * factor)

    model = Thrice()
    x = torch.linspace(-1, 1, 100)
    with watch(model, statistics=["histogram"], bins=10) as w:
        model(x)
    counts, edges = np.histogram(np.concatenate([x, 5 * x, 0 * x]), bins=10)
    found = w.last["same"]["histogram"]
    assert sum(found.counts) == 300
    assert found.edges == pytest.approx(edges.tolist())
    assert np.abs(np.cumsum(found.counts) - np.cumsum(counts)).max() <= 60  # within one bin of where they were


class Rectified(nn.Module):
    """One layer that runs several times."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, *values: Tensor) -> None:
        for value in values:
            self.relu(value)


def test_histograms_are_of_the_finite_values() -> None:
    x = torch.linspace(0, 1, 100)
    bad = torch.cat([x * 2, torch.tensor([math.inf, math.nan])])
    model = Rectified()
    with watch(model, statistics=["histogram"], bins=10, alarms=False) as w:
        for values in ([x, bad], [bad], [torch.full((3,), math.inf), x], [torch.full((3,), math.nan)]):
            model(*values)
    both, one, beside, none = (shot.sites["relu"] for shot in w.history)
    assert sum(both["histogram"].counts) == 200
    assert both["histogram"].edges == pytest.approx(np.linspace(0, 2, 11))
    for found, values in ((one, x * 2), (beside, x)):
        counts, edges = np.histogram(values.double().numpy(), bins=10)
        assert np.abs(np.array(found["histogram"].counts) - counts).sum() <= 4
        assert sum(found["histogram"].counts) == 100
        assert found["histogram"].edges == pytest.approx(edges.tolist(), rel=1e-5)
    assert "histogram" not in none


def test_a_histogram_of_huge_values_loses_nobody() -> None:
    model = nn.Sequential(nn.Identity())
    with watch(model, statistics=["histogram"], bins=4, alarms=False) as w:
        model(torch.tensor([-3e38, 0.0, 0.0, 3e38]))
    assert w.last["0"]["histogram"].counts == [1, 0, 2, 1]


def test_a_histogram_of_equal_values_counts_those_that_are_numbers() -> None:
    model = Rectified()
    with watch(model, statistics=["histogram"], bins=4, alarms=False) as w:
        model(torch.tensor([2.0, 2.0, math.nan, math.inf]))
    assert w.last["relu"]["histogram"] == Histogram([2, 0, 0, 0], [2.0] * 5)


def test_the_table_shows_the_newest_step_and_the_alarms() -> None:
    model = mlp()
    with watch(model, statistics=["mean", "update_ratio"]) as w:
        assert "no step measured yet" in str(w)
        model(X)
        model(X)
    lines = str(w.table()).splitlines()
    assert lines[0] == "step 1"
    assert lines[1].split() == ["site", "mean", "update_ratio"]
    assert [line.split()[0] for line in lines[3:]] == list(w.last)
    assert lines[3].split()[1] == f"{w.last['0']['mean']:.4g}"
    assert "<table" in w._repr_html_()


def test_the_history_keeps_the_newest() -> None:
    model = mlp()
    with watch(model, "0", history=3) as w:
        for _ in range(10):
            model(X)
    assert [shot.step for shot in w.history] == [7, 8, 9]


# -- alarms -----------------------------------------------------------------------------------------------------------


def deep(activation: type[nn.Module], gain: float = 1.0, depth: int = 20) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(16, 16), activation()]
        with torch.no_grad():
            layers[-2].weight.mul_(gain)  # type: ignore[operator]
    return nn.Sequential(*layers)


def alarms_of(model: nn.Module, x: Tensor, steps: int = 12, **options: Any) -> tuple[list[str], list[Any]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch(model, **options) as w:
            for _ in range(steps):
                model.zero_grad()
                (model(x) ** 2).sum().backward()
    assert all(issubclass(c.category, TrainingWarning) for c in caught)
    assert [str(c.message) for c in caught] == [alarm.message for alarm in w.alarms]
    return [str(c.message) for c in caught], w.alarms


def test_dead_units_are_named_once_after_a_whole_window() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].bias[[2, 5]] = -100
    messages, alarms = alarms_of(model, X, steps=9, alarms=Alarms(window=3))
    assert len(messages) == 1
    assert "2 of 8 units" in messages[0]
    assert "(units 2, 5)" in messages[0]
    assert (alarms[0].site, alarms[0].kind, alarms[0].step) == ("1", "dead", 2)


def test_units_that_live_once_in_the_window_are_not_dead() -> None:
    model = nn.Sequential(nn.ReLU())
    low, high = -torch.ones(2, 4), torch.tensor([[1.0, -1, -1, -1], [-1, 1, 1, 1]])
    with watch(model, alarms=Alarms(window=4)) as w:
        for step in range(12):
            model(high if step % 4 == 3 else low)
    assert w.alarms == []
    assert [shot.sites["0"]["dead"] for shot in w.history][:4] == [1.0, 1.0, 1.0, 0.0]


def test_units_of_tokens_are_in_the_last_dim_and_functional_ones_count_too() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x)

    model = Net()
    x = torch.ones(2, 5, 3)
    x[..., 1] = -1
    with pytest.warns(TrainingWarning, match=r"'/relu': 1 of 3 units .* \(units 1\)"):
        with watch(model, "/relu", alarms=Alarms(window=1)):
            model(x)


def dead_channel(conv: nn.Module, channel: int) -> nn.Module:
    with torch.no_grad():
        conv.weight[channel] = 0  # type: ignore[operator, index]
        conv.bias[channel] = -1  # type: ignore[operator, index]
    return conv


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@pytest.mark.parametrize(
    ("layers", "shape", "dead"),
    [
        ([dead_channel(nn.Conv1d(2, 4, 3), 1), nn.ReLU()], (8, 2, 10), (1, 4)),
        ([dead_channel(nn.Conv1d(2, 4, 3), 1), nn.MaxPool1d(2), nn.ReLU()], (8, 2, 10), (1, 4)),
        ([nn.Conv1d(2, 4, 1), dead_channel(nn.BatchNorm1d(4), 2), nn.ReLU()], (8, 2, 10), (2, 4)),
        ([dead_channel(nn.Conv1d(2, 4, 3), 1), nn.ReLU()], (2, 10), (1, 4)),
        ([dead_channel(nn.Conv2d(2, 4, 3), 3), nn.ReLU()], (2, 8, 10), (3, 4)),
        ([dead_channel(nn.Linear(6, 5), 4), nn.ReLU()], (8, 7, 6), (4, 5)),
        ([nn.Conv1d(2, 6, 1), Transposed(), dead_channel(nn.Linear(6, 5), 4), nn.ReLU()], (8, 2, 7), (4, 5)),
        ([dead_channel(nn.Linear(6, 5), 4), nn.ReLU()], (8, 3, 4, 6), (4, 5)),
    ],
)
def test_units_are_where_the_layer_before_has_them(
    layers: list[nn.Module], shape: tuple[int, ...], dead: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    x = torch.randn(shape) * 10
    site = str(len(layers) - 1)
    with pytest.warns(TrainingWarning, match=rf"1 of {dead[1]} units .* \(units {dead[0]}\)"):
        with watch(model, site, gradients=False, parameters=False, alarms=Alarms(window=1)) as w:
            model(x)
    assert w.last[site]["dead"] == 1 / dead[1]


def test_padded_times_are_no_dead_units_and_unknown_units_are_not_judged() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 4, 1, bias=False), nn.ReLU(), Transposed(), nn.ReLU())
    x = torch.randn(8, 1, 10)
    x[..., 7:] = 0
    with watch(model, alarms=Alarms(window=1)) as w:
        model(x).sum().backward()
    assert w.last["1"]["dead"] == 0.0
    assert "dead" not in w.last["3"]
    assert w.alarms == []


def test_weights_that_begin_at_zero_do_not_explode_but_may_later() -> None:
    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(self.a(x))

    torch.manual_seed(0)
    model, x = Adapter(), torch.randn(8, 64)
    model.a.requires_grad_(False)
    optimizer = torch.optim.SGD(model.b.parameters(), lr=1e-6)

    def train(steps: int, factor: float) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            ((model(x) - 3).square().sum() * factor).backward()
            optimizer.step()

    w = watch(model)
    train(5, 1.0)
    w.flush()
    assert model.b.weight.grad.norm() > 1.0  # a thousand times the least norm that a weight was taken to have
    assert w.alarms == []
    optimizer.param_groups[0]["lr"] = 0.0
    train(1, 1e4)
    with pytest.warns(TrainingWarning, match=r"'b.weight': the gradient explodes: .* usually was"):
        w.close()


def test_vanishing_gradients_are_found_in_a_deep_sigmoid_network_at_its_early_layers() -> None:
    messages, alarms = alarms_of(deep(nn.Sigmoid), torch.randn(4, 16))
    assert {alarm.kind for alarm in alarms} == {"vanishing"}
    sites = [int(alarm.site.split(".")[0]) for alarm in alarms]
    assert 0 in sites
    assert max(sites) < 30
    assert len(messages) == len(set(sites))


def test_exploding_gradients_are_found_when_they_are_large_sudden_or_not_finite() -> None:
    _, alarms = alarms_of(deep(nn.Identity, gain=40.0, depth=6), torch.randn(4, 16), steps=1)
    assert {alarm.kind for alarm in alarms} == {"exploding"}
    model = mlp()
    for factors, message in (((1, 1, 1, 1, 1000), "usually was"), ((math.nan,), "its norm is nan")):
        w = watch(model, "5", alarms=Alarms(exploding=100))
        for factor in factors:
            model.zero_grad()
            (model(X).sum() * factor * 1e-3).backward()
        with pytest.warns(TrainingWarning, match=message):
            w.close()


def test_healthy_training_raises_no_alarm() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(weights=None, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    with watch(model, alarms=Alarms(window=3)) as w:
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert [alarm for alarm in w.alarms if alarm.kind != "dead"] == []


def test_alarms_can_be_left_out() -> None:
    messages, alarms = alarms_of(deep(nn.Sigmoid), torch.randn(4, 16), alarms=False)
    assert messages == [] == alarms


# -- no residue -------------------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.fails:
            raise RuntimeError("the model's own error")
        return self.second(x)


@pytest.mark.parametrize("steps", ["calls", "manual"])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_nothing_is_left_behind(steps: Any, error: type[BaseException] | None) -> None:
    model = mlp()
    before = snapshot(model)
    try:
        with watch(model, every=2, steps=steps) as w:
            for _ in range(3):
                model(X).sum().backward()
                if steps == "manual":
                    w.step()
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt) as raised:
        assert type(raised) is error  # noqa: PT017
    model.zero_grad()
    assert_same(before, snapshot(model), "model")


def test_a_forward_that_raises_passes_its_own_error_and_the_next_step_goes_on() -> None:
    model = Fragile()
    before = snapshot(model)
    with watch(model) as w:
        model.fails = True
        with pytest.raises(RuntimeError, match="the model's own error"):
            model(torch.ones(2, 3))
        model.fails = False
        model(torch.ones(2, 3))
    assert_same(before, snapshot(model), "model")
    first, second = (shot.sites for shot in w.history)
    assert "first" in first
    assert "second" not in first
    assert_close(second["second"], by_numpy([model(torch.ones(2, 3))]))
    model.fails = True
    with pytest.raises(RuntimeError, match="the model's own error"), watch(model) as w:
        model(torch.ones(2, 3))
    model.fails = False
    assert_same(before, snapshot(model), "model")
    assert len(w.history) == 0


def test_a_destination_that_fails_passes_its_own_error_and_no_hook_stays() -> None:
    def fail(step: int, values: Any) -> None:
        raise OSError("disk full")

    model = mlp()
    w = watch(model, log=fail)
    model(X)
    with pytest.raises(OSError, match="disk full"):
        w.close()
    assert hooks_on(model) == 0
    w.close()


def test_a_dropped_watch_takes_its_hooks_along_at_once() -> None:
    model = mlp()
    gc.disable()
    try:
        w = watch(model)
        output = model(X)
        assert hooks_on(model) > 1
        del w
        assert hooks_on(model) == 0
    finally:
        gc.enable()
    output.sum().backward()
    with pytest.warns(ResourceWarning, match="keep what th.watch"):
        watch(model)
    assert hooks_on(model) == 0


def test_a_watched_model_can_be_copied_and_pickled_in_the_middle_of_a_step() -> None:
    model = mlp()
    with watch(model) as w:
        model(X).sum().backward()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(X * 100).sum().backward()
        assert len(w.history) == 0
    assert len(w.history) == 1


def test_the_graph_of_a_step_is_not_kept_alive() -> None:
    class Mark:
        pass

    model = mlp()
    with watch(model):
        output = model(X)
        output.grad_fn.metadata["mark"] = mark = Mark()
        alive = weakref.ref(mark)
        del output, mark
        assert alive() is None


def test_layers_that_never_ran_are_reported_once_at_the_end() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Half()
    w = watch(model)
    for _ in range(3):
        model(torch.ones(1, 2))
    with pytest.warns(NeverRanWarning, match=r"1 watched site never ran:\n  'unused': the model ran without") as caught:
        w.close()
    assert len(caught) == 1


def test_a_watch_that_measured_nothing_says_so() -> None:
    model = mlp()
    for start, steps, why in ((0, 0, "the model was not called"), (1, 2, "none of the 2 steps was a multiple")):
        w = watch(model, every=10, start=start)
        for _ in range(steps):
            model(X)
        with pytest.warns(NeverRanWarning, match=f"measured nothing: {why}"):
            w.close()


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_step_waits_for_nothing_until_its_end() -> None:
    model = mlp().cuda()
    x = X.cuda()
    expected = by_numpy([mlp()(X)])
    w = watch(model, statistics=(*DEFAULT, "histogram"))
    model(x).sum().backward()
    w.flush()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    w.close()
    assert_close(w.last["5"], expected, rel=1e-2)

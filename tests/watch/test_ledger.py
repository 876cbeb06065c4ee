"""Numbers that come over while the next step runs: none is lost, late or out of order."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import BareHooks, copies
from tests.watch.emulated import Kernels, emulated  # noqa: F401
from tests.watch.helpers import X, assert_close, by_numpy, hooks_on, mlp, square_norm
from torchhook._watch import ledger as ledgers
from torchhook._watch.alarms import Alarms
from torchhook._watch.api import watch
from torchhook._watch.ledger import Ledger, norm_at
from torchhook._watch.statistics import DEFAULT
from torchhook.errors import TrainingWarning

pytestmark = pytest.mark.usefixtures("emulated")


def train(model: nn.Module, log: Any, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with watch(model, log=log, **options) as w:
        for _ in range(5):
            optimizer.zero_grad()
            (model(X) ** 2).sum().backward()
            optimizer.step()
            if "steps" in options:
                w.step()


def test_every_layer_of_a_resnet_has_the_statistics_of_what_bare_hooks_cloned(emulated: Kernels) -> None:  # noqa: F811
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18(weights=None).train()
    x = torch.randn(2, 3, 32, 32)
    with BareHooks(model) as bare:
        model(x)
    with watch(model, alarms=False) as w:
        model(x).sum().backward()
    values = 0
    for site, calls in bare.outputs.items():
        if site:
            tensors = [c.tensor for frozen in calls for c in copies(frozen)]
            assert_close(w.last[site], by_numpy(tensors), site)
            values += len(tensors)
    for name, parameter in model.named_parameters():
        assert w.last[name]["grad_norm"] == pytest.approx(square_norm(parameter.grad), rel=1e-6)
    # One launch for each value, each gradient of one, each parameter and each gradient of one; containers share theirs.
    parameters = len(list(model.parameters()))
    assert emulated.look.launches <= 2 * values + 2 * parameters


@pytest.mark.parametrize("options", [{}, {"every": 2}, {"steps": "manual"}])
def test_the_numbers_are_those_of_a_watch_that_waits(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[Any] = []
    train(mlp(), lambda step, values: logs.append((step, values)), **options)
    late, logs = logs, []
    monkeypatch.setattr(ledgers, "has_rows", lambda tensor: False)
    train(mlp(), lambda step, values: logs.append((step, values)), **options)
    assert [step for step, _ in late] == [step for step, _ in logs]
    for (_, found), (_, expected) in zip(late, logs, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_step_is_told_when_the_next_one_has_ended_or_when_it_is_asked_for() -> None:
    model, told = mlp(), []
    w = watch(model, log=lambda step, values: told.append(step)).open()
    model(X)
    model[1].register_forward_hook(lambda *_: told.append("in the model"))
    model(X)
    assert told == ["in the model"]
    model(X)
    assert told == ["in the model", 0, "in the model"]
    w.flush()
    assert told[-2:] == [1, 2]
    model(X)
    model[5].register_forward_hook(lambda *_: told.append(len(w.history)))
    model(X)
    assert told[-2:] == [3, 4]  # asked for inside the next step: it is told then, and once
    w.close()
    assert told[-1] == 4
    assert [shot.step for shot in w.history] == [0, 1, 2, 3, 4]


def run_and_fail(model: nn.Module) -> None:
    model(X)
    model(X[:, :2])


def test_a_step_that_has_ended_is_told_though_the_next_one_fails() -> None:
    model, told = mlp(), []
    with pytest.raises(RuntimeError, match="expected input"), watch(model, log=lambda step, _: told.append(step)):
        run_and_fail(model)
    assert told == [0]
    assert hooks_on(model) == 0


def test_a_step_that_is_not_followed_by_a_measured_one_is_told_at_the_next_call() -> None:
    model, told = mlp(), []
    with watch(model, every=3, log=lambda step, values: told.append(step)):
        for calls in range(4):
            model(X)
            assert told == ([0] if calls >= 2 else [])
    assert told == [0, 3]


def test_what_was_built_ahead_is_not_used_when_layers_were_frozen_meanwhile() -> None:
    model = mlp()
    with watch(model) as w:
        for step in range(5):
            model.zero_grad()
            model[0].requires_grad_(step % 2 == 0)
            model(X).sum().backward()
    assert [("0.weight" in shot.sites) for shot in w.history] == [True, False, True, False, True]
    assert all(shot.sites["5.weight"]["grad_norm"] > 0 for shot in w.history)


def test_an_alarm_that_is_an_error_keeps_the_step_after_the_next_from_beginning() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    nn.init.constant_(model[0].bias, -100.0)
    told: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        w = watch(model, alarms=Alarms(window=1), log=lambda step, values: told.append(step)).open()
        for _ in range(2):
            model(torch.rand(2, 3))
        with pytest.raises(TrainingWarning, match="4 of 4 units"):
            model(torch.rand(2, 3))
        w.close()
    assert told == [0, 1]
    assert hooks_on(model) == 0


def test_dead_units_are_found_in_the_pass_that_takes_the_statistics(emulated: Kernels) -> None:  # noqa: F811
    model = mlp()
    with torch.no_grad():
        model[0].bias[[2, 5]] = -100
    with pytest.warns(TrainingWarning, match=r"2 of 8 units .* \(units 2, 5\)"):
        with watch(model, "1", gradients=False, parameters=False, alarms=Alarms(window=1)) as w:
            model(X)
    assert w.last["1"]["dead"] == 2 / 8
    assert emulated.look.launches == 1


def test_histograms_and_rows_do_not_get_in_each_others_way() -> None:
    model = mlp()
    with watch(model, statistics=(*DEFAULT, "histogram"), bins=8) as w:
        model(X).sum().backward()
        expected = by_numpy([model(X)])
    assert_close(w.history[0].sites["5"], expected)
    assert sum(w.history[0].sites["5"]["histogram"].counts) == 10


@pytest.mark.parametrize("name", ["mean", "std", "min", "zeros", "nans", "norm"])
def test_only_what_is_wanted_is_told(name: str) -> None:
    with watch(mlp(), "5", statistics=[name], alarms=False) as w:
        w._engine.watched.index.modules[""](X)
    assert list(w.last["5"]) == [name]


def test_a_ledger_reads_what_it_holds_whatever_its_kind() -> None:
    ledger = Ledger()
    mask = torch.tensor([True, False])
    keys = [ledger.note(t) for t in (torch.tensor(1.5), torch.tensor([1, 2]), mask, torch.tensor(2.5).double())]
    several = ledger.note_all([torch.tensor(3.0), torch.tensor(4.0)])
    assert ledger.note_all([]) == []
    norm = ledger.norm(torch.tensor([3.0, 4.0]))
    numbers = ledger.read()
    assert [numbers[key] for key in (keys[0], keys[1], keys[3])] == [1.5, [1, 2], 2.5]
    assert [norm_at(key, numbers) for key in several] == [3.0, 4.0]
    assert norm_at(norm, numbers) == 5.0
    assert torch.equal(numbers[keys[2]], mask)


class Meta(Tensor):
    """A tensor that says it is not on the CPU."""

    is_cpu = False  # type: ignore[assignment]


def test_what_waits_on_a_device_comes_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    transfer = ledgers._Transfer
    monkeypatch.setattr(ledgers, "_Transfer", lambda *a: made.append(a) or transfer(*a))
    ledger = Ledger()
    monkeypatch.setattr(ledgers, "local", lambda tensor: tensor)
    held = [torch.tensor(1.5), torch.tensor([True, False, True]), torch.tensor([7, 8]), torch.tensor(0.5).double()]
    keys = [ledger.note(tensor.as_subclass(Meta)) for tensor in held]
    numbers = ledger.read()
    assert len(made) == 1
    assert [numbers[key] for key in (keys[0], keys[2], keys[3])] == [1.5, [7, 8], 0.5]
    assert numbers[keys[1]].tolist() == [True, False, True]


# -- gradients of parameters, many together ------------------------------------------------------------


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gradients are taken together, as on a GPU; how many at a time."""
    numbers: list[int] = []
    really = ledgers.foreach.norms
    monkeypatch.setattr(ledgers, "_goes_together", lambda t: type(t) is Tensor and t.layout == torch.strided)
    monkeypatch.setattr(ledgers.foreach, "norms", lambda tensors: numbers.append(len(tensors)) or really(tensors))
    return numbers


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_those_of_the_end_of_the_backward_pass(set_to_none: bool, together: list[int]) -> None:
    model, expected = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with watch(model) as w:
        for _ in range(3):
            (model(X) ** 2).sum().backward()
            expected.append({name: square_norm(p.grad) for name, p in model.named_parameters()})
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    for shot, norms in zip(w.history, expected, strict=True):
        for name, norm in norms.items():
            assert shot.sites[name]["grad_norm"] == pytest.approx(norm, rel=1e-5), name
    assert together == ([6] * 3 if set_to_none else [6])


def test_gradients_that_are_used_up_or_handed_out_at_once_are_measured(together: list[int]) -> None:
    model = mlp()
    kept = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: kept.update({name: square_norm(grad)}))

        def step(parameter: Tensor) -> None:  # an optimizer inside the backward pass
            parameter.data.add_(parameter.grad, alpha=-1e-3)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(step)
    with watch(model) as w:
        model(X).sum().backward()
        w.flush()
        used_up = dict(kept)
        torch.autograd.grad(model(X).sum(), list(model.parameters()))
    for shot, norms in zip(w.history, (used_up, kept), strict=True):
        for name, norm in norms.items():
            assert shot.sites[name]["grad_norm"] == pytest.approx(norm, rel=1e-5), name
    assert together == [6, 6]


def test_a_parameter_keeps_the_very_memory_of_its_gradient(together: list[int]) -> None:
    """Autograd copies a gradient that somebody else holds."""
    found = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            new = grad.clone()
            found.append(new.data_ptr())
            return new

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ Noted.apply(self.weight)

    model = Net()
    with watch(model, "(model)"):
        model(torch.ones(1, 8)).sum().backward()
    assert [model.weight.grad.data_ptr()] == found
    assert together == [1]


def test_few_gradients_are_held_at_a_time(together: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "_HELD", 1500)
    monkeypatch.setattr(ledgers, "_SMALL", 300)
    model = mlp()
    with watch(model) as w:
        model(X).sum().backward()
    assert sum(together) == len([p for p in model.parameters() if p.numel() <= 300])
    assert len(together) > 1
    for name, parameter in model.named_parameters():
        assert w.last[name]["grad_norm"] == pytest.approx(square_norm(parameter.grad), rel=1e-5), name


def test_gradients_are_those_of_now_after_a_backward_pass_that_failed(together: list[int]) -> None:
    def fail(grad: Tensor) -> None:
        raise RuntimeError("out of memory")

    model = mlp()
    with watch(model, steps="manual") as w:
        handle = model[0].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(X).sum().backward()
        handle.remove()
        model.zero_grad()
        model(X * 3).sum().backward()
    for name, parameter in model.named_parameters():
        assert w.last[name]["grad_norm"] == pytest.approx(square_norm(parameter.grad), rel=1e-5), name

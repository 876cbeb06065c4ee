"""Callbacks of trainers: what a watch measures is what a bare loop measures by hand, step by step of the optimizer."""

from __future__ import annotations

import csv
import gc
import math
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchhook._guard.api import guard
from torchhook._watch.api import watch
from torchhook.errors import GuardError, NeverRanWarning, SessionError

RATE, BATCHES, SIZE = 0.1, 8, 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(BATCHES, SIZE, 3, generator=generator)
    return [(x, x.sum(1, keepdim=True)) for x in xs]


class Measured(NamedTuple):
    mean: float
    grad_norm: float
    norm: float
    update_ratio: float


def by_hand(accumulate: int = 1) -> list[Measured]:
    """The first layer in a bare loop: its outputs in all batches of a step, and its weight around the optimizer's."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    outputs: list[Tensor] = []
    net[0].register_forward_hook(lambda module, args, output: outputs.append(output.detach().clone()))
    found = []
    for number, (x, y) in enumerate(batches()):
        (F.mse_loss(net(x), y) / accumulate).backward()
        if (number + 1) % accumulate:
            continue
        weight = net[0].weight.detach().clone()
        gradient = net[0].weight.grad.norm().item()
        optimizer.step()
        optimizer.zero_grad()
        moved = (net[0].weight.detach() - weight).norm() / weight.norm()
        found.append(Measured(torch.cat(outputs).mean().item(), gradient, weight.norm().item(), moved.item()))
        outputs.clear()
    return found


def measured(w: Any) -> list[Measured]:
    """The same of a watch."""
    return [
        Measured(s["0"]["mean"], s["0.weight"]["grad_norm"], s["0.weight"]["norm"], s["0.weight"]["update_ratio"])
        for s in (snapshot.sites for snapshot in w.history)
    ]


def assert_as_by_hand(w: Any, accumulate: int, every: int = 1) -> None:
    expected, found = by_hand(accumulate)[::every], measured(w)
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert one == pytest.approx(two, rel=1e-4)
    assert [snapshot.step for snapshot in w.history] == list(range(0, BATCHES // accumulate, every))


# -- Hugging Face, by the handler that its Trainer tells of everything -------------------------------------------


def train_by_events(net: nn.Module, callbacks: list[Any], accumulate: int = 1, first: int = 0) -> None:
    """A loop that tells of its steps as ``transformers.Trainer`` does, without what else that needs."""
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    handler = CallbackHandler(callbacks, net, None, optimizer, None)
    state, control, args = TrainerState(), TrainerControl(), SimpleNamespace(spec=TrainingArguments)
    state.global_step = first
    handler.on_train_begin(args, state, control)
    for number, (x, y) in enumerate(batches()):
        if number % accumulate == 0:
            handler.on_step_begin(args, state, control)
        (F.mse_loss(net(x), y) / accumulate).backward()
        if (number + 1) % accumulate:
            handler.on_substep_end(args, state, control)
            continue
        handler.on_pre_optimizer_step(args, state, control)
        optimizer.step()
        handler.on_optimizer_step(args, state, control)
        net.zero_grad()
        state.global_step += 1
        handler.on_step_end(args, state, control)
        with torch.no_grad():  # evaluation, between the steps
            net(x * 100)
        handler.on_evaluate(args, state, control, {})
    handler.on_train_end(args, state, control)


@pytest.fixture
def events() -> Any:
    pytest.importorskip("transformers", reason="transformers is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing the Trainer's parts says
        from transformers import trainer_callback

        return trainer_callback


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("every", [1, 2])
def test_a_step_is_one_of_the_optimizer(events: Any, accumulate: int, every: int) -> None:
    net = model()
    w = watch(net, every=every)
    train_by_events(net, [w.callback()], accumulate)
    assert_as_by_hand(w, accumulate, every)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_numbers_are_the_trainers_own(events: Any) -> None:
    net = model()
    w = watch(net, every=4)
    train_by_events(net, [w.callback()], first=102)
    assert [snapshot.step for snapshot in w.history] == [104, 108]


def test_a_training_after_one_that_failed_has_its_own_numbers(events: Any) -> None:
    net = model()
    w = watch(net)
    callback = w.callback()
    callback.on_train_begin(None, SimpleNamespace(global_step=0), None)
    callback.on_step_begin(None, SimpleNamespace(global_step=50), None)  # and an error, of which nobody is told
    train_by_events(net, [callback])
    assert [snapshot.step for snapshot in w.history][-BATCHES:] == list(range(BATCHES))


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("mine")


def hooks(net: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


@pytest.mark.parametrize("tool", [watch, guard])
def test_hooks_go_with_the_trainer_whose_training_failed(events: Any, tool: Any) -> None:
    """Hugging Face tells nobody of an exception."""
    net = model().append(Fails())
    made = tool(net)
    callback = made.callback()
    with pytest.raises(KeyError, match="mine"):
        train_by_events(net, [callback])
    assert made.is_open
    del callback
    gc.collect()
    assert not made.is_open
    assert hooks(net) == 0


@pytest.mark.parametrize("tool", [watch, guard])
def test_hooks_go_at_once_from_a_block_around_a_training_that_fails(events: Any, tool: Any) -> None:
    net = model().append(Fails())
    with pytest.raises(KeyError, match="mine"), tool(net) as made:
        train_by_events(net, [made.callback()])
    assert not made.is_open
    assert hooks(net) == 0


@pytest.mark.parametrize("steps", ["calls", "manual"])
def test_a_watch_that_is_open_already_stays_open(events: Any, steps: Any) -> None:
    net = model()
    with watch(net, steps=steps) as w:
        train_by_events(net, [w.callback()], 2)
        assert w.is_open
        net(torch.ones(1, 3))  # belongs to no step
    assert_as_by_hand(w, 2)


def test_sinks_get_what_they_got(events: Any, tmp_path: Path) -> None:
    net, seen = model(), []
    w = watch(net, log=[tmp_path / "a.csv", lambda step, values: seen.append((step, values["0/mean"]))])
    train_by_events(net, [w.callback()], 2)
    expected = [one.mean for one in by_hand(2)]
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert [mean for _, mean in seen] == pytest.approx(expected, rel=1e-4)
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["site"] == "0"]
    assert [float(row["mean"]) for row in rows] == pytest.approx(expected, rel=1e-4)


def test_two_tools_go_side_by_side(events: Any, caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    w, g = watch(net), guard(net)
    train_by_events(net, [w.callback(), g.callback()])
    assert_as_by_hand(w, 1)
    assert (g.findings, g.is_open) == ([], False)
    assert "already one" not in caplog.text


@pytest.mark.shows("Training stacks: guard")
def test_a_guard_stops_the_training_at_the_layer(events: Any) -> None:
    net = model()
    with torch.no_grad():
        net[2].weight[0, 0] = math.inf
    with pytest.raises(GuardError, match=r"2\.weight"):
        train_by_events(net, [guard(net).callback()])


def test_a_tool_serves_one_training(events: Any) -> None:
    net = model()
    w = watch(net)
    made = w.callback()
    train_by_events(net, [made])
    with pytest.raises(SessionError, match="opens once"):
        train_by_events(net, [made])
    with pytest.raises(SessionError, match=r"callback\(\): this watch is closed"):
        w.callback()


def test_a_watch_that_is_closed_early_lets_the_training_go_on(events: Any) -> None:
    net = model()
    w = watch(net)

    class Closes(events.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 3:
                w.close()

    train_by_events(net, [w.callback(), Closes()])
    assert [snapshot.step for snapshot in w.history] == [0, 1, 2]


def test_steps_are_not_made_by_hand_too(events: Any) -> None:
    w = watch(model())
    w.callback()
    with w:
        with pytest.raises(SessionError, match="the trainer's optimizer makes them"):
            w.step()
        with pytest.warns(NeverRanWarning, match="measured nothing"):
            w.close()


def test_without_a_trainer_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    net = model()
    with watch(net, steps="manual") as w:
        with pytest.raises(SessionError, match=r"none of them is imported\. Import yours first"):
            w.callback()
        net(torch.ones(1, 3))
        w.step()  # goes on as before
    assert len(w.history) == 1


# -- the trainers themselves -----------------------------------------------------------------------------------


@pytest.mark.shows("Training stacks: the Trainer of Hugging Face")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_of_hugging_face(accumulate: int, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate, which transformers.Trainer needs, is not installed")
    from transformers import Trainer, TrainingArguments

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.mse_loss(self.body(x), labels)}

    net = Regression()
    rows = [{"x": x, "labels": y} for xs, ys in batches() for x, y in zip(xs, ys, strict=True)]
    args = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=SIZE,
        gradient_accumulation_steps=accumulate,
        num_train_epochs=1,
        max_grad_norm=0,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        eval_strategy="steps",
        eval_steps=1,
    )

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)  # type: ignore[arg-type]

        def create_optimizer(self, *args: Any) -> Any:
            self.optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
            return self.optimizer

    w, g = watch(net), guard(net)
    InOrder(net, args, train_dataset=rows, eval_dataset=rows, callbacks=[w.callback(), g.callback()]).train()
    for snapshot in w.history:
        snapshot.sites.update({name.removeprefix("body."): value for name, value in snapshot.sites.items()})
    assert_as_by_hand(w, accumulate)
    assert g.findings == []


def lightning() -> Any:
    return pytest.importorskip("lightning.pytorch", reason="lightning is not installed")


def lightning_module(fails: bool = False) -> Any:
    class Regression(lightning().LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = model()

        def training_step(self, batch: Any, index: int) -> Tensor:
            if fails and index == 3:
                raise KeyError("mine")
            x, y = batch
            return F.mse_loss(self.body(x), y)

        def validation_step(self, batch: Any, index: int) -> None:
            self.body(batch[0] * 100)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    return Regression()


def loader() -> Any:
    xs, ys = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(xs, ys), batch_size=SIZE)


def lightning_trainer(callbacks: list[Any], **options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning().Trainer(
        max_epochs=1, accelerator="cpu", enable_model_summary=False, callbacks=callbacks, **quiet, **options
    )


@pytest.mark.shows("Training stacks: Lightning")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("accumulate", "validate"), [(1, 1), (2, 1), (4, 3), (2, 8)])
def test_the_trainer_of_lightning(accumulate: int, validate: int) -> None:
    """Validation comes between steps and, where it does not fit their length, in the midst of one."""
    module = lightning_module()
    w, g = watch(module), guard(module)
    trainer = lightning_trainer(
        [w.callback(), g.callback()], accumulate_grad_batches=accumulate, val_check_interval=validate
    )
    trainer.fit(module, loader(), loader())
    trainer.validate(module, loader(), verbose=False)  # the callbacks hear of it, and all is over
    for snapshot in w.history:
        snapshot.sites.update({name.removeprefix("body."): value for name, value in snapshot.sites.items()})
    assert_as_by_hand(w, accumulate)
    assert (w.is_open, g.is_open, g.findings) == (False, False, [])


@pytest.mark.filterwarnings("ignore")
def test_an_error_in_lightning_passes_and_leaves_no_hook() -> None:
    module = lightning_module(fails=True)
    w = watch(module)
    with pytest.raises(KeyError, match="mine"):
        lightning_trainer([w.callback()]).fit(module, loader())
    assert not w.is_open
    assert [snapshot.step for snapshot in w.history] == [0, 1, 2]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_a_lightning_module_that_is_watched_without_a_callback_is_told_at_once() -> None:
    module = lightning_module()
    with pytest.warns(NeverRanWarning, match=r"Lightning calls the training_step .* callback\(\)"):
        w = watch(module).open()
    with pytest.warns(NeverRanWarning, match="measured nothing"):
        w.close()

"""Bad gradients: found when the backward pass has ended, by repeating the run that made them."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchhook as th
from tests.guard.faults import NAN, Apply, at_zero, ones
from torchhook._guard.api import Guard, guard
from torchhook.errors import GuardError


def _found(g: Guard) -> list[tuple[str, str, int]]:
    return [(f.kind, str(f.site), f.run) for f in g.findings]


def test_the_run_that_made_a_gradient_bad_is_found_among_several() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Apply(lambda x: x.sqrt()))
    nn.init.constant_(model[0].weight, 1.0)
    with guard(model, action="record") as g:
        outputs = [model(ones() * scale) for scale in (1, 0, 2)]
        sum(output.sum() for output in outputs).backward()
    assert _found(g) == [("op", "1/sqrt#1:grad_input", 1)]


def test_a_gradient_that_went_bad_in_a_later_run_of_a_chain_is_that_runs() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Apply(lambda x: x.sqrt()))
    nn.init.eye_(model[0].weight)
    with guard(model, action="record") as g:
        first = model(ones())
        model(first - 1).sum().backward()
    assert _found(g) == [("op", "1/sqrt#1:grad_input", 1)]


def test_an_input_gradient_alone_is_enough() -> None:
    model = nn.Sequential(Apply(lambda x: x.sqrt()), nn.Identity())
    x = torch.zeros(2, requires_grad=True)
    with guard(model, action="record") as g:
        for _ in range(2):
            torch.autograd.grad(model(x).sum(), x)
    assert [(*_found(g)[0], g.findings[0].times)] == [("op", "0/sqrt#0:grad_input", 0, 2)]
    assert x.grad is None
    assert not x._backward_hooks


def test_what_the_loss_does_to_the_input_is_not_the_models() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 4, requires_grad=True)
    with guard(model) as g:
        (model(x).sum() + x.sqrt().sum()).backward()
    assert g.findings == []
    assert not x.grad.isfinite().all()


def test_autocast_is_repeated_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: (x - x).sqrt()))
    with guard(model, action="record") as g:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(ones())
        output.sum().backward()
    (finding,) = g.findings
    assert str(finding.site) == "1/sqrt#0:grad_input"
    assert {s.dtype for s in (*finding.inputs, *finding.outputs)} == {torch.bfloat16}


def test_a_step_of_the_optimizer_in_between_is_said() -> None:
    model = at_zero(lambda x: x.sqrt())(True)
    optimizer = torch.optim.SGD([model[2].bias], lr=0.1)
    model[2].bias.grad = torch.ones(4)
    with guard(model, action="record") as g:
        output = model(ones())
        optimizer.step()
        output.sum().backward()
    (finding,) = g.findings
    assert "because parameters were written to since the forward pass" in str(finding)
    assert finding.site.path in ("0.weight", "0.bias")
    assert finding.phase == "backward"


def test_random_numbers_of_the_forward_pass_are_drawn_again() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * (torch.rand_like(x) < 0.5)).sqrt()  # half of them at 0

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Noisy())
    nn.init.constant_(model[0].weight, 1.0)
    torch.manual_seed(0)
    expected = int((torch.rand(64, 4) >= 0.5).sum())
    torch.manual_seed(0)
    with guard(model, action="record") as g:
        output = model(torch.ones(64, 4))
        torch.rand(3)  # others draw too
        output.sum().backward()
        after = torch.rand(1)
    (finding,) = g.findings
    assert str(finding.site) == "1/sqrt#0:grad_input"
    assert finding.outputs[0].inf == expected
    torch.manual_seed(0)
    torch.rand(64, 4)
    torch.rand(3)
    assert torch.equal(after, torch.rand(1))


def test_an_edited_gradient_is_not_repeated_and_that_is_said() -> None:
    model = at_zero(lambda x: x.sqrt())(True)
    with th.edit(model, {"2:grad": lambda grad: grad * 2}), guard(model, action="record") as g:
        model(ones()).sum().backward()
    assert "because another session changes gradients on their way" in str(g.findings[0])


def test_a_gradient_scaled_bad_by_the_loss_needs_no_repetition() -> None:
    runs: list[int] = []
    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: runs.append(1) or x))
    with pytest.raises(GuardError, match="the loss, outside the model, made it"):
        with guard(model):
            (model(ones()).sum() * NAN).backward()
    assert len(runs) == 1


def test_gradients_that_accumulate_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.grad = torch.full((4, 4), NAN)  # from before, and none of this pass
    with guard(model) as g:
        model(ones()).sum().backward()
    assert g.findings == []


def test_a_model_that_keeps_its_last_output_keeps_no_other() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last, self.all = nn.Linear(4, 4), None, []

        def forward(self, x: Tensor) -> Tensor:
            self.all[:] = [self.last]
            self.last = self.layer(x)
            return self.last

    model = Keeps()
    refs = []
    gc.disable()
    try:
        with guard(model):
            for _ in range(12):
                refs.append(weakref.ref(model(ones())))
            alive = sum(ref() is not None for ref in refs)
    finally:
        gc.enable()
    assert alive <= 2


class Marker:
    pass


def test_an_output_that_is_the_input_overwritten_is_freed() -> None:
    model = nn.Sequential(Apply(lambda x: x.mul_(2)))
    gc.disable()
    try:
        with guard(model):
            x = ones().requires_grad_() * 1
            output = model(x)
            ref, output.grad_fn.metadata["goes with the graph"] = weakref.ref(marker := Marker()), marker
            del x, output, marker
            assert ref() is None
    finally:
        gc.enable()


def test_a_backward_pass_on_another_thread_is_looked_into() -> None:
    model = at_zero(lambda x: x.sqrt())(True)
    raised: list[Any] = []
    with guard(model, action="record") as g:
        loss = model(ones()).sum()

        def back() -> None:
            try:
                loss.backward()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=back)
        thread.start()
        thread.join()
    assert raised == []
    assert _found(g) == [("op", "1/sqrt#0:grad_input", 0)]


def test_an_optimizer_inside_the_backward_pass_steps_once() -> None:
    model = at_zero(lambda x: x.sqrt())(True)
    optimizers = {p: torch.optim.SGD([p], lr=1.0) for p in model[2].parameters()}
    for p in optimizers:
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = model[2].bias.detach().clone()
    with guard(model, action="record") as g:
        model(ones()).sum().backward()
    assert torch.equal(model[2].bias, before - 2)
    # It has stepped by then, so that the forward pass is another one.
    assert "parameters were written to" in str(g.findings[0])


def test_a_parameter_that_the_first_run_makes_is_waited_for() -> None:
    model = nn.Sequential(nn.LazyLinear(4), Apply(lambda x: (x - x).sqrt()))
    with guard(model, action="record") as g:
        model(ones()).sum().backward()
    assert _found(g) == [("op", "1/sqrt#0:grad_input", 0)]


@pytest.mark.parametrize("build", [nn.LSTM, nn.GRU])
def test_weights_that_a_module_keeps_in_a_list_of_its_own_come_back(build: Any) -> None:
    model = nn.Sequential(build(4, 4, num_layers=2), Apply(lambda out: (out[0] - out[0]).sqrt()))
    before = [id(p) for p in (*model.parameters(), *model[0]._flat_weights)]
    with guard(model, action="record") as g:
        model(torch.ones(3, 2, 4)).sum().backward()
    assert _found(g) == [("op", "1/sqrt#0:grad_input", 0)]
    assert [id(p) for p in (*model.parameters(), *model[0]._flat_weights)] == before

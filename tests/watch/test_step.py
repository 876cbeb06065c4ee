"""What one step measures, against bare hooks and ``autograd.grad``."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.oracle import BareHooks, copies
from tests.watch.helpers import X, assert_close, by_numpy, mlp, square_norm
from torchhook._watch.api import watch
from torchhook._watch.statistics import DEFAULT


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


@pytest.mark.shows("Precision: watch under autocast")
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_step_waits_for_nothing_until_its_end() -> None:
    model = mlp().cuda()
    x = X.cuda()
    expected = by_numpy([mlp()(X)])
    w = watch(model, statistics=(*DEFAULT, "histogram")).open()
    model(x).sum().backward()
    w.flush()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    w.close()
    assert_close(w.last["5"], expected, rel=1e-2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_the_elements_of_nested_tensors_are_measured(layout: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    rows = [torch.randn(2, 3), torch.randn(5, 3)]
    with watch(model, gradients=False) as w, torch.no_grad():
        model(torch.nested.nested_tensor(rows, layout=layout))
    for site, end in (("0", 1), ("1", 2), ("2", 3)):
        flat = torch.cat([model[:end](row).detach().flatten() for row in rows]).double()
        found = w.last[site]
        assert found["mean"] == pytest.approx(flat.mean().item(), rel=1e-5)
        assert found["std"] == pytest.approx(flat.std(correction=0).item(), rel=1e-5)
        assert found["zeros"] == pytest.approx((flat == 0).double().mean().item())
        assert found["norm"] == pytest.approx(flat.norm().item(), rel=1e-5)

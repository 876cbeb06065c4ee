"""The guard names what made the first NaN or Inf, and says nothing about models that make none.

Every planted fault has a clean twin: the same model on other numbers. What is right is written down by hand.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import tensors_in
from tests.oracle import assert_same, snapshot
from tests.zoo import WITHOUT_GRADIENT, ZOO
from torchhook.errors import NeverRanWarning, TorchHookError
from torchhook.guard import GuardError, GuardWarning, guard
from torchhook.sites import Site, parse

INF, NAN = math.inf, math.nan


class Apply(nn.Module):
    """Runs a function: the smallest module with an operation of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def around(function: Callable[..., Any]) -> nn.Module:
    """``function`` as module 1 of 3, with a nested propagator after it."""
    return nn.Sequential(nn.Identity(), Apply(function), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def ones() -> Tensor:
    return torch.ones(2, 4)


class Fault(NamedTuple):
    model: Callable[[bool], nn.Module]
    """Builds the faulty model, or its clean twin."""
    inputs: Callable[[bool], Any]
    kind: str
    site: str
    backward: bool = False
    loss: Callable[[Any], Tensor] = lambda out: out.float().square().mean()


FAULTS: dict[str, Fault] = {}


def fault(name: str, kind: str, site: str, inputs: Callable[[bool], Any] = lambda bad: ones(), **rest: Any) -> Any:
    def add(model: Callable[[bool], nn.Module]) -> Callable[[bool], nn.Module]:
        assert name not in FAULTS
        FAULTS[name] = Fault(model, inputs, kind, site, **rest)
        return model

    return add


def one_zero(bad: bool) -> Tensor:
    return torch.tensor([[1.0, 2.0, 0.0 if bad else 3.0, 4.0]]).expand(2, 4).clone()


def simple(name: str, site: str, function: Callable[[Tensor], Tensor], inputs: Any = one_zero, **rest: Any) -> None:
    fault(name, "op", site, inputs, **rest)(lambda bad: around(function))


simple("log of 0", "1/log#0", lambda x: x.log())
simple("0 / 0", "1/div#0", lambda x: x / x)
simple("1 / 0", "1/div#0", lambda x: 1 / x)
simple("square root of a negative", "1/sqrt#0", lambda x: torch.sqrt(x - 0.5))
simple("in place", "1/log_#0", lambda x: (x * 1).log_())
simple("in-place operator", "1/div_#0", lambda x: _idiv(x * 1))
simple("out=", "1/log#0", lambda x: torch.log(x, out=torch.empty(2, 4)))
simple("memory of its own, then in place", "1/log_#0", lambda x: torch.empty(2, 4).copy_(x).log_())
simple("power", "1/pow#0", lambda x: x**-0.5)
simple("norm made by hand", "1/div#0", lambda x: x / (x * 0 + x.min()))
simple("overflow of exp", "1/exp#0", lambda x: x.exp(), lambda bad: ones() * (100 if bad else 1))
simple("arccos outside its domain", "1/acos#0", lambda x: x.acos(), lambda bad: ones() * (1.001 if bad else 0.5))
simple("a NaN written down", "1/where#0", lambda x: torch.where(x == 0, NAN, x))
simple("a plus infinity written down", "1/masked_fill#0", lambda x: x.masked_fill(x == 0, INF))
simple("set by index", "1/setitem#0", lambda x: _set(x * 1))
simple("infinite minus infinite", "1/sub#0", lambda x: _masked(x) - _masked(x))
simple("0 times minus infinite", "1/mul#0", lambda x: (x - 1) * torch.where(x == 0, -INF, 0.0)[:, [2, 2, 2, 2]])
simple("second of two same operations", "1/log#1", lambda x: (x + 1).log() + x.log())
simple("complex", "1/reciprocal#0", lambda x: torch.complex(x, x).reciprocal().abs())
simple("half overflow", "1/mul#0", lambda x: (x.half() * 40000).float(), lambda bad: ones() * (2 if bad else 1))
simple("cast that overflows", "1/to#0", lambda x: x.to(torch.half).float(), lambda bad: ones() * (1e5 if bad else 1))
simple(
    "fully masked row",
    "1/softmax#0",
    lambda x: x.masked_fill(x < 1, -INF).softmax(-1),
    lambda bad: ones() * (0 if bad else 1),
)


def _idiv(x: Tensor) -> Tensor:
    x /= x.clone()
    return x


def _set(x: Tensor) -> Tensor:
    x[x == 0] = NAN
    return x


def _masked(x: Tensor) -> Tensor:
    return x.masked_fill(x == 0, -INF).clamp(max=3.0)


def _spoilt(tensor: Tensor, bad: bool, value: float = NAN) -> None:
    with torch.no_grad():
        tensor.view(-1)[1] = value if bad else 0.5


@fault("weight", "parameter", "1.0.weight")
def _(bad: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    _spoilt(model[1][0].weight, bad)
    return model


@fault("infinite weight read directly", "parameter", "0.weight")
def _(bad: bool) -> nn.Module:
    class Tied(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self[0].weight.t()

    model = Tied(nn.Linear(4, 4))
    _spoilt(model[0].weight, bad, -INF)
    return model


@fault("buffer", "buffer", "1.running_var")
def _(bad: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()).eval()
    _spoilt(model[1].running_var, bad)
    return model


@fault(
    "batch norm that overflows",
    "op",
    "0/batch_norm#0",
    lambda bad: torch.tensor([[3e38 if bad else 0.0] * 4, [3e38 if bad else 1.0] * 4]),
)
def _(bad: bool) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4))


@fault("embedding row", "parameter", "0.weight", lambda bad: torch.tensor([[0, 3 if bad else 2]]))
def _(bad: bool) -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[3] = NAN  # in the clean twin, nobody looks it up
    return model


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.left = Apply(lambda x: x.abs() + 1)
        self.right = Apply(lambda x: (x.abs() - 1e6).log())
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, right: bool) -> Tensor:
        y = self.stem(x)
        return self.head(y + (self.right(y) if right else self.left(y)))


@fault("branch", "op", "right/log#0", lambda bad: (ones(), bad))
def _(bad: bool) -> nn.Module:
    return Branches()


@fault("shared module, second call", "op", "twice/log#1")
def _(bad: bool) -> nn.Module:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = Apply(lambda x: x.log())

        def forward(self, x: Tensor) -> Tensor:
            return self.twice(self.twice(x + (0 if bad else 2)))

    return Shared()


@fault("third step of a loop", "op", "cell/div#3")
def _(bad: bool) -> nn.Module:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Apply(lambda x, step: 1 / (x * (step - (3 if bad else 9))))

        def forward(self, x: Tensor) -> Tensor:
            for step in range(5):
                x = self.cell(x, step).sign()
            return x

    return Loop()


@fault("LSTM weight", "parameter", "0.weight_hh_l0")
def _(bad: bool) -> nn.Module:
    model = nn.Sequential(nn.LSTM(4, 4), Apply(lambda out: out[0]), nn.Linear(4, 4))
    _spoilt(model[0].weight_hh_l0, bad)
    return model


@fault("after an LSTM", "op", "1/log#0")
def _(bad: bool) -> nn.Module:
    return nn.Sequential(nn.LSTM(4, 4), Apply(lambda out: (out[1][0] - (2 if bad else -2)).log()))


@fault(
    "multi-head attention, fully masked",
    "op",
    "attend/multi_head_attention_forward#0",
    lambda bad: (torch.ones(1, 3, 4), bad),
)
def _(bad: bool) -> nn.Module:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor, all_of_it: bool) -> Tensor:
            mask = torch.tensor([[False, True, True]]) | torch.tensor(all_of_it)
            return self.attend(x, x, x, key_padding_mask=mask)[0]

    return Attend()


@fault("input", "input", "#0:input", lambda bad: torch.tensor([[1.0, NAN if bad else 1.0, 2.0, 3.0]]))
def _(bad: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


@fault("infinite input", "input", "#0:input", lambda bad: torch.tensor([[1.0, -INF if bad else 1.0, 2.0, 3.0]]))
def _(bad: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


@fault("autocast", "op", "1/linear#0", lambda bad: ones() * (1e38 if bad else 1))
def _(bad: bool) -> nn.Module:
    class Auto(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    model = Auto(nn.Identity(), nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        model[1].weight.fill_(2.0)
    return model


@fault("autocast to half", "op", "1/linear#0", lambda bad: ones() * (60000 if bad else 1))
def _(bad: bool) -> nn.Module:
    class Auto(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                return super().forward(x)

    model = Auto(nn.Identity(), nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        model[1].weight.fill_(2.0)
    return model


class Unseen(torch.autograd.Function):
    """Works in numpy, where no listener sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        numbers = x.detach().numpy().copy()
        numbers[numbers == 0] = NAN
        ctx.save_for_backward(x)
        return torch.from_numpy(numbers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / ctx.saved_tensors[0].sub(7).relu()


class Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


fault("custom function, unseen", "module", "1#0", one_zero)(lambda bad: around(Unseen.apply))
fault("custom function, seen", "op", "1/log#0", one_zero)(lambda bad: around(Seen.apply))


@fault("a plain attribute", "outside", "0/add#0:input")
def _(bad: bool) -> nn.Module:
    offset = torch.tensor([1.0, 2.0, NAN if bad else 3.0, 4.0])
    return nn.Sequential(Apply(lambda x: x + offset), nn.Linear(4, 4))


# -- in the backward pass only


def at_zero(function: Callable[[Tensor], Tensor]) -> Callable[[bool], nn.Module]:
    """``function`` after a layer that gives exactly 0, or 1 in the clean twin."""

    def build(bad: bool) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), Apply(function), nn.Linear(4, 4))
        with torch.no_grad():
            model[0].weight.zero_()
            model[0].bias.fill_(0.0 if bad else 1.0)
        return model

    return build


def backward_fault(name: str, site: str, function: Callable[[Tensor], Tensor], **rest: Any) -> None:
    fault(name, "op", site, backward=True, **rest)(at_zero(function))


backward_fault("root at 0", "1/sqrt#0:grad_input", lambda x: x.sqrt())
backward_fault("root at 0 in a residual", "1/sqrt#0:grad_input", lambda x: x + x.sqrt() + x.exp())
backward_fault("norm at 0, by hand", "1/sqrt#0:grad_input", lambda x: x.square().sum(-1, keepdim=True).sqrt() + x)
backward_fault("where hides a branch", "1/sqrt#0:grad_input", lambda x: torch.where(x > 0, x.sqrt(), x))
backward_fault("power at 0", "1/pow#0:grad_input", lambda x: x.abs() ** 0.5)
backward_fault("root in place at 0", "1/sqrt_#0:grad_input", lambda x: (x * 1).sqrt_())
backward_fault("overflow of a gradient in half", "1/mul#0:grad_input", lambda x: (x.half() * 200).float() * _steep(x))


def _steep(x: Tensor) -> float:
    return 1e5 if bool((x == 0).all()) else 1.0


@fault("custom function in backward", "op", "1/Unseen:grad_input", backward=True)
def _(bad: bool) -> nn.Module:
    model = at_zero(Unseen.apply)(False)
    with torch.no_grad():
        model[0].bias.fill_(1.0 if bad else 9.0)
    return model


@fault(
    "custom function in the model itself",
    "op",
    "/Unseen:grad_input",
    lambda bad: ones() * (1 if bad else 9),
    backward=True,
)
def _(bad: bool) -> nn.Module:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(Unseen.apply(x.requires_grad_()))

    return Mixed()


@fault("loss outside the model", "loss", "#0:grad", backward=True, loss=lambda out: out.square().mean().sqrt())
def _(bad: bool) -> nn.Module:
    return at_zero(lambda x: x)(bad) if not bad else nn.Sequential(nn.Linear(4, 4), Apply(lambda x: x * 0))


@fault("checkpointed, root at 0", "op", "1/sqrt:grad_input", backward=True)
def _(bad: bool) -> nn.Module:
    model = at_zero(lambda x: x.sqrt())(bad)

    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x = self[0](x)
            return self[2](checkpoint(self[1], x, use_reentrant=True))

    return Checkpointed(*model)


@pytest.mark.parametrize("name", FAULTS)
def test_the_guard_names_the_producer(name: str) -> None:
    case = FAULTS[name]
    torch.manual_seed(0)
    model, inputs = case.model(True), case.inputs(True)
    with pytest.raises(GuardError) as caught:  # noqa: PT012
        with guard(model):
            output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
            case.loss(output).backward()
    finding = caught.value.finding
    assert (finding.kind, str(finding.site)) == (case.kind, case.site), finding
    assert finding.phase == ("backward" if case.backward else "forward")
    assert finding.run == 0


@pytest.mark.parametrize("name", FAULTS)
def test_its_clean_twin_raises_no_alarm(name: str) -> None:
    case = FAULTS[name]
    torch.manual_seed(0)
    model, inputs = case.model(False), case.inputs(False)
    with guard(model) as g:
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        if output.requires_grad:
            case.loss(output).backward()
    assert g.findings == []
    assert torch.isfinite(output).all()  # or the twin is not clean


@pytest.mark.parametrize("name", FAULTS)
def test_recording_finds_the_same_and_lets_the_model_finish(name: str) -> None:
    case = FAULTS[name]
    torch.manual_seed(0)
    model, inputs = case.model(True), case.inputs(True)
    with guard(model, action="record") as g:
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        if output.requires_grad:
            case.loss(output).backward()
    assert [(f.kind, str(f.site)) for f in g.findings] == [(case.kind, case.site)]


# -- infinities that are there on purpose ---------------------------------------------------------------------------


def _scores() -> Tensor:
    return torch.randn(2, 4, 4)


def _causal(fill: float = -INF) -> Tensor:
    return torch.full((4, 4), fill).triu(1)


def _weighted(scores: Tensor) -> Tensor:
    return scores.softmax(-1) @ torch.ones(4, 4)


def _banned(x: Tensor) -> Tensor:
    x = x * 1
    x[..., 2] = -INF
    return x


def _summed_masks(x: Tensor) -> Tensor:
    lowest = torch.finfo(x.dtype).min
    return _weighted(x + _causal(lowest).to(x.dtype) + _causal(lowest).to(x.dtype))


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_fill": lambda x: _weighted(x.masked_fill(_causal() < 0, -INF)),
    "masked_fill_": lambda x: _weighted((x * 1).masked_fill_(_causal() < 0, float("-inf"))),
    "where": lambda x: _weighted(torch.where(_causal() < 0, -INF, x)),
    "where with a tensor": lambda x: _weighted(torch.where(_causal() < 0, torch.tensor(-INF), x)),
    "added": lambda x: _weighted(x + _causal()),
    "added in place": lambda x: _weighted((x * 1).add_(_causal())),
    "scaled after": lambda x: _weighted((x + _causal()) / 2),
    "lowest number": lambda x: _weighted(x + _causal(torch.finfo(x.dtype).min)),
    "lowest number twice": _summed_masks,
    "lowest number in half": lambda x: _weighted((x.half() - 60).add(_causal(-65504.0).half()).float()),
    "log of zeros and ones": lambda x: _weighted(x + (_causal() == 0).float().log()),
    "set by index": lambda x: _weighted(_banned(x)),
    "scatter": lambda x: _weighted(x.scatter(-1, torch.zeros(2, 4, 1, dtype=torch.long), -INF)),
    "fused attention": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=_causal()),
    "log softmax": lambda x: (x + _causal()).log_softmax(-1).exp(),
    "left in the output": lambda x: _banned(x),
    "running maximum": lambda x: torch.maximum(torch.full_like(x, -INF), x),
    "largest unmasked": lambda x: x.masked_fill(x < 0, -INF).amax(-1).clamp(min=0),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_no_finding(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Apply(MASKS[name]))
    with guard(model) as g:
        output = model(_scores())
        output[output.isfinite()].sum().backward()
    assert g.findings == []


def test_a_mask_may_come_from_outside_or_pass_through_modules_or_be_a_buffer() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("causal", _causal())
            self.make = Apply(lambda x, mask: (mask + 0, x + mask))
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            both, scores = self.make(x, mask + self.causal)
            return self.layer(scores.softmax(-1), src_mask=both)

    model = Masked()
    with guard(model) as g:
        model(_scores(), _causal()).sum().backward()
        model(x=_scores(), mask=_causal() + 1)  # named as one
    assert g.findings == []


def test_what_is_allowed_can_be_widened_and_narrowed() -> None:
    low, high = (
        around(lambda x: x.masked_fill(x == 0, -INF).relu()),
        around(lambda x: x.masked_fill(x == 0, INF).clamp(max=9)),
    )
    with guard(low) as g:
        low(one_zero(True))
    with guard(high, allow="inf") as h:
        high(one_zero(True))
    assert g.findings == h.findings == []
    unbounded = around(lambda x: x.masked_fill(x == 0, -INF))
    with pytest.raises(GuardError, match="masked_fill"):
        with guard(unbounded, allow=None):
            unbounded(one_zero(True))


def test_integers_and_booleans_are_never_a_finding() -> None:
    model = nn.Sequential(Apply(lambda x: (x > 0, x.long() * 2**62, x.to(torch.uint8))), Apply(lambda t: t[1] // 3))
    with guard(model) as g:
        model(ones() * 3)
    assert g.findings == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_sum_that_overflows_is_no_finding(dtype: torch.dtype) -> None:
    model = nn.Sequential(Apply(lambda x: x * 1), nn.ReLU())
    with guard(model) as g:
        model(torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype))
    assert g.findings == []


def test_memory_that_was_not_filled_yet_is_no_finding() -> None:
    def fill(x: Tensor) -> Tensor:
        out = torch.empty(3, 4)
        out[0] = x[0]
        out[1].copy_(x[1])
        out[2:] = 0
        return out * 2

    model = nn.Sequential(Apply(fill), nn.Linear(4, 4))
    torch.use_deterministic_algorithms(True)  # fills empty memory with NaN
    try:
        with guard(model) as g:
            model(ones())
    finally:
        torch.use_deterministic_algorithms(False)
    assert g.findings == []


def test_an_infinity_that_never_leaves_its_module_is_no_finding() -> None:
    model = nn.Sequential(Apply(lambda x: torch.where(x > 0, x.reciprocal(), 0)), nn.Linear(4, 4))
    with guard(model) as g:
        model(one_zero(True))
    assert g.findings == []


# -- what is said -------------------------------------------------------------------------------------------------


def test_the_finding_holds_the_numbers() -> None:
    model = around(lambda x: x.log())
    with pytest.raises(GuardError) as caught:
        with guard(model):
            model(torch.tensor([[0.0, 1.0, -2.0, 4.0]]))
    finding = caught.value.finding
    (given,), (made,) = finding.inputs, finding.outputs
    numbers = torch.tensor([0.0, 1.0, -2.0, 4.0])
    assert (given.shape, given.dtype, given.min, given.max) == ((1, 4), torch.float32, -2.0, 4.0)
    assert given.mean == pytest.approx(numbers.mean().item())
    assert given.std == pytest.approx(numbers.std(correction=0).item())
    assert given.finite
    assert (made.nan, made.inf, made.neg_inf, made.min) == (1, 0, 1, 0.0)
    assert made.max == pytest.approx(math.log(4))
    assert finding.site == Site("1", "log", 0)
    assert finding.stack == ["model (Sequential)", "1 (Apply)"]
    text = str(caught.value)
    for part in (
        "'1/log#0' made 1 NaN, 1 -Inf out of finite inputs",
        "forward pass of run 0",
        "std 2.165",
        "1 (Apply)",
    ):
        assert part in text


def test_an_in_place_operation_shows_the_input_as_it_was() -> None:
    model = around(lambda x: x.log_())
    with guard(model, action="record") as g:
        model(torch.tensor([[1.0, 2.0, -3.0, 4.0]]))
    assert (g.findings[0].inputs[0].min, g.findings[0].inputs[0].max) == (-3.0, 4.0)


def test_a_weight_is_shown_with_its_first_user() -> None:
    case = FAULTS["weight"]
    model = case.model(True)
    with guard(model, action="record") as g:
        model(ones())
    (finding,) = g.findings
    assert finding.used_by == Site("1.0", "linear", 0)
    assert {s.name: s.nan for s in finding.weights} == {"1.0.weight": 1, "1.0.bias": 0}
    assert str(finding).startswith("parameter '1.0.weight' already holds 1 NaN; '1.0/linear#0' was the first to use it")


def test_a_gradient_is_shown_with_what_came_in_and_what_was_kept() -> None:
    case = FAULTS["root at 0"]
    model = case.model(True)
    with pytest.raises(
        GuardError, match=r"'1/sqrt#0:grad_input' made .*Inf.* out of a finite gradient \(SqrtBackward0\)"
    ):
        with guard(model) as g:
            case.loss(model(ones())).backward()
    (finding,) = g.findings
    assert finding.inputs[0].finite
    assert not finding.outputs[0].finite
    assert (finding.weights[0].min, finding.weights[0].max) == (0.0, 0.0)


def test_the_run_is_counted_and_calls_go_on() -> None:
    model = around(lambda x: x.log())
    with guard(model, action="record") as g:
        for bad in (False, False, True):
            model(one_zero(bad))
    assert (g.findings[0].run, str(g.findings[0].site)) == (2, "1/log#2")


def test_two_producers_are_two_findings_and_repeats_are_counted() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Apply(lambda x: x.log()), Apply(lambda x: x / x)
            self.join = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.join(torch.cat([self.a(x), self.b(x)], -1))

    model = Two()
    with guard(model, action="record") as g:
        for _ in range(3):
            model(one_zero(True))
    assert [(str(f.site), f.times) for f in g.findings] == [("a/log#0", 3), ("b/div#0", 3)]


def test_warn_warns_once_for_each_site() -> None:
    model = around(lambda x: x.log())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with guard(model, action="warn") as g:
            for _ in range(3):
                assert not model(one_zero(True)).isfinite().all()
    assert [w.category for w in seen] == [GuardWarning]
    assert "'1/log#0' made 2 -Inf" in str(seen[0].message)
    assert g.findings[0].times == 3


def test_the_error_is_an_arithmetic_error_and_pickles() -> None:
    model = around(lambda x: x.log())
    with pytest.raises(ArithmeticError) as caught:
        with guard(model):
            model(one_zero(True))
    assert isinstance(caught.value, TorchHookError)
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (str(twin), twin.finding) == (str(caught.value), caught.value.finding)


def test_a_handle_guards_until_it_is_closed() -> None:
    model = around(lambda x: x.log())
    g = guard(model).open()
    model(one_zero(False))
    g.close()
    g.close()
    model(one_zero(True))
    assert g.findings == []


def test_what_is_excluded_is_not_judged() -> None:
    model = nn.Sequential(Apply(lambda x: x.log()), Apply(lambda x: x.nan_to_num(0, 0, 0)), nn.Linear(4, 4))
    for exclude in ("0", "0/log"):
        with guard(model, exclude=exclude) as g:
            model(one_zero(True))
        assert g.findings == []


def test_gradients_can_be_left_alone() -> None:
    case = FAULTS["root at 0"]
    model = case.model(True)
    with guard(model, backward=False) as g:
        case.loss(model(ones())).backward()
    assert g.findings == []
    assert not model[0].weight.grad.isfinite().all()


def test_a_guard_that_saw_nothing_says_so() -> None:
    with pytest.warns(NeverRanWarning, match="the guard saw nothing: nothing ran while the session was open"):
        with guard(nn.Linear(4, 4)):
            pass


@pytest.mark.parametrize("wrong", [{"action": "stop"}, {"allow": "nan"}])
def test_a_wrong_option_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="use "):
        guard(nn.Linear(4, 4), **wrong)


# -- nothing else changes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_followed(reentrant: bool) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](checkpoint(self[1], self[0](x), use_reentrant=reentrant))

    for bad in (False, True):
        model = Checkpointed(*at_zero(lambda x: x.exp().sub(1).sqrt())(bad))
        with guard(model, action="record") as g:
            model(ones()).sum().backward()
        assert [(f.site.path, f.site.op, f.phase) for f in g.findings] == [("1", "sqrt", "backward")] * bad


def test_double_backward_and_retained_graphs_are_clean() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = ones().requires_grad_()
    with guard(model) as g:
        output = model(x).sum()
        (grad,) = torch.autograd.grad(output, x, create_graph=True)
        (output + grad.square().sum()).backward()
    assert g.findings == []


def boom(kind: type[BaseException]) -> Callable[[Tensor], Tensor]:
    def raises(x: Tensor) -> Tensor:
        raise kind("from the model")

    return raises


EXITS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], type[BaseException] | None]] = {
    "success": (lambda: around(lambda x: x + 1), lambda m: m(ones()).sum().backward(), None),
    "finding forward": (lambda: around(lambda x: x / 0), lambda m: m(ones()), GuardError),
    "finding backward": (lambda: at_zero(lambda x: x.sqrt())(True), lambda m: m(ones()).sum().backward(), GuardError),
    "the model's error": (lambda: around(boom(KeyError)), lambda m: m(ones()), KeyError),
    "an interrupt": (lambda: around(boom(KeyboardInterrupt)), lambda m: m(ones()), KeyboardInterrupt),
}


@pytest.mark.parametrize("name", EXITS)
def test_nothing_is_left_behind(name: str) -> None:
    build, use, error = EXITS[name]
    built = build()
    model, twin = copy.deepcopy(built), copy.deepcopy(built)
    with contextlib.suppress(KeyError, KeyboardInterrupt):
        use(twin)  # what the model itself changes, such as gradients
    if error is None:
        with guard(model):
            use(model)
    else:
        with pytest.raises(error):
            with guard(model):
                use(model)
    if name not in ("finding forward", "finding backward"):
        assert_same(snapshot(twin), snapshot(model), name)
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert torch._C._len_torch_function_stack() == 0
    assert not any(p._backward_hooks for p in model.parameters())


def test_a_dropped_guard_takes_its_hooks_along() -> None:
    model = around(lambda x: x.log())
    g = guard(model).open()
    output = model(one_zero(False))
    ref = weakref.ref(g)
    del g
    gc.collect()
    assert ref() is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model(one_zero(True))
    output.sum().backward()


def test_a_graph_outlives_the_guard_unwatched() -> None:
    model = at_zero(lambda x: x.sqrt())(True)
    with guard(model) as g:
        output = model(ones())
    output.sum().backward()
    assert g.findings == []
    assert not model[0].weight.grad.isfinite().all()


def test_a_graph_is_freed_as_without_a_guard() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    gc.disable()
    try:
        with guard(model):
            output = model(ones())
            ref = weakref.ref(output)
            del output
            assert ref() is None
    finally:
        gc.enable()


def test_random_numbers_and_results_stay_the_same() -> None:
    built = nn.Sequential(
        nn.Linear(4, 64), nn.Dropout(0.5), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 2)
    )
    model, twin = copy.deepcopy(built), copy.deepcopy(built)
    x = torch.randn(8, 4)
    torch.manual_seed(3)
    expected = twin(x)
    expected.sum().backward()
    torch.manual_seed(3)
    with guard(model):
        found = model(x)
        found.sum().backward()
    assert torch.equal(expected, found)
    assert_same(snapshot(twin), snapshot(model), "the model")


# -- real models ----------------------------------------------------------------------------------------------------


def _resnet() -> tuple[nn.Module, dict[str, Any]]:
    import torchvision

    return torchvision.models.resnet18(weights=None, num_classes=5), {"x": torch.randn(2, 3, 64, 64)}


def _vit() -> tuple[nn.Module, dict[str, Any]]:
    import timm

    options = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **options), {"x": torch.randn(2, 3, 32, 32)}


def _padded() -> dict[str, Any]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    return {"input_ids": torch.randint(3, 64, (2, 8)), "attention_mask": mask}


def _gpt2(attention: str) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    config._attn_implementation = attention
    given = _padded()
    return GPT2LMHeadModel(config), {**given, "labels": given["input_ids"]}


def _bert(attention: str) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config._attn_implementation = attention
    given = _padded()
    return BertForMaskedLM(config), {**given, "labels": given["input_ids"]}


def _t5() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
    given = _padded()
    return T5ForConditionalGeneration(config), {**given, "labels": given["input_ids"]}


REAL: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "resnet18": _resnet,
    "vit": _vit,
    "gpt2, eager": lambda: _gpt2("eager"),
    "gpt2, fused": lambda: _gpt2("sdpa"),
    "bert, eager": lambda: _bert("eager"),
    "bert, fused": lambda: _bert("sdpa"),
    "t5": _t5,
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", REAL)
def test_real_models_raise_no_alarm_and_compute_the_same(name: str, training: bool) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a library says of itself while it is imported
        model, inputs = REAL[name]()
    model.train(training)
    twin = copy.deepcopy(model)

    def step(one: nn.Module) -> Tensor:
        torch.manual_seed(1)
        output = one(**inputs)
        loss = output.sum() if isinstance(output, Tensor) else output.loss
        loss.backward()
        return loss

    expected = step(twin)
    with guard(model) as g:
        found = step(model)
    assert g.findings == []
    assert torch.equal(expected, found)
    grads = [(p.grad, q.grad) for p, q in zip(twin.parameters(), model.parameters(), strict=True)]
    assert all(p is q is None or torch.equal(p, q) for p, q in grads)


@pytest.mark.parametrize("name", REAL)
def test_a_weight_spoilt_deep_in_a_real_model_is_named(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs = REAL[name]()
    names = {id(p): n for n, p in model.named_parameters()}  # a tied weight goes by its first name
    target, weight = [(n, p) for n, p in model.named_parameters() if p.dim() > 1 and "emb" not in n][7]
    with torch.no_grad():
        weight.view(-1)[3] = NAN
    with guard(model, action="record") as g:
        model(**inputs)
    assert [(f.kind, str(f.site)) for f in g.findings] == [("parameter", names[id(weight)])]
    assert target == names[id(weight)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_no_model_of_the_zoo_raises_an_alarm(name: str) -> None:
    case = ZOO[name]()
    with guard(case.model) as g:
        output = case.model(*case.args, **case.kwargs)
        if name not in WITHOUT_GRADIENT:
            sum(t.float().sum() for t in tensors_in(output) if t.requires_grad).backward()
    assert g.findings == []


# -- on a GPU -------------------------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ON_CPU_ONLY = {"autocast", "autocast to half", "custom function, unseen", "a plain attribute"}
# On a GPU, autograd recomputes on a thread of its own, where no operation is seen: the checkpoint itself is named.
ON_CPU_ONLY |= {"custom function in backward", "custom function in the model itself", "checkpointed, root at 0"}
ON_CPU_ONLY |= {"multi-head attention, fully masked", "out=", "memory of its own, then in place"}


def to_gpu(value: Any) -> Any:
    return (
        tuple(map(to_gpu, value)) if isinstance(value, tuple) else value.cuda() if isinstance(value, Tensor) else value
    )


@needs_cuda
@pytest.mark.parametrize("bad", [True, False], ids=["faulty", "clean"])
@pytest.mark.parametrize("name", [n for n in FAULTS if n not in ON_CPU_ONLY])
def test_a_gpu_gives_the_same_answers(name: str, bad: bool) -> None:
    case = FAULTS[name]
    torch.manual_seed(0)
    model, inputs = case.model(bad).cuda(), to_gpu(case.inputs(bad))
    with guard(model, action="record") as g:
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        if output.requires_grad:
            case.loss(output).backward()
    found = [(f.kind, f.site.every_call) for f in g.findings]
    expected = [(case.kind, Site(*_parts(case.site)))] if bad else []
    assert found == expected


def _parts(address: str) -> tuple[str, str | None, None, str]:
    site = parse(address, {"", "1", "0", "1.0.weight", "0.weight", "1.running_var", "0.weight_hh_l0"})
    return site.path, site.op, None, site.port


@needs_cuda
def test_a_gpu_error_comes_before_the_output_does() -> None:
    model = nn.Sequential(
        *[nn.Linear(4, 4) for _ in range(3)], Apply(lambda x: x - x.amax() - 1), Apply(torch.sqrt)
    ).cuda()
    output = None
    with pytest.raises(GuardError, match="'4/sqrt#0' made 8 NaN"):
        with guard(model):
            output = model(torch.ones(2, 4, device="cuda"))
    assert output is None


@needs_cuda
def test_a_gpu_is_asked_once_for_many_operations() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(20)]).cuda()
    x = torch.ones(2, 4, device="cuda")
    with guard(model) as g:
        model(x)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            model(x)
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in seen if "called a synchronizing" in str(w.message)]
    assert g.findings == []
    assert len(waits) <= 4

"""Planted faults, each with a clean twin: the same model on other numbers. What is right is written down by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.guard.memory import COPIES, WRITES, halves
from tests.models import Apply

INF, NAN = math.inf, math.nan


def around(function: Callable[..., Any]) -> nn.Module:
    """``function`` as module 1 of 3, with a nested propagator after it."""
    return nn.Sequential(nn.Identity(), Apply(function), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def ones() -> Tensor:
    return torch.ones(2, 4)


def run(model: nn.Module, inputs: Any) -> Any:
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


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


for how, copy in COPIES.items():
    simple(
        f"overflow copied by {how}",
        "1/exp#0",
        lambda x, copy=copy: copy(x.exp()),
        lambda bad: ones() * (100 if bad else 1),
    )
for how, write in WRITES.items():
    simple(
        f"memory written by {how}",
        "1/div_#0",
        lambda x, write=write: halves(x, write),
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

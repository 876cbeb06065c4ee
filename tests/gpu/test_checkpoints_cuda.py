"""Checkpoints, streams and threads on a GPU: autograd recomputes on a thread of its own there."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchhook as th
from torchhook import edits

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # tests.gpu runs without pytest too
    pass


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "plain":
            return self.head(self.inner(x))
        return self.head(checkpoint(self.inner, x, use_reentrant=self.kind == "reentrant"))


def by_hand(model: Net, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The edit and the gradient, without the library and without checkpoints."""
    kept: list[Tensor] = []

    def halve(module: nn.Module, args: object, output: Tensor) -> Tensor:
        kept.append(output * 0.5)
        kept[-1].retain_grad()
        return kept[-1]

    handle = model.inner[1].register_forward_hook(halve)
    model(x).square().sum().backward()
    handle.remove()
    assert kept[0].grad is not None
    return kept[0].grad, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_edits_and_gradients_under_checkpoints() -> None:
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    grad, grads = by_hand(Net("plain").cuda(), x)
    for kind in ("plain", "reentrant", "new"):
        model = Net(kind).cuda()
        with th.edit(model, {"inner.1": edits.scale(0.5)}), th.capture(model, "inner.1:grad", "inner.1") as rec:
            model(x).square().sum().backward()
        torch.testing.assert_close(rec["inner.1:grad"], grad)
        assert len(rec.all("inner.1")) == 1
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name])


class Operations(nn.Module):
    """A tanh that is no module, checkpointed with its module or by the module's own forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.layer = how, nn.Linear(64, 64)

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * x

    def forward(self, x: Tensor) -> Tensor:
        if self.how.startswith("forward"):
            return checkpoint(self.body, x, use_reentrant=self.how.endswith("reentrant"))
        return self.body(x)


def test_edits_and_gradients_of_operations_under_checkpoints() -> None:
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    found = []
    for how in ("plain", "module, reentrant", "module, new", "forward, reentrant", "forward, new"):
        block = Operations(how).cuda()
        model = nn.Sequential(block)
        with th.edit(model, {"0/tanh": edits.scale(0.5)}), th.capture(model, "0/tanh:grad") as rec:
            y = checkpoint(model, x, use_reentrant=how.endswith("reentrant")) if how[0] == "m" else model(x)
            y.square().sum().backward()
        found.append((rec["0/tanh:grad"], block.layer.weight.grad))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_what_runs_on_a_stream_of_its_own_is_true_on_the_way_to_the_host() -> None:
    model, x = Net("plain").cuda(), torch.randn(4096, 64, device="cuda")
    expected = model.inner(x).detach().cpu()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.no_grad(), torch.cuda.stream(stream), th.capture(model, "inner", device="cpu") as rec:
            model(x)
        torch.testing.assert_close(rec["inner"], expected)


def test_sessions_of_several_threads_keep_apart() -> None:
    model, wrong = Net("plain").cuda().eval(), list[int]()

    def work(number: int) -> None:
        generator = torch.Generator("cuda").manual_seed(number)
        for _ in range(50):
            x = torch.randn(16, 64, device="cuda", generator=generator)
            with torch.no_grad(), th.capture(model, "inner.0") as rec:
                model(x)
            if not torch.allclose(rec["inner.0"], nn.functional.linear(x, model.inner[0].weight, model.inner[0].bias)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []

"""What is kept from a GPU: true under copy-on-write, true on the way to the host, and not waited for."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import Tensor, nn

import torchhook as th
from tests.models import Nasty

try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
except ImportError:  # tests.gpu runs without pytest too
    pass


def bare(model: nn.Module, *args: Tensor) -> dict[str, list[Tensor]]:
    seen: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules():

        def keep(module: nn.Module, args: object, output: Tensor, name: str = name) -> None:
            if isinstance(output, Tensor):
                seen.setdefault(name, []).append(output.detach().clone())

        handles.append(module.register_forward_hook(keep))
    model(*args)
    for handle in handles:
        handle.remove()
    return seen


def models() -> list[tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    found: list[tuple[nn.Module, Tensor]] = [(Nasty(512, 24).cuda(), torch.randn(256, 512, device="cuda"))]
    try:
        from torchvision.models import resnet18, vgg11
    except Exception:
        return found
    for make in (resnet18, vgg11):
        found.append((make().cuda().eval(), torch.randn(8, 3, 128, 128, device="cuda")))
    return found


MODES = (torch.enable_grad, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cuda", torch.bfloat16))


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one, other, strict=True))


def test_every_layer_is_true_on_the_device() -> None:
    for model, x in models():
        for mode in MODES:
            with mode():
                expected = bare(model, x)
                with th.capture(model) as rec:
                    model(x)
            assert all(equal(rec.all(name), expected[name]) for name in rec), type(model).__name__
            assert set(rec.keys()) == set(expected)


def test_every_layer_is_true_on_the_way_to_the_host() -> None:
    for model, x in models():
        for mode in MODES:
            with mode():
                expected = bare(model, x)
                for _ in range(5):
                    with th.capture(model, device="cpu") as rec:
                        model(x)
                    assert all(t.device.type == "cpu" for name in rec for t in rec.all(name))
                    wrong = [name for name in rec if not equal(rec.all(name), expected[name])]
                    assert not wrong, (type(model).__name__, wrong)


def test_host_copies_are_pinned_and_read_safely_inside_the_block() -> None:
    model, x = models()[0]
    with torch.no_grad():
        expected = bare(model, x)
        with th.capture(model, "layers.*", device="cpu") as rec:
            model(x)
            assert rec["layers.3"].is_pinned()
            assert torch.equal(rec["layers.23"], expected["layers.23"][0].cpu())


def test_a_value_that_is_dropped_at_once_is_still_copied_whole() -> None:
    """The copy reads memory that the allocator must not hand out again before it is done."""

    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros((), device=x.device)
            for i in range(20):
                y = self.make(x + i)
                total = total + y.mean()
                y.fill_(-1.0)
            return total

    x = torch.randn(4096, 4096, device="cuda")
    big = Big().cuda()
    with th.capture(big, "make", device="cpu") as rec:
        big(x)
    for i, value in enumerate(rec.all("make")):
        assert torch.equal(value, (x + i).cpu()), i


def test_casts_on_the_device_before_the_transfer() -> None:
    model, x = models()[0]
    with torch.no_grad():
        expected = bare(model, x)
        with th.capture(model, "layers.*", device="cpu", dtype=torch.float16) as rec:
            model(x)
    assert torch.equal(rec["layers.5"], expected["layers.5"][0].half().cpu())


def test_transforms_run_before_the_transfer() -> None:
    model, x = models()[0]
    with torch.no_grad():
        expected = bare(model, x)
        with th.capture(model, "layers.*", device="cpu", transform=lambda t: t.mean(1)) as rec:
            model(x)
    assert torch.equal(rec["layers.5"], expected["layers.5"][0].mean(1).cpu())


class Gentle(Nasty):
    """In place too, but only where autograd allows it."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.relu(layer(x)) + x
            x = self.relu(x * 0.5)
        return x


def test_gradients_are_true() -> None:
    torch.manual_seed(0)
    model, x = Gentle(512, 24).cuda(), torch.randn(256, 512, device="cuda")
    twin = copy.deepcopy(model)
    outputs: dict[str, Tensor] = {}

    def note(name: str):  # type: ignore[no-untyped-def]
        def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
            outputs[name] = output.clone()
            outputs[name].retain_grad()
            return outputs[name].clone()

        return hook

    for name, module in twin.named_modules():
        if name.startswith("layers."):
            module.register_forward_hook(note(name))
    twin(x).sum().backward()
    with th.capture(model, "layers.*:grad", device="cpu") as rec:
        model(x).sum().backward()
    for name, output in outputs.items():
        assert output.grad is not None
        torch.testing.assert_close(rec[f"{name}:grad"], output.grad.cpu(), rtol=1e-5, atol=1e-6)


def test_compiled_models_are_seen_and_compiled_again_afterwards() -> None:
    model, x = models()[0]
    compiled = torch.compile(model)
    with torch.no_grad():
        compiled(x)
        expected = bare(model, x)
        with th.capture(compiled, "layers.*") as rec:
            compiled(x)
        assert all(equal(rec.all(name), expected[name]) for name in rec)
        compiled(x)


def test_nothing_waits_for_the_host() -> None:
    model, x = models()[0]
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        with contextlib.ExitStack() as stack:
            session = th.capture(model, "layers.*", device="cpu")
            stack.enter_context(session)
            torch.cuda.set_sync_debug_mode("error")  # any synchronisation inside the forward pass raises
            try:
                model(x)
            finally:
                torch.cuda.set_sync_debug_mode("default")

"""Copying features to the host on a CUDA device: ``PYTHONPATH=src python benchmarks/gpu.py``.

The six stages of a ResNet-50 (random weights), batch 64, as ratios over the plain forward pass: ``.cpu()`` in every
hook, the same after cloning, and ``th.capture(device="cpu")``; then capture that stays on the device, beside bare
cloning hooks.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.models import resnet50

import torchhook as th

STAGES = ["relu", "maxpool", "layer1", "layer2", "layer3", "layer4"]


def median_ms(run: Callable[[], object], rounds: int = 20) -> float:
    times = []
    for i in range(rounds + 5):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        torch.cuda.synchronize()
        end.record()
        end.synchronize()
        if i >= 5:
            times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def hooked(model: nn.Module, x: Tensor, keep: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    def run() -> None:
        store: dict[str, Tensor] = {}
        handles = []
        for name in STAGES:

            def hook(module: nn.Module, args: object, output: Tensor, name: str = name) -> None:
                store[name] = keep(output)

            handles.append(model.get_submodule(name).register_forward_hook(hook))
        model(x)
        for handle in handles:
            handle.remove()

    return run


def captured(model: nn.Module, x: Tensor, device: str | None) -> Callable[[], None]:
    def run() -> None:
        with th.capture(model, STAGES, device=device):
            model(x)

    return run


def main() -> None:
    model = resnet50().cuda().eval()
    x = torch.randn(64, 3, 224, 224, device="cuda")
    with torch.no_grad():
        contestants: dict[str, Callable[[], object]] = {
            "plain forward": lambda: model(x),
            "bare hooks, .cpu()": hooked(model, x, lambda t: t.detach().cpu()),
            "bare hooks, .clone()": hooked(model, x, lambda t: t.detach().clone()),
            "torchhook, device='cpu'": captured(model, x, "cpu"),
            "torchhook, on the device": captured(model, x, None),
        }
        rounds = [{name: median_ms(run) for name, run in contestants.items()} for _ in range(3)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, ResNet-50 at 64×3×224×224, six stages")
    figures = {}
    for name in contestants:
        ratio = sorted(r[name] / r["plain forward"] for r in rounds)[1]
        figures[name] = ratio
        print(f"  {name:<28}{ratio:6.2f}   ({sorted(r[name] for r in rounds)[1]:.2f} ms)")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
